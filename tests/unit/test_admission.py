"""Who may come in (scheduling §5)."""

from __future__ import annotations

import pytest

from calculet_core.capacity import CapacityBudget
from calculet_core.clock import S
from calculet_core.errors import TenantQuota
from calculet_core.requests import SamplingParams, StopRules
from calculet_worker.scheduling.admission import (
    AdmissionController,
    Admit,
    Decision,
    DrainRate,
    Queue,
    QueueState,
    RejectCapacity,
    RejectInvalid,
    named_ids,
)

CONTEXT = 40_960
NOW = 11 * S


def nothing_over() -> None:
    """The tenant has quota enough."""


EMPTY = QueueState(True, 0, 0, nothing_over)
FULL_LANES = QueueState(False, 0, 0, nothing_over)


def a_controller(waiting: int = 128, tokens: int = 262_144, kv: int = CONTEXT, drain: DrainRate | None = None) -> AdmissionController:
    return AdmissionController(CapacityBudget(1, kv, waiting, tokens, 1), CONTEXT, 64, drain or DrainRate())


def decide(
    prompt: int, asked: int | None, queue: QueueState = EMPTY, controller: AdmissionController | None = None, left_s: int = 120
) -> Decision:
    return (controller or a_controller()).decide(prompt, asked, (0, 63), lambda size: queue, NOW + left_s * S, NOW)


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"),
    [
        (1, 1, 1),
        (40_959, 1, 1),
        (40_959, None, 1),
        (1, None, 40_959),
        (20_480, 20_480, 20_480),
    ],
)
def test_prompt_and_output_up_to_the_context_are_admitted(prompt: int, asked: int | None, expected: int) -> None:
    assert decide(prompt, asked) == Admit(expected)


@pytest.mark.parametrize(("prompt", "asked"), [(40_959, 2), (40_960, None), (40_960, 1), (100_000, 5), (1, 40_960), (1, 2**63)])
def test_what_can_never_fit_is_refused_with_the_three_numbers(prompt: int, asked: int | None) -> None:
    decision = decide(prompt, asked)
    assert isinstance(decision, RejectInvalid)
    error = decision.error
    assert (error.code, error.http_status, error.retryable) == ("context_length_exceeded", 400, False)
    assert str(prompt) in error.message and str(CONTEXT) in error.message and str(asked or 1) in error.message
    assert "-" not in error.message, "no negative number is ever shown"


@pytest.mark.parametrize(("prompt", "asked"), [(0, 1), (5, 0), (5, -3)])
def test_empty_prompts_and_outputs_are_invalid(prompt: int, asked: int) -> None:
    decision = decide(prompt, asked)
    assert isinstance(decision, RejectInvalid) and decision.error.code == "invalid_value"


@pytest.mark.parametrize("id_range", [(-1, 5), (0, 64)])
def test_token_ids_outside_the_vocabulary_never_reach_the_device(id_range: tuple[int, int]) -> None:
    decision = a_controller().decide(3, 3, id_range, lambda size: EMPTY, 9 * S, 0)
    assert isinstance(decision, RejectInvalid) and "vocabulary of 64" in decision.error.message


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_other_ids_that_a_request_names_are_in_the_vocabulary_too(name: str) -> None:
    def named(token_id: int) -> object:
        sampling = SamplingParams(logit_bias={3: 1.0, token_id: 1.0} if name == "logit_bias" else {})
        ids = named_ids(sampling, StopRules(token_ids=(3, token_id) if name == "stop_token_ids" else ()))
        return a_controller().decide(3, 3, (0, 63), lambda size: EMPTY, 9 * S, 0, named=ids)

    assert named(63) == Admit(3)
    decision = named(64)
    assert isinstance(decision, RejectInvalid) and decision.error.param == name
    assert "64" in decision.error.message and "0 to 63" in decision.error.message


@pytest.mark.parametrize(("prompt", "asked", "blamed"), [(40_959, 2, "max_tokens"), (40_960, 2, "messages"), (90_000, None, "messages")])
def test_a_prompt_that_does_not_even_fit_alone_is_named_instead_of_the_output(prompt: int, asked: int | None, blamed: str) -> None:
    decision = a_controller().decide(prompt, asked, (0, 63), lambda size: EMPTY, 9 * S, 0, "messages")
    assert isinstance(decision, RejectInvalid) and decision.error.param == blamed
    assert f"maximum context length is {CONTEXT} tokens" in decision.error.message, "words that agents look for"


