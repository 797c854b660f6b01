"""`calculet init`: what it writes is a configuration, and it writes over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from calculet_core.config import SchedulerConfig, parse_scheduler
from calculet_core.shell.fleet import load_fleet
from calculet_supervisor.cli import main

ROOT = Path(__file__).resolve().parents[2]


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments])


@pytest.mark.parametrize(("device", "options"), [("sim", {}), ("llamacpp", {"threads": 1})])
def test_the_files_parse_and_are_what_was_asked_for(tmp_path: Path, device: str, options: dict[str, int]) -> None:
    done = init(str(tmp_path / "new"), "--boards", "3", "--device", device, "--package", "/srv/p", "--alias", "chat", "--trusted-key", "/srv/k.pub")
    assert done.exit_code == 0, done.stderr
    fleet = load_fleet(tmp_path / "new" / "fleet.yaml")
    assert [(board.name, board.device, board.options) for board in fleet.config.boards] == [(f"board{n}", device, options) for n in range(3)]
    assert (fleet.config.models[0].package, fleet.config.trusted_keys) == ("/srv/p", ("/srv/k.pub",))
    assert fleet.scheduler_of("chat") == parse_scheduler(b"{schema: calculet-scheduler/v1, model_alias: chat}", "default")
    assert done.stdout.split() == [str(tmp_path / "new" / name) for name in ("fleet.yaml", "scheduler-chat.yaml")]


def test_every_commented_key_is_a_key_with_that_default(tmp_path: Path) -> None:
    """A comment that is taken for true must be true."""
    init(str(tmp_path), "--alias", "chat")
    path = tmp_path / "scheduler-chat.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# The scheduler")]
    said = "\n".join(line.replace("# ", "", 1) if line.lstrip().startswith("# ") and ":" in line and "Compiled" not in line else line for line in lines)
    assert "max_waiting_requests: 128" in said and "#   max" not in said
    assert parse_scheduler(said.encode(), "said") == SchedulerConfig(schema="calculet-scheduler/v1", model_alias="chat")


def test_profiles_and_device_come_from_the_package(tmp_path: Path, packages: object) -> None:
    package = packages.get("sim-batch")  # type: ignore[attr-defined]
    assert init(str(tmp_path), "--package", str(package), "--alias", "toy").exit_code == 0
    fleet = load_fleet(tmp_path / "fleet.yaml")
    scheduler = fleet.scheduler_of("toy")
    assert scheduler is not None
    assert len(scheduler.batch.profiles) > 1
    assert {board.device for board in fleet.config.boards} == {"sim"}
    refused = init(str(tmp_path / "other"), "--package", str(package), "--device", "llamacpp")
    assert refused.exit_code == 1
    assert "is made for 'sim'" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_relative_paths_are_said_as_the_file_has_to_say_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert init("conf", "--package", "models/a", "--trusted-key", "keys/a.pub").exit_code == 0
    fleet = load_fleet(Path("conf/fleet.yaml"))
    assert fleet.resolve(fleet.config.models[0].package) == tmp_path / "models/a"
    assert fleet.resolve(fleet.config.trusted_keys[0]) == tmp_path / "keys/a.pub"


@pytest.mark.parametrize("name", ["fleet.yaml", "scheduler-model.yaml"])
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    done = init(str(tmp_path))
    assert (done.exit_code, [path.name for path in tmp_path.iterdir()], (tmp_path / name).read_text()) == (1, [name], "mine")
    assert "is there already; nothing was written" in done.stderr


@pytest.mark.parametrize("alias", ["../up", "a b", "x: y", ""])
def test_an_alias_that_is_none_is_refused_by_name(tmp_path: Path, alias: str) -> None:
    done = init(str(tmp_path), "--alias", alias)
    assert done.exit_code == 78, done.output
    assert "alias" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["with space/p", "a: b", "#x", "1.5", "no", "ü", "'quoted'"])
def test_odd_paths_survive(tmp_path: Path, package: str) -> None:
    assert init(str(tmp_path), "--package", f"/srv/{package}").exit_code == 0
    assert load_fleet(tmp_path / "fleet.yaml").config.models[0].package == f"/srv/{package}"


@pytest.mark.parametrize("alias", ["yes", "no", "on", "null", "true", "1e3", "a.b-c_d", "123"])
def test_an_alias_that_yaml_could_misread_stays_itself(tmp_path: Path, alias: str) -> None:
    assert init(str(tmp_path), "--alias", alias).exit_code == 0
    fleet = load_fleet(tmp_path / "fleet.yaml")
    assert fleet.config.models[0].alias == alias
    assert fleet.scheduler_of(alias) is not None
