"""A stream that is longer than the drain deadline is told so: an error event, never a silent end; and operators hear it beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from builders_fleet import Fleet, Packages, until

DRAIN_MS = 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    """One board with short drain deadlines."""
    fleet = Fleet(
        tmp_path_factory.mktemp("drain") / "fleet", packages.get("sim-batch", "--step-ms", "20"), packages.key.with_suffix(".pub"),
        boards=1, supervision={"drain_timeout_ms": DRAIN_MS}, rollout={"drain_timeout_ms": DRAIN_MS},
    )  # fmt: skip
    with fleet:
        yield fleet


class Stream:
    """A stream that would take minutes, read to its end on a thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.events: list[str] = []
        self._fleet = fleet
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.events) > 2, "it has begun")

    def _read(self) -> None:
        for event in self._fleet.stream({"prompt": "a long story", "max_tokens": 3_000}):
            self.events.append(event)

    def end(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert "[DONE]" not in self.events, "a stream that was cut must not look whole"
        return json.loads(self.events[-1])["error"]


def test_a_swap_cuts_a_longer_stream_with_an_error_event_and_says_the_deadline_first(fleet: Fleet, packages: Packages) -> None:
    stream = Stream(fleet)
    green = packages.get("sim-batch", "--step-ms", "19")
    done = fleet.cli("load", "toy", str(green), "--yes", "--allow-downtime")
    assert done.returncode == 0, done.stderr
    assert "running answers may take 0.4 s more (rollout.drain_timeout_ms); longer ones end with the error model_draining" in done.stderr
    error = stream.end()
    assert error["code"] == "model_draining", error
    assert fleet.completion().status == 200


@pytest.mark.parametrize("verb", ["restart", "stop"])
def test_a_restart_and_a_stop_do_the_same(fleet: Fleet, verb: str) -> None:
    fleet.wait_ready(1)
    stream = Stream(fleet)
    done = fleet.cli(verb, "board0")
    assert done.returncode == 0
    assert "running answers may take 0.4 s more (supervision.drain_timeout_ms); longer ones end with the error shutting_down" in done.stderr
    error = stream.end()
    assert error["code"] == "shutting_down", error


def test_the_deadlines_are_metrics(fleet: Fleet) -> None:
    text = fleet.get("/metrics").body.decode()
    assert f'calculet_supervisor_limit{{limit="rollout.drain_timeout_ms"}} {DRAIN_MS}.0' in text
    assert f'calculet_supervisor_limit{{limit="supervision.drain_timeout_ms"}} {DRAIN_MS}.0' in text
    assert 'calculet_router_limit{limit="drain_timeout_s"} 30.0' in text
