"""`calculet install` and `uninstall` below a folder: what is written, what is left alone, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from calculet_supervisor.cli import main
from calculet_supervisor.shell import installing

UNITS = "etc/systemd/system"
WORKER = f"{UNITS}/calculet-worker@.service"
FLEET = """
schema: calculet-fleet/v1
run_dir: /run/calculet
state_dir: /var/lib/calculet
log_dir: /var/log/calculet
boards: [{name: board0, device: sim}]
models: [{alias: toy, package: /srv/toy}]
router: {listen: "0.0.0.0:9000"}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image with Calculet below /opt/calculet and a configuration."""
    for name in installing.COMMANDS:
        command = tmp_path / "opt/calculet/bin" / name
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text("#!/usr/bin/python3\n")
        command.chmod(0o755)
    configure(tmp_path, FLEET)
    return tmp_path


def configure(root: Path, text: str) -> None:
    (root / "etc/calculet").mkdir(parents=True, exist_ok=True)
    (root / "etc/calculet/fleet.yaml").write_text(text)


def call(verb: str, root: Path, *options: str) -> Result:
    return CliRunner().invoke(main, [verb, "--root", str(root), *options])


def install(root: Path, *options: str) -> Result:
    return call("install", root, "--prefix", "/opt/calculet", *options)


def everything(root: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): (path.read_text(), path.stat().st_mtime_ns) for path in files}


def test_units_are_rendered_for_the_prefix_and_the_configuration(root: Path) -> None:
    done = install(root, "--user", "npu")
    assert (done.exit_code, done.stderr) == (0, "")
    worker = (root / WORKER).read_text()
    assert "ExecStart=/opt/calculet/bin/calculet-worker run --config /etc/calculet/fleet.yaml --board %i\nUser=npu\n" in worker
    assert "ListenStream=0.0.0.0:9000\n" in (root / UNITS / "calculet-router.socket").read_text()
    assert 'subject.user === "npu"' in (root / "etc/polkit-1/rules.d/50-calculet.rules").read_text()
    assert (root / "etc/sysusers.d/calculet.conf").read_text().splitlines()[2].split()[:2] == ["u", "npu"]
    assert (root / WORKER).stat().st_mode & 0o777 == 0o644


def test_twice_is_once(root: Path) -> None:
    install(root)
    before = everything(root)
    done = install(root)
    assert done.exit_code == 0 and "nothing to do" in done.stdout
    assert everything(root) == before


def test_a_dry_run_shows_what_would_change_and_changes_nothing(root: Path) -> None:
    shown = install(root, "--dry-run")
    assert shown.exit_code == 0 and f"create {root / WORKER}" in shown.stdout
    assert not (root / UNITS).exists()
    install(root)
    before = everything(root)
    configure(root, FLEET.replace("9000", "9001"))
    shown = install(root, "--dry-run")
    assert "-ListenStream=0.0.0.0:9000\n+ListenStream=0.0.0.0:9001\n" in shown.stdout
    assert [line for line in shown.stdout.splitlines() if line.startswith("update")] == [f"update {root / UNITS}/calculet-router.socket"]
    assert {name: kept for name, kept in everything(root).items() if "fleet.yaml" not in name} == {
        name: kept for name, kept in before.items() if "fleet.yaml" not in name
    }


def test_an_edited_file_is_neither_overwritten_nor_removed_unless_forced(root: Path) -> None:
    install(root)
    edited = (root / WORKER).read_text() + "Nice=-5\n"
    (root / WORKER).write_text(edited)
    configure(root, FLEET.replace("9000", "9001"))
    before = everything(root)
    for verb in (install(root), call("uninstall", root)):
        assert verb.exit_code == 1 and str(root / WORKER) in verb.stderr and "drop-in" in verb.stderr
        assert everything(root) == before
    assert install(root, "--force").exit_code == 0
    assert "Nice" not in (root / WORKER).read_text()


def test_a_file_of_somebody_else_is_not_taken_over(root: Path) -> None:
    (root / UNITS).mkdir(parents=True)
    (root / UNITS / "calculet.target").write_text("[Unit]\nDescription=mine\n")
    done = install(root)
    assert done.exit_code == 1 and "calculet.target was edited, or is not Calculet's" in done.stderr
    assert sorted(path.name for path in (root / UNITS).iterdir()) == ["calculet.target"]


def test_what_an_older_version_installed_goes(root: Path) -> None:
    from calculet_supervisor.units import stamp

    install(root)
    old = root / UNITS / "calculet-keeper.service"
    old.write_text(stamp(str(old), "[Unit]\n"))
    assert f"remove {old}" in install(root).stdout
    assert not old.exists()


def test_uninstall_removes_what_was_installed_and_nothing_else(root: Path) -> None:
    (root / UNITS / "calculet-worker@.service.d").mkdir(parents=True)
    (root / UNITS / "calculet-worker@.service.d/10-mine.conf").write_text("[Service]\n")
    before = everything(root)
    install(root)
    assert len(everything(root)) > len(before) + 10
    shown = call("uninstall", root, "--dry-run")
    assert f"remove {root / WORKER}" in shown.stdout and (root / WORKER).exists()
    assert call("uninstall", root).exit_code == 0
    assert everything(root) == before
    assert "nothing to do" in call("uninstall", root).stdout


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("/run/calculet", "/srv/run"), "$.run_dir: /srv/run, but the services may write only below /run"),
        (("/var/lib/calculet", "../state"), "$.state_dir: /etc/state, but"),
        (("/srv/toy", "/home/me/toy"), "$.models[0].package: /home/me/toy is below /home"),
        (("/srv/toy", "/srv/a package"), "$.models[0].package: '/srv/a package' cannot stand in a unit"),
        (("board0, ", "board0, nmae: x, "), "nmae"),
    ],
)  # fmt: skip
def test_a_configuration_that_units_could_not_run_is_refused_by_its_path(root: Path, change: tuple[str, str], where: str) -> None:
    configure(root, FLEET.replace(*change))
    done = install(root)
    assert done.exit_code == 78 and where in done.stderr
    assert not (root / UNITS).exists()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--prefix", "/root/venv"), "the prefix: /root/venv is below /root"),
        (("--prefix", "venv"), "the prefix: 'venv' cannot stand in a unit"),
        (("--user", "Robert'); DROP"), "cannot be the name of a user"),
        (("--user", "root"), "the services run unprivileged"),
        (("--config", "/tmp/fleet.yaml"), "the configuration: /tmp/fleet.yaml is below /tmp"),
    ],
)  # fmt: skip
def test_options_that_units_could_not_run_are_refused(root: Path, options: tuple[str, ...], where: str) -> None:
    done = install(root, *options)
    assert done.exit_code == 78 and where in done.stderr


def test_commands_that_the_service_user_cannot_reach_are_warned_of(root: Path) -> None:
    (root / "opt").chmod(0o750)
    done = install(root)
    assert done.exit_code == 0 and f"{root}/opt is closed to others" in done.stderr


def test_an_image_without_a_configuration_gets_an_example_that_is_good(root: Path) -> None:
    (root / "etc/calculet/fleet.yaml").unlink()
    assert install(root).exit_code == 0
    example = root / "etc/calculet/fleet.yaml.example"
    configure(root, example.read_text())
    assert "nothing to do" in install(root).stdout


def test_at_the_host_missing_commands_and_a_hidden_interpreter_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CliRunner().invoke(main, ["install", "--dry-run", "--prefix", "/opt/there-is-none"])
    assert refused.exit_code == 1 and "/opt/there-is-none/bin has no calculet, calculet-router" in refused.stderr
    (root / "opt/calculet/bin/calculet-worker").write_text("#!/root/.pyenv/bin/python\n")
    monkeypatch.setattr(installing, "below", lambda _, path: root / path.lstrip("/"))
    with pytest.raises(installing.Refusal, match="below /root: services cannot see it"):
        installing.check_commands(Path("/"), "/opt/calculet")


@pytest.mark.parametrize(
    ("uid", "there", "words"),
    [
        (1000, ("run/systemd/system", "usr/lib/polkit-1/polkitd"), "only be installed by root"),
        (0, ("usr/lib/polkit-1/polkitd",), "systemd does not run this machine"),
        (0, ("run/systemd/system",), "polkit is not installed"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_take_it_is_told_so(uid: int, there: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for path in there:
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(installing.Refusal, match=words) as refusal:
        installing.check_host(uid, tmp_path)
    assert refusal.value.hint
