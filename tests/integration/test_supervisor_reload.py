"""SIGHUP to the supervisor of a development fleet: the configuration is read again, and nobody else notices."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from builders_fleet import Fleet, Packages, until


def test_sighup_reads_the_configuration_again_and_refuses_a_wrong_one(tmp_path: Path, packages: Packages) -> None:
    with Fleet(tmp_path / "fleet", packages.get("sim-batch", "--step-ms", "5"), packages.key.with_suffix(".pub")) as fleet:
        before, good = fleet.pids(), fleet.config.read_text()
        assert before["supervisor"]
        fleet.config.write_text(json.dumps({**json.loads(good), "boards": []}))
        os.kill(before["supervisor"], signal.SIGHUP)
        until(lambda: "the reload is refused" in (tmp_path / "fleet/log/supervisor.log").read_text(), "it refuses")
        fleet.config.write_text(good)
        assert fleet.pids() == before and fleet.status() is not None
        os.kill(before["supervisor"], signal.SIGHUP)
        until(lambda: fleet.pid("supervisor") not in (before["supervisor"], None), "it is born again")
        fleet.wait_ready(2)
        assert {**fleet.pids(), "supervisor": 0} == {**before, "supervisor": 0}
        assert fleet.completion().status == 200
