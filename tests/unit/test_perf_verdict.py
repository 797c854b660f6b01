"""Verdicts: the precedence of exit codes, what each check catches, and what is never a pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from builders_perf import S, a_request, a_step, an_info, evidence, some_requests, the_rules, verdict_between, verdict_on

from calculet_core.history import FLEET_ROLLOUT, Event
from calculet_perf.checks import CHECKS, CheckResult, Result
from calculet_perf.evidence import Reset
from calculet_perf.faults import Outcome as FaultRun
from calculet_perf.manifest import SwapsPart
from calculet_perf.records import DeviceJobs, DeviceRecord, ProcessRecord, Resources
from calculet_perf.recovery import history
from calculet_perf.rules import BatchTarget, BoardLimits, Claim, RulesError, Sla, check_claim, parse_claim, parse_rules
from calculet_perf.runinfo import GoldenOutcome, Invalid, Returned, Shortened
from calculet_perf.stability import StageRun
from calculet_perf.swapping import SwapBoard, SwapCycle, driven, due_s, kind_of
from calculet_perf.verdict import Verdict, exit_code

DAY = 86_400.0
OUTCOMES = {"configuration": 2, "hard": 1, "infrastructure": 3, "performance": 4}


def a_check(kind: str, result: Result) -> CheckResult:
    return CheckResult(check="x", kind=kind, clause="", title="", result=result, why="")  # type: ignore[arg-type]


def reasons(verdict: Verdict) -> dict[str, Result]:
    return {check.check: check.result for check in verdict.checks}


# ---------------------------------------------------------------- precedence
@pytest.mark.parametrize("failed", [kinds for size in range(5) for kinds in itertools.combinations(OUTCOMES, size)])
@pytest.mark.parametrize("unsure", [False, True])
def test_exit_code_precedence(failed: tuple[str, ...], unsure: bool) -> None:
    checks = [a_check(kind, Result.FAIL if kind in failed else Result.PASS) for kind in OUTCOMES]
    checks += [a_check("hard", Result.INSUFFICIENT)] if unsure else []
    expected = next((OUTCOMES[kind] for kind in OUTCOMES if kind in failed), 3 if unsure else 0)
    for order in itertools.islice(itertools.permutations(checks), 12):
        assert exit_code(order) == (expected, unsure and not failed)


@pytest.mark.parametrize("kind", OUTCOMES)
def test_insufficient_evidence_of_any_kind_is_three(kind: str) -> None:
    assert exit_code([a_check(kind, Result.INSUFFICIENT), a_check("hard", Result.PASS)]) == (3, True)
    assert exit_code([a_check(kind, Result.NOT_ASKED)]) == (0, False)


def test_rules_and_checks_are_the_same_set() -> None:
    assert set(the_rules().checks) == set(CHECKS)


def test_the_shipped_rules_have_the_specifications_numbers() -> None:
    """Acceptance §13, §14.2, §14.3: durations in seconds, limits in percent."""
    rules = the_rules()
    lengths = {name: stage.duration_s for name, stage in rules.stages.items()}
    assert lengths == {"smoke": 600, "dev": 3600, "candidate": 8 * 3600, "release": DAY, "endurance": 3 * DAY}
    assert [name for name, stage in rules.stages.items() if stage.optional] == ["endurance"]
    passes = {name: set(stage.passes) for name, stage in rules.stages.items()}
    assert passes["smoke"] == {"golden", "zero_errors"} and passes["dev"] == {"no_leak", "no_process_death"}
    assert passes["candidate"] == {"sla", "no_lost_board", "no_leak"} and "no_lost_board" in passes["release"]
    assert rules.capacity_window_s == 1800

    def limits(claim: str, question: str) -> set[tuple[str, str | None, Any, str]]:
        return {(one.metric, one.quantile, one.percent, one.scope) for one in getattr(rules.claims[claim], question)}

    assert limits("rebuild", "not_worse") == {
        (metric, quantile, percent, "all") for metric in ("ttft", "tpot") for quantile, percent in (("p50", 3), ("p99", 5))
    }  # fmt: skip
    assert limits("candidate", "improved") == {("target", "p50", 8, "target")}
    (target,) = rules.claims["candidate"].improved
    assert target.alternative is not None and (target.alternative.metric, target.alternative.percent) == ("e2e", 5)
    assert {(quantile, percent, scope) for _, quantile, percent, scope in limits("candidate", "not_worse")} == {("p99", 5, "others")}
    assert limits("ping_pong", "improved") == {("tokens_per_s", None, 10, "target")}
    assert limits("ping_pong", "not_worse") == {("tpot", "p99", 5, "all")} and rules.claims["ping_pong"].stage == "release"
    assert {percent for _, _, percent, _ in limits("batch", "improved")} == {"batch_target"}, "no default multiple"
    assert (rules.model_swaps.loads, rules.claims["multi_model"].stage) == (100, "candidate")


# ---------------------------------------------------------------- one run
def test_a_sound_baseline_passes() -> None:
    verdict = verdict_on(evidence(some_requests(60)))
    assert verdict.exit_code == 0 and verdict.conclusion == "pass" and verdict.milestone is None, verdict.checks


def test_golden_before_and_after_are_needed() -> None:
    failed = GoldenOutcome(moment="after", passed=False, cases=3, source="self", failures=["case a: token 3 is 7, not 9"])
    good = GoldenOutcome(moment="before", passed=True, cases=3, source="self", failures=[])
    assert verdict_on(evidence(some_requests(60), an_info(golden=[good, failed]))).exit_code == 1
    missing = verdict_on(evidence(some_requests(60), an_info(golden=[good])))
    assert missing.exit_code == 3 and missing.conclusion == "insufficient_evidence"


def test_a_swapped_token_is_exit_one() -> None:
    requests = [a_request(f"r{i}", sample=f"s{i % 3}", token_hash=f"ids:{i % 3}", index=i, start_s=float(i)) for i in range(30)]
    assert verdict_on(evidence(requests)).exit_code == 0
    requests[7].result.token_hash = "ids:other"
    verdict = verdict_on(evidence(requests))
    assert verdict.exit_code == 1 and reasons(verdict)["no_crosstalk"] is Result.FAIL
    assert verdict_on(evidence(requests), batch_invariant=False).exit_code == 0, "an engine that is not batch-invariant may differ"


def test_another_samples_answer_is_crosstalk_for_any_engine() -> None:
    requests = [a_request(f"r{i}", sample=f"s{i % 3}", token_hash=f"ids:{i % 3}", index=i, start_s=float(i)) for i in range(30)]
    requests[7].result.token_hash = "ids:2"
    verdict = verdict_on(evidence(requests), batch_invariant=False)
    assert verdict.exit_code == 1
    assert any("answer of s2" in line for check in verdict.checks for line in check.details)


def test_answers_that_cannot_be_compared_are_no_pass() -> None:
    requests = [a_request(f"r{i}", sample=f"s{i}", index=i) for i in range(30)]
    assert verdict_on(evidence(requests)).conclusion == "insufficient_evidence"


def test_a_bad_output_that_was_used_is_exit_one() -> None:
    steps = [a_step(job=1, step=0), a_step(job=2, step=1, output_status="ccu_exception"), a_step(job=3, step=2)]
    assert verdict_on(evidence([a_request("r1"), *some_requests(20)], steps=steps)).exit_code == 1
    fell_over = [a_step(job=1, step=0), a_step(job=2, step=1, output_status="ccu_exception")]
    fell_over += [a_step(job=10 + index, step=index, generation=2) for index in range(11)]
    assert verdict_on(evidence([a_request("r1", ttft_ms=100), *some_requests(20)], steps=fell_over)).exit_code == 0


@pytest.mark.parametrize("code", ["worker_lost", "client_timeout", "internal_error"])
def test_lost_workers_and_endless_waits_fail(code: str) -> None:
    assert verdict_on(evidence([*some_requests(30), a_request("bad", error=code)])).exit_code == 1


def test_a_refusal_is_not_a_lost_request() -> None:
    assert verdict_on(evidence([*some_requests(30), a_request("bad", error="over_capacity")])).exit_code == 0


def test_what_did_not_come_back_fails() -> None:
    stuck = Returned(resource="leased_buffers", board="b0", before=0, after=1, returned=False)
    assert verdict_on(evidence(some_requests(30), an_info(returned=[stuck]))).exit_code == 1
    assert verdict_on(evidence(some_requests(30), an_info(returned=[]))).exit_code == 3


def test_invalid_infrastructure_is_neither_pass_nor_fail_and_wrong_tokens_go_before_it() -> None:
    info = an_info(invalid=[Invalid(code="clock", message="the clock stood still")])
    assert verdict_on(evidence(some_requests(30), info)).exit_code == 3
    bad = [*some_requests(30), a_request("bad", token_hash="ids:other")]
    assert verdict_on(evidence(bad, info)).exit_code == 1
    assert verdict_on(evidence(bad, info, configuration_errors=["manifest.yaml: changed"])).exit_code == 2


def test_an_interrupted_or_empty_run_is_three() -> None:
    assert verdict_on(evidence(some_requests(30), an_info(status="interrupted"))).exit_code == 3
    assert verdict_on(evidence([])).exit_code == 3


def a_fault(**changes: object) -> FaultRun:
    """A scenario that ended as designed."""
    fields = {
        "scenario": "wait_timeout", "clause": "12.2", "planned": 1, "fired": 1, "expected": "recovers", "observed": "recovered", "as_expected": True,
        "valid": True, "golden_after": True, "reset": True, "recovery_ms": 900.0, "reasons": [], **changes,
    }  # fmt: skip
    return FaultRun(**fields)  # type: ignore[arg-type]


def test_faults_must_fire_and_end_as_designed() -> None:
    def code(*faults: FaultRun) -> int:
        return verdict_on(evidence(some_requests(30), faults=faults)).exit_code

    assert code(a_fault()) == 0
    assert code(a_fault(fired=0, valid=False, as_expected=False)) == 3, "planned and not fired proves nothing"
    assert code(a_fault(), a_fault(as_expected=False, reasons=["golden failed afterwards"])) == 1
    assert code() == 3, "an empty list of scenarios shows nothing"


def test_a_reset_after_which_nothing_was_served_fails_the_day() -> None:
    requests = some_requests(60)
    end = max(record.client_ns.response_end or 0 for record in requests)

    def verdict(at_ns: int, recovery_ms: float | None) -> Verdict:
        reset = Reset(board="b0", at_ns=at_ns, kind="reset", recovery_ms=recovery_ms, source="journal")
        return verdict_on(evidence(requests, stage=a_stage(24), journal_resets=[reset]))

    assert reasons(verdict(end + 1, None))["no_lost_board"] is Result.FAIL
    assert reasons(verdict(end - 1, None))["no_lost_board"] is Result.PASS
    assert reasons(verdict(end + 1, 900.0))["no_lost_board"] is Result.PASS


def test_an_armed_injector_spoils_a_run_without_scenarios() -> None:
    assert verdict_on(evidence(some_requests(30), an_info(injector_armed=True))).exit_code == 3


# ---------------------------------------------------------------- long gates
def a_stage(hours: float, virtual: bool = False, stage: str = "release") -> StageRun:
    asked = the_rules().stages[stage].duration_s
    return StageRun(stage=stage, asked_s=asked, done_s=hours * 3600, virtual_time=virtual)


@pytest.mark.parametrize(("hours", "virtual"), [(0.1, False), (23.0, False), (24.0, True)])
def test_short_or_virtual_days_never_satisfy_m0(hours: float, virtual: bool) -> None:
    verdict = verdict_on(evidence(some_requests(30), stage=a_stage(hours, virtual)), "release")
    assert verdict.exit_code == 3 and verdict.milestone is None and verdict.labels
    assert reasons(verdict)["stage_length"] is Result.INSUFFICIENT


def test_a_stage_that_claims_a_shorter_asked_time_is_held_to_the_rules() -> None:
    cheat = StageRun(stage="release", asked_s=60, done_s=60)
    assert reasons(verdict_on(evidence(some_requests(30), stage=cheat), "release"))["stage_length"] is Result.INSUFFICIENT


def test_a_day_without_memory_samples_is_insufficient() -> None:
    verdict = verdict_on(evidence(some_requests(30), stage=a_stage(24)), "release")
    assert reasons(verdict)["stage_length"] is Result.PASS and reasons(verdict)["no_leak"] is Result.INSUFFICIENT
    assert verdict.exit_code == 3


def test_m1_is_not_signed_over_a_shortened_run() -> None:
    cut = [Shortened(what="idle sampling", asked=300, done=5, unit="s", clause="§8.2")]
    base, candidate = evidence(some_requests(300, seed=1)), evidence(some_requests(300, seed=2), an_info(shortened=cut))
    verdict = verdict_between(base, candidate)
    assert verdict.exit_code == 0 and verdict.milestone is None and "idle sampling" in verdict.labels[0]
    whole = verdict_between(base, evidence(some_requests(300, seed=2)))
    assert whole.exit_code == 0 and whole.milestone == "M1"


# ---------------------------------------------------------------- two runs
@pytest.mark.parametrize("seed", range(3))
def test_eight_percent_slower_is_four_and_the_same_is_zero(seed: int) -> None:
    base = evidence(some_requests(300, seed=seed))
    slow = verdict_between(base, evidence(some_requests(300, seed=seed + 100, slower=1.08)), seed=seed)
    same = verdict_between(base, evidence(some_requests(300, seed=seed + 200)), seed=seed)
    assert slow.exit_code == 4 and slow.conclusion == "performance_regression"
    assert same.exit_code == 0, [check.why for check in same.checks]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_eight_percent_slower_is_four_and_the_same_is_zero_in_twenty_seeds(seed: int) -> None:
    test_eight_percent_slower_is_four_and_the_same_is_zero(1_000 + 7 * seed)


def test_too_few_samples_for_p99_are_no_pass_but_do_not_hide_a_regression() -> None:
    base = evidence(some_requests(100, seed=1))
    same = verdict_between(base, evidence(some_requests(100, seed=2)))
    assert same.conclusion == "insufficient_evidence" and any("299" in line for check in same.checks for line in check.details)
    assert verdict_between(base, evidence(some_requests(100, seed=2, slower=1.3))).exit_code == 4


def test_a_base_that_is_wrong_is_no_measure() -> None:
    failed = GoldenOutcome(moment="before", passed=False, cases=3, source="self", failures=["case a: token 3 is 7, not 9"])
    base = evidence(some_requests(300, seed=1), an_info(golden=[failed]))
    verdict = verdict_between(base, evidence(some_requests(300, seed=2)))
    assert verdict.exit_code == 3 and reasons(verdict)["base: golden"] is Result.INSUFFICIENT


def test_a_noisy_cell_cannot_gate() -> None:
    verdict = verdict_between(evidence(some_requests(300, seed=1, noise=0.5)), evidence(some_requests(300, seed=2, noise=0.5)))
    assert verdict.exit_code == 3 and reasons(verdict)["aa_floor"] is Result.INSUFFICIENT


def test_failures_of_the_candidate_are_a_regression() -> None:
    failing = some_requests(300, seed=2)
    failing[::20] = [a_request(f"f{i}", case="single/p16/o11", round=i, error="over_capacity") for i in range(15)]
    assert verdict_between(evidence(some_requests(300, seed=1)), evidence(failing)).exit_code == 4


def test_a_candidate_must_win_where_it_aims_and_keep_the_rest() -> None:
    claim = Claim(claim="candidate", target_cells=("aim/*",), target_metric="tpot", limits=BoardLimits(temperature_c=90))

    def run(aim: float, rest: float, seed: int) -> list:  # type: ignore[type-arg]
        return [
            *some_requests(300, seed=seed, case="aim/p16", slower=aim),
            *some_requests(300, seed=seed + 1, case="rest/p16", slower=rest),
        ]

    base = evidence(run(1, 1, 1))
    won = verdict_between(base, evidence(run(0.85, 1, 11)), claim)
    assert reasons(won)["improved"] is Result.PASS and reasons(won)["not_worse"] is Result.PASS
    assert won.exit_code == 3 and reasons(won)["limits"] is Result.INSUFFICIENT, "temperatures were not seen"
    assert reasons(verdict_between(base, evidence(run(0.99, 1, 21)), claim))["improved"] is Result.FAIL
    lost = verdict_between(base, evidence(run(0.85, 1.2, 31)), claim)
    assert lost.exit_code == 4 and reasons(lost)["not_worse"] is Result.FAIL


def test_ping_pong_needs_a_real_day() -> None:
    base, fast = evidence(some_requests(300, seed=1)), evidence(some_requests(300, seed=2, slower=0.8))
    claim = Claim(claim="ping_pong")
    short = verdict_between(base, fast, claim, soak=evidence(some_requests(60), stage=a_stage(0.2)))
    assert short.exit_code == 3 and short.milestone is None and reasons(short)["improved"] is Result.PASS


# ---------------------------------------------------------------- rules and claims
def test_the_batch_target_has_no_default() -> None:
    rules, sla = the_rules(), Sla(tpot_p99_ms=50)
    with pytest.raises(RulesError, match=r"\$\.batch: a batch claim must state it"):
        check_claim(Claim(claim="batch", target_cells=("*",), sla=sla), "claim.yaml", rules)
    with pytest.raises(RulesError, match=r"\$\.sla"):
        check_claim(Claim(claim="batch", target_cells=("*",), batch=BatchTarget(target_percent=60)), "claim.yaml", rules)
    check_claim(Claim(claim="batch", target_cells=("*",), batch=BatchTarget(target_percent=60), sla=sla), "claim.yaml", rules)
    with pytest.raises(RulesError, match=r"claim.yaml: \$\.batch: Object missing required field `target_percent`"):
        parse_claim(b"claim: batch\nbatch: {}\n", "claim.yaml", rules)


def test_a_batch_claim_is_held_to_its_own_target() -> None:
    base = evidence(some_requests(300, seed=1))
    candidate = evidence(some_requests(300, seed=2, slower=0.7), faults=[a_fault()])
    for target, expected in ((20.0, 0), (90.0, 4)):
        claim = Claim(claim="batch", target_cells=("*",), batch=BatchTarget(target_percent=target), sla=Sla(tpot_p99_ms=50))
        assert verdict_between(base, candidate, claim).exit_code == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"claim: faster\n", r"c.yaml: \$\.claim: no rules for 'faster'"),
        (b"claim: candidate\n", r"c.yaml: \$\.target_cells: a candidate claim must state it"),
        (b"claim: rebuild\nextra: 1\n", r"c.yaml: \$: Object contains unknown field `extra`"),
        (b"[", r"c.yaml: not valid YAML"),
    ],
)
def test_a_wrong_claim_names_file_and_field(data: bytes, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        parse_claim(data, "c.yaml", the_rules())


def test_rules_that_name_an_unknown_check_are_refused() -> None:
    data = msgspec.yaml.encode({**msgspec.to_builtins(the_rules()), "always": ["nothing"]})
    with pytest.raises(RulesError, match=r"\$\.always: no check 'nothing'"):
        parse_rules(data, "rules.yaml")


def test_service_level_is_judged_by_exact_bounds() -> None:
    requests = some_requests(400, ttft_ms=50, noise=0.05)
    assert verdict_on(evidence(requests), sla=Sla(ttft_p99_ms=70)).exit_code == 0
    assert verdict_on(evidence(requests), sla=Sla(ttft_p99_ms=51)).exit_code == 4
    assert verdict_on(evidence(requests[:100]), sla=Sla(ttft_p99_ms=70)).conclusion == "insufficient_evidence"
    refused = [*requests, *(a_request(f"x{i}", case="single/p16/o11", error="over_capacity") for i in range(10))]
    assert verdict_on(evidence(refused), sla=Sla(reject_rate=0.01)).exit_code == 4
    assert verdict_on(evidence(refused), sla=Sla(reject_rate=0.05)).exit_code == 0


def open_loop(count: int, gap_s: float, growth_ms: float) -> list:  # type: ignore[type-arg]
    """Requests at fixed times; each waits a little longer than the one before when the queue grows."""
    made = []
    for index in range(count):
        record = a_request(f"o{index}", start_s=index * gap_s, ttft_ms=50 + growth_ms * index, case="poisson/q1", concurrency=None)
        record.case.arrival = "poisson"
        made.append(record)
    return made


def test_a_rate_is_stable_only_over_a_whole_window_without_a_growing_queue() -> None:
    sla = Sla(ttft_p99_ms=100_000)
    steady = verdict_on(evidence(open_loop(1_000, 2.0, 0)), "capacity", sla=sla)
    assert steady.exit_code == 0, [check.why for check in steady.checks]
    short = verdict_on(evidence(open_loop(1_000, 0.1, 0)), "capacity", sla=sla)
    assert short.conclusion == "insufficient_evidence" and any("1800 s" in check.why for check in short.checks)
    growing = verdict_on(evidence(open_loop(1_000, 2.0, 40)), "capacity", sla=sla)
    assert growing.exit_code == 4 and any("queue went on growing" in check.why for check in growing.checks)


def a_watched_day(growth_mb_per_hour: float, idle_share: float = 0.01, load_share: float = 0.2) -> list[DeviceRecord]:
    """A sample a minute for 24 h, idle at both ends; shares are of one core."""
    cpu_s = 100.0
    found = []
    for minute in range(-5, 24 * 60 + 5):
        phase = "idle" if minute < 0 else "measure" if minute < 24 * 60 else "after"
        memory = (500 + 2 * math.sin(minute / 7) + max(0, minute) / 60 * growth_mb_per_hour) * (1 << 20)
        cpu_s += 60 * (load_share if phase == "measure" else idle_share)
        resources = Resources(rss_bytes=memory, cpu_s=cpu_s, leased_buffers=2.0 if phase == "measure" else 0.0)
        found.append(
            DeviceRecord(
                run_id="run", utc="", monotonic_ns=minute * 60 * 1_000_000_000, board="b0", phase=phase, chips=[], jobs=DeviceJobs(),
                resources=resources,
            )
        )  # fmt: skip
    return found


def test_a_whole_sound_day_satisfies_m0_and_a_leaking_one_fails() -> None:
    sound = verdict_on(evidence(some_requests(60), stage=a_stage(24), device=a_watched_day(0), faults=[a_fault()]), "release")
    assert sound.exit_code == 0 and sound.milestone == "M0", [check.why for check in sound.checks]
    unbroken = verdict_on(evidence(some_requests(60), stage=a_stage(24), device=a_watched_day(0)), "release")
    assert unbroken.exit_code == 3 and reasons(unbroken)["faults_recovered"] is Result.INSUFFICIENT
    leaking = verdict_on(evidence(some_requests(60), stage=a_stage(24), device=a_watched_day(5)), "release")
    assert leaking.exit_code == 1 and reasons(leaking)["no_leak"] is Result.FAIL and leaking.milestone is None


def test_one_lease_that_never_came_back_fails_the_day() -> None:
    samples = a_watched_day(0)
    for sample in samples:
        if sample.phase == "after":
            sample.resources.leased_buffers = 1.0
    verdict = verdict_on(evidence(some_requests(60), stage=a_stage(24), device=samples), "release")
    assert verdict.exit_code == 1 and any(
        "leased_buffers: 1 after everything had ended, 0 before" in check.why for check in verdict.checks
    )


# ---------------------------------------------------------------- busy waiting (M0) and swaps (M4)
def release(days: list[DeviceRecord], backend: str | None = None, **more: Any) -> Verdict:
    return verdict_on(
        evidence(some_requests(60), an_info(backend=backend), stage=a_stage(24), device=days, faults=[a_fault()], **more), "release"
    )


def test_a_process_that_spins_while_nothing_runs_fails_the_day() -> None:
    spinning = release(a_watched_day(0, idle_share=0.97))
    assert spinning.exit_code == 1 and reasons(spinning)["no_busy_wait"] is Result.FAIL
    assert any("97% of a core while nothing runs" in check.why for check in spinning.checks)


def test_a_process_that_spins_for_its_device_fails_the_day_unless_its_engine_computes_on_the_host() -> None:
    days = a_watched_day(0, load_share=0.99)
    assert reasons(release(days, backend="sim"))["no_busy_wait"] is Result.FAIL
    assert reasons(release(days, backend="llamacpp"))["no_busy_wait"] is Result.PASS
    idle_too = a_watched_day(0, load_share=0.99, idle_share=0.5)
    assert reasons(release(idle_too, backend="llamacpp"))["no_busy_wait"] is Result.FAIL


def test_cpu_time_that_nobody_told_is_no_pass() -> None:
    days = a_watched_day(0)
    for sample in days:
        sample.resources.cpu_s = None
    assert reasons(release(days))["no_busy_wait"] is Result.INSUFFICIENT
    short = [sample for sample in a_watched_day(0) if sample.phase == "measure"]
    assert reasons(release(short))["no_busy_wait"] is Result.INSUFFICIENT, "no idle moment was seen"


def test_a_worker_that_was_started_anew_does_not_make_up_for_spinning() -> None:
    days = a_watched_day(0, idle_share=0.97)
    for sample in days[len(days) // 2 :]:
        sample.resources.cpu_s = (sample.resources.cpu_s or 0) - (days[len(days) // 2].resources.cpu_s or 0)
    assert reasons(release(days))["no_busy_wait"] is Result.FAIL


@pytest.mark.parametrize(("busy", "result"), [(0.6, Result.PASS), (0.93, Result.FAIL), (None, Result.INSUFFICIENT)])
def test_a_board_that_is_busier_than_the_service_level_allows_fails(busy: float | None, result: Result) -> None:
    days = a_watched_day(0)
    for place, sample in enumerate(days):
        sample.resources.device_busy_s = None if busy is None else 60.0 * place * busy
    found = verdict_on(evidence(some_requests(60), device=days), sla=Sla(utilisation=0.8))
    assert reasons(found)["sla"] is result, [check.why for check in found.checks]


def a_watched_process(name: str, share: float, *, lives: int = 1, told: bool = True) -> list[ProcessRecord]:
    """A sample a second, first idle for 60 s, then under load for 60 s; several lives answer in turns, as routers of one address do."""
    spent = [1000.0 * life for life in range(lives)]
    found = []
    for second in range(120):
        for life in range(lives):
            spent[life] += share if second < 60 else 0.95
        life = second % lives
        found.append(
            ProcessRecord(
                run_id="run", utc="", monotonic_ns=second * 1_000_000_000, phase="idle" if second < 60 else "measure", process=name,
                start_s=float(life), cpu_s=spent[life] if told else None,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("name", ["router", "supervisor"])
def test_a_router_or_a_supervisor_that_spins_fails_the_day(name: str, lives: int) -> None:
    days = a_watched_day(0)
    spinning = release(days, processes=a_watched_process(name, 0.9, lives=lives))
    assert reasons(spinning)["no_busy_wait"] is Result.FAIL
    assert any(f"{name}: 90% of a core while nothing runs" in check.why for check in spinning.checks)
    calm = release(days, processes=a_watched_process(name, 0.02, lives=lives))
    assert reasons(calm)["no_busy_wait"] is Result.PASS, "what it uses under load is its work"
    (use,) = [use for use in evidence([], processes=a_watched_process(name, 0.02, lives=lives)).cpu if use.role == "other"]
    assert use.idle_share == pytest.approx(0.02) and use.load_share == pytest.approx(0.95)


def test_routers_and_supervisors_that_tell_nothing_are_not_judged_and_that_is_said() -> None:
    silent = release(a_watched_day(0), processes=a_watched_process("router", 0.9, told=False))
    (check,) = [check for check in silent.checks if check.check == "no_busy_wait"]
    assert (check.result, "routers and supervisor told nothing" in check.why) == (Result.PASS, True)
    alone = release([], processes=a_watched_process("router", 0.02))
    assert reasons(alone)["no_busy_wait"] is Result.INSUFFICIENT, "a router is no board"


def rollouts(*swaps: tuple[str, str]) -> list[Event]:
    """A journal of (verb, last state)."""
    found = []
    for number, (verb, state) in enumerate(swaps):
        for at, name in enumerate(("STAGING", state)):
            data = {"rollout": number, "alias": "toy", "verb": verb, "state": name, "text": "as it went"}
            found.append(Event(event=FLEET_ROLLOUT, t=number * 10 + at, data=data))
    return found


def multi_model(events: list[Event] | None, hours: float = 8, cycles: Sequence[SwapCycle] = ()) -> Verdict:
    told = history(events, None, None) if events is not None else None
    found = evidence(
        some_requests(60), stage=a_stage(hours, stage="candidate"), device=a_watched_day(0), swaps=told.swaps if told else None,
        broken_promises=told.broken if told else None, driven=driven(cycles),
    )  # fmt: skip
    return verdict_on(found, "multi_model", sla=Sla(ttft_p99_ms=1e6, reject_rate=0.5))


HUNDRED = [("load", "DONE")] * 100


def test_m4_needs_a_hundred_loads_and_a_way_back() -> None:
    def outcome(*swaps: tuple[str, str]) -> Result:
        return reasons(multi_model(rollouts(*swaps)))["model_swaps"]

    assert outcome(*HUNDRED, ("rollback", "DONE")) is Result.PASS
    assert outcome(*HUNDRED, ("load", "ROLLED_BACK")) is Result.PASS, "a load that went back by itself is a way back"
    assert outcome(*HUNDRED) is Result.INSUFFICIENT, "no way back was shown"
    assert outcome(*HUNDRED[1:], ("load", "REFUSED"), ("rollback", "DONE")) is Result.INSUFFICIENT, "a refusal is no load"
    assert outcome(*HUNDRED, ("rollback", "DONE"), ("load", "STAGING")) is Result.FAIL, "a swap that never ended"
    assert reasons(multi_model(None))["model_swaps"] is Result.INSUFFICIENT


def a_cycle(number: int, kind: str = "swap", **changes: Any) -> SwapCycle:
    """One that ended as asked, on one board; an emptied board used 1 MiB."""
    empty = 1 << 20 if kind == "unload_load" else None
    board = SwapBoard(
        board="b0", generation_before=number + 1, generation_after=number + 2, digest_after="d" * 64, state_after="READY",
        device_bytes_empty=changes.pop("empty", empty),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "run_id": "run", "number": number, "kind": kind, "under_load": kind != "unload_load", "from_digest": "e" * 64,
        "from_package": "/p", "to_digest": "d" * 64, "rollout": number, "utc": "", "start_ns": number * S, "end_ns": number * S + S // 2,
        "unload_s": 0.1 if empty else None, "state": "DONE", "ok": True, "boards": [board], **changes,
    }  # fmt: skip
    return SwapCycle(**fields)


def driven_cycles(count: int = 100, **last: Any) -> list[SwapCycle]:
    found = [a_cycle(number, "rollback" if number == 1 else "unload_load" if number % 5 == 4 else "swap") for number in range(count)]
    return [*found[:-1], a_cycle(count - 1, **last)] if last else found


@pytest.mark.parametrize(
    ("cycles", "result", "words"),
    [
        (driven_cycles(), Result.PASS, "100 cycles ended as asked, 1 of them rollbacks, 20 into emptied boards"),
        (driven_cycles(99), Result.INSUFFICIENT, "99 cycles ended as asked"),
        ([one for one in driven_cycles(101) if one.kind != "rollback"], Result.INSUFFICIENT, "100 cycles ended as asked, 0 of them"),
        (driven_cycles(kind="swap", ok=False, why="rollout 7: ROLLED_BACK: golden"), Result.FAIL, "golden"),
        (driven_cycles(kind="unload_load", empty=9 << 20), Result.FAIL, "device memory while empty"),
        (driven_cycles(kind="swap", to_digest="f" * 64), Result.FAIL, "b0 is READY with dddddddddddd"),
        (driven_cycles(kind="swap", ok=False, interrupted=True, why="stopped"), Result.INSUFFICIENT, "99 cycles"),
        ([a_cycle(0, "rollback"), *(a_cycle(number) for number in range(1, 101))], Result.INSUFFICIENT, "0 into emptied"),
    ],
)  # fmt: skip
def test_m4_is_judged_by_the_cycles_that_the_stage_drove(cycles: list[SwapCycle], result: Result, words: str) -> None:
    verdict = multi_model(rollouts(("load", "DONE")), cycles=cycles)
    (check,) = [check for check in verdict.checks if check.check == "model_swaps"]
    assert check.result is result and words in check.why, check.why
    assert result is Result.PASS or verdict.milestone is None


def test_driven_cycles_without_the_fleets_history_show_no_isolation() -> None:
    assert reasons(multi_model(None, cycles=driven_cycles()))["model_swaps"] is Result.INSUFFICIENT


def test_cycles_try_the_way_back_first_and_empty_the_boards_now_and_then() -> None:
    part = SwapsPart(allow=True, other="p", unload_every=5, rollback_every=10)
    kinds = [kind_of(number, part, to_home=number % 2 == 1) for number in range(100)]
    assert (kinds[0], kinds[1], kinds[4]) == ("swap", "rollback", "unload_load")
    assert (kinds.count("unload_load"), kinds.count("rollback")) == (20, 5)
    assert due_s(0, 100, 28_800) == 144 and due_s(99, 100, 28_800) == 28_656


def test_m4_is_signed_only_over_eight_hours() -> None:
    whole, short = (multi_model(rollouts(*HUNDRED, ("rollback", "DONE")), hours) for hours in (8, 1))
    assert reasons(whole)["stage_length"] is Result.PASS
    assert (short.exit_code, short.milestone) == (3, None)


def test_rules_of_ones_own_sign_no_milestone() -> None:
    days = a_watched_day(0)
    own = release(days, own_rules=True)
    assert own.exit_code == 0 and own.milestone is None
    assert any("other rules than the shipped" in label for label in own.labels)
