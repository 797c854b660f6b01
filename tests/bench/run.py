"""`make bench`: run every benchmark beside this file, one after the other, and print what they measured.

Machines are shared and noisy: figures are CPU per item (process CPU clock), ratios within one run, or counts; wall times are
printed with their spread. Name benchmarks to run only those: `python tests/bench/run.py router fleet`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    wanted = sys.argv[1:]
    scripts = [path for path in sorted(HERE.glob("bench_*.py")) if not wanted or path.stem.removeprefix("bench_") in wanted]
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    print(f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    failed = []
    for script in scripts:
        print(f"\n== {script.stem.removeprefix('bench_')}", flush=True)
        if subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(HERE.parent)}).returncode:
            failed.append(script.stem)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
