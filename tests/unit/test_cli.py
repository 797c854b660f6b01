"""What operators type: answers on stdout, errors on stderr with what to do, exit codes that scripts can use."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders_supervisor import a_package
from click.testing import CliRunner, Result

from calculet_core.shell.control_client import pack, unpacker
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.journal import Journal
from calculet_perf.cli import main as perf
from calculet_supervisor.cli import main
from calculet_supervisor.commands import COMMANDS, common
from calculet_supervisor.commands.common import default_config

CONFIG, UNREACHABLE = 78, 69


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env=environment, catch_exceptions=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return a_package(tmp_path_factory.mktemp("package"))


def a_fleet(folder: Path, package: tuple[Path, Path], **sections: Any) -> Fleet:
    config = {
        "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log", "trusted_keys": [str(package[1])],
        "boards": [{"name": "board0", "device": "sim"}, {"name": "board1", "device": "sim"}],
        "models": [{"alias": "toy", "package": str(package[0])}], **sections,
    }  # fmt: skip
    (folder / "fleet.yaml").write_text(json.dumps(config))
    return load_fleet(folder / "fleet.yaml")


@pytest.fixture
def fleet(tmp_path: Path, package: tuple[Path, Path]) -> Fleet:
    return a_fleet(tmp_path, package)


@contextmanager
def a_supervisor(fleet: Fleet, **answers: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Answers verbs on the control socket; yields what was asked."""
    asked: list[dict[str, Any]] = []
    fleet.control_socket.parent.mkdir(parents=True, exist_ok=True)
    fleet.control_socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(fleet.control_socket))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                incoming = unpacker()
                incoming.feed(connection.recv(65_536))
                request = next(iter(incoming))
                asked.append(request)
                connection.sendall(pack(answers.get(request["verb"], {"ok": True})))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def a_row(board: str, **fields: Any) -> dict[str, Any]:
    return {
        "board": board, "device": "sim", "state": "READY", "process": "UP", "pid": 4_123_456, "epoch": 1234, "generation": 4321,
        "alias": "qwen3", "digest": "d" * 64, "up": True, "draining": False, "worker_draining": False, "lanes_used": 12,
        "lanes_total": 16, "queues": {"decode": 12, "short": 3, "medium": 0, "long": 1}, "waiting": 117, "tokens": 123_456_789,
        "active": 12, "faults": 2, "why": None, "load_step": None, "retry_in_s": None, **fields,
    }  # fmt: skip


def a_status(*rows: dict[str, Any]) -> dict[str, Any]:
    router = {
        "router": "0badcafe", "pid": 4_123_455, "url": "http://127.0.0.1:8080", "view_version": 91, "inflight": 129,
        "requests": 1_234_567, "failed": 3, "resent": 12,
    }  # fmt: skip
    return {"ok": True, "schema": "calculet-status/v1", "boards": list(rows), "routers": [router]}


# ---------------------------------------------------------------- finding the fleet
@pytest.mark.parametrize("verb", ["status", "up", "drain board0", "resume board0", "stop board0", "start board0", "restart board0", "config check"])
def test_a_missing_configuration_is_one_line_that_says_how_to_name_it(verb: str, tmp_path: Path) -> None:
    result = run(*verb.split(), "--config", str(tmp_path / "none.yaml"))
    assert (result.exit_code, result.stdout) == (CONFIG, "")
    assert "none.yaml: No such file" in result.stderr and "CALCULET_CONFIG" in result.stderr


def test_the_configuration_may_be_named_by_the_environment(fleet: Fleet) -> None:
    assert run("config", "check", CALCULET_CONFIG=str(fleet.path)).exit_code == 0


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("schema: calculet-fleet/v1\nboards: [\n")
    result = run("up", "--config", str(tmp_path / "fleet.yaml"))
    assert result.exit_code == CONFIG and "line 3" in result.stderr and "not valid YAML" in result.stderr


@pytest.mark.parametrize("verb", ["status", "drain board0", "restart board0"])
def test_a_supervisor_that_is_not_there_has_an_exit_code_of_its_own(verb: str, fleet: Fleet) -> None:
    result = run(*verb.split(), "--config", str(fleet.path))
    assert (result.exit_code, result.stdout) == (UNREACHABLE, "")
    assert "no supervisor listens" in result.stderr and "calculet up" in result.stderr


