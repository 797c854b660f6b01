"""Every life cycle as one transition table: request, KV sequence, model generation, worker process, rollout."""

from __future__ import annotations

from typing import Any

from calculet_core.fsm import Machine
from calculet_core.states.kv_sequence import KV_SEQUENCE
from calculet_core.states.model_generation import MODEL_GENERATION
from calculet_core.states.request import REQUEST
from calculet_core.states.rollout import ROLLOUT
from calculet_core.states.worker_process import WORKER_PROCESS

MACHINES: tuple[Machine[Any, Any], ...] = (REQUEST, KV_SEQUENCE, MODEL_GENERATION, WORKER_PROCESS, ROLLOUT)
