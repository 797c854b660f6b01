"""A router that was stopped for longer than everybody's patience goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from builders_fleet import Fleet, Packages, until
from builders_swap import Load

STOPPED_S = 2.0


def test_requests_that_wait_for_a_router_that_stood_still_are_answered(tmp_path: Path, packages: Packages) -> None:
    patience = {"worker_silence_ms": 800, "accept_timeout_ms": 800, "lease_interval_ms": 200}
    fleet = Fleet(
        tmp_path / "fleet", packages.get("sim-batch", "--step-ms", "2"), packages.key.with_suffix(".pub"), boards=1, router=patience
    )
    with fleet:
        with Load(fleet, 8, streams=False) as load:  # the worker gives up a stream that has begun, which is told
            load.more(20)
            router = fleet.pid("router")
            assert router is not None
            os.kill(router, signal.SIGSTOP)
            since = time.monotonic()
            worker_log = fleet.folder / "log" / "worker-board0.log"
            until(lambda: "is lost: lease" in worker_log.read_text() and time.monotonic() - since > STOPPED_S, "the worker gives it up")
            os.kill(router, signal.SIGCONT)
            load.more(20)
        assert load.failed == []
        assert "stood still for" in (fleet.folder / "log" / "router.log").read_text()
