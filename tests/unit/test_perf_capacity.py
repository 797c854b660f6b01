"""The highest stable rate: the search finds a server's true limit, and a window passes only when it is stable."""

from __future__ import annotations

import pytest
from builders_perf import a_request

from calculet_perf.capacity import MAX_TRIALS, Outcome, Search, Trial, judge
from calculet_perf.records import OpenLoop, RequestRecord
from calculet_perf.workloads.matrix import Capacity

SPEC = Capacity(prompt=8, output=4, ttft_p99_ms=100, screen_s=10, window_s=100)
MS = 1_000_000


def search(limit: float, spec: Capacity = SPEC, *, flaky: tuple[int, ...] = ()) -> tuple[Search, list[Trial]]:
    """A server that holds up to `limit`; trials whose number is in `flaky` go the other way."""
    looking, trials = Search(spec), []
    while (trial := looking.next()) is not None:
        trials.append(trial)
        looking.tell((trial.qps <= limit) != (trial.number in flaky))
    return looking, trials


@pytest.mark.parametrize("limit", [0.02, 0.3, 1.0, 1.01, 7.3, 250])
def test_the_limit_is_found_within_the_tolerance(limit: float) -> None:
    found, trials = search(limit)
    assert found.best is not None
    assert limit / 1.06 <= found.best <= limit
    assert found.unproven is None
    assert [trial.kind for trial in trials[-3:]] == ["window", "window", "step"], "confirmed twice, and the next step failed"
    assert all(trial.seconds == (10 if trial.kind == "screen" else 100) for trial in trials)


def test_screens_only_choose_and_windows_decide() -> None:
    _, trials = search(5)
    screens = [trial for trial in trials if trial.kind == "screen"]
    assert len(screens) > 3
    assert sum(trial.kind != "screen" for trial in trials) == 3, "long windows are few"


def test_a_candidate_that_fails_its_window_goes_down_a_step() -> None:
    _, clean = search(5)
    first_window = next(trial.number for trial in clean if trial.kind == "window")
    found, trials = search(5, flaky=(first_window,))
    rates = [trial.qps for trial in trials if trial.kind == "window"]
    assert rates[1] == pytest.approx(rates[0] / 1.05)
    assert found.best is not None


def test_a_step_up_that_passes_becomes_the_candidate_and_is_confirmed() -> None:
    _, clean = search(5)
    step = next(trial.number for trial in clean if trial.kind == "step")
    found, trials = search(5, flaky=(step,))
    after = trials[step:]
    assert after[0].kind == "window"
    assert after[0].qps == trials[step - 1].qps
    assert found.best is not None
    assert found.best <= 5


def test_no_stable_rate_is_no_answer() -> None:
    found, _ = search(0.001)
    assert found.best is None


def test_a_server_that_never_fails_gives_a_bound_and_says_so() -> None:
    found, _ = search(1e9, Capacity(prompt=1, output=1, max_qps=50))
    assert found.best == 50
    assert found.unproven == "no rate up to max_qps = 50 failed"


def test_a_search_ends_whatever_happens() -> None:
    looking, number = Search(SPEC), 0
    while looking.next() is not None:
        looking.tell(number % 3 != 2)
        number += 1
    assert number <= MAX_TRIALS


# ---------------------------------------------------------------- one window
def a_window(count: int = 400, *, service_ms: float = 50, growth_ms: float = 0.0, failed: int = 0) -> list[RequestRecord]:
    """Ten requests a second; each takes `growth_ms` longer than the one before."""
    records = []
    for index in range(count):
        start, length = index * 100.0, service_ms + growth_ms * index
        record = a_request(
            start_s=start / 1e3, ttft_ms=length / 2, e2e_ms=length, error="over_capacity" if index < failed else None
        )
        at = round(start * MS)
        record.open_loop = OpenLoop(scheduled_start_ns=at, send_delay_ms=0.0, ttft_ms=length / 2, e2e_ms=length)
        records.append(record)
    return records


def outcome(records: list[RequestRecord], spec: Capacity = SPEC) -> Outcome:
    return judge(Trial(1, "window", 10, 40), records, spec)


def test_a_stable_window_passes() -> None:
    found = outcome(a_window())
    assert found.passed, found.reasons
    assert (found.requests, found.error_share, found.ttft_p99_ms) == (400, 0, 25)


def test_a_queue_that_grows_fails_whatever_the_latency_may_be() -> None:
    found = outcome(a_window(growth_ms=5), Capacity(prompt=8, output=4))
    assert not found.passed
    assert any("queue" in reason for reason in found.reasons)
    assert found.queue_end > found.queue_start + 2


def test_latency_above_the_sla_fails() -> None:
    assert outcome(a_window(service_ms=300)).reasons == ["P99 TTFT 150 ms (at most 100 ms)"]


def test_failures_are_infinitely_slow() -> None:
    found = outcome(a_window(failed=5))  # 1.25 %: more than the SLA's share, and more than P99 leaves out
    assert found.reasons[0].startswith("1.25% of requests failed")
    assert "P99 TTFT unbounded (at most 100 ms)" in found.reasons
    assert found.ttft_p99_ms is None
    assert outcome(a_window(failed=3)).passed, "0.75 % is within both"


def test_a_window_without_requests_proves_nothing() -> None:
    assert not outcome([]).passed
