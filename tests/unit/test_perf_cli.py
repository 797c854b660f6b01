"""Exit codes of `calculet-perf` when it is itself that fails: never Python's 1, which would blame the server."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from calculet_perf.cli import main
from calculet_perf.commands import COMMANDS
from calculet_perf.manifest import ManifestError
from calculet_perf.records import RecordError
from calculet_perf.shell.run_dir import RunDirError, RunWriter


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
        (OSError(errno.ENOSPC, "No space left on device", "runs/x/a"), 3, "cannot write: runs/x/a: No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "cannot write: No space left on device"),
        (OSError(errno.EBADF, "Bad file descriptor"), 3, "not a verdict on the server"),
    ],
)
def test_a_fault_of_ours_is_3_and_wrong_input_is_2(broken: list[BaseException], error: BaseException, code: int, words: str) -> None:
    broken.append(error)
    done = run("broken")
    assert done.exit_code == code, done.output
    assert words in done.output
    assert ("Traceback" in done.output) == ("not a verdict" in words), "only a bug shows its trace"


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


def test_ctrl_c_while_it_is_being_loaded_is_3_too() -> None:
    """What a person sees who thinks better of it at once."""
    broken = "import sys\nclass Stop:\n    def find_spec(self, name, *_):\n        if name == 'calculet_perf.commands': raise KeyboardInterrupt\n"
    code = broken + "sys.meta_path.insert(0, Stop())\nimport calculet_perf.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "calculet-perf: interrupted\n")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="file/run cannot hold a run: "):
        RunWriter(tmp_path / "file" / "run")
