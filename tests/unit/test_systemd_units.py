"""The unit files: accepted by systemd itself, hardened, and true to who owns whose life."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "systemd"
SERVICES = ("calculet-supervisor.service", "calculet-router.service", "calculet-worker@.service")


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string((UNITS / name).read_text())
    return parser


def test_only_the_supervisor_restarts_workers() -> None:
    assert read("calculet-worker@.service")["Service"]["Restart"] == "no"
    assert "Install" not in read("calculet-worker@.service")


@pytest.mark.parametrize("name", SERVICES[:2])
def test_a_wrong_configuration_is_not_restarted(name: str) -> None:
    assert read(name)["Service"]["RestartPreventExitStatus"] == "78"


@pytest.mark.parametrize("name", SERVICES)
def test_everything_stops_with_the_target_and_runs_unprivileged(name: str) -> None:
    assert read(name)["Unit"]["PartOf"] == "calculet.target"
    assert read(name)["Service"]["User"] == "calculet"


@pytest.fixture(scope="module")
def units_for_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units with a program that exists here: systemd checks that ExecStart can be found."""
    folder = tmp_path_factory.mktemp("units")
    for path in UNITS.iterdir():
        if path.suffix in (".service", ".target"):
            text = path.read_text()
            lines = ["ExecStart=/bin/true" if line.startswith("ExecStart=") else line for line in text.splitlines()]
            lines = [line for line in lines if not line.startswith(("User=", "Group=", "Documentation="))]
            (folder / path.name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("name", ("calculet.target", *SERVICES))
def test_systemd_accepts_the_unit(name: str, units_for_this_machine: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    unit = units_for_this_machine / name.replace("@.", "@board0.")
    if "@" in name:
        shutil.copy(units_for_this_machine / name, unit)
    done = subprocess.run([analyze, "verify", "--recursive-errors=no", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", SERVICES)
def test_the_exposure_is_low(name: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    command = [analyze, "security", "--offline=true", "--threshold=20", str(UNITS / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
