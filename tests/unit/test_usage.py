"""Usage records: written once, synced in bounds, kept through bad disks, found again after a killed router."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from calculet_core import history
from calculet_core.clock import S
from calculet_core.config import UsageConfig
from calculet_core.errors import WorkerLost
from calculet_core.history import Event, check
from calculet_core.shell.usage import read_usage, usage_days, usage_file
from calculet_core.usage import UsageRecord, sum_usage
from calculet_router.actions import Ended
from calculet_router.recovery import add_attempts, find_orphans
from calculet_router.shell.recovering import done_of, record_of
from calculet_router.shell.usage import UsageLog

NOON_S = 1_796_040_000.0
"""2026-11-30 12:00 UTC."""
DAY_S = 86_400


def an_end(number: int = 1, **fields: Any) -> Ended:
    given = {
        "alias": "qwen3", "outcome": "completed", "error": None, "prompt_tokens": 10, "generated_tokens": 5, "accepted_ns": 1 * S,
        "first_ns": None, "ended_ns": 3 * S, "tenant": "red", "key": "0a0b0c0d", "request": f"{number:016x}", "choices": 1,
        "label": None, **fields,
    }  # fmt: skip
    return Ended(**given)


def a_record(number: int = 1, **fields: Any) -> UsageRecord:
    given = {
        "at": "2026-11-30T12:00:00.000Z", "request": f"{number:016x}", "tenant": "red", "model": "qwen3", "outcome": "completed",
        "prompt_tokens": 10, "generated_tokens": 5, "seconds": 1.0, **fields,
    }  # fmt: skip
    return UsageRecord(**given)


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_every_end_is_a_line_in_its_days_file(tmp_path: Path) -> None:
    now_s = [NOON_S]
    log = UsageLog(tmp_path / "usage", UsageConfig(), wall_s=lambda: now_s[0])
    log.append(an_end(1, label="mine"))
    log.append(an_end(2, outcome="failed", error=WorkerLost("gone")))
    now_s[0] += DAY_S
    log.append(an_end(3, outcome="cancelled"))
    log.close()
    assert usage_days(tmp_path / "usage") == ["2026-11-30", "2026-12-01"]
    first, second, third = read_usage(tmp_path / "usage")
    assert first == a_record(1, seconds=2.0, key="0a0b0c0d", label="mine")
    assert (second.outcome, second.code, third.outcome, third.day) == ("failed", "worker_lost", "cancelled", "2026-12-01")
    assert list(read_usage(tmp_path / "usage", first="2026-12-01")) == [third]
    assert usage_file(tmp_path / "usage", "2026-11-30").stat().st_mode & 0o777 == 0o640


def test_it_is_written_at_once_and_synced_at_most_once_per_interval(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage", UsageConfig(sync_interval_ms=3_600_000), wall_s=lambda: NOON_S)
    for number in range(50):
        log.append(an_end(number))
        log.flush()
    until(lambda: len(list(read_usage(tmp_path / "usage"))) == 50)
    assert log.syncs == 0
    log.close()
    assert log.syncs == 1


def test_what_was_written_is_synced_although_nothing_follows(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage", UsageConfig(sync_interval_ms=1), wall_s=lambda: NOON_S)
    log.append(an_end())

    def synced() -> bool:
        log.flush()
        return log.syncs > 0

    until(synced)
    log.close()


def test_a_torn_last_line_loses_nothing_that_follows(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    folder.mkdir()
    usage_file(folder, "2026-11-30").write_bytes(b'{"at":"2026-11-30T11:59:59.000Z","requ')
    log = UsageLog(folder, UsageConfig(), wall_s=lambda: NOON_S)
    log.append(an_end(7))
    log.close()
    assert [record.request for record in read_usage(folder)] == [f"{7:016x}"]


def test_a_disk_that_takes_nothing_for_a_while_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    folder.write_text("in the way")
    log = UsageLog(folder, UsageConfig(), wall_s=lambda: NOON_S)
    log.append(an_end(1))
    log.flush()
    until(lambda: log._kept)
    assert log.written == 0 and log.lost == 0
    folder.unlink()
    log.append(an_end(2))
    log.close()
    assert [record.request for record in read_usage(folder)] == [f"{1:016x}", f"{2:016x}"] and log.written == 2


def test_at_the_end_a_disk_that_takes_nothing_is_a_counted_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "usage").write_text("in the way")
    log = UsageLog(tmp_path / "usage", UsageConfig(), wall_s=lambda: NOON_S)
    log.append(an_end(1))
    log.close()
    assert log.lost == 1 and "cannot be written" in caplog.text


def test_old_days_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    folder.mkdir()
    for day in ("2026-11-01", "2026-11-27", "2026-11-28"):
        usage_file(folder, day).write_bytes(b"")
    (folder / "notes.txt").write_text("kept")
    log = UsageLog(folder, UsageConfig(keep_days=2), wall_s=lambda: NOON_S)
    log.append(an_end())
    log.close()
    assert usage_days(folder) == ["2026-11-28", "2026-11-30"] and (folder / "notes.txt").exists()


def test_sums_count_a_request_once_and_group_as_asked() -> None:
    records = [a_record(1), a_record(1), a_record(2, outcome="cancelled", key="k"), a_record(3, tenant="blue", recovered=True, outcome="failed")]
    assert [(one.group, one.requests, one.prompt_tokens) for one in sum_usage(records, ("tenant",))] == [
        (("blue",), 1, 10), (("red",), 2, 20),
    ]  # fmt: skip
    (whole,) = sum_usage(records, ())
    assert (whole.requests, whole.completed, whole.failed, whole.cancelled, whole.generated_tokens, whole.recovered) == (3, 1, 1, 1, 15, 1)
    assert [one.group for one in sum_usage(records, ("key", "day"))] == [("-", "2026-11-30"), ("k", "2026-11-30")]


# ---------------------------------------------------------------- a killed router's
def accepted(request: int, **data: Any) -> Event:
    return Event(history.REQUEST_ACCEPTED, 1 * S, request, data={"model": "qwen3", "tenant": "red", **data})


def test_only_what_never_ended_is_an_orphan_and_workers_know_its_tokens() -> None:
    old, new = 7 << 32, 8 << 32
    router = [
        accepted(old, key="0a0b0c0d", label="mine"), Event(history.REQUEST_SENT, 1 * S, old, 1), Event(history.REQUEST_SENT, 1 * S, old, 2),
        accepted(old + 1), Event(history.REQUEST_DONE, 2 * S, old + 1, 1, data={"outcome": "completed"}),
        accepted(old + 2, choice=1), Event(history.REQUEST_SENT, 1 * S, old + 2, 1),
        accepted(old + 3),
        accepted(new),
    ]  # fmt: skip
    orphans = find_orphans(router, incarnation=8)
    assert sorted(orphans) == [old, old + 2, old + 3]
    used = {"outcome": "cancelled", "prompt_tokens": 30, "tokens": 12}
    add_attempts(orphans, [Event(history.ATTEMPT_DONE, 4 * S, old, attempt, "b", 1, 1, data={**used, "tokens": 10 + attempt}) for attempt in (1, 2)])
    add_attempts(orphans, [Event(history.ATTEMPT_DONE, 4 * S, old + 2, 1, "b", 1, 1, data=used)])
    records = {request: record_of(orphan, NOON_S) for request, orphan in orphans.items()}
    first = records[old]
    assert (first.prompt_tokens, first.generated_tokens, first.seconds, first.key, first.label) == (30, 12, 3.0, "0a0b0c0d", "mine")
    assert first.recovered and (first.outcome, first.code) == ("failed", "router_lost")
    assert (records[old + 2].prompt_tokens, records[old + 2].generated_tokens) == (0, 12), "another answer to the same prompt"
    assert (records[old + 3].prompt_tokens, records[old + 3].generated_tokens) == (0, 0), "no worker ever had it"
    ends = [done_of(orphan, 5 * S) for orphan in orphans.values()]
    assert find_orphans([*router, *ends], incarnation=8) == {}
    assert check([event for event in router if event.request != new] + ends) == []
