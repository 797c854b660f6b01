"""What holds of every command: a version, JSON for programs, completion by the running fleet, progress that can be left and found again."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from builders_supervisor import a_package
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from test_cli import a_fleet, run
from test_cli import a_supervisor as answering

from calculet_core.shell.fleet import Fleet
from calculet_perf.cli import main as perf
from calculet_supervisor.cli import main

wait_module = importlib.import_module("calculet_supervisor.commands.wait")
BIN = Path(sys.executable).parent
SCRIPTS = ("calculet", "calculet-router", "calculet-worker", "calculet-supervisor", "calculet-perf")
WITHOUT_JSON = {
    "up", "top",  # live on a terminal; `status --json --watch` is for programs
    "init", "keys curve", "completion",  # write files, print a script
    "package build", "package prove", "package derive-profiles",  # pass on what calculet-worker prints
}  # fmt: skip


def a_supervisor(fleet: Fleet, **answers: dict[str, Any]) -> AbstractContextManager[Any]:
    return answering(fleet, **{verb: {"ok": True, **answer} for verb, answer in answers.items()})


@pytest.fixture
def fleet(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return a_fleet(tmp_path, a_package(tmp_path_factory.mktemp("package")))


def leaves(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name, below in command.commands.items():
        yield from leaves(below, f"{path} {name}".strip())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_console_script_tells_its_version(script: str) -> None:
    done = subprocess.run([str(BIN / script), "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"{script}, version {version('calculet')}"), done.stderr


def test_every_command_speaks_json_or_is_known_not_to() -> None:
    without = {path for path, command in leaves(main) if not any("--json" in param.opts for param in command.params)}
    assert without == WITHOUT_JSON


def test_what_calculet_perf_prints_as_an_answer_it_prints_as_json_too() -> None:
    """What it writes as files (runs, reports, comparisons, capacities) is JSON already."""
    without = {path for path, command in leaves(perf) if not any("--json" in param.opts for param in command.params)}
    assert without == {"manifest init", "run", "capacity", "soak", "report", "compare", "schema", "maintenance check", "maintenance run"}


@pytest.mark.parametrize(
    ("arguments", "answer", "expected"),
    [
        (["drain", "board0"], {"board": "board0", "draining": True}, {"board": "board0", "draining": True}),
        (["breaker"], {"reason": "too much", "was": None}, {"reason": "too much", "was": None}),
        (["reset", "board0"], {"generation": 3, "resets_left": 1}, {"generation": 3, "resets_left": 1}),
        (["promote", "toy"], {"rollout": 4}, {"rollout": 4}),
        (["pingpong", "board0", "forbid"], {"max_inflight": 1, "pingpong_off": None}, {"max_inflight": 1, "pingpong_off": None}),
    ],
)
def test_the_answer_is_the_json(fleet: Fleet, arguments: list[str], answer: dict[str, Any], expected: dict[str, Any]) -> None:
    with a_supervisor(fleet, **{arguments[0]: answer}):
        done = run(*arguments, "--config", str(fleet.path), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == expected


def test_a_wrong_configuration_is_told_as_json_too(fleet: Fleet) -> None:
    done = run("config", "check", "--config", str(fleet.path), "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["problems"] == []
    broken = json.loads(fleet.path.read_text())
    broken["models"][0]["package"] = "/nowhere"
    fleet.path.write_text(json.dumps(broken))
    done = run("config", "check", "--config", str(fleet.path), "--json")
    assert done.exit_code == 78 and "/nowhere" in json.loads(done.stdout)["problems"][0]


# ---------------------------------------------------------------- completion
def offered(fleet: Fleet, arguments: list[str], incomplete: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CALCULET_CONFIG", str(fleet.path))
    complete = ShellComplete(main, {}, "calculet", "_CALCULET_COMPLETE")
    return [item.value for item in complete.get_completions(arguments, incomplete)]


STATUS = {"boards": [{"board": "board0"}, {"board": "board1"}, {"board": "spare"}]}
GENERATIONS = {"aliases": [{"alias": "toy"}, {"alias": "chat"}], "boards": [], "quarantined": [{"digest": "3f2a" * 16}]}


def test_names_come_from_the_running_fleet(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_supervisor(fleet, status=STATUS, generations=GENERATIONS, rollouts={"rollouts": [{"id": 12}, {"id": 3}]}):
        assert offered(fleet, ["drain"], "b", monkeypatch) == ["board0", "board1"]
        assert offered(fleet, ["events", "--board"], "", monkeypatch) == ["board0", "board1", "spare"]
        assert offered(fleet, ["load"], "", monkeypatch) == ["toy", "chat"]
        assert offered(fleet, ["rollback"], "c", monkeypatch) == ["chat"]
        assert offered(fleet, ["release"], "3", monkeypatch) == ["3f2a3f2a3f2a"]
        assert offered(fleet, ["rollouts"], "1", monkeypatch) == ["12"]
        assert offered(fleet, ["keys", "create"], "", monkeypatch) == ["default"]


def test_the_fleet_that_the_line_names_is_asked(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CALCULET_CONFIG", str(tmp_path / "another.yaml"))
    with a_supervisor(fleet, status=STATUS):
        complete = ShellComplete(main, {}, "calculet", "_CALCULET_COMPLETE")
        found = complete.get_completions(["drain", "--config", str(fleet.path)], "sp")
    assert [item.value for item in found] == ["spare"]


def test_where_nobody_answers_nothing_is_offered_and_nothing_is_said(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert offered(fleet, ["drain"], "", monkeypatch) == []
    fleet.path.write_text("{")
    assert offered(fleet, ["drain"], "", monkeypatch) == []
    fleet.path.unlink()
    assert offered(fleet, ["rollback"], "", monkeypatch) == []
    assert capfd.readouterr() == ("", "")


def test_scenarios_of_chaos_are_offered(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kill_decoding" in offered(fleet, ["chaos", "run"], "kill_d", monkeypatch)


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef calculet"), ("fish", "complete --no-files --command calculet")])
def test_a_shell_gets_its_script(shell: str, words: str) -> None:
    done = run("completion", shell)
    assert done.exit_code == 0 and words in done.stdout and "_CALCULET_COMPLETE" in done.stdout
    if program := shutil.which(shell):
        checked = subprocess.run([program, "-n"], input=done.stdout, capture_output=True, text=True, timeout=30)
        assert checked.returncode == 0, checked.stderr


def test_bash_completes_a_board_end_to_end(fleet: Fleet) -> None:
    script = run("completion", "bash").stdout
    line = f'{script}\nCOMP_WORDS=(calculet drain s)\nCOMP_CWORD=2\n_calculet_completion calculet\necho "${{COMPREPLY[@]}}"'
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "CALCULET_CONFIG": str(fleet.path)}
    with a_supervisor(fleet, status=STATUS):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "spare", done.stderr


# ---------------------------------------------------------------- watching
def row(**fields: Any) -> dict[str, Any]:
    base = {
        "board": "board0", "state": "READY", "process": "UP", "pid": 7, "epoch": 3, "generation": 2, "worker_draining": False,
        "active": 0, "waiting": 0, "load_step": None, "why": None,
    }  # fmt: skip
    return {**base, **fields}


def watching(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], *arguments: str, **answers: dict[str, Any]) -> Any:
    """A supervisor whose board goes through `rows`, one for each look."""
    monkeypatch.setattr(wait_module, "GLANCE_S", 0)
    looks = iter(rows)

    with a_supervisor(fleet, status={"boards": [rows[0]]}, **answers):
        monkeypatch.setattr(wait_module, "_row", lambda fleet, board, patience_s: next(looks, rows[-1]))
        return CliRunner().invoke(main, [*arguments, "--config", str(fleet.path)], catch_exceptions=False)


def test_what_was_begun_by_anybody_can_be_watched_and_tells_its_progress(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [row(worker_draining=True, active=2, waiting=1), row(worker_draining=True, active=2, waiting=1), row(worker_draining=True, active=1), row(worker_draining=True)]
    done = watching(fleet, monkeypatch, steps, "wait", "board0", "--for", "drained")
    assert done.exit_code == 0 and done.stdout == "board0 is drained\n"
    told = [line.split("board0: ")[1] for line in done.stderr.splitlines()]
    assert told == ["ready, 2 requests run, 1 wait", "ready, 1 requests run, 0 wait"], "only what changed is told"


def test_a_restart_that_is_waited_for_is_over_when_the_next_life_serves(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [row(epoch=3), row(state=None, pid=None, epoch=None, process="STARTING"), row(epoch=4, state="CONFIGURING", load_step="golden 3/8"), row(epoch=4)]
    done = watching(fleet, monkeypatch, steps, "restart", "board0", "--wait", restart={"board": "board0"})
    assert done.exit_code == 0 and done.stdout == "board0 is restarted and ready\n"
    assert "no worker yet (starting)" in done.stderr and "configuring, golden 3/8" in done.stderr


def test_a_wait_that_takes_too_long_says_how_it_is_and_what_watches_it_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    done = watching(fleet, monkeypatch, [row(state="FAILED", why="golden failed")], "wait", "board0", "--timeout-s", "0")
    assert done.exit_code == 1
    assert "board0 is not ready after 0 s: failed, golden failed" in done.stderr and "calculet wait board0 --for ready" in done.stderr


@pytest.mark.parametrize(
    "fields, words, remedy",
    [
        ({"up": False, "state": None, "pid": None, "epoch": None}, "is stopped", "calculet start board0"),
        ({"draining": True, "worker_draining": True}, "is drained", "calculet resume board0"),
        ({"up": False, "condemned": "two timeouts"}, "set aside: two timeouts", "calculet probation board0"),
        ({"wanted_digest": None, "state": "UNLOADED", "alias": "toy", "time_shared": None}, "unloaded", "calculet load toy DIR"),
    ],
)
def test_nobody_waits_for_a_board_that_an_operators_word_keeps_from_being_ready(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str, remedy: str
) -> None:
    done = watching(fleet, monkeypatch, [row(state="WARMING", up=True), row(**fields)], "wait", "board0")
    assert done.exit_code == 1 and words in done.stderr and remedy in done.stderr


def test_a_word_that_holds_already_says_so(fleet: Fleet) -> None:
    for verb, answer, words in (
        ("stop", {"already": True, "up": False}, "stopped already"), ("start", {"already": True, "up": True}, "was not stopped"),
        ("start", {"draining": True, "up": True}, "calculet resume board0"), ("resume", {"up": False}, "calculet start board0"),
        ("drain", {"already": True, "up": True}, "drained already"),
    ):  # fmt: skip
        with a_supervisor(fleet, **{verb: {"board": "board0", **answer}}):
            done = CliRunner().invoke(main, [verb, "board0", "--config", str(fleet.path)], catch_exceptions=False)
        assert done.exit_code == 0 and words in done.stdout, (verb, done.stdout)


def test_leaving_leaves_what_was_begun_and_says_how_to_come_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wait_module, "time", SimpleNamespace(sleep=gone, monotonic=time.monotonic))
    done = watching(fleet, monkeypatch, [row(active=1)], "wait", "board0", "--for", "down")
    assert done.exit_code == 130 and "`calculet wait board0 --for down` watches it again" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["completion", "bash"]])
def test_output_that_goes_nowhere_is_one_line_and_no_stack(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "calculet_supervisor.cli", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("calculet: No space left on device\n") and "Traceback" not in done.stderr
