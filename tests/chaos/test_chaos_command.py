"""`calculet chaos` on a real fleet that runs on: what is ordered happens, ends by itself, and every promise is kept meanwhile.

One fleet bears all of the quick scenarios one after the other, as a fleet in production would; the others are long.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders_fleet import BIN, Fleet, Packages, until
from builders_tls import trusting, write_certificate

from calculet_core import history
from calculet_core.shell.control_client import ControlError, call
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import read_journal
from calculet_perf.chaos import parse_catalogue

NAMES = [one.id for one in parse_catalogue((files("calculet_perf") / "scenarios" / "chaos.yaml").read_bytes(), "chaos").scenarios]
TOUR_S = 420
"""What a tour of all faults may take on a machine that others keep busy; it took 57 s on one."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "5")
    restart = {"max_restarts": 50}  # and a worker that is frozen for three seconds is replaced
    folder, trust = tmp_path_factory.mktemp("chaos"), packages.key.with_suffix(".pub")
    with Fleet(folder / "fleet", package, trust, chaos={"enabled": True}, supervision={"restart": restart, "heartbeat_timeout_ms": 1500}) as fleet:
        yield fleet


def run(fleet: Fleet, *arguments: str, timeout: float = 110) -> tuple[int, dict[str, Any], str]:
    command = [str(BIN / "calculet"), "chaos", "run", *arguments, "--config", str(fleet.config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stdout + done.stderr


def order(fleet: Fleet, fault: dict[str, Any], board: str | None = None, name: str = "by-hand") -> dict[str, Any]:
    return call(load_fleet(fleet.config).control_socket, "chaos", {"order": name, "fault": fault, "board": board})


def audit(fleet: Fleet) -> list[str]:
    acts = call(load_fleet(fleet.config).control_socket, "audit")["acts"]
    return [act["detail"] for act in acts if act["verb"] == "chaos"]


@pytest.mark.timeout(TOUR_S + 60)
@pytest.mark.parametrize("name", [name if name == "tour" else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_every_promise_is_kept(fleet: Fleet, name: str) -> None:
    """The tour has every fault, short; the others, and longer ones, are for `make test-long`."""
    code, outcome, text = run(fleet, name, "--seed", "1", timeout=TOUR_S)
    assert code == 0, text
    assert (outcome["valid"], outcome["passed"], outcome["golden_after"], outcome["baseline"]) == (True, True, True, True)
    assert outcome["planned"] == outcome["fired"] == len(outcome["faults"])
    assert outcome["ok"] + sum(outcome["codes"].values()) == outcome["sent"] > 0
    ordered = [name for fault in outcome["faults"] for name in fault["orders"]]
    assert all(any(name in detail for detail in audit(fleet)) for name in ordered), "every order is in the audit log"


@pytest.mark.long
def test_random_faults_are_kept_through_too(fleet: Fleet) -> None:
    code, outcome, text = run(fleet, "random", "--seed", "5", "--duration", "4", "--interval", "2", "--requests", "100")
    assert code == 0, text
    assert outcome["sent"] >= 100 and outcome["planned"] == outcome["fired"] >= 1


def test_a_driver_that_is_killed_leaves_nothing_behind(fleet: Fleet, tmp_path: Path) -> None:
    scenario = {
        "id": "mine", "injects": "a frozen worker and a slow link", "expected": "both end by themselves",
        "steps": [
            {"fault": {"fault": "frames", "trouble": "slow", "for_s": 3}},
            {"fault": {"fault": "freeze_worker", "for_s": 3}, "board": "other", "together": True},
        ],
    }  # fmt: skip
    catalogue = tmp_path / "mine.yaml"
    catalogue.write_text(json.dumps({"schema": "calculet-perf-chaos-scenarios/v1", "scenarios": [scenario]}))
    command = [str(BIN / "calculet-perf"), "chaos", "run", "mine", "--config", str(fleet.config), "--catalogue", str(catalogue)]
    journal = load_fleet(fleet.config).journal("supervisor")
    before = len(read_journal(journal))

    def told(event: str) -> list[Any]:
        return [one for one in read_journal(journal)[before:] if one.event == event]

    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    frozen = until(lambda: [one.data["pid"] for one in told(history.CHAOS_FIRED) if "pid" in one.data], "a worker is frozen")[0]
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    until(lambda: told(history.CHAOS_HEALED), "the supervisor lets the worker go on by its own clock")

    def stands_still() -> bool:
        try:
            return bool(psutil.Process(frozen).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False  # it was silent for longer than its limit: it was replaced

    until(lambda: not stands_still(), "it goes on, or another does")
    link = [load_fleet(fleet.config).journal(f"worker-{board}") for board in fleet.boards]
    until(lambda: sum(one.event == history.CHAOS_HEALED and one.data["fault"] == "frames slow" for path in link for one in read_journal(path)),
          "the worker ends its trouble by its own clock")  # fmt: skip
    fleet.wait_ready(2)
    assert fleet.completion().status == 200


def test_a_fault_that_is_not_carried_makes_the_run_invalid(fleet: Fleet, tmp_path: Path) -> None:
    scenario = {
        "id": "never", "injects": "a death that nobody visits", "expected": "nothing",
        "steps": [{"fault": {"fault": "kill_worker", "phase": "prefilling", "for_s": 0.001}}], "load": {"rate": 5},
    }  # fmt: skip
    catalogue = tmp_path / "mine.yaml"
    catalogue.write_text(json.dumps({"schema": "calculet-perf-chaos-scenarios/v1", "scenarios": [scenario]}))
    code, outcome, text = run(fleet, "never", "--catalogue", str(catalogue))
    assert code == 3, text
    assert (outcome["planned"], outcome["fired"], outcome["valid"], outcome["broken"]) == (1, 0, False, [])
    assert len(outcome["faults"][0]["orders"]) == 3, "it was tried again"


def test_what_is_wrong_with_the_command_is_said(fleet: Fleet) -> None:
    code, _, text = run(fleet, "no_such_thing")
    assert code == 2 and "there is no scenario 'no_such_thing'" in text
    assert "--duration and --interval are for random scenarios" in run(fleet, "kill_router", "--duration", "3")[2]
    with pytest.raises(ControlError, match=r"61 is above chaos.max_fault_s \(60\)"):
        order(fleet, {"fault": "freeze_worker", "for_s": 61}, "board0")


def test_a_fleet_without_the_switch_refuses_everywhere(tmp_path: Path, packages: Packages) -> None:
    package = packages.get("sim-batch", "--step-ms", "5")
    with Fleet(tmp_path / "fleet", package, packages.key.with_suffix(".pub"), boards=1) as plain:
        code, _, text = run(plain, "kill_worker")
        assert code == 2 and "$.chaos.enabled is false" in text
        config = plain.config.read_text()
        for fault in ({"fault": "kill_supervisor"}, {"fault": "kill_worker"}, {"fault": "full_disk", "process": "router", "for_s": 1}):
            with pytest.raises(ControlError, match="does not allow chaos"):
                order(plain, fault, "board0")
        plain.config.write_text(json.dumps({**json.loads(config), "chaos": {"enabled": True}}))
        code, _, text = run(plain, "kill_worker")
        assert code == 2 and "does not allow chaos" in text, "the file alone arms nothing: the processes must have started with it"
        assert audit(plain) == []
        assert b"calculet_supervisor_chaos_enabled 0.0" in plain.get("/metrics").body


def test_a_fleet_with_https_and_keys_is_disturbed_like_any_other(tmp_path: Path, packages: Packages) -> None:
    folder = tmp_path / "fleet"
    folder.mkdir()
    write_certificate(folder)
    tls = {"tls": {"certificate": "tls.crt", "key": "tls.key"}, "require_keys": True}
    secure = Fleet(folder, packages.get("sim-batch", "--step-ms", "5"), packages.key.with_suffix(".pub"), chaos={"enabled": True}, router=tls)
    secure.tls = trusting(folder)
    with secure:
        until(lambda: "at https://" in (folder / "keeper.log").read_text(), "`calculet up` says that it serves, and how")
        code, _, text = run(secure, "kill_worker")
        assert code == 2 and "--api-key" in text, text
        made = subprocess.run(
            [str(BIN / "calculet"), "keys", "create", "default", "--config", str(secure.config), "--json"], capture_output=True, text=True, timeout=60
        )
        assert made.returncode == 0, made.stderr
        key = json.loads(made.stdout)["key"]
        until(lambda: secure.ask("GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status == 200, "the key is taken")
        code, outcome, text = run(secure, "kill_router", "--api-key", key)
        assert code == 0 and outcome["passed"] and outcome["ok"] > 0, text
        code, _, text = run(secure, "kill_router", "--api-key", key, "--server-name", "another.example")
        assert code == 3 and "another.example" in text, text