@pytest.mark.parametrize("arguments", [["drain"], ["status", "extra"], ["nonsense"], ["drain", "b", "--nonsense"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


# ---------------------------------------------------------------- verbs
@pytest.mark.parametrize("verb", ["drain", "resume", "stop", "start", "restart"])
def test_a_verb_asks_the_supervisor_and_says_what_happens(verb: str, fleet: Fleet) -> None:
    with a_supervisor(fleet) as asked:
        result = run(verb, "board1", "--config", str(fleet.path))
    assert asked == [{"verb": verb, "board": "board1"}]
    assert result.exit_code == 0 and "board1" in result.stdout
    assert ("30 s more (supervision.drain_timeout_ms)" in result.stderr) == (verb in ("stop", "restart"))


def test_a_refusal_is_1_with_its_hint(fleet: Fleet) -> None:
    refusal = {"ok": False, "error": "there is no board 'x'", "hint": "boards: board0, board1"}
    with a_supervisor(fleet, drain=refusal):
        result = run("drain", "x", "--config", str(fleet.path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "calculet: there is no board 'x'\n  boards: board0, board1\n"


def test_drain_wait_returns_when_nothing_runs(fleet: Fleet) -> None:
    with a_supervisor(fleet, status=a_status(a_row("board0", worker_draining=True, active=0, waiting=0))) as asked:
        assert run("drain", "board0", "--wait", "--config", str(fleet.path)).exit_code == 0
    assert [request["verb"] for request in asked] == ["drain", "status"]


# ---------------------------------------------------------------- status
def test_status_fits_100_columns_without_colour_and_on_one_line_a_board(fleet: Fleet) -> None:
    rows = [a_row(f"board{index}", state="RECOVERING") for index in range(3)] + [a_row("board3", draining=True)]
    with a_supervisor(fleet, status=a_status(*rows)):
        result = run("status", "--config", str(fleet.path))
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    assert max(map(len, lines)) <= 100
    assert [len(re.findall(f"board{index}", result.stdout)) for index in range(4)] == [1, 1, 1, 1]
    assert "DRAINING" in next(line for line in lines if "board3" in line)
    for cell in ("4123456/1234", "4321", "qwen3", "12/16", "d12 s3 l1", "117", "123M", "0badcafe", "http://127.0.0.1:8080"):
        assert cell in result.stdout
    assert "…" not in result.stdout


def test_status_says_what_is_wrong_and_what_to_do(fleet: Fleet) -> None:
    rows = (
        a_row("board0", state=None, pid=None, epoch=None, process="QUARANTINED", why="exit 78: fleet.yaml: [red]wrong"),
        a_row("board1", state=None, pid=None, process="BACKOFF", why="killed by signal 9", retry_in_s=3.2),
        a_row("board2", state=None, pid=None, process="ABSENT", up=False),
    )
    with a_supervisor(fleet, status=a_status(*rows)):
        out = run("status", "--config", str(fleet.path)).stdout
    assert "board0: exit 78: fleet.yaml: [red]wrong; `calculet restart board0` tries again" in out.replace("\n", " ")
    assert "board1: killed by signal 9; tried again in 3 s" in out
    assert "board2: stopped by an operator; `calculet start board2` brings it back" in out


def test_status_json_is_one_object_with_its_schema(fleet: Fleet) -> None:
    with a_supervisor(fleet, status=a_status(a_row("board0"))):
        answer = json.loads(run("status", "--json", "--config", str(fleet.path)).stdout)
    assert answer["schema"] == "calculet-status/v1" and answer["boards"][0]["board"] == "board0" and "ok" not in answer


# ---------------------------------------------------------------- config check
def test_a_good_configuration_is_said_to_be_good(fleet: Fleet) -> None:
    result = run("config", "check", "--config", str(fleet.path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "good (2 boards, models: toy)" in result.stdout


def test_everything_that_is_wrong_is_said_at_once_each_with_its_path(tmp_path: Path, package: tuple[Path, Path]) -> None:
    (tmp_path / "s.yaml").write_text("schema: calculet-scheduler/v1\nmodel_alias: toy\nbatch: {profiles: [1, 8]}\n")
    boards = [{"name": "board0", "device": "sim"}, {"name": "board1", "device": "abacus"}, {"name": "board2", "device": "sim"}]
    models = [
        {"alias": "toy", "package": str(package[0]), "scheduler": "s.yaml", "boards": ["board0", "board1"]},
        {"alias": "gone", "package": "nowhere", "boards": ["board2"]},
    ]
    fleet = a_fleet(tmp_path, package, boards=boards, models=models)
    result = run("config", "check", "--config", str(fleet.path))
    assert (result.exit_code, result.stdout) == (CONFIG, "")
    for words in ("s.yaml: $.batch.profiles[1]: B8 is not in manifest", "$.boards[1].device: 'abacus'", "$.models[1].package: ", "nowhere"):
        assert words in result.stderr


def test_a_package_that_nobody_trusts_or_that_was_changed_is_wrong(tmp_path: Path) -> None:
    mine, theirs = a_package(tmp_path / "mine"), a_package(tmp_path / "theirs")
    fleet = a_fleet(tmp_path, (theirs[0], mine[1]))
    assert "not trusted" in run("config", "check", "--config", str(fleet.path)).stderr
    (mine[0] / "image.bin").write_bytes(b"other")
    fleet = a_fleet(tmp_path, mine)
    assert "image.bin was changed" in run("config", "check", "--config", str(fleet.path)).stderr


# ---------------------------------------------------------------- package
def test_package_show_verify_and_sign(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    root, trust = a_package(tmp_path)
    assert "stub 1" in run("package", "show", str(root)).stdout
    assert json.loads(run("package", "show", "--json", str(root)).stdout)["manifest"]["name"] == "stub"
    assert "good" in run("package", "verify", str(root), "--trust", str(trust)).stdout

    key = Ed25519PrivateKey.generate()
    (tmp_path / "new.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "new.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert run("package", "sign", str(root), "--key", str(tmp_path / "new.pem")).exit_code == 0
    assert run("package", "verify", str(root), "--trust", str(tmp_path / "new.pub")).exit_code == 0
    refused = run("package", "verify", str(root), "--trust", str(trust))
    assert (refused.exit_code, refused.stdout) == (1, "") and "not trusted" in refused.stderr

    wrong = run("package", "sign", str(root), "--key", str(trust))
    assert wrong.exit_code == 1 and "not a PEM private key" in wrong.stderr
    assert run("package", "show", str(tmp_path / "nowhere")).exit_code == 1


# ---------------------------------------------------------------- as a whole
def test_every_command_explains_itself() -> None:
    for command in COMMANDS:
        assert command.name and command.help
        assert run(command.name, "--help").exit_code == 0


def test_help_and_errors_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom calculet_supervisor.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'zmq', 'rich', 'cryptography', 'msgspec', 'asyncio', 'sqlite3', 'prometheus_client'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.stderr.strip() == "[]"


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"calculet \d+\.\d+\.\d+\n", run("version").stdout)


# ---------------------------------------------------------------- calculet-perf
def a_journal(path: Path, *outcomes: str) -> Path:
    journal = Journal(path, 1 << 20, 0)
    for request, outcome in enumerate(outcomes, 1):
        journal.write("request.accepted", request=request)
        if outcome:
            journal.write("request.done", request=request, outcome=outcome)
    journal.close()
    return path


def test_a_history_that_kept_its_promises_is_0_and_a_broken_one_is_1_and_named(tmp_path: Path) -> None:
    good, bad = a_journal(tmp_path / "good.jsonl", "completed", "cancelled"), a_journal(tmp_path / "bad.jsonl", "completed", "")
    kept = CliRunner().invoke(perf, ["history", "check", str(good)])
    assert (kept.exit_code, kept.stdout) == (0, "") and "2 requests, 0 broken promises" in kept.stderr
    broken = CliRunner().invoke(perf, ["history", "check", str(bad)])
    assert broken.exit_code == 1 and "one_terminal: request 0000000000000002 was accepted and never ended" in broken.stdout
    assert CliRunner().invoke(perf, ["history", "check", "--running", str(bad)]).exit_code == 0
    assert CliRunner().invoke(perf, ["history", "check"]).exit_code == 2


def test_without_config_the_fleet_that_make_runs_here_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_config() == "configs/fleet.yaml"
    (tmp_path / ".calculet").mkdir()
    (tmp_path / ".calculet" / "fleet").write_text("mine.yaml\n")
    assert default_config() == "configs/fleet.yaml", "a name without a file is no fleet"
    (tmp_path / "mine.yaml").write_text("")
    assert default_config() == "mine.yaml"


def test_an_installed_fleet_is_found_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "INSTALLED_CONFIG", str(tmp_path / "installed.yaml"))
    assert default_config() == "configs/fleet.yaml"
    (tmp_path / "installed.yaml").write_text("schema: calculet-fleet/v1")
    assert default_config() == str(tmp_path / "installed.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/fleet.yaml").write_text("schema: calculet-fleet/v1")
    assert default_config() == "configs/fleet.yaml"


def test_status_says_who_was_set_aside_what_is_under_way_and_that_automatic_action_stopped(fleet: Fleet) -> None:
    rows = (a_row("board0", up=False, condemned="it burns"), a_row("board1", probation=True))
    swap = {"id": 7, "alias": "toy", "verb": "load", "state": "STAGING", "share": 0.1, "text": "board1 leaves toy 1"}
    with a_supervisor(fleet, status={**a_status(*rows), "breaker": "2 of 2 boards went bad", "rollouts": [swap]}):
        shown = " ".join(run("status", "--config", str(fleet.path)).stdout.split())
    assert "board0: set aside: it burns; `calculet probation board0`" in shown and "`calculet start" not in shown
    assert "board1: on probation" in shown
    assert "automatic action is stopped: 2 of 2 boards went bad (calculet breaker --close)" in shown
    assert "rollout 7 of toy: STAGING, board1 leaves toy 1" in shown


# ------------------------------------------------------------------------------------------------ model swaps
def a_swap(state: str, **fields: Any) -> dict[str, Any]:
    log = [{"wall_s": 100.0, "text": "load toy"}, {"wall_s": 101.5, "text": "board0 leaves toy 1"}]
    return {
        "id": 7, "alias": "toy", "verb": "load", "state": state, "begun": 100.0, "log": log, "reason": None, "green": {"name": "toy 2"},
        "package": "/p", "boards_seen": {"board0": "READY"}, "canary_words": None, **fields,
    }  # fmt: skip


def answers(state: str, **fields: Any) -> dict[str, dict[str, Any]]:
    return {"load": {"ok": True, "rollout": 7, "state": "VERIFYING"}, "rollouts": {"ok": True, "rollouts": [a_swap(state, **fields)]}}


def test_a_load_is_followed_to_its_end_and_the_exit_code_says_how_it_went(fleet: Fleet, tmp_path: Path) -> None:
    with a_supervisor(fleet, **answers("DONE")) as asked:
        done = run("load", "toy", str(tmp_path), "--config", str(fleet.path), "--canary", "10%", "--floor", "1", "--yes")
    assert (done.exit_code, done.stdout.splitlines()[-1].split()) == (0, ["1.500", "s", "board0", "leaves", "toy", "1"])
    assert asked[0] == {
        "verb": "load", "alias": "toy", "package": str(tmp_path.resolve()), "canary": 0.1, "floor": 1, "max_unavailable": 1,
        "allow_downtime": False, "override": False,
    }  # fmt: skip
    with a_supervisor(fleet, **answers("ROLLED_BACK", reason="board0: golden: wrong")):
        done = run("load", "toy", str(tmp_path), "--config", str(fleet.path), "--yes")
    assert done.exit_code == 1 and "rollout 7 of toy: ROLLED_BACK: board0: golden: wrong" in done.stderr


def test_a_load_can_be_left_alone_and_looked_at_again(fleet: Fleet, tmp_path: Path) -> None:
    with a_supervisor(fleet, **answers("STAGING")):
        done = run("load", "toy", str(tmp_path), "--config", str(fleet.path), "--yes", "--detach")
        assert done.exit_code == 0 and "calculet rollouts 7 --follow" in done.stdout
        assert "STAGING: board0 READY" in run("rollouts", "7", "--config", str(fleet.path)).stdout
        assert "toy -> toy 2  STAGING" in run("rollouts", "--config", str(fleet.path)).stdout
        assert json.loads(run("rollouts", "--json", "--config", str(fleet.path)).stdout)[0]["id"] == 7


def test_nobody_to_ask_is_a_usage_error_and_nothing_is_asked(fleet: Fleet, tmp_path: Path) -> None:
    with a_supervisor(fleet, **answers("DONE")) as asked:
        for verb in (("load", "toy", str(tmp_path)), ("rollback", "toy"), ("unload", "toy")):
            done = run(*verb, "--config", str(fleet.path))
            assert done.exit_code == 2 and "--yes" in done.stderr
        assert run("load", "toy", str(tmp_path), "--canary", "much", "--config", str(fleet.path)).exit_code == 2
        assert run("load", "toy", str(tmp_path), "--canary", "100%", "--config", str(fleet.path)).exit_code == 2
        assert asked == []
        run("generations", "--config", str(fleet.path), "--json")


def test_words_about_boards_reach_the_supervisor_and_are_answered(fleet: Fleet) -> None:
    given = {
        "reset": {"ok": True, "generation": 4, "resets_left": 0}, "condemn": {"ok": True},
        "probation": {"ok": True, "probation_s": 600.0, "was": "it burns"}, "breaker": {"ok": True, "was": "half", "reason": None},
        "release": {"ok": True, "digest": "d" * 64, "was": "golden"},
    }  # fmt: skip
    config = ("--config", str(fleet.path))
    with a_supervisor(fleet, **given) as asked:
        assert "generation 4; the budget had 0 left" in run("reset", "board0", *config).stdout
        assert "calculet probation board0" in run("condemn", "board0", "--reason", "it burns", *config).stdout
        assert "for 600 s (it was set aside: it burns)" in run("probation", "board0", *config).stdout
        assert "it was stopped: half" in run("breaker", "--close", *config).stdout
        assert "dddddddddddd may be loaded again" in run("release", "dddd", *config).stdout
    assert asked[1] == {"verb": "condemn", "board": "board0", "reason": "it burns"}
