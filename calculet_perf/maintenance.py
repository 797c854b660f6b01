"""Maintenance windows as a log that nobody can quietly thin out (acceptance §12.4).

Resets of PCIe, driver and device are tried on real hardware only in a window with somebody's authority. Each window leaves lines:
who, when, by whose word, what was in flight, versions and health before and after, whose requests were touched, and how it ended.
Every line carries the sha256 of the line before it, so that a line which was changed or taken out shows; lines are only appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from calculet_core.artifact import sha256_hex
from calculet_perf.records import Record, decoder, from_line, to_line

Action = Literal["device_reset", "driver_reset", "pcie_reset", "other"]
Step = Literal["opened", "set_aside", "acted", "brought_back", "closed"]
BEGIN = "0" * 64


class Health(Record, kw_only=True):
    """The board at one moment, by the supervisor and the router; null: nobody told."""

    state: str | None
    """Of its generation; null: no worker."""
    generation: int | None
    artifact: str | None
    """Digest of the package."""
    fault: str | None
    resets: int | None
    resets_left: int | None
    restarts_left: int | None
    running: int | None
    """Requests with a lane."""
    waiting: int | None
    in_flight: int | None
    """Jobs on the device."""
    runtime: str | None
    driver: str | None
    firmware: str | None
    power_mode: str | None
    golden: list[str] | None
    """Hashes of fixed greedy answers of the fleet; null: one failed, or they do not agree."""


class Touched(Record, kw_only=True):
    """Whose requests the window could touch."""

    running: int | None
    """On the board when it was opened; they are drained before anything is done."""
    waiting: int | None
    tenants: dict[str, int]
    """Tenant -> open requests at the routers, of the whole fleet."""
    errors: dict[str, int]
    """Error code -> how often it was answered while the window was open, by the whole fleet."""


class Line(Record, kw_only=True):
    """`maintenance.jsonl`, `calculet-perf-maintenance/v1`."""

    schema: Literal["calculet-perf-maintenance/v1"] = "calculet-perf-maintenance/v1"
    previous: str
    """sha256 of the line before; of a file's first line: zeros."""
    number: int
    utc: str
    monotonic_ns: int
    window: str
    """Names the window: all its lines have it."""
    step: Step
    operator: str
    uid: int
    authority: str
    """By whose word: a ticket, a contract, a name."""
    board: str
    action: Action
    command: list[str] | None
    """What was run besides; null: only the product's own reset."""
    health: Health | None = None
    touched: Touched | None = None
    detail: dict[str, Any] = {}


class Findings(Record, kw_only=True):
    """How a window ended."""

    recovered: bool
    recovery_ms: float | None
    """From setting aside until the board served again."""
    golden_same: bool | None
    """The fleet's golden answers are those from before; null: they were not asked."""
    changed: dict[str, list[str | None]]
    """Version -> before and after, where they differ: after a new driver that is what was wanted."""
    reasons: list[str]
    """Why the window failed; empty: it did not."""


def judge(before: Health, after: Health | None, command_code: int | None, recovery_ms: float | None) -> Findings:
    """Hold the end against the beginning.

    Args:
        after: None when the board did not serve again in time.
        command_code: exit code of the command; None: none was run.
    """
    reasons = [f"the command ended with {command_code}"] if command_code else []
    if after is None:
        reasons.append("the board did not serve again")
        return Findings(recovered=False, recovery_ms=None, golden_same=None, changed={}, reasons=reasons)
    same = after.golden is not None and after.golden == before.golden
    if not same:
        reasons.append("golden failed" if after.golden is None else "golden answers are not those from before")
    versions = ("runtime", "driver", "firmware", "power_mode", "artifact")
    changed = {
        name: [getattr(before, name), getattr(after, name)] for name in versions if getattr(before, name) != getattr(after, name)
    }
    return Findings(recovered=True, recovery_ms=recovery_ms, golden_same=same, changed=changed, reasons=reasons)


def chained(line: Line, last: bytes | None) -> bytes:
    """The bytes of a line that follows `last`, which is the last line of the file with its end; None: the file is empty."""
    line.previous, line.number = (BEGIN, 0) if last is None else (sha256_hex(last), _number(last) + 1)
    return to_line(line)


def _number(last: bytes) -> int:
    return from_line(decoder(Line), last, "the log's last line", 0).number


def broken(lines: Iterable[bytes], name: str) -> list[str]:
    """Where a log is not what was written: a line that was changed, taken out or put in, or a window that was never closed.

    Raises:
        RecordError: a line is no line of such a log; names it.
    """
    found: list[str] = []
    previous, number, open_windows = BEGIN, 0, dict[str, int]()
    for place, data in enumerate(lines, 1):
        line = from_line(decoder(Line), data, name, place)
        if line.previous != previous:
            found.append(f"{name}:{place}: does not follow the line before it: a line was changed, taken out or put in")
        elif line.number != number:
            found.append(f"{name}:{place}: is numbered {line.number}, not {number}")
        if line.step == "closed":
            open_windows.pop(line.window, None)
        else:
            open_windows.setdefault(line.window, place)
        previous, number = sha256_hex(data), line.number + 1
    return found + [f"{name}:{place}: window {window} was never closed" for window, place in open_windows.items()]


def tenants_of(samples: Sequence[tuple[str, dict[str, str], float]]) -> dict[str, int]:
    """Open requests by tenant, of those that have any."""
    name = "calculet_router_tenant_active"
    return {labels.get("tenant", "-"): int(value) for sample, labels, value in samples if sample == name and value > 0}


def errors_of(samples: Sequence[tuple[str, dict[str, str], float]]) -> dict[str, int]:
    """Errors answered so far, by code."""
    name = "calculet_router_errors_total"
    return {labels.get("code", "-"): int(value) for sample, labels, value in samples if sample == name}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was added between two counts; a counter that began anew counts from zero."""
    added = {name: value - before.get(name, 0) if value >= before.get(name, 0) else value for name, value in after.items()}
    return {name: value for name, value in added.items() if value}

