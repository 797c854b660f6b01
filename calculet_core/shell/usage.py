"""Usage files: `usage-2026-11-30.jsonl`, one for each UTC day, in the fleet's usage folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from calculet_core.usage import UsageRecord

_NAME = re.compile(r"usage-(\d{4}-\d{2}-\d{2})\.jsonl")
_decode = msgspec.json.Decoder(UsageRecord).decode


def usage_file(folder: Path, day: str) -> Path:
    """The file of a day (2026-11-30)."""
    return folder / f"usage-{day}.jsonl"


def usage_days(folder: Path) -> list[str]:
    """Days that there are files of, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(match[1] for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def read_usage(folder: Path, first: str | None = None, last: str | None = None) -> Iterator[UsageRecord]:
    """Records of the days from `first` to `last`, both included, in the order they were written; a torn line is skipped."""
    for day in usage_days(folder):
        if (first is None or day >= first) and (last is None or day <= last):
            with usage_file(folder, day).open("rb") as file:
                for line in file:
                    try:
                        yield _decode(line)
                    except msgspec.DecodeError:
                        continue
