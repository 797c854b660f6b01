"""`pip wheel .`: what people install has everything that they are told to use. Built without a network, from a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    "configs": ROOT / "configs", "configs/perf": ROOT / "configs/perf", "prometheus": ROOT / "configs/prometheus",
    "grafana": ROOT / "configs/grafana", "runbooks": ROOT / "docs/runbooks", "runbooks/zh": ROOT / "docs/runbooks/zh", "systemd": ROOT / "systemd",
    "systemd/examples": ROOT / "systemd/examples",
}  # fmt: skip
"""Folder below share/calculet -> where its files come from."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel."""
    found = tuple(int(part) for part in metadata.version("setuptools").split(".")[:2])
    if found < (70, 1):
        pytest.skip(f"setuptools {metadata.version('setuptools')} cannot build wheels by itself (pip install 'setuptools>=70.1')")
    folder = tmp_path_factory.mktemp("wheel")
    local = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "tests")
    top = shutil.ignore_patterns("build", "dist")  # of the checkout itself; a package of ours has a `build` too

    def left_out(where: str, names: list[str]) -> set[str]:
        return local(where, names) | (top(where, names) if Path(where) == ROOT else set())

    shutil.copytree(ROOT, folder / "source", ignore=left_out, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("calculet-*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_units_configurations_dashboards_alerts_and_runbooks_are_in_it(wheel: set[str]) -> None:
    data = {name.partition(".data/data/share/calculet/")[2] for name in wheel if ".data/data/" in name}
    wanted = {f"{folder}/{path.name}" for folder, source in SHIPPED.items() for path in source.iterdir() if path.is_file()}
    assert data == wanted
    assert {"prometheus/alerts.yml", "grafana/requests.json", "systemd/calculet-worker@.service.j2", "configs/fleet.yaml"} <= data


def test_every_module_and_every_file_that_a_package_reads_is_in_it(wheel: set[str]) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ROOT.glob("calculet_*")
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert sources - wheel == set()


def test_no_tests_and_nothing_local_is_in_it(wheel: set[str]) -> None:
    assert [name for name in wheel if name.startswith(("tests", "build", ".")) or "__pycache__" in name] == []