def test_a_configured_kv_budget_below_the_context_is_the_limit() -> None:
    decision = decide(1_000, 1, controller=a_controller(kv=1_000))
    assert isinstance(decision, RejectInvalid) and "at most 1000 fit" in decision.error.message
    assert decide(600, None, controller=a_controller(kv=1_000)) == Admit(400)


def test_with_all_lanes_taken_a_request_waits() -> None:
    assert decide(10, 10, FULL_LANES) == Queue(10)


def test_a_full_waiting_count_is_named() -> None:
    decision = decide(10, 10, QueueState(False, 128, 1_280, nothing_over))
    assert isinstance(decision, RejectCapacity)
    assert (decision.error.code, decision.error.http_status) == ("over_capacity", 429)
    assert "admission.max_waiting_requests" in decision.error.message and "128" in decision.error.message


def test_full_waiting_tokens_are_named() -> None:
    decision = decide(10, 10, QueueState(False, 3, 95, nothing_over), a_controller(tokens=100))
    assert isinstance(decision, RejectCapacity) and "admission.max_waiting_prompt_tokens" in decision.error.message
    assert decide(5, 10, QueueState(False, 3, 95, nothing_over), a_controller(tokens=100)) == Queue(10)


def test_a_tenants_own_limit_is_its_own_error() -> None:
    quota = TenantQuota("tenant a: ...")
    assert decide(10, 10, QueueState(False, 3, 95, lambda: quota)) == RejectCapacity(quota)


def test_a_request_that_starts_at_once_is_not_measured_by_waiting_budgets() -> None:
    assert decide(10, 10, QueueState(True, 0, 0, nothing_over), a_controller(waiting=1, tokens=1)) == Admit(10)


def test_before_tokenizing_free_lanes_count_as_room() -> None:
    controller = a_controller(waiting=2)
    assert controller.arrival(tokenizing=5, waiting=0, free_lanes=4, now_ns=0) is None
    assert controller.arrival(tokenizing=6, waiting=0, free_lanes=4, now_ns=0) is not None
    assert controller.arrival(tokenizing=0, waiting=2, free_lanes=0, now_ns=0) is not None


def test_retry_after_is_the_time_the_queue_needs_at_its_measured_rate() -> None:
    drain = DrainRate()
    for second in range(11):
        drain.departed(second * S)
    decision = decide(1, 1, QueueState(False, 11, 0, nothing_over), a_controller(waiting=11, drain=drain))
    assert isinstance(decision, RejectCapacity)
    assert drain.retry_after_s(11, 11 * S) == 11.0
    assert drain.retry_after_s(100_000, 11 * S) == 60.0


def test_retry_after_grows_when_nothing_leaves_any_more() -> None:
    drain = DrainRate()
    drain.departed(0)
    drain.departed(1 * S)
    assert drain.retry_after_s(4, 2 * S) < drain.retry_after_s(4, 20 * S)


def test_a_request_without_hope_before_its_deadline_is_not_queued() -> None:
    drain = DrainRate()
    for second in range(11):
        drain.departed(second * S)
    controller = a_controller(drain=drain)
    waiting = QueueState(False, 10, 0, nothing_over)
    assert decide(1, 1, waiting, controller, left_s=5) == Queue(1), "at twice the rate it would have its lane just in time"
    decision = decide(1, 1, waiting, controller, left_s=4)
    assert isinstance(decision, RejectCapacity) and decision.error.code == "over_capacity"
    assert "10.0 s away" in decision.error.message and "deadline 4.0 s" in decision.error.message


def test_an_idle_hour_is_no_slow_queue() -> None:
    drain = DrainRate()
    for minute in range(60):  # one request a minute, each served at once
        drain.departed(minute * 60 * S, waited=False)
    assert drain.wait_s(20, 3_600 * S) is None and drain.retry_after_s(20, 3_600 * S) == 1.0
    for second in range(3_600, 3_608):
        drain.departed(second * S)
    assert drain.wait_s(8, 3_608 * S) == 8.0, "the queue of now is measured by itself"


def test_hope_is_not_denied_before_the_rate_was_measured() -> None:
    drain = DrainRate()
    for _ in range(7):
        drain.departed(0)
    assert decide(1, 1, QueueState(False, 100, 0, nothing_over), a_controller(drain=drain), left_s=1) == Queue(1)


def test_retry_after_before_any_measurement_is_a_second() -> None:
    assert DrainRate().retry_after_s(50, 5 * S) == 1.0
