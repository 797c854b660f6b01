"""What reports draw and count: scales, figures, recovery times, agreement of answers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from builders_perf import a_request, an_info, evidence, some_requests, verdict_between, verdict_on

from calculet_core.history import BOARD_GENERATION, BOARD_RESET, FLEET_WORKER_EXITED, FLEET_WORKER_KILLED, Event
from calculet_perf.agreement import Agreement
from calculet_perf.comparison import compare_runs
from calculet_perf.recovery import history, resets
from calculet_perf.report import figures, html, pdf
from calculet_perf.report.drawing import Scale, logarithmic, number, svg
from calculet_perf.report.model import report_of, run_report
from calculet_perf.report.sections import sections
from calculet_perf.rules import Claim
from calculet_perf.runinfo import NotApplicable
from calculet_perf.shell.loading import load_rules, template

S = 1_000_000_000


# ---------------------------------------------------------------- scales and numbers
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.2, 3.9), (-12.0, 47.0), (0.0, 2_600.0)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    ticks = Scale(low, high, 0, 100).ticks()
    assert 2 <= len(ticks) <= 11 and all(low <= tick <= high for tick in ticks)
    steps = {round(after - before, 9) for before, after in pairwise(ticks)}
    assert len(steps) == 1


def test_a_logarithmic_scale_puts_equal_ratios_at_equal_distances() -> None:
    scale = logarithmic([10, 1000], 0, 100)
    assert scale(100) - scale(10) == pytest.approx(scale(1000) - scale(100))
    assert scale(1) == scale(8) == 0, "what is outside stops at the edge"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0, "0"), (12.345, "12.3"), (1234.5, "1,234"), (0.01234, "0.0123"), (math.inf, "unbounded")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


# ---------------------------------------------------------------- counterexamples
def test_recovery_is_from_the_reset_until_the_board_is_ready() -> None:
    def generation(at_s: float, state: str) -> Event:
        return Event(event=BOARD_GENERATION, t=int(at_s * S), board="b0", generation=1, data={"state": state})

    events = [
        generation(0, "CONFIGURING"), generation(1, "READY"), Event(event=BOARD_RESET, t=5 * S, board="b0"), generation(5.5, "CONFIGURING"),
        generation(7, "READY"), generation(9, "CONFIGURING"), generation(10.5, "READY"), Event(event=BOARD_RESET, t=20 * S, board="b0"),
    ]  # fmt: skip
    found = [(reset.kind, reset.at_ns / S, reset.recovery_ms) for reset in resets(events)]
    assert found == [("reset", 5.0, 2000.0), ("reconfigure", 9.0, 1500.0), ("reset", 20.0, None)]


def test_journals_show_deaths_of_the_run_and_broken_promises() -> None:
    def exited(at_s: float, **data: object) -> Event:
        return Event(event=FLEET_WORKER_EXITED, t=int(at_s * S), board="b0", data=data, wall=1000.0 + at_s)

    events = [
        exited(1, code=None, signal=6), exited(50, code=0, commanded=True), exited(60, code=None, signal=9),
        Event(event=FLEET_WORKER_KILLED, t=70 * S, board="b1", data={"reason": "hangs"}, wall=1070.0),
    ]  # fmt: skip
    found = history(events, 1030.0, 1080.0)
    assert found.deaths == ["b0: the worker ended by itself: signal 9", "b1: killed: hangs"]
    assert verdict_on(evidence(some_requests(30), deaths=found.deaths)).exit_code == 1
    done = [Event(event="request.done", t=at, request=7, data={"outcome": "completed"}) for at in (1, 2)]
    broken = history(done, None, None).broken
    assert len(broken) == 1 and "ended twice" in broken[0]
    assert verdict_on(evidence(some_requests(30), broken_promises=broken)).exit_code == 1
    assert verdict_on(evidence(some_requests(30), deaths=[], broken_promises=[])).exit_code == 0


def test_agreement_counts_every_answer_and_keeps_few_examples() -> None:
    agreement = Agreement()
    for index in range(100):
        agreement.add(a_request(f"r{index}", sample="s", token_hash="ids:good" if index < 70 else "ids:bad", index=index))
    (found,) = agreement.disagreements()
    assert (found.expected, found.count, len(found.requests), agreement.compared) == ("ids:good", 30, 20, 100)


def test_the_answer_alone_is_the_reference_against_a_majority_in_company() -> None:
    agreement = Agreement()
    agreement.add(a_request("alone", sample="s", token_hash="ids:right"))
    for index in range(5):
        agreement.add(a_request(f"r{index}", sample="s", token_hash="ids:wrong", concurrency=4))
    (found,) = agreement.disagreements()
    assert (found.expected, found.count) == ("ids:right", 5)


def test_throttled_requests_are_a_stratum_and_excluded_ones_are_counted_by_reason() -> None:
    requests = some_requests(40)
    for request in requests[:10]:
        request.quality.throttled = True
    requests[11].quality.warmup = True
    requests[12].quality.clock_complete = False
    requests[13].result.error_code = "network_broken"
    report = run_report(
        evidence(requests, an_info(not_applicable=[NotApplicable(case="single/p99999", reason="beyond the context")])), 1
    )
    assert {(cell.stratum, cell.count) for cell in report.cells} == {("throttled", 10), ("", 27)}
    assert report.excluded == {"clock_incomplete": 1, "warmup": 1, "network_broken": 1, "client_interrupted": 0}
    assert {reason for _, _, reason in report.excluded_requests} == {"clock_incomplete", "network_broken"}


def test_the_curve_is_of_single_streamed_requests_by_prompt_length() -> None:
    requests = []
    for prompt, tpot in ((128, 10.0), (16_384, 13.0), (40_000, 29.0)):
        part = some_requests(30, case=f"single/p{prompt}/o11", tpot_ms=tpot, noise=0.01)
        for request in part:
            request.workload.prompt_tokens = prompt
        requests += part
    requests += some_requests(30, case="closed/c8/p128/o11", concurrency=8)
    curve = run_report(evidence(requests), 1).curve
    assert [(point.prompt_tokens, round(point.p50 or 0)) for point in curve] == [(128, 10), (16_384, 13), (40_000, 29)]
    drawn = figures.context_curve(curve)
    assert drawn is not None and "40,000" in svg(drawn)


# ---------------------------------------------------------------- whole pages
def test_a_comparison_draws_winners_and_losers_in_both_formats() -> None:
    def run(seed: int, fast: float, slow: float) -> list:  # type: ignore[type-arg]
        return [
            *some_requests(60, seed=seed, case="wins", slower=fast, concurrency=4), *some_requests(60, seed=seed + 1, case="loses & more", slower=slow),
        ]  # fmt: skip

    base, candidate = evidence(run(1, 1, 1), an_info("base")), evidence(run(5, 0.8, 1.2), an_info("candidate"))
    rules, _ = load_rules()
    comparison = compare_runs(base.cells, candidate.cells, rules.claims["rebuild"], Claim(claim="rebuild"), 1)
    report = report_of(candidate, verdict_between(base, candidate), created_utc="now", base=base, comparison=comparison)
    page = html.render(report, template(html.TEMPLATE_NAME)).decode()
    assert "loses &amp; more" in page and "Winners and losers" in page and "Cells of the base" in page
    for section in sections(report):
        for figure in section.figures:
            ET.fromstring(svg(figure))
    assert pdf.render(report).startswith(b"%PDF-")
    changes = {(delta.cell, delta.metric): delta.change for delta in comparison.deltas if delta.quantile == "p50"}
    assert changes["wins", "tpot"] == "better" and changes["loses & more", "tpot"] == "worse"


def test_a_run_without_anything_still_has_a_report() -> None:
    found = evidence([], an_info(status="interrupted"))
    page = html.render(report_of(found, verdict_on(found), created_utc="now"), template(html.TEMPLATE_NAME)).decode()
    assert "The measurement is invalid" in page and "None was seen" in page


def test_throughput_has_an_interval_around_it() -> None:
    (cell,) = run_report(evidence(some_requests(100, noise=0.1)), 1).cells
    assert cell.tokens_per_s is not None and cell.tokens_per_s_low is not None and cell.tokens_per_s_high is not None
    assert cell.tokens_per_s_low < cell.tokens_per_s < cell.tokens_per_s_high
    assert cell.tokens_per_s == pytest.approx(11 / 0.152, rel=0.05), "11 tokens in 50 + 10 * 10 ms and a pause"
