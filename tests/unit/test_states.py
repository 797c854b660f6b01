"""Every life cycle's table, and the machine that guards it."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from calculet_core.fsm import InvalidTransitionError, Machine
from calculet_core.states import MACHINES
from calculet_core.states.kv_sequence import KV_SEQUENCE, KvEvent, KvSequenceState
from calculet_core.states.model_generation import MODEL_GENERATION, ModelEvent, ModelState
from calculet_core.states.request import REQUEST, RequestEvent, RequestState

ROOT = Path(__file__).resolve().parents[2]
NOBODYS = {"AWAIT_MODEL"}
"""A board has one model: a request that finds none is refused, and does not wait for it."""


class Light(IntEnum):
    RED = 0
    GREEN = 1
    BROKEN = 2


class Signal(IntEnum):
    GO = 0
    STOP = 1


def test_the_specifications_states_are_all_there() -> None:
    assert [state.name for state in RequestState] == [
        "NEW", "WAITING_MODEL", "WAITING_ADMISSION", "PREFILL_READY", "PREFILL_RUNNING", "DECODE_READY", "DECODE_RUNNING",
        "FINISHING", "COMPLETED", "CANCELLED", "FAILED",
    ]  # fmt: skip
    assert len(KvSequenceState) == 6
    assert len(ModelState) == 9


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_event_of_a_machine_has_a_row(machine: Machine[Any, Any]) -> None:
    used = {event for _, event in machine.rows()}
    assert used == set(type(next(iter(used))))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_what_has_no_row_is_refused_by_name(machine: Machine[Any, Any]) -> None:
    rows = machine.rows()
    events = type(next(event for _, event in rows))
    missing = [(state, event) for state in machine.states for event in events if (state, event) not in rows]
    assert missing
    for state, event in missing:
        with pytest.raises(InvalidTransitionError, match=f"{machine.name}: no transition from {state.name} on {event.name}"):
            machine.next(state, event)


def test_a_cancel_is_a_transition_only_where_no_job_runs() -> None:
    running = {RequestState.PREFILL_RUNNING, RequestState.DECODE_RUNNING}
    can = {state for state in RequestState if REQUEST.can(state, RequestEvent.CANCEL)}
    drained = {state for state in RequestState if REQUEST.can(state, RequestEvent.DRAINED_CANCELLED)}
    assert not can & running
    assert drained == running


def test_an_unknown_lane_has_no_way_out() -> None:
    assert KvSequenceState.UNKNOWN in KV_SEQUENCE.terminal
    assert not [event for event in KvEvent if KV_SEQUENCE.can(KvSequenceState.UNKNOWN, event)]


def test_a_lane_becomes_free_only_by_the_runtimes_confirmation() -> None:
    into_free = {event for (_, event), target in KV_SEQUENCE.rows().items() if target is KvSequenceState.FREE}
    assert into_free == {KvEvent.CONFIRM_FREE}


def test_a_generation_becomes_ready_only_through_golden_and_warm_up() -> None:
    """Nothing leads back from Draining: scheduling §12 knows no other way out than Unloading or Recovering."""
    into_ready = {(state, event) for (state, event), target in MODEL_GENERATION.rows().items() if target is ModelState.READY}
    assert into_ready == {(ModelState.WARMING, ModelEvent.WARMED)}


def test_every_event_of_the_three_tables_of_a_worker_happens_somewhere() -> None:
    """A row that nobody can take is a promise that nobody keeps."""
    code = "\n".join(path.read_text() for path in (ROOT / "calculet_worker").rglob("*.py"))
    for events, names in ((RequestEvent, "_E|RequestEvent"), (KvEvent, "KvEvent"), (ModelEvent, "_E|ModelEvent")):
        idle = {event.name for event in events if not re.search(rf"\b({names})\.{event.name}\b", code)}
        assert idle <= NOBODYS, f"{events.__name__}: {idle}"


def test_a_table_with_an_unreachable_state_is_refused() -> None:
    with pytest.raises(ValueError, match="light: unreachable states"):
        Machine("light", Light.RED, {(Light.RED, Signal.GO): Light.GREEN, (Light.GREEN, Signal.STOP): Light.RED})


def test_a_terminal_state_with_a_way_out_is_refused() -> None:
    table = {
        (Light.RED, Signal.GO): Light.GREEN,
        (Light.GREEN, Signal.STOP): Light.BROKEN,
        (Light.BROKEN, Signal.GO): Light.RED,
    }
    with pytest.raises(ValueError, match="BROKEN"):
        Machine("light", Light.RED, table, terminal=frozenset({Light.BROKEN}))


def test_a_diagram_names_every_row() -> None:
    text = KV_SEQUENCE.mermaid()
    assert "RELEASING --> FREE: confirm_free" in text
    assert text.count("-->") == len(KV_SEQUENCE.rows()) + 1 + len(KV_SEQUENCE.terminal)
