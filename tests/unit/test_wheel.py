"""`pip wheel .`: what people install has everything that they are told to use. Built without a network, from a copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from builders_fleet import free_port, until

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = {
    "configs": ROOT / "configs", "configs/perf": ROOT / "configs/perf", "prometheus": ROOT / "configs/prometheus",
    "grafana": ROOT / "configs/grafana", "runbooks": ROOT / "docs/runbooks", "runbooks/zh": ROOT / "docs/runbooks/zh", "systemd": ROOT / "systemd",
    "systemd/examples": ROOT / "systemd/examples",
}  # fmt: skip
"""Folder below share/calculet -> where its files come from."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    found = tuple(int(part) for part in metadata.version("setuptools").split(".")[:2])
    if found < (70, 1):
        pytest.skip(f"setuptools {metadata.version('setuptools')} cannot build wheels by itself (pip install 'setuptools>=70.1')")
    folder = tmp_path_factory.mktemp("wheel")
    local = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "tests")
    top = shutil.ignore_patterns("build", "dist")  # of the checkout itself; a package of ours has a `build` too

    def left_out(where: str, names: list[str]) -> set[str]:
        return local(where, names) | (top(where, names) if Path(where) == ROOT else set())

    shutil.copytree(ROOT, folder / "source", ignore=left_out, symlinks=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("calculet-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    """Names in the wheel."""
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


# ---------------------------------------------------------------- a stranger
@pytest.fixture(scope="module")
def bin_folder(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; what it needs comes from this one's, but none of our own code."""
    folder = tmp_path_factory.mktemp("stranger") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True, timeout=100)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
        str(built),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "needs.pth").write_text(f"{metadata.distribution('click').locate_file('')}\n")
    where = subprocess.run(
        [str(folder / "bin" / "python"), "-c", "import calculet_core; print(calculet_core.__file__)"],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    )
    assert where.stdout.startswith(str(folder)), "the wheel's own code runs"
    return folder / "bin"


def test_a_stranger_comes_from_the_wheel_to_an_answer_in_an_empty_folder(bin_folder: Path, tmp_path: Path) -> None:
    """init says what to do next; exactly that is done."""
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    begun = run("calculet", "init")
    assert begun.returncode == 0, begun.stderr
    for line in begun.stderr.splitlines():
        if line.startswith("  "):
            done = run(*line.split())
            assert done.returncode == 0, done.stdout + done.stderr
    fleet = tmp_path / "fleet.yaml"
    port = free_port()
    fleet.write_text(
        fleet.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace("127.0.0.1:8081", f"127.0.0.1:{free_port()}")
    )
    examined = run("calculet", "doctor")
    assert examined.returncode == 0 and examined.stdout.endswith("good\n"), examined.stdout
    with (tmp_path / "up.log").open("w") as log:
        keeper = subprocess.Popen(["calculet", "up"], cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until(
            lambda: "(2 of 2 boards ready)" in (tmp_path / "up.log").read_text() or keeper.poll() is not None,
            "the boards are ready",
        )
        body = json.dumps({"model": "model", "prompt": "Hello", "max_tokens": 4})
        answer = run("curl", "-s", f"http://127.0.0.1:{port}/v1/completions", "-H", "content-type: application/json", "-d", body)
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 4, answer.stdout + (tmp_path / "up.log").read_text()
        assert "board1" in run("calculet", "status").stdout
    finally:
        keeper.terminate()
        assert keeper.wait(60) == 0


def test_installing_writes_units_from_the_wheels_own_templates(bin_folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(bin_folder / "calculet"), "install", "--root", str(tmp_path / "image"), "--prefix", "/opt/calculet"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "image" / "etc" / "systemd" / "system" / "calculet.target").exists()
