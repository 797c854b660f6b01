"""`calculet upgrade` is interrupted and goes on: over a `systemctl` whose services are sleeping processes, and a fleet whose boards are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders_fleet import BIN, Fleet, Packages, until

SUPERVISOR, ROUTER = "calculet-supervisor.service", "calculet-router.service"
# One process a unit; a restart of a unit waits while there is a file hold-UNIT.
SYSTEMCTL = r"""#!/bin/bash
here=$(dirname "$0"); unit=${!#}
case $1 in
list-units) for file in "$here"/*.pid; do name=$(basename "$file" .pid); [[ $name == $unit ]] && echo "$name loaded active running x"; done ;;
show) cat "$here/$unit.pid" ;;
restart)
    echo "$unit" >>"$here/asked"
    while [ -e "$here/hold-$unit" ]; do sleep 0.02; done
    kill "$(cat "$here/$unit.pid")"
    setsid sleep 300 </dev/null >/dev/null 2>&1 & echo $! >"$here/$unit.pid" ;;
esac
exit 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    for unit in (SUPERVISOR, ROUTER):
        process = subprocess.Popen(["sleep", "300"], start_new_session=True)
        threading.Thread(target=process.wait, daemon=True).start()
        (tmp_path / f"{unit}.pid").write_text(str(process.pid))
    yield tmp_path
    for unit in (SUPERVISOR, ROUTER):
        os.kill(int((tmp_path / f"{unit}.pid").read_text()), signal.SIGKILL)


class Upgrade:
    """One call of the command."""

    def __init__(self, folder: Path, fleet: Fleet, *options: str) -> None:
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = [str(BIN / "calculet"), "upgrade", "--config", str(fleet.config), *options]
        self.log = folder / f"upgrade-{len(list(folder.glob('upgrade-*')))}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def ended(self) -> tuple[int, str]:
        return self.process.wait(120), self.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may upgrade")
def test_an_interrupted_upgrade_goes_on_where_it_was_and_restarts_nothing_twice(folder: Path, tmp_path: Path, packages: Packages) -> None:
    package = packages.get("sim-batch", "--step-ms", "5")
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub")) as fleet:
        asked, before = folder / "asked", fleet.pids()
        # A lost terminal while the router drains.
        (folder / f"hold-{ROUTER}").touch()
        first = Upgrade(folder, fleet)
        until(lambda: asked.exists() and ROUTER in asked.read_text(), "the router is being restarted")
        code, text = Upgrade(folder, fleet).ended()
        assert code == 1 and "another `calculet upgrade` is at work" in text
        first.process.send_signal(signal.SIGHUP)
        code, text = first.ended()
        assert code == 130 and "goes on where it was" in text and f"{SUPERVISOR}: restarted" in text, text
        (folder / f"hold-{ROUTER}").unlink()
        # Ctrl-C while a board drains.
        streams = [threading.Thread(target=lambda: list(fleet.stream({"prompt": "long", "max_tokens": 700}))) for _ in range(4)]
        for stream in streams:
            stream.start()
        until(lambda: sum(fleet.active()) == 4, "streams run")
        second = Upgrade(folder, fleet)
        until(lambda: any(row["worker_draining"] for row in (fleet.status() or {"boards": []})["boards"]), "board0 drains")
        second.process.send_signal(signal.SIGINT)
        code, text = second.ended()
        assert code == 130 and f"new already: {SUPERVISOR} (" in text and f"{ROUTER}: restarted" in text, text
        third = Upgrade(folder, fleet, "--json")
        code, text = third.ended()
        assert code == 0 and f"new already: {SUPERVISOR}, {ROUTER}" in text, text
        answer = json.loads(text[text.index("{") :])
        assert answer["goes_on"] and not answer["dry_run"]
        for stream in streams:
            stream.join(60)
        after = fleet.pids()
        assert all(after[board] not in (before[board], None) for board in fleet.boards)
        epochs = [row["epoch"] for row in until(fleet.status, "status")["boards"]]
        assert epochs == [2, 2], "each of them once"
        assert sorted(asked.read_text().split()) == [ROUTER, ROUTER, SUPERVISOR], "the router's first restart was cut off by this systemctl"
        # It is over: the next one begins anew.
        code, text = Upgrade(folder, fleet, "--dry-run").ended()
        assert (code, [line for line in text.splitlines() if "would" in line]) == (
            0, [f"would restart {what}" for what in (SUPERVISOR, ROUTER, "board0", "board1")]
        )  # fmt: skip
