"""A process that is stuck tells where, when it is asked and when it dies; who cannot tell is not asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders_fleet import until

from calculet_core.shell.stacks import DUMP, can_dump

PROGRAM = """
import sys, threading, time
from pathlib import Path
from calculet_core.shell.stacks import ignore_dumps, keep_stacks

def stuck_in_a_driver():
    threading.Event().wait()

ignore_dumps()
if sys.argv[2] == "keeps":
    keep_stacks(Path(sys.argv[1]), "board b epoch 3")
threading.Thread(target=stuck_in_a_driver, daemon=True).start()
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=["keeps"])
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "stacks"), request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_stacks_of_all_threads_are_written_on_demand_and_on_abort(stuck: subprocess.Popen[str], tmp_path: Path) -> None:
    assert can_dump(stuck.pid)
    stuck.send_signal(DUMP)
    text = until(lambda: (found := (tmp_path / "stacks").read_text()).count("stuck_in_a_driver") == 1 and "<module>" in found and found, "stacks")
    assert text.startswith("# board b epoch 3\n") and "Fatal" not in text
    assert stuck.poll() is None, "it goes on"
    stuck.send_signal(signal.SIGABRT)
    assert stuck.wait(20) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in (tmp_path / "stacks").read_text()


@pytest.mark.parametrize("stuck", ["does not"], indirect=True)
def test_a_process_without_a_handler_is_not_asked_and_would_not_die_of_it(stuck: subprocess.Popen[str]) -> None:
    assert not can_dump(stuck.pid)
    stuck.send_signal(DUMP)
    assert not can_dump(stuck.pid) and stuck.poll() is None
    assert not can_dump(2**22 + 1) and not can_dump(os.getpid())
