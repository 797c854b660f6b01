"""A model generation's life (scheduling §10-§12): an artifact configured on one board.

A generation that has recovered is not the same generation: the board serves a new one of the same artifact, and the old one
takes `RETIRE`. So a late completion can always be told by its generation.
"""

from __future__ import annotations

from enum import IntEnum, auto

from calculet_core.fsm import Machine


class ModelState(IntEnum):
    """Scheduling §10, in its order."""

    UNLOADED = 0
    VALIDATING = 1
    CONFIGURING = 2
    WARMING = 3
    READY = 4
    DRAINING = 5
    UNLOADING = 6
    RECOVERING = 7
    FAILED = 8


class ModelEvent(IntEnum):
    """What can happen to a generation."""

    LOAD = auto()
    VALIDATED = auto()
    """Path, signature, hashes, manifest, profiles and capacity are good (scheduling §11 steps 1-4)."""
    CONFIGURED = auto()
    """Calbin, KV manager and pools exist; tensors and profiles match the manifest (§11 steps 7-8)."""
    WARMED = auto()
    """Golden and warm-up passed (§11 step 9)."""
    DRAIN = auto()
    DRAINED = auto()
    DRAIN_EXPIRED = auto()
    """The drain deadline passed with a submitted job: its buffers cannot be freed (§12)."""
    UNLOADED = auto()
    FAULT = auto()
    RETIRE = auto()
    """A reset ended this generation; a new one takes the board."""
    FAIL = auto()


_S, _E = ModelState, ModelEvent

MODEL_GENERATION: Machine[ModelState, ModelEvent] = Machine(
    "model_generation",
    _S.UNLOADED,
    {
        (_S.UNLOADED, _E.LOAD): _S.VALIDATING,
        (_S.VALIDATING, _E.VALIDATED): _S.CONFIGURING,
        (_S.VALIDATING, _E.FAIL): _S.FAILED,
        (_S.CONFIGURING, _E.CONFIGURED): _S.WARMING,
        (_S.CONFIGURING, _E.FAULT): _S.RECOVERING,
        (_S.CONFIGURING, _E.FAIL): _S.FAILED,
        (_S.WARMING, _E.WARMED): _S.READY,
        (_S.WARMING, _E.FAULT): _S.RECOVERING,
        (_S.WARMING, _E.FAIL): _S.FAILED,
        (_S.READY, _E.DRAIN): _S.DRAINING,
        (_S.READY, _E.FAULT): _S.RECOVERING,
        (_S.READY, _E.FAIL): _S.FAILED,
        (_S.DRAINING, _E.DRAINED): _S.UNLOADING,
        (_S.DRAINING, _E.DRAIN_EXPIRED): _S.RECOVERING,
        (_S.DRAINING, _E.FAULT): _S.RECOVERING,
        (_S.UNLOADING, _E.UNLOADED): _S.UNLOADED,
        (_S.UNLOADING, _E.FAULT): _S.RECOVERING,
        (_S.UNLOADING, _E.FAIL): _S.FAILED,
        (_S.RECOVERING, _E.RETIRE): _S.UNLOADED,
        (_S.RECOVERING, _E.FAIL): _S.FAILED,
    },
    terminal=frozenset({_S.FAILED}),
)
