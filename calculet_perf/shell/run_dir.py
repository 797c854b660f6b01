"""A run's folder: one writer, any number of streaming readers.

```
manifest.yaml  matrix.yaml   what was asked, byte for byte
run.json                     how far it came (calculet_perf.runinfo)
cases.jsonl                  one line per executed cell and round
requests.jsonl  steps.jsonl  device.jsonl  processes.jsonl   (calculet_perf.records)
golden.jsonl                 the golden requests, same record
faults.jsonl                 planned and fired faults
swaps.jsonl                  loads, ways back and unloads that a stage drove (calculet_perf.swapping)
```

Lines are appended whole and flushed at every cell's end. A reader holds one line at a time and refuses half a line by file and line
number; only the writer that resumes may cut off a last line that its own death left incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from calculet_core.shell.files import FileLock, LockHeld, read_bounded, sync_folder, write_atomic
from calculet_perf.manifest import Manifest, parse_manifest
from calculet_perf.records import DeviceRecord, ProcessRecord, RecordError, RequestRecord, StepRecord, decoder, from_line, to_line
from calculet_perf.runinfo import CaseRecord, RunInfo
from calculet_perf.swapping import SwapCycle

T = TypeVar("T", bound=msgspec.Struct)
MAX_LINE = 1 << 20
REQUESTS, STEPS, DEVICE, PROCESSES, CASES, GOLDEN, FAULTS, SWAPS = (
    f"{stem}.jsonl" for stem in ("requests", "steps", "device", "processes", "cases", "golden", "faults", "swaps")
)
INFO, MANIFEST, MATRIX = "run.json", "manifest.yaml", "matrix.yaml"


class RunDirError(Exception):
    """The folder is not a run's, or is in use; names it. Exit code 2."""


def read_lines(path: Path, cls: type[T]) -> Iterator[T]:
    """The records of a file, one at a time; nothing when there is no such file.

    Raises:
        RecordError: half a line, a line above 1 MiB, or one that is not this record; names file and line.
    """
    decode, name = decoder(cls), path.name
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise RecordError(f"{name}:{number}: longer than {MAX_LINE} bytes")
            yield from_line(decode, line, name, number)


class RunReader:
    """A finished or unfinished run.

    Raises:
        RunDirError: there is no `run.json`.
        RecordError: it is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            data = read_bounded(folder / INFO, 64 << 20)
        except OSError as error:
            raise RunDirError(f"{folder} is not a run's folder: {INFO}: {error.strerror}") from None
        self.info: RunInfo = from_line(decoder(RunInfo), data, INFO, 1)

    def manifest(self) -> Manifest:
        """The manifest as it was run.

        Raises:
            ManifestError, OSError: as of any manifest.
        """
        path = self.folder / MANIFEST
        return parse_manifest(read_bounded(path), str(path))

    def requests(self) -> Iterator[RequestRecord]:
        """Measured requests and warm-ups, in the order of their ends."""
        return read_lines(self.folder / REQUESTS, RequestRecord)

    def golden(self) -> Iterator[RequestRecord]:
        """The golden requests, before and after."""
        return read_lines(self.folder / GOLDEN, RequestRecord)

    def steps(self) -> Iterator[StepRecord]:
        """Steps, where the server wrote a trace."""
        return read_lines(self.folder / STEPS, StepRecord)

    def device(self) -> Iterator[DeviceRecord]:
        """Device samples by time."""
        return read_lines(self.folder / DEVICE, DeviceRecord)

    def processes(self) -> Iterator[ProcessRecord]:
        """Samples of routers and supervisor by time."""
        return read_lines(self.folder / PROCESSES, ProcessRecord)

    def cases(self) -> Iterator[CaseRecord]:
        """Executed cells by time."""
        return read_lines(self.folder / CASES, CaseRecord)

    def swaps(self) -> Iterator[SwapCycle]:
        """Driven cycles by time."""
        return read_lines(self.folder / SWAPS, SwapCycle)


class RunWriter:
    """Owns a run's folder while it is written.

    Raises:
        RunDirError: the folder holds another run, or another process writes it.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        try:
            self._lock = FileLock(folder / ".lock")
        except LockHeld as error:
            raise RunDirError(str(error)) from None
        if (folder / INFO).exists() and not resume:
            self._lock.release()
            raise RunDirError(f"{folder} already holds a run: name another folder, or go on with --resume")
        self._files: dict[str, BinaryIO] = {}
        if resume:
            for name in (REQUESTS, STEPS, DEVICE, PROCESSES, CASES, GOLDEN, SWAPS):
                cut_half_line(folder / name)

    def put(self, name: str, data: bytes) -> None:
        """A whole small file, replaced in one step."""
        write_atomic(self.folder / name, data, 0o644)

    def put_info(self, info: RunInfo) -> None:
        """Replace `run.json`."""
        self.put(INFO, to_line(info))

    def append(self, name: str, record: msgspec.Struct) -> None:
        """One line, buffered until `flush`."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self.folder / name).open("ab", buffering=1 << 16)
        file.write(to_line(record))

    def flush(self) -> None:
        """What was appended is on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def close(self) -> None:
        """Flush, and let others write; twice is fine."""
        if self._files:
            self.flush()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.release()


def drop_unfinished(folder: Path, done: set[tuple[str, int]]) -> int:
    """Take requests of cells that did not finish out of `requests.jsonl` before they are measured again; how many went.

    Args:
        done: (case, round) of the cells that have their line in `cases.jsonl`. Warm-ups stay.
    """
    path, dropped = folder / REQUESTS, 0
    if not path.exists():
        return 0
    kept = path.with_name(f".{path.name}.kept")
    with kept.open("wb") as out:
        for record in read_lines(path, RequestRecord):
            if record.quality.warmup or (record.case.id, record.case.round) in done:
                out.write(to_line(record))
            else:
                dropped += 1
        out.flush()
        os.fsync(out.fileno())
    kept.replace(path)
    sync_folder(folder)
    return dropped


def cut_half_line(path: Path) -> int:
    """Cut what follows the last newline; how many bytes went."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0
    with file:
        size = file.seek(0, os.SEEK_END)
        end, step = size, 1 << 16
        while end > 0:
            begin = max(0, end - step)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end != size:
            file.truncate(end)
        return size - end
