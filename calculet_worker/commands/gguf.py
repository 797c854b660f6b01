"""The metadata at the head of a GGUF file (version 2 and 3, little endian): names and values, arrays included.

libllama hands out single values but not the arrays that a tokenizer is made of.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from calculet_core.errors import ArtifactError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key with its value; strings as `str`, arrays as lists.

    Raises:
        ArtifactError: not a GGUF file that we can read.
    """
    try:
        with path.open("rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise ArtifactError(f"{path}: not a GGUF file of version 2 or 3")
            return {_string(file): _value(file, _scalar(file, "<I")) for _ in range(count)}
    except (OSError, struct.error, KeyError, UnicodeDecodeError, MemoryError) as error:
        raise ArtifactError(f"{path}: no readable GGUF metadata: {error}") from None


def _scalar(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "<Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, count = _scalar(file, "<I"), _scalar(file, "<Q")
        return [_value(file, item) for _ in range(count)]
    return _scalar(file, _SCALARS[kind])
