"""`calculet doctor`: each thing that can be wrong is found, named, and comes with what to do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders_fleet import Packages, free_port
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_supervisor.cli import main
from calculet_supervisor.shell import doctoring
from calculet_supervisor.shell.doctoring import BORN_S, DAY_S, Finding, Mark
from calculet_worker.commands.build_package import make_keys

NOW_S = BORN_S + 100 * DAY_S


@pytest.fixture
def config(tmp_path: Path, packages: Packages) -> Path:
    """A fleet of one simulated board, good in every way."""
    package = tmp_path / "package"
    shutil.copytree(packages.get("sim-batch"), package)
    document = {
        "schema": "calculet-fleet/v1", "run_dir": "run", "state_dir": "state", "log_dir": "log",
        "trusted_keys": [str(packages.key.with_suffix(".pub"))], "router": {"listen": f"127.0.0.1:{free_port()}", "max_connections": 100},
        "boards": [{"name": "board0", "device": "sim"}], "models": [{"alias": "toy", "package": str(package)}],
    }  # fmt: skip
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps(document))
    return path


def changed(config: Path, **sections: Any) -> Fleet:
    document = json.loads(config.read_text())
    for name, value in sections.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) and name in document else value
    config.write_text(json.dumps(document))
    return load_fleet(config)


def doctor(config: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--config", str(config), *options])


def findings(answers: Iterator[Finding]) -> list[Finding]:
    found = [one for one in answers if one.mark is Mark.FINDING]
    assert all(one.mend for one in found), "a finding says how to mend it"
    return found


def test_a_good_machine_is_good(config: Path) -> None:
    done = doctor(config, "--json")
    answer = json.loads(done.stdout)
    # Whether the clock of a container is synchronised, or units are installed where tests run, is not ours to say.
    found = [row for row in answer["checks"] if row["mark"] == "finding"]
    assert [row for row in found if row["check"] not in {"clock", "systemd"}] == []
    assert (answer["schema"], answer["findings"], done.exit_code) == ("calculet-doctor/v1", len(found), min(1, len(found)))
    checks = {row["check"] for row in answer["checks"]}
    assert checks >= {"python", "libraries", "clock", "systemd", "configuration", "trust", "run_dir", "descriptors", "memory", "port", "boards"}
    assert not (config.parent / "run").exists(), "it only looks"


def test_findings_are_said_with_their_mending_and_end_with_1(config: Path) -> None:
    config.with_name("package").joinpath("model.sim").write_bytes(b"changed")
    done = doctor(config)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("!!  configuration: ")]
    assert "model.sim" in lines[at] and "`calculet config check`" in lines[at + 1]
    assert lines[-1].endswith(("1 finding", " findings"))


@pytest.mark.parametrize(("text", "mend"), [(None, "calculet init"), ("schema: what", "correct it")])
def test_a_configuration_that_is_missing_or_wrong_is_a_finding(tmp_path: Path, text: str | None, mend: str) -> None:
    if text is not None:
        (tmp_path / "fleet.yaml").write_text(text)
    done = doctor(tmp_path / "fleet.yaml", "--json")
    row = json.loads(done.stdout)["checks"][-1]
    assert (row["check"], row["mark"], done.exit_code) == ("configuration", "finding", 1)
    assert mend in row["mend"]


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        ("key", "calculet-worker keygen DIR"), ("package", "calculet package build qwen3-sim"), ("signature", "calculet package sign FOLDER"),
        ("damage", "copy the package again"), ("signer", "trusted_keys"), ("device", "models[].boards"), ("profiles", "batch.profiles"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_keys_and_packages_comes_with_the_command_that_mends_it(config: Path, tmp_path: Path, wrong: str, mend: str) -> None:
    document = json.loads(config.read_text())
    package = config.parent / document["models"][0]["package"]
    if wrong == "key":
        document["trusted_keys"] = ["gone.pub"]
    elif wrong == "package":
        document["models"][0]["package"] = "nowhere"
    elif wrong == "signature":
        (package / "manifest.sig").unlink()
    elif wrong == "damage":
        (package / "model.sim").write_bytes(b"x")
    elif wrong == "signer":
        document["trusted_keys"] = [str(make_keys(tmp_path / "stranger", "x")[1])]
    elif wrong == "device":
        document["boards"][0]["device"] = "llamacpp"
    else:
        scheduler = {"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 7]}}
        (config.parent / "wide.yaml").write_text(json.dumps(scheduler))
        document["models"][0]["scheduler"] = "wide.yaml"
    config.write_text(json.dumps(document))
    found = findings(doctoring.configuration(load_fleet(config)))
    assert any(mend in str(one.mend) for one in found), [(one.message, one.mend) for one in found]


def test_a_port_that_somebody_has_is_found(config: Path) -> None:
    fleet = load_fleet(config)
    host, _, number = fleet.config.router.listen.rpartition(":")
    assert findings(doctoring.port(fleet, running=False)) == []
    with socket.create_server((host, int(number))):
        (found,) = findings(doctoring.port(fleet, running=False))
        assert fleet.config.router.listen in found.message and "ss -ltnp" in str(found.mend)
        assert findings(doctoring.port(fleet, running=True)) == []
        fleet = changed(config, router={"listen": f"127.0.0.1:{free_port()}", "admin_listen": f"{host}:{number}"})
        (found,) = findings(doctoring.port(fleet, running=False))
        assert "router.admin_listen" in str(found.mend)


def test_a_held_board_lock_names_its_process_and_is_not_touched(config: Path) -> None:
    fleet = load_fleet(config)
    code = f"import sys; from pathlib import Path; from calculet_core.shell.files import FileLock; l = FileLock(Path({str(fleet.board_lock('board0'))!r})); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        (found,) = findings(doctoring.locks(fleet, running=False))
        assert f"process {holder.pid} holds the lock of board0" in found.message
        assert findings(doctoring.locks(fleet, running=True)) == []
    finally:
        holder.communicate(timeout=30)
    assert findings(doctoring.locks(fleet, running=False)) == []
    FileLock(fleet.board_lock("board0")).release()


def test_limits_are_compared_with_what_the_configuration_needs(config: Path) -> None:
    fleet = changed(config, router={"max_connections": 5000})
    (found,) = findings(doctoring.descriptors(fleet, hard=4096))
    assert "5256" in found.message
    assert findings(doctoring.descriptors(fleet, hard=8192)) == []
    assert findings(doctoring.descriptors(fleet, hard=resource.RLIM_INFINITY)) == []
    (found,) = findings(doctoring.memory(fleet, running=False, available=100 << 20))
    assert "100 MiB" in found.message
    assert findings(doctoring.memory(fleet, running=False, available=8 << 30)) == []


def test_folders_that_cannot_be_used_are_found(config: Path) -> None:
    (config.parent / "state").write_text("a file")
    (config.parent / "log").mkdir(mode=0o777)
    (config.parent / "log").chmod(0o777)
    found = findings(doctoring.folders(load_fleet(config)))
    assert [(one.check, one.mend) for one in found] == [("state_dir", "move it away"), ("log_dir", f"chmod 750 {config.parent / 'log'}")]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours_is_found(config: Path) -> None:
    found = findings(doctoring.folders(changed(config, state_dir="/usr/calculet")))
    assert [one.check for one in found] == ["state_dir"]


def test_what_this_user_may_not_look_at_is_said_and_the_rest_is_looked_at(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(fleet: Fleet) -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/some/keys.json")
        yield

    monkeypatch.setattr(doctoring, "trust", closed)
    found = {one.check: one for one in doctoring.examine(config)}
    assert found["trust"].mark == Mark.SKIPPED
    assert found["trust"].message.startswith("/some/keys.json: Permission denied: run this as the user")
    assert found["log_dir"].mark == found["boards"].mark == Mark.GOOD


def test_a_file_system_that_is_mounted_read_only_is_no_question_of_owners(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctoring.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    found = findings(doctoring.folders(load_fleet(config)))
    assert len(found) == 3 and all("is mounted read-only" in one.message and "chown" not in (one.mend or "") for one in found)


def test_keys_and_packages_that_everybody_may_write_prove_nothing(config: Path) -> None:
    fleet = load_fleet(config)
    assert findings(doctoring.trust(fleet)) == []
    package = config.with_name("package")
    package.chmod(0o777)
    fleet.keys.parent.mkdir()
    fleet.keys.write_text("{}")
    fleet.keys.chmod(0o644)
    assert {one.mend for one in findings(doctoring.trust(fleet))} == {f"chmod o-w {package}", f"chmod 600 {fleet.keys}"}
    package.chmod(0o755)
    fleet.keys.chmod(0o600)
    fleet.keys.write_text('{"what": ')
    (found,) = findings(doctoring.trust(fleet))
    assert "keys.json" in found.message and "no router starts with it" in (found.mend or "")
    (found,) = findings(doctoring.trust(changed(config, trusted_keys=[])))
    assert "trusted_keys is empty" in found.message


def test_versions_that_are_too_old_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.check for one in findings(doctoring.python((3, 10, 4)))] == ["python"]
    assert findings(doctoring.python((3, 11, 0))) == []
    real = doctoring.metadata.version
    monkeypatch.setattr(doctoring.metadata, "version", lambda name: "8.0.4" if name == "click" else real(name))
    (found,) = findings(doctoring.libraries())
    assert found.message == "click 8.0.4 is older than 8.1"


def test_a_clock_that_was_never_set_or_went_back_is_found(config: Path) -> None:
    (found,) = findings(doctoring.clock(3600.0))
    assert "1970-01-01" in found.message
    fleet = load_fleet(config)
    fleet.store.parent.mkdir()
    fleet.store.touch()
    os.utime(fleet.store, (NOW_S + 500, NOW_S + 500))
    (found,) = findings(doctoring.times(fleet, NOW_S))
    assert "500 s from the future" in found.message
    assert findings(doctoring.times(fleet, NOW_S + 490)) == []


def test_a_certificate_that_is_missing_or_ends_is_found(config: Path) -> None:
    fleet = changed(config, router={"tls": {"certificate": "cert.pem", "key": "key.pem"}})
    (found,) = findings(doctoring.tls(fleet, NOW_S))
    assert "cert.pem" in found.message
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "calculet")])
    ends = datetime.fromtimestamp(NOW_S + 30 * DAY_S, UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, ends - timedelta(days=90), ends)
    config.with_name("cert.pem").write_bytes(builder.sign(key, None).public_bytes(Encoding.PEM))
    config.with_name("key.pem").write_text("a key")
    config.with_name("key.pem").chmod(0o640)
    (found,) = findings(doctoring.tls(fleet, NOW_S))
    assert "key.pem cannot be used with" in found.message
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    config.with_name("key.pem").write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(*plain))
    (found,) = findings(doctoring.tls(fleet, NOW_S))
    assert "key.pem cannot be used with" in found.message, "a key of another certificate"
    config.with_name("key.pem").write_bytes(key.private_bytes(*plain))
    assert findings(doctoring.tls(fleet, NOW_S)) == []
    (found,) = findings(doctoring.tls(fleet, NOW_S + 20 * DAY_S))
    assert "ends in 10 days" in found.message
    (found,) = findings(doctoring.tls(fleet, NOW_S + 33 * DAY_S))
    assert "ended 3 days ago" in found.message
    config.with_name("key.pem").chmod(0o644)
    (found,) = findings(doctoring.tls(fleet, NOW_S))
    assert found.mend == f"chmod 640 {config.with_name('key.pem')}"
    assert list(doctoring.tls(changed(config, router={"tls": {"certificate": None, "key": None}}), NOW_S)) == []


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """systemd's files as `calculet install` writes them, below a folder."""
    root = tmp_path / "image"
    for name in ("calculet", "calculet-router", "calculet-supervisor", "calculet-worker"):
        command = root / "opt/calculet/bin" / name
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
    done = CliRunner().invoke(main, ["install", "--root", str(root), "--prefix", "/opt/calculet"])
    assert done.exit_code == 0, done.output
    return root


def test_installed_units_are_good_until_somebody_edits_them_or_they_start_nothing(image: Path) -> None:
    assert [one.mark for one in doctoring.units(image)] == [Mark.GOOD]
    router = image / "etc/systemd/system/calculet-router.service"
    router.write_text(router.read_text() + "# mine\n")
    (image / "opt/calculet/bin/calculet-worker").unlink()
    (image / "etc/systemd/system/calculet.target").unlink()
    messages = [one.message for one in findings(doctoring.units(image))]
    assert f"{router} was edited or is not ours" in messages
    assert any("starts /opt/calculet/bin/calculet-worker, which is not there" in one for one in messages)
    assert any("calculet.target is missing" in one for one in messages)


def test_no_units_are_nothing_wrong(tmp_path: Path) -> None:
    assert [one.mark for one in doctoring.units(tmp_path)] == [Mark.SKIPPED]
