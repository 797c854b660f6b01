"""Packages that are wrong in one way each, made from a good one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from builders_fleet import BIN

from calculet_core.shell.packages import hash_file


def copy_of(package: Path, folder: Path) -> Path:
    """A folder of its own with the same content."""
    shutil.copytree(package, folder)
    return folder


def sign(folder: Path, key: Path) -> Path:
    done = subprocess.run([str(BIN / "calculet"), "package", "sign", str(folder), "--key", str(key)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the manifest; the signature no longer fits."""
    path = folder / "manifest.yaml"
    manifest = yaml.safe_load(path.read_text())
    change(manifest)
    path.write_text(yaml.safe_dump(manifest))
    return folder


def with_wrong_golden(package: Path, folder: Path, key: Path) -> Path:
    """Signed and whole, and its golden cases expect what the model does not say."""
    copy_of(package, folder)
    path = folder / "golden.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    for case in cases:
        case["expected_token_ids"] = [(token + 1) % 128 for token in case["expected_token_ids"]]
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    edit_manifest(folder, lambda manifest: manifest["files"].update({"golden.jsonl": hash_file(path)}))
    return sign(folder, key)
