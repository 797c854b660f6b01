"""What this installation was built from: for `/version`, so that a measurement can say what it measured."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]


@cache
def build() -> dict[str, str | None]:
    """`version`; `commit` (CALCULET_COMMIT, else the checkout's HEAD); `image_digest` (CALCULET_IMAGE_DIGEST). None: unknown."""
    return {
        "version": version("calculet"),
        "commit": os.environ.get("CALCULET_COMMIT") or head_of(SOURCE / ".git"),
        "image_digest": os.environ.get("CALCULET_IMAGE_DIGEST") or None,
    }


def head_of(git: Path) -> str | None:
    """The commit that a checkout is at, read without running git; None where it is no checkout."""
    try:
        if git.is_file():  # a worktree: "gitdir: PATH"
            git = (git.parent / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        if (common / name).exists():
            return (common / name).read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0]
    except OSError:
        return None
    return None
