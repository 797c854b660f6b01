"""The unit files: accepted by systemd itself, hardened, and true to who owns whose life."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from calculet_core.config import parse_fleet
from calculet_supervisor.shell.installing import read_templates
from calculet_supervisor.units import FILES, example_fleet, plan_installation, render

CONFIG = "/etc/calculet/fleet.yaml"
UNITS = ("calculet.target", "calculet.slice", "calculet-workers.slice", "calculet-router.socket")
SERVICES = ("calculet-supervisor.service", "calculet-router.service", "calculet-router@.service", "calculet-worker@.service")


@cache
def rendered() -> dict[str, str]:
    """Everything, for the example configuration: path -> text."""
    templates = read_templates()
    fleet = parse_fleet(example_fleet(templates, CONFIG).encode(), CONFIG)
    return render(templates, plan_installation("/opt/calculet", CONFIG, fleet, "calculet", "calculet"))


def text_of(name: str) -> str:
    return rendered()[f"/etc/systemd/system/{name}"]


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(text_of(name))
    return parser


def test_every_template_is_installed_or_a_part_of_one_that_is() -> None:
    assert set(read_templates()) == {*FILES, "examples/fleet.yaml.j2", "hardening.j2", "router.j2"}


@pytest.mark.parametrize(
    ("sections", "families"),
    [
        ("", {"AF_UNIX"}),
        ("\ntracing: {endpoint: 'http://127.0.0.1:4318'}\n", {"AF_UNIX", "AF_INET", "AF_INET6"}),
    ],
)  # fmt: skip
def test_workers_have_the_network_only_where_something_of_theirs_needs_it(sections: str, families: set[str]) -> None:
    templates = read_templates()
    fleet = parse_fleet((example_fleet(templates, CONFIG) + sections).encode(), CONFIG)
    text = render(templates, plan_installation("/opt/calculet", CONFIG, fleet, "calculet", "calculet"))["/etc/systemd/system/calculet-worker@.service"]
    (found,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("RestrictAddressFamilies=")]
    assert set(found.split()) == families


def test_only_the_supervisor_starts_workers() -> None:
    assert read("calculet-worker@.service")["Service"]["Restart"] == "no"
    assert "Install" not in read("calculet-worker@.service")
    assert "worker" not in text_of("calculet.target").split("[Unit]")[1].replace("workers", "")


@pytest.mark.parametrize("name", SERVICES[:3])
def test_a_wrong_configuration_is_not_restarted(name: str) -> None:
    assert read(name)["Service"]["RestartPreventExitStatus"] == "78"


@pytest.mark.parametrize("name", SERVICES)
def test_everything_stops_with_the_target_and_runs_unprivileged(name: str) -> None:
    assert read(name)["Unit"]["PartOf"] == "calculet.target"
    assert read(name)["Service"]["User"] == "calculet"


def test_routers_share_a_socket_that_is_not_theirs() -> None:
    assert read("calculet-router.socket")["Socket"]["ListenStream"] == "127.0.0.1:8080"
    assert {read(name)["Service"]["Sockets"] for name in SERVICES[1:3]} == {"calculet-router.socket"}


def test_systemd_waits_longer_than_a_drain_takes() -> None:
    fleet = parse_fleet(
        b"{schema: calculet-fleet/v1, run_dir: /run/c, state_dir: /var/lib/c, log_dir: /var/log/c, boards: [{name: b, device: sim}],"
        b" models: [{alias: a, package: /p}], router: {drain_timeout_s: 100.5}, supervision: {drain_timeout_ms: 200000}}", CONFIG,
    )  # fmt: skip
    files = render(read_templates(), plan_installation("/opt/calculet", CONFIG, fleet, "npu", "npu"))
    assert "\nTimeoutStopSec=116s\n" in files["/etc/systemd/system/calculet-router.service"]
    assert "\nTimeoutStopSec=215s\n" in files["/etc/systemd/system/calculet-worker@.service"]
    assert 'subject.user === "npu"' in files["/etc/polkit-1/rules.d/50-calculet.rules"]


def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed here")
    return found


@pytest.fixture(scope="module")
def units_for_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units with a program that exists here: systemd checks that ExecStart can be found. Instances beside their templates."""
    folder = tmp_path_factory.mktemp("units")
    for name in (*UNITS, *SERVICES):
        lines = ["ExecStart=/bin/true" if line.startswith("ExecStart=") else line for line in text_of(name).splitlines()]
        lines = [line for line in lines if not line.startswith(("User=", "Group=", "ExecReload=/opt"))]
        for file in {name, name.replace("@.", "@one.")}:
            (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def test_systemd_accepts_the_units(units_for_this_machine: Path) -> None:
    paths = [str(units_for_this_machine / name.replace("@.", "@one.")) for name in (*UNITS, *SERVICES)]
    done = subprocess.run([analyze(), "verify", "--man=no", "--recursive-errors=no", *paths], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_accepts_the_examples_of_drop_ins(units_for_this_machine: Path, tmp_path: Path) -> None:
    examples = {path: text for path, text in rendered().items() if path.endswith(".conf.example")}
    assert len(examples) == 3
    for name in ("calculet-worker@.service", "calculet-worker@one.service", "calculet-router.socket", "calculet-router.service"):
        (tmp_path / name).write_text((units_for_this_machine / name).read_text())
    for path, text in examples.items():
        place = tmp_path / path.removeprefix("/etc/systemd/system/").removesuffix(".example")
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(line.lstrip("#") if "=" in line and " " not in line[:12] else line for line in text.splitlines()))
    paths = [str(tmp_path / name) for name in ("calculet-worker@one.service", "calculet-router.socket")]
    done = subprocess.run([analyze(), "verify", "--man=no", "--recursive-errors=no", *paths], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_would_not_accept_a_wrong_one(units_for_this_machine: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.service"
    wrong.write_text((units_for_this_machine / "calculet-supervisor.service").read_text().replace("ProtectClock=", "ProtectClocks="))
    done = subprocess.run([analyze(), "verify", "--man=no", "--recursive-errors=no", str(wrong)], capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_the_exposure_is_at_most_two(name: str, units_for_this_machine: Path, tmp_path: Path) -> None:
    unit = tmp_path / name
    unit.write_text(text_of(name))
    done = subprocess.run([analyze(), "security", "--offline=true", "--threshold=20", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_workers_may_use_the_network_only_where_a_board_listens_on_it() -> None:
    def families(board: str) -> str:
        fleet = parse_fleet(
            b"{schema: calculet-fleet/v1, run_dir: /run/c, state_dir: /var/lib/c, log_dir: /var/log/c, models: [{alias: a, package: /p}],"
            b" boards: [{name: b, device: sim%b}]}" % board.encode(), CONFIG,
        )  # fmt: skip
        files = render(read_templates(), plan_installation("/opt/calculet", CONFIG, fleet, "npu", "npu"))
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        parser.read_string(files["/etc/systemd/system/calculet-worker@.service"])
        return parser["Service"]["RestrictAddressFamilies"]

    assert families("") == "AF_UNIX"
    assert families(", listen: '10.0.0.5:7001'") == "AF_UNIX AF_INET AF_INET6"
