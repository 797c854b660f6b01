"""What decides that a compiled engine may be used, and what happens where none can be made."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from calculet_worker.device.build import __main__ as build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment in which nobody has installed the engine; the packages of this one are on its path."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    return folder


def run(environment: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    packages = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))])
    command = [str(environment / "bin" / "python"), "-m", "calculet_worker.device.build", *arguments]
    variables = {"PATH": path, "PYTHONPATH": packages, "HOME": str(environment)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_compiler_it_says_what_to_install_and_exits_3(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "--wheel-dir", str(tmp_path / "wheels"), path=str(tmp_path))
    assert done.returncode == 3
    assert "no C++ compiler" in done.stderr and "g++" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "wheels").exists()


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler here")
def test_check_tells_that_it_is_missing_and_makes_nothing(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "--check", "--wheel-dir", str(tmp_path / "wheels"), path=os.environ["PATH"])
    assert (done.returncode, "not built yet" in done.stderr) == (1, True)
    assert not (tmp_path / "wheels").exists()


def test_everything_that_decides_the_content_names_another_wheel(tmp_path: Path) -> None:
    inputs = {"engine": "1", "python": "cpython-311", "cpu": "-DGGML_AVX2=ON", "cmake": "ab", "compiler": "g++ 12"}
    changed = [{**inputs, name: "other"} for name in inputs]
    assert len({build.wheel_folder(tmp_path, each) for each in (inputs, *changed)}) == 1 + len(inputs)


def test_the_host_cpu_is_never_left_to_the_compiler() -> None:
    options = build.cpu_options()
    assert "-DGGML_NATIVE=OFF" in options
    assert {option.split("=")[0].removeprefix("-D") for option in options[1:]} == set(build.X86_OPTIONS)


def test_a_build_that_fails_shows_its_errors_and_keeps_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "print('[1/9] compiling'); print('x.cpp:3: error: no such thing'); raise SystemExit(2)"
    with pytest.raises(SystemExit) as caught:
        build.run_logged([sys.executable, "-c", script], tmp_path / "log", dict(os.environ))
    assert "x.cpp:3: error: no such thing" in str(caught.value)
    assert str(tmp_path / "log") in capsys.readouterr().err
    assert "[1/9]" in (tmp_path / "log").read_text()
