"""Tables that must be total, budgets over a window, identities and clocks."""

from __future__ import annotations

import random

import pytest

from calculet_core.budgets import Backoff, WindowBudget
from calculet_core.capacity import GIB, DramPlan
from calculet_core.clock import MS, FakeClock, S
from calculet_core.errors import ERROR_TYPES, CalculetError, InternalError, OverCapacity, error_from_code
from calculet_core.faults import FAULT_POLICY, FaultKind, ResetRule, fault_of_code, fault_of_status
from calculet_core.ids import make_request_id, parse_request_id, request_id_text
from calculet_core.jobs import OutputStatus, ReturnCode
from calculet_core.kv import CONTEXT_OPS, ContextOp
from calculet_core.metrics import CATALOGUE


def test_the_fault_policy_is_total() -> None:
    assert set(FAULT_POLICY) == set(FaultKind)
    assert {rule.error_code for rule in FAULT_POLICY.values()} <= set(ERROR_TYPES)


@pytest.mark.parametrize(
    ("rc", "kind"), [(13, "wait_timeout"), (17, "device_busy"), (18, "device_unavailable"), (21, "invalid_shape"), (22, "invalid_dtype")]
)
def test_the_runtimes_codes_have_their_faults(rc: int, kind: str) -> None:
    assert fault_of_code(rc) == kind


def test_an_unlisted_code_fails_closed() -> None:
    assert fault_of_code(99) is FaultKind.OTHER
    assert FAULT_POLICY[FaultKind.OTHER].reset is ResetRule.OPERATOR_ONLY
    with pytest.raises(ValueError, match="no fault"):
        fault_of_code(ReturnCode.OK)


def test_only_a_done_output_is_no_fault() -> None:
    assert [status for status in OutputStatus if fault_of_status(status) is None] == [OutputStatus.DONE]


def test_busy_never_costs_a_reset() -> None:
    assert FAULT_POLICY[FaultKind.DEVICE_BUSY].reset is ResetRule.NEVER
    assert not FAULT_POLICY[FaultKind.DEVICE_BUSY].kv_lost


def test_every_context_operation_has_a_rule_and_only_append_needs_no_proof() -> None:
    assert set(CONTEXT_OPS) == set(ContextOp)
    assert [op for op, rule in CONTEXT_OPS.items() if rule.allowed and not rule.needs_proof] == [ContextOp.APPEND]


def test_429_and_503_always_carry_retry_after() -> None:
    for cls in ERROR_TYPES.values():
        if cls.http_status in (429, 503) and cls.code != "slow_reader":
            assert cls("x").retry_after_s, cls.code


def test_error_codes_are_unique_and_every_class_is_listed() -> None:
    def leaves(cls: type[CalculetError]) -> set[type[CalculetError]]:
        return {cls} | {leaf for child in cls.__subclasses__() for leaf in leaves(child)}

    assert leaves(CalculetError) - {CalculetError} == set(ERROR_TYPES.values())


def test_an_error_survives_the_wire_and_an_unknown_one_becomes_internal() -> None:
    error = error_from_code("over_capacity", "full", None, 3.0)
    assert isinstance(error, OverCapacity)
    assert error.retry_after_s == 3.0
    assert isinstance(error_from_code("from_the_future", "x"), InternalError)


def test_the_third_spend_in_a_window_of_two_is_refused() -> None:
    budget, clock = WindowBudget(2, 600 * S), FakeClock()
    assert budget.spend(clock.now_ns())
    clock.advance(100 * S)
    assert budget.spend(clock.now_ns())
    assert not budget.spend(clock.now_ns())
    assert budget.next_ns(clock.now_ns()) == 1 * S + 600 * S
    clock.advance_to(601 * S)
    assert budget.spend(clock.now_ns())


def test_a_budget_rebuilt_from_its_spends_is_no_fresh_budget() -> None:
    budget = WindowBudget(2, 600 * S)
    budget.spend(5 * S)
    budget.spend(6 * S)
    assert WindowBudget(2, 600 * S, budget.spends()).left(10 * S) == 0


def test_a_budget_of_zero_never_allows() -> None:
    assert not WindowBudget(0, S).spend(1)


def test_back_off_doubles_to_its_cap_and_jitters_fully() -> None:
    backoff, rng = Backoff(100 * MS, 1 * S), random.Random(1)
    first = [backoff.delay_ns(1, rng) for _ in range(200)]
    tenth = [backoff.delay_ns(10, rng) for _ in range(200)]
    assert 0 <= min(first) < 20 * MS and 80 * MS < max(first) <= 100 * MS
    assert max(tenth) <= 1 * S and max(tenth) > 800 * MS


def test_a_fake_clock_does_not_go_back() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_request_ids_read_back() -> None:
    number = make_request_id(0xDEADBEEF, 7)
    assert request_id_text(number) == "deadbeef00000007"
    assert parse_request_id("chatcmpl-deadbeef00000007") == number
    assert parse_request_id("cmpl-deadbeef00000007-1") == number
    with pytest.raises(ValueError, match="not a request id"):
        parse_request_id("chatcmpl-7")


def test_a_second_large_model_is_refused_with_the_arithmetic() -> None:
    size = int(28.150 * GIB)
    assert DramPlan(32 * GIB, 0, size).fits
    second = DramPlan(32 * GIB, size, size)
    assert not second.fits
    assert second.arithmetic() == "28.150 + 28.150 = 56.300 GiB > 32.000 GiB of board DRAM"


def test_metric_names_are_unique_and_never_labelled_with_ids() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    for metric in CATALOGUE:
        assert not {"request_id", "job_id", "request", "job"} & set(metric.labels), metric.name
        assert metric.name.startswith(f"calculet_{metric.component}_")
