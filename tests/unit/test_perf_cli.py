"""Exit codes of `calculet-perf` when it is itself that fails: never Python's 1, which would blame the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from calculet_perf.cli import main
from calculet_perf.commands import COMMANDS
from calculet_perf.manifest import ManifestError
from calculet_perf.records import RecordError
from calculet_perf.shell.run_dir import RunDirError


@pytest.fixture
def broken() -> Iterator[list[BaseException]]:
    """A verb that raises what it is given."""
    raises: list[BaseException] = []

    @click.command("broken")
    def verb() -> None:
        raise raises[0]

    main.add_command(verb)
    yield raises
    main.commands.pop("broken")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeError("a bug"), 3, "not a verdict on the server"),
        (MemoryError(), 3, "not a verdict on the server"),
        (KeyboardInterrupt(), 3, "interrupted"),
        (ManifestError("m.yaml: $.x: is wrong"), 2, "calculet-perf: m.yaml: $.x: is wrong"),
        (RecordError("requests.jsonl:7: half"), 2, "requests.jsonl:7: half"),
        (RunDirError("runs/x is not a run's folder"), 2, "is not a run's folder"),
    ],
)
def test_a_fault_of_ours_is_3_and_wrong_input_is_2(broken: list[BaseException], error: BaseException, code: int, words: str) -> None:
    broken.append(error)
    done = run("broken")
    assert done.exit_code == code, done.output
    assert words in done.output
    assert ("Traceback" in done.output) == isinstance(error, RuntimeError | MemoryError), "only a bug shows its trace"


def test_wrong_usage_is_2() -> None:
    assert run("run").exit_code == 2
    assert run("no-such-verb").exit_code == 2
    assert run("soak", "m.yaml", "--stage", "forever").exit_code == 2


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_verb_explains_itself(command: click.Command) -> None:
    done = run(str(command.name), "--help")
    assert done.exit_code == 0
    assert len(done.output) > 100


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = run("run", str(tmp_path / "nowhere.yaml"))
    assert done.exit_code == 2
    assert "nowhere.yaml: No such file" in done.output
