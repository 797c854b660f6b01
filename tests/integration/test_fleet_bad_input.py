"""Bad input of every kind gets one clear message, and what serves goes on serving."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import BIN, Fleet, Packages

CONFIG_EXIT = 78


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "1")
    with Fleet(tmp_path_factory.mktemp("fleet"), package, packages.key.with_suffix(".pub")) as fleet:
        yield fleet
        assert fleet.completion().status == 200, "what served must still serve"


def up(config: Path) -> subprocess.CompletedProcess[str]:
    """`calculet up` that is expected to refuse."""
    return subprocess.run([str(BIN / "calculet"), "up", "--config", str(config)], capture_output=True, text=True, timeout=60)


def refused(config: Path, *words: str) -> None:
    done = up(config)
    assert done.returncode == CONFIG_EXIT, (done.returncode, done.stdout, done.stderr)
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def a_fleet(tmp_path: Path, packages: Packages, **sections: Any) -> Fleet:
    package = sections.pop("package", None) or packages.get("sim-batch", "--step-ms", "1")
    return Fleet(tmp_path / "other", package, packages.key.with_suffix(".pub"), **sections)


# ---------------------------------------------------------------- configuration
def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("schema: calculet-fleet/v1\nboards: [\n")
    refused(tmp_path / "fleet.yaml", "fleet.yaml", "line ", "not valid YAML")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.yaml", "nowhere.yaml", "No such file")


def test_an_unknown_key_is_refused_with_its_path(tmp_path: Path, packages: Packages) -> None:
    fleet = a_fleet(tmp_path, packages)
    config = json.loads(fleet.config.read_text())
    config["boards"][1]["speed"] = 9
    fleet.config.write_text(json.dumps(config))
    refused(fleet.config, "$.boards[1]", "`speed`")


def test_an_unknown_device_is_refused(tmp_path: Path, packages: Packages) -> None:
    refused(a_fleet(tmp_path, packages, device="abacus").config, "abacus")


def test_a_profile_that_the_manifest_does_not_have_is_refused(tmp_path: Path, packages: Packages) -> None:
    (tmp_path / "s.yaml").write_text("schema: calculet-scheduler/v1\nmodel_alias: toy\nbatch: {profiles: [1, 3]}\n")
    fleet = a_fleet(tmp_path, packages, model={"scheduler": str(tmp_path / "s.yaml")})
    refused(fleet.config, "s.yaml: $.batch.profiles[1]: B3 is not in manifest")


def test_a_missing_package_is_refused(tmp_path: Path, packages: Packages) -> None:
    refused(a_fleet(tmp_path, packages, package=tmp_path / "gone").config, "gone")


def test_a_tampered_package_never_serves(tmp_path: Path, packages: Packages) -> None:
    copy = tmp_path / "tampered"
    shutil.copytree(packages.get("sim-batch", "--step-ms", "1"), copy)
    with (copy / "golden.jsonl").open("ab") as file:
        file.write(b"\n")
    refused(a_fleet(tmp_path, packages, package=copy).config, "golden.jsonl was changed")


def test_a_package_of_a_stranger_never_serves(tmp_path: Path, packages: Packages) -> None:
    others = Packages(tmp_path / "others")
    fleet = Fleet(tmp_path / "other", others.get("sim-batch", "--step-ms", "1"), packages.key.with_suffix(".pub"))
    refused(fleet.config, "not trusted")


def test_a_busy_port_is_refused_and_its_owner_unharmed(tmp_path: Path, packages: Packages, fleet: Fleet) -> None:
    other = a_fleet(tmp_path, packages, router={"listen": f"127.0.0.1:{fleet.port}"})
    refused(other.config, str(fleet.port), "in use")


def test_a_second_up_of_the_same_fleet_is_refused(fleet: Fleet) -> None:
    done = up(fleet.config)
    assert done.returncode not in (0, 70)
    assert "already" in done.stderr or "held by another process" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- requests
@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b"[]", 400, "invalid_value", None),
        (b'{"model":"toy","prompt":"\xff"}', 400, "invalid_json", None),
        (b'{"model":"toy"}', 400, "invalid_value", "prompt"),
        (b'{"prompt":"x"}', 400, "invalid_value", "model"),
        (b'{"model":"nope","prompt":"x"}', 404, "model_not_found", "model"),
        (b'{"model":"toy","prompt":5}', 400, "invalid_value", "prompt"),
        (b'{"model":"toy","prompt":""}', 400, "invalid_value", "prompt"),
        (b'{"model":"toy","prompt":[-1]}', 400, "invalid_value", "prompt[0]"),
        (b'{"model":"toy","prompt":[999999]}', 400, "invalid_value", "prompt"),
        (b'{"model":"toy","prompt":"x","max_tokens":0}', 400, "invalid_value", "max_tokens"),
        (b'{"model":"toy","prompt":"x","max_tokens":"many"}', 400, "invalid_value", "max_tokens"),
        (b'{"model":"toy","prompt":"x","temperature":-1}', 400, "invalid_value", "temperature"),
        (b'{"model":"toy","prompt":"x","temperature":NaN}', 400, "invalid_json", None),
        (b'{"model":"toy","prompt":"x","top_p":2}', 400, "invalid_value", "top_p"),
        (b'{"model":"toy","prompt":"x","n":0}', 400, "invalid_value", "n"),
        (b'{"model":"toy","prompt":"x","stop":["a","b","c","d","e"]}', 400, "invalid_value", "stop"),
        (b'{"model":"toy","prompt":"x","max_tokens":99999999}', 400, "context_length_exceeded", None),
        (b'{"model":"toy","prompt":"x","max_tokens":18446744073709551616}', 400, None, None),
    ],
)
def test_a_bad_body_is_a_clear_400(fleet: Fleet, body: bytes, status: int, code: str | None, param: str | None) -> None:
    answer = fleet.post("/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param


def test_a_prompt_longer_than_the_context_names_the_numbers(fleet: Fleet) -> None:
    error = fleet.completion("x" * 5000, max_tokens=1).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"] and "4096" in error["message"]


def test_bad_messages_are_a_400(fleet: Fleet) -> None:
    for messages in ("hi", [], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}], [5]):
        answer = fleet.post("/v1/chat/completions", {"model": "toy", "messages": messages})
        assert answer.status == 400, (messages, answer.body)
        assert answer.json()["error"]["code"] == "invalid_value"


def test_unknown_paths_and_methods_answer_in_json(fleet: Fleet) -> None:
    assert fleet.get("/v2/x").json()["error"]["code"] == "not_found"
    wrong = fleet.get("/v1/completions")
    assert (wrong.status, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert fleet.ask("DELETE", "/v1/models").status == 405


def test_garbage_bytes_get_a_400_and_no_stack_trace(fleet: Fleet) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST /v1/completions HTTP/9.9\r\n\r\n", b"\0" * 100):
        with socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        assert b"Traceback" not in answer
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
