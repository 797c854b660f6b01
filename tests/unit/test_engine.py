"""The engine as a whole, in virtual time: requests, faults, cancels, deadlines, drains, and the order of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from builders_engine import EOS, VOCABULARY, Driver, Fault, Told, a_manifest, a_package, a_scheduler, next_token, reference, text_of

from calculet_core import history, wire
from calculet_core.clock import MS, S
from calculet_core.config import TenantConfig
from calculet_core.errors import ERROR_TYPES, InvalidValue
from calculet_core.history import check
from calculet_core.ids import WireKey
from calculet_core.jobs import JobKind, OutputStatus, ReturnCode
from calculet_core.limits import LocalLimits
from calculet_core.requests import Prompt, SamplingParams, StopRules
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_worker import actions, events
from calculet_worker.answers import token_hash
from calculet_worker.scheduling.admission import RejectUnavailable


def one_lane(**admission: int) -> Driver:
    return Driver(a_manifest(lanes=1, profiles=(1,)), scheduler=a_scheduler((1,), admission=admission)).ready()


def idle(driver: Driver) -> None:
    """Nothing is left, nothing leaks, and the history keeps every promise."""
    driver.run(2 * S)
    report = driver.engine.report(driver.now)
    assert (report.inflight, report.active, report.kv_tokens_reserved, report.waiting) == (0, 0, 0, 0)
    assert driver.engine.load().cost == 0 and not driver.board.leased
    gauges = driver.engine.gauges(driver.now)
    assert gauges.buffers["leased"] == 0 and gauges.kv_violations == 0
    assert check(driver.records, require_done=False) == []


# ------------------------------------------------------------------------------------------------ answers
def test_one_request_from_arrival_to_its_end() -> None:
    driver = Driver().ready()
    told = driver.submit(1, [1, 2, 3], 5)
    assert told.accepted == wire.Acceptance(1, 1, 3, 5)
    driver.until(lambda: told.ended)
    assert (told.text, told.finish, sum(piece.tokens for piece in told.pieces)) == (text_of([1, 2, 3], 5), "length", 5)
    usage = told.last.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 5)
    assert usage.token_hash == token_hash(reference([1, 2, 3], 5))
    assert (usage.prefill_ns, usage.decode_ns, usage.device_ns) == (3 * MS, 40 * MS, 43 * MS)
    idle(driver)
    assert driver.record_names()[-1] == history.BOARD_IDLE


def test_tokens_are_the_same_alone_and_among_many() -> None:
    driver = Driver(a_manifest(lanes=4, profiles=(1, 4))).ready()
    prompts = {number: [number, number + 1, 7] for number in range(1, 20)}
    told = {number: driver.submit(number, prompt, 6) for number, prompt in prompts.items()}
    driver.until(lambda: all(one.ended for one in told.values()))
    assert {number: one.text for number, one in told.items()} == {number: text_of(prompt, 6) for number, prompt in prompts.items()}
    assert any(len(job.lanes) == 4 for job in driver.board.jobs if job.kind is JobKind.DECODE)
    idle(driver)


@pytest.mark.parametrize("mode", ["mask_tensor", "csr", "compact"])
def test_a_batch_that_is_not_full_gives_the_right_tokens_under_every_policy(mode: str) -> None:
    from calculet_core.batches import InactiveMode

    driver = Driver(a_manifest(mode=InactiveMode(mode)), scheduler=a_scheduler((4,))).ready()
    told = {number: driver.submit(number, [number, 2], 4) for number in (1, 2)}
    driver.until(lambda: all(one.ended for one in told.values()))
    assert all(one.text == text_of([number, 2], 4) for number, one in told.items())


def test_a_prompt_in_proven_cuts_gives_the_same_tokens() -> None:
    scheduler = a_scheduler(executor={"max_prefill_tokens_per_job": 16})
    driver = Driver(a_manifest(cut=8), scheduler=scheduler).ready()
    before = len(driver.board.jobs)
    told = driver.submit(1, list(range(40)), 4)
    driver.until(lambda: told.ended)
    assert told.text == text_of(list(range(40)), 4)
    parts = [job for job in driver.board.jobs[before:] if job.kind is JobKind.PREFILL]
    assert [len(job.token_ids) for job in parts] == [16, 16, 8]
    assert [job.want_logits for job in parts] == [False, False, True]


def test_eos_ends_an_answer_and_is_counted_but_not_shown() -> None:
    driver = Driver().ready()
    bias = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})
    told = driver.submit(1, [1, 2], 9, sampling=bias)
    driver.until(lambda: told.ended)
    assert (told.text, told.finish, told.last.usage and told.last.usage.completion_tokens) == ("", "stop", 1)


def test_a_stop_string_ends_the_answer_before_it_and_no_further_step_is_wasted() -> None:
    driver = Driver().ready()
    whole = text_of([1, 2, 3], 8)
    before = len(driver.board.jobs)
    told = driver.submit(1, [1, 2, 3], 8, stop=StopRules(strings=(whole[3:5],)))
    driver.until(lambda: told.ended)
    assert (told.text, told.finish) == (whole[:3], "stop")
    assert len(driver.board.jobs) - before == 5, "a prefill and four steps: five tokens"


def test_text_that_might_still_become_a_stop_string_comes_at_the_end() -> None:
    driver = Driver().ready()
    whole = text_of([1, 2, 3], 4)
    told = driver.submit(1, [1, 2, 3], 4, stop=StopRules(strings=(whole[-1] + "~never",)))
    driver.until(lambda: told.ended)
    assert (told.text, told.finish) == (whole, "length")


def test_token_ids_and_logprobs_come_with_the_tokens() -> None:
    driver = Driver().ready()
    told = driver.submit(1, [1, 2, 3], 3, want_token_ids=True, sampling=SamplingParams(temperature=0.0, logprobs=1))
    driver.until(lambda: told.ended)
    assert [token for piece in told.pieces for token in piece.token_ids or []] == reference([1, 2, 3], 3)
    assert [one.token_id for piece in told.pieces for one in piece.logprobs or []] == reference([1, 2, 3], 3)


def logprobs_of(told: Told) -> list[int]:
    return [one.token_id for piece in told.pieces for one in piece.logprobs or []]


def test_logprobs_are_of_the_text_alone_and_never_run_ahead_of_it() -> None:
    whole, tokens = text_of([1, 2, 3], 8), reference([1, 2, 3], 8)
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    driver = Driver().ready()
    stopped = driver.submit(1, [1, 2, 3], 8, sampling=sampling, stop=StopRules(strings=(whole[3:5],)))
    held = driver.submit(2, [1, 2, 3], 8, sampling=sampling, stop=StopRules(strings=(whole[3:5] + "~never",)))
    ended = driver.submit(3, [1, 2, 3], 8, sampling=SamplingParams(temperature=0.0, logprobs=0, logit_bias={EOS: 100.0}))
    driver.until(lambda: stopped.ended and held.ended and ended.ended)
    assert (stopped.text, logprobs_of(stopped)) == (whole[:3], tokens[:3]), "what the stop string took back has none"
    assert (held.text, logprobs_of(held)) == (whole, tokens)
    for told in (stopped, held):
        text = entries = 0
        for piece in told.pieces:
            text, entries = text + len(piece.text), entries + len(piece.logprobs or [])
            assert text == entries, "one character a token here"
    assert (ended.text, logprobs_of(ended)) == ("", []), "EOS is no text"


def test_an_answer_may_begin_with_the_prompt_s_text() -> None:
    class Echoing(Driver):
        def tokenized(self, action: actions.Tokenize) -> events.Tokenized:
            found = super().tokenized(action)
            text = b"".join(VOCABULARY[token] for token in action.prompt.token_ids or ()).decode()
            return msgspec.structs.replace(found, echo=text if action.echo else "")

    driver = Echoing().ready()
    told, plain = driver.submit(1, [1, 2, 3], 4, echo=True), driver.submit(2, [1, 2, 3], 4)
    driver.until(lambda: told.ended and plain.ended)
    assert told.text == "123" + text_of([1, 2, 3], 4) and plain.text == text_of([1, 2, 3], 4)
    assert told.last.usage and told.last.usage.completion_tokens == 4


def test_a_seed_gives_the_same_answer_on_every_worker_and_without_one_workers_differ() -> None:
    def answer(engine_seed: int, seed: int | None) -> list[int]:
        driver = Driver(seed=engine_seed).ready()
        sampling = SamplingParams(temperature=50.0, seed=seed)
        told = driver.submit(1, [1, 2, 3], 12, want_token_ids=True, sampling=sampling, stop=StopRules(ignore_eos=True))
        driver.until(lambda: told.ended)
        return [token for piece in told.pieces for token in piece.token_ids or []]

    assert answer(1, 7) == answer(2, 7)
    assert answer(1, None) != answer(2, None)


def test_absent_max_tokens_is_what_the_context_leaves() -> None:
    driver = Driver().ready()
    told = driver.submit(1, [1, 2, 3], None)
    assert told.accepted is not None and told.accepted.max_new_tokens == 61
    driver.until(lambda: told.ended)
    assert told.last.usage is not None and told.last.usage.completion_tokens == 61
    idle(driver)


def test_a_context_that_is_filled_to_the_last_position() -> None:
    driver = Driver().ready()
    told = driver.submit(1, [1] * 63, 1)
    refused = driver.submit(2, [1] * 63, 2)
    driver.until(lambda: told.ended)
    assert told.finish == "length"
    assert refused.error == "context_length_exceeded" and refused.refused is not None and not refused.refused.retryable


# ------------------------------------------------------------------------------------------------ order of actions
def kinds(done: list[actions.Action]) -> list[type]:
    return [type(action) for action in done]


def test_the_next_job_goes_out_before_anything_is_written_to_clients() -> None:
    driver = Driver().ready()
    driver.submit(1, max_new_tokens=10)
    driver.run(12 * MS)
    driver.actions.clear()
    driver.run(10 * MS)
    order = kinds(driver.actions)
    assert order.index(actions.GiveBack) < order.index(actions.SubmitJob) < order.index(actions.Record) < order.index(actions.ToRouter)


def test_text_is_made_only_when_the_device_has_its_next_job() -> None:
    driver = Driver().ready()
    driver.submit(1, max_new_tokens=10)
    driver.run(12 * MS)
    seen: list[list[type]] = []
    handle = driver.engine.handle

    def spy(event: events.Event, now_ns: int) -> list[actions.Action]:
        done = handle(event, now_ns)
        seen.append([type(event), *kinds(done)])
        return done

    driver.engine.handle = spy  # type: ignore[method-assign]
    driver.run(10 * MS)
    completed = next(one for one in seen if one[0] is events.JobCompleted)
    submitted = next(one for one in seen if one[0] is events.JobSubmitted)
    assert actions.SubmitJob in completed and actions.ToRouter not in completed
    assert actions.ToRouter in submitted


# ------------------------------------------------------------------------------------------------ admission
def test_a_full_queue_refuses_with_429_and_a_retry_after() -> None:
    driver = one_lane(max_waiting_requests=2)
    told = [driver.submit(number) for number in range(1, 6)]
    assert [one.error for one in told] == [None, None, None, "over_capacity", "over_capacity"]
    refusal = told[-1].refused
    assert refusal is not None and refusal.retryable and (refusal.error.retry_after_s or 0) >= 1
    driver.until(lambda: all(one.ended for one in told))
    idle(driver)


def test_full_waiting_tokens_refuse_after_tokenizing() -> None:
    driver = one_lane(max_waiting_prompt_tokens=20)
    driver.submit(1), driver.submit(2, [1] * 15)
    assert "max_waiting_prompt_tokens" in driver.submit(3, [1] * 6).refused.error.message  # type: ignore[union-attr]


def test_a_request_that_waits_in_vain_gets_429_not_504() -> None:
    driver = one_lane()
    driver.submit(1, max_new_tokens=60)
    told = driver.submit(2, deadline_ns=driver.now + 50 * MS)
    assert told.accepted is not None
    driver.until(lambda: told.ended)
    assert told.error == "over_capacity" and driver.now < 3 * S


def test_a_request_that_arrives_after_its_deadline_is_not_tokenized() -> None:
    driver = Driver().ready()
    told = driver.submit(1, deadline_ns=driver.now)
    assert told.error == "over_capacity" and not any(isinstance(action, actions.Tokenize) for action in driver.actions)


def test_an_answer_that_is_too_late_gets_504_and_frees_its_lane() -> None:
    driver = Driver().ready()
    told = driver.submit(1, max_new_tokens=60, deadline_ns=driver.now + 55 * MS)
    driver.until(lambda: told.ended)
    assert told.error == "deadline_exceeded" and 3 <= sum(piece.tokens for piece in told.pieces) <= 6
    idle(driver)


def test_a_tenants_limits_hold_on_this_board() -> None:
    tenants = (TenantConfig("default"), TenantConfig("small", max_active=1, max_waiting_tokens=6))
    driver = Driver(tenants=tenants).ready()
    told = [driver.submit(number, tenant="small") for number in (1, 2, 3, 4)]
    assert [one.error for one in told] == [None, None, None, "tenant_quota"]
    other = driver.submit(5, max_new_tokens=4)
    driver.until(lambda: other.ended)
    assert sum(one.ended for one in told) <= 2
    driver.until(lambda: all(one.ended for one in told))
    idle(driver)


def test_what_a_tenant_lets_wait_is_limited_on_all_boards_together_and_given_back_whatever_becomes_of_it() -> None:
    ledger, tenants = LocalLimits(), (TenantConfig("default"), TenantConfig("small", max_waiting_tokens=6))
    here, there = (Driver(tenants=tenants, limits_of_waiting=ledger).ready() for _ in range(2))
    lanes = here.manifest.lanes
    running = [driver.submit(number, max_new_tokens=40, tenant="small") for driver in (here, there) for number in range(1, lanes + 1)]
    assert ledger.total("small") == 0 and not any(one.refused for one in running), "who starts at once does not wait"
    waits = here.submit(50, tenant="small")
    leaves = there.submit(51, tenant="small")
    assert [driver.submit(52, tenant="small").error for driver in (here, there)] == ["tenant_quota"] * 2 and ledger.total("small") == 6
    there.cancel(51)
    assert ledger.total("small") == 3 and not leaves.pieces
    there.submit(53, tenant="small")
    there.command(wire.DrainBoard)
    assert ledger.total("small") == 3
    here.until(lambda: waits.ended)
    assert waits.finish == "length" and ledger.total("small") == 0


@pytest.mark.parametrize("change", [{"epoch": 2}, {"generation": 9}, {"digest": "e" * 64}, {"alias": "other"}])
def test_a_router_with_an_old_view_is_told_to_look_again(change: dict[str, object]) -> None:
    driver = Driver().ready()
    told = driver.submit(1, **change)
    assert told.error == "stale_view" and told.refused is not None and told.refused.retryable


def test_without_a_model_there_is_no_ready_worker() -> None:
    assert Driver().submit(1, generation=0).error == "no_ready_worker"


def test_the_same_key_twice_is_served_once() -> None:
    driver = Driver().ready()
    told = driver.submit(1)
    driver.submit(1)
    driver.until(lambda: told.ended)
    assert told.refused is None and told.text == text_of([1, 2, 3], 4)
    idle(driver)


def test_the_same_key_twice_while_it_is_tokenized_is_tokenized_once() -> None:
    driver = Driver().ready()
    driver.hold_tokenizing = True
    driver.submit(1), driver.submit(1)
    assert len(driver.tokenizing) == 1


def test_prompts_with_the_tokenizer_are_bounded_in_bytes() -> None:
    driver = Driver().ready()
    driver.hold_tokenizing = True
    big = Prompt(text="x" * (40 << 20))
    assert driver.submit(1, **{"prompt": None, "max_new_tokens": 4} | {"prompt": [1]}).error is None
    first = driver.submit(2, sampling=SamplingParams(), stop=StopRules(), accepted_ns=0)
    assert first.error is None
    from builders_engine import Told

    for number, expected in ((3, None), (4, "over_capacity")):
        told = driver.told.setdefault((number, 1), Told())
        life = driver.engine.life
        message = wire.Submit(
            number, 1, 1, life.generation, "d" * 64, "toy", "default", 1.0, big, 4, SamplingParams(), StopRules(), driver.now + S, False, 0
        )  # fmt: skip
        driver.feed(events.RequestArrived(7, message))
        assert told.error == expected


def test_a_prompt_that_cannot_be_tokenized_fails_alone() -> None:
    driver = Driver().ready()
    driver.hold_tokenizing = True
    bad, good = driver.submit(1), driver.submit(2)
    driver.feed(events.TokenizingFailed(WireKey(1, 1, 1), InvalidValue("messages: no")))
    driver.feed(driver.tokenized(driver.tokenizing[1]))
    driver.until(lambda: good.ended)
    assert bad.refused is not None and bad.error == "invalid_value"
    idle(driver)


def test_a_short_request_waits_for_one_long_prefill_at_most() -> None:
    """Under a stream of prompts that cannot be cut, on the one lane of the baseline."""
    tenants = (TenantConfig("long"), TenantConfig("short"))
    driver = Driver(a_manifest(lanes=1, profiles=(1,), context=4_200), scheduler=a_scheduler((1,)), tenants=tenants).ready()
    longs = [driver.submit(number, [number] * 4_100, 1, tenant="long") for number in range(1, 9)]
    waits = []
    for number in range(100, 112):
        told = driver.submit(number, [1, 2, 3], 1, tenant="short")
        start = driver.now
        driver.until(lambda told=told: told.ended)
        waits.append(driver.now - start)
        driver.run(337 * MS)
    one_long, tick = 4_100 * driver.board.token_ns, driver.board.step_ns
    assert max(waits) <= one_long + tick
    driver.until(lambda: all(one.ended for one in longs))


def test_requests_wait_in_weighted_fair_order() -> None:
    tenants = (TenantConfig("default"), TenantConfig("a", weight=3.0), TenantConfig("b"))
    driver = Driver(a_manifest(lanes=1, profiles=(1,)), tenants=tenants).ready()
    driver.submit(1)
    told = {number: driver.submit(number, tenant="a" if number % 2 else "b") for number in range(2, 34)}
    driver.until(lambda: sum(one.ended for one in told.values()) >= 12)
    assert sum(one.ended for number, one in told.items() if number % 2) == 9


# ------------------------------------------------------------------------------------------------ cancel
def test_cancel_while_tokenizing() -> None:
    driver = Driver().ready()
    driver.hold_tokenizing = True
    told = driver.submit(1)
    driver.cancel(1)
    driver.feed(driver.tokenized(driver.tokenizing[0]))
    assert not told.ended and told.accepted is None and driver.engine.report(driver.now).cancelled == 1
    idle(driver)


def test_cancel_while_waiting_frees_its_place_at_once() -> None:
    driver = one_lane(max_waiting_requests=1)
    driver.submit(1), driver.submit(2)
    driver.cancel(2)
    assert driver.submit(3).error is None
    idle(driver)


def test_cancel_while_ready_for_prefill() -> None:
    driver = Driver().ready()
    driver.submit(1, [1] * 30), driver.submit(2)
    driver.cancel(2)
    assert driver.lanes(KvSequenceState.FREE) == 3
    idle(driver)


@pytest.mark.parametrize(("after_ns", "kind"), [(2 * MS, JobKind.PREFILL), (25 * MS, JobKind.DECODE)])
def test_cancel_while_a_job_runs_drains_it_and_frees_the_lane_within_two_steps(after_ns: int, kind: JobKind) -> None:
    driver = Driver().ready()
    told = driver.submit(1, [1] * 10, 50)
    driver.run(after_ns)
    assert driver.board.jobs[-1].kind is kind
    pieces, jobs = len(told.pieces), len(driver.board.jobs)
    driver.cancel(1)
    assert driver.lanes(KvSequenceState.UPDATING) == 1, "the job drains"
    driver.cancel(1)
    driver.until(lambda: driver.lanes(KvSequenceState.FREE) == 4)
    assert (len(told.pieces), len(driver.board.jobs)) == (pieces, jobs), "no word to the client, no further job"
    freed = driver.events_of(history.BOARD_LANE_FREE)[-1]
    assert 0 < freed.data["since_cancel_ns"] <= 2 * driver.board.step_ns
    assert driver.engine.report(driver.now).cancelled == 1
    idle(driver)


def test_cancel_of_one_row_leaves_the_others_of_its_batch_alone() -> None:
    driver = Driver().ready()
    told = {number: driver.submit(number, [number, 2], 20) for number in (1, 2, 3)}
    driver.run(60 * MS)
    driver.cancel(2)
    driver.until(lambda: told[1].ended and told[3].ended)
    assert told[1].text == text_of([1, 2], 20) and told[3].text == text_of([3, 2], 20)
    idle(driver)


def test_cancel_after_the_end_and_of_unknown_keys_is_ignored() -> None:
    driver = Driver().ready()
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    driver.cancel(1), driver.cancel(99)
    assert driver.engine.report(driver.now).cancelled == 0
    idle(driver)


def test_cancel_between_submission_and_the_runtimes_answer_drains_too() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(refuse=ReturnCode.DEVICE_BUSY)])
    driver.submit(1)
    driver.cancel(1)
    idle(driver)
    assert driver.engine.report(driver.now).cancelled == 1


def test_a_lost_router_takes_its_requests_along_and_no_others() -> None:
    driver = Driver().ready()
    mine, other = driver.submit(1, max_new_tokens=30), driver.submit(2, max_new_tokens=30, router=8)
    driver.run(30 * MS)
    driver.feed(events.RouterLost(7, "lease"))
    driver.until(lambda: other.ended)
    assert other.finish == "length" and not mine.ended
    idle(driver)


# ------------------------------------------------------------------------------------------------ drain, resume, stop
def test_a_drained_board_finishes_what_runs_and_sends_away_what_waits() -> None:
    driver = one_lane()
    running, waiting = driver.submit(1), driver.submit(2)
    driver.command(wire.DrainBoard)
    report = driver.engine.report(driver.now)
    assert (report.state, report.draining) == ("READY", True)
    assert waiting.error == "model_draining" and driver.submit(3).error == "model_draining"
    driver.until(lambda: running.ended)
    assert running.finish == "length"
    driver.command(wire.ResumeBoard)
    again = driver.submit(4)
    driver.until(lambda: again.ended)
    assert again.finish == "length" and not driver.engine.report(driver.now).draining
    idle(driver)


def test_a_drained_board_stays_drained_when_its_model_is_loaded_again() -> None:
    driver = Driver()
    driver.command(wire.DrainBoard)
    driver.ready()
    assert driver.submit(1).error == "model_draining"


def test_stop_ends_with_zero_after_the_last_request() -> None:
    driver = one_lane()
    running, waiting = driver.submit(1), driver.submit(2)
    driver.command(wire.StopWorker, deadline_ms=10_000)
    assert waiting.error == "shutting_down" and driver.submit(3).error == "shutting_down"
    driver.until(lambda: driver.exit)
    assert running.finish == "length" and driver.exit is not None and driver.exit.code == 0


def test_stop_at_its_deadline_fails_what_runs_and_drains_its_job() -> None:
    driver = Driver().ready()
    running = driver.submit(1, max_new_tokens=60)
    driver.command(wire.StopWorker, deadline_ms=35)
    driver.until(lambda: driver.exit)
    assert running.error == "shutting_down" and not driver.board.leased and driver.now < 2 * S
    assert driver.exit is not None and driver.exit.code == 0


def test_stop_of_an_empty_worker_is_immediate() -> None:
    driver = Driver()
    driver.command(wire.StopWorker, deadline_ms=10_000)
    assert driver.exit is not None and driver.exit.code == 0


def test_stop_during_golden_does_not_wait_for_its_end() -> None:
    driver = Driver()
    driver.load()
    driver.until(lambda: driver.state == "WARMING")
    driver.command(wire.StopWorker, deadline_ms=10_000)
    driver.until(lambda: driver.exit)
    assert driver.exit is not None and driver.exit.code == 0 and driver.now < 2 * S
    assert not driver.events_of(history.BOARD_GOLDEN)


# ------------------------------------------------------------------------------------------------ busy
def test_a_busy_device_is_asked_again_with_growing_pauses() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(refuse=ReturnCode.DEVICE_BUSY)] * 3)
    start = driver.now
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    assert told.text == text_of([1, 2, 3], 4)
    assert driver.board.busy_until_ns - start == (5 + 10 + 20) * MS + 3 * MS + 3 * 10 * MS
    assert driver.state == "READY" and not driver.events_of(history.BOARD_FAULT)
    idle(driver)


def test_a_device_that_stays_busy_fails_the_jobs_requests_and_is_never_reset() -> None:
    driver = Driver(scheduler=a_scheduler(executor={"busy_max_tries": 3})).ready()
    driver.faults = iter([Fault(refuse=ReturnCode.DEVICE_BUSY)] * 4)
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    assert told.error == "device_busy" and driver.state == "READY" and not driver.engine.report(driver.now).wants_reset
    after = driver.submit(2)
    driver.until(lambda: after.ended)
    assert after.finish == "length"
    idle(driver)


def test_a_second_job_that_the_device_does_not_take_ends_ping_pong() -> None:
    scheduler = a_scheduler((1,), executor={"max_inflight": 2})
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=scheduler).ready()
    assert driver.engine.report(driver.now).max_inflight == 2
    driver.faults = iter([None, *[Fault(refuse=ReturnCode.DEVICE_BUSY)] * 3])
    prompts = [[7] * 40, [8] * 40]  # longer on the device than three pauses
    told = [driver.submit(number, prompt) for number, prompt in enumerate(prompts, 1)]
    driver.until(lambda: all(one.ended for one in told))
    report = driver.engine.report(driver.now)
    assert report.max_inflight == 1 and (report.pingpong_off or "").startswith("busy")
    assert [one.text for one in told] == [text_of(prompt, 4) for prompt in prompts]
    idle(driver)


def test_ping_and_pong_carry_different_sequences_with_arrays_of_their_own() -> None:
    scheduler = a_scheduler((1,), executor={"max_inflight": 2})
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=scheduler).ready()
    told = [driver.submit(1, max_new_tokens=20), driver.submit(2, max_new_tokens=20)]
    driver.run(60 * MS)
    assert driver.engine.report(driver.now).inflight == 2
    first, second = driver.board.jobs[-2:]
    assert first.token_ids.base is not second.token_ids.base and first.lanes.tolist() != second.lanes.tolist()
    driver.until(lambda: all(one.ended for one in told))
    assert [one.text for one in told] == [text_of([1, 2, 3], 20), text_of([2, 2, 3], 20)]
    idle(driver)


def test_a_lane_that_the_runtime_frees_late_is_not_given_away_before() -> None:
    driver = one_lane()
    driver.release_rcs = [ReturnCode.DEVICE_BUSY, ReturnCode.DEVICE_BUSY]
    first, second = driver.submit(1), driver.submit(2)
    driver.until(lambda: first.ended)
    assert driver.lanes(KvSequenceState.RELEASING) == 1 and not second.pieces
    driver.until(lambda: second.ended)
    assert second.finish == "length"
    idle(driver)


def test_a_lane_that_cannot_be_freed_fails_closed() -> None:
    driver = one_lane()
    driver.release_rcs = [ReturnCode.OTHER]
    told = driver.submit(1)
    driver.until(lambda: driver.state == "FAILED")
    assert told.finish == "length" and driver.engine.report(driver.now).condemned


# ------------------------------------------------------------------------------------------------ faults
def test_a_timeout_loses_the_lanes_fails_everyone_and_recovers_as_a_new_generation() -> None:
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,))).ready()
    driver.run(1 * MS)
    told = [driver.submit(number, max_new_tokens=30) for number in (1, 2, 3)]
    driver.run(30 * MS)
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT)])
    driver.until(lambda: driver.state == "RECOVERING")
    report = driver.engine.report(driver.now)
    assert [one.error for one in told] == ["model_recovering"] * 3
    assert (report.fault, report.wants_reset, report.lanes["UNKNOWN"], report.kv_tokens_reserved) == ("wait_timeout", True, 2, 0)
    assert driver.engine.gauges(driver.now).buffers["quarantined"] == 1
    assert driver.submit(4).error == "model_recovering"
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    again = driver.submit(5)
    driver.until(lambda: again.ended)
    assert again.text == text_of([5, 2, 3], 4)
    idle(driver)


def test_the_load_after_a_reset_answers_recovering() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(status=OutputStatus.CCU_EXCEPTION)])
    driver.submit(1)
    driver.until(lambda: driver.state == "RECOVERING")
    driver.grant()
    driver.until(lambda: driver.state == "WARMING")
    assert driver.submit(2).error == "model_recovering"


@pytest.mark.parametrize("late_ns", [1 * MS, 2 * S])
def test_a_late_completion_dies_on_the_check_and_its_buffer_is_freed(late_ns: int) -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT, late_ns=late_ns)])
    driver.submit(1)
    driver.until(lambda: driver.state == "RECOVERING")
    driver.call_at(driver.now + 1 * S, driver.grant)
    driver.until(lambda: driver.events_of(history.BOARD_STALE) and driver.state == "READY")
    stale = driver.events_of(history.BOARD_STALE)
    assert len(stale) == 1 and stale[0].generation == 1 and not driver.board.leased
    again = driver.submit(2)
    driver.until(lambda: again.ended)
    assert again.text == text_of([2, 2, 3], 4)
    idle(driver)


def test_a_late_completion_proves_that_its_buffers_are_free() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT, late_ns=1 * MS)])
    driver.submit(1)
    driver.until(lambda: driver.events_of(history.BOARD_STALE))
    assert driver.engine.gauges(driver.now).buffers == {"total": 2, "leased": 0, "quarantined": 0, "free": 2}
    assert driver.state == "RECOVERING"


def test_a_fault_takes_the_other_bank_with_it() -> None:
    scheduler = a_scheduler((1,), executor={"max_inflight": 2})
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=scheduler).ready()
    driver.faults = iter([Fault(status=OutputStatus.CCU_EXCEPTION), None])
    told = [driver.submit(1), driver.submit(2)]
    driver.until(lambda: driver.events_of(history.BOARD_STALE))
    assert [one.error for one in told] == ["model_recovering"] * 2
    assert driver.lanes(KvSequenceState.UNKNOWN) == 2 and not driver.board.leased


def test_the_fault_that_a_reset_has_ended_is_not_the_new_generations() -> None:
    """Who counts faults by generation would count it twice, and set a good board aside."""
    driver = one_lane()
    driver.faults = iter([Fault(status=OutputStatus.CCU_EXCEPTION)])
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    assert driver.engine.report(driver.now).fault == "ccu_exception"
    seen: set[tuple[int, str | None]] = set()
    driver.grant()
    driver.until(lambda: seen.add((driver.engine.life.generation, driver.engine.report(driver.now).fault)) or driver.state == "READY")
    assert (2, None) in seen and not any(fault for generation, fault in seen if generation == 2)


@pytest.mark.parametrize(
    "second",
    [
        Fault(refuse=ReturnCode.INVALID_SHAPE), Fault(refuse=ReturnCode.OTHER), Fault(refuse=ReturnCode.DEVICE_UNAVAILABLE),
        Fault(status=OutputStatus.CCU_EXCEPTION), Fault(bad_row=0), Fault(lose=ReturnCode.TIMEOUT, late_ns=1 * S),
    ],
    ids=["shape", "other", "unavailable", "ccu", "nan", "lost"],
)  # fmt: skip
@pytest.mark.parametrize("refused_first", [False, True])
def test_a_second_fault_finds_the_generation_stopped_already(second: Fault, refused_first: bool) -> None:
    scheduler = a_scheduler((1,), executor={"max_inflight": 2})
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=scheduler).ready()
    stops = Fault(refuse=ReturnCode.INVALID_SHAPE)
    driver.faults = iter([stops, second] if refused_first else [second, stops])
    told = [driver.submit(1), driver.submit(2)]
    driver.until(lambda: all(one.ended for one in told))
    driver.run(100 * S)
    assert driver.exit is None and driver.state in ("FAILED", "RECOVERING")
    report = driver.engine.report(driver.now)
    assert (report.inflight, report.waiting, report.active) == (0, 0, 0)
    assert not driver.board.leased and driver.engine.load().cost == 0


@pytest.mark.parametrize(
    ("fault", "state", "code", "wants_reset", "condemned"),
    [
        (Fault(refuse=ReturnCode.DEVICE_UNAVAILABLE), "RECOVERING", "model_recovering", True, False),
        (Fault(status=OutputStatus.CCU_EXCEPTION), "RECOVERING", "model_recovering", True, False),
        (Fault(lose=ReturnCode.DEVICE_UNAVAILABLE), "RECOVERING", "model_recovering", True, False),
        (Fault(lose=ReturnCode.DEVICE_BUSY), "RECOVERING", "model_recovering", True, False),
        (Fault(refuse=ReturnCode.INVALID_SHAPE), "FAILED", "artifact_rejected", False, False),
        (Fault(refuse=ReturnCode.INVALID_DTYPE), "FAILED", "artifact_rejected", False, False),
        (Fault(refuse=ReturnCode.OTHER), "FAILED", "board_failed", False, True),
        (Fault(status=OutputStatus.ABORTED), "FAILED", "board_failed", False, True),
        (Fault(lose=ReturnCode.OTHER), "FAILED", "board_failed", False, True),
    ],
)
def test_each_fault_has_its_response(fault: Fault, state: str, code: str, wants_reset: bool, condemned: bool) -> None:
    driver = Driver().ready()
    driver.faults = iter([fault])
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    report = driver.engine.report(driver.now)
    assert (report.state, told.error, report.wants_reset, report.condemned is not None) == (state, code, wants_reset, condemned)
    assert report.fault is not None and len(driver.events_of(history.BOARD_FAULT)) == 1
    driver.run(2 * S)
    assert check(driver.records, require_done=False) == []


def test_bystanders_of_a_rejected_artifact_may_be_served_elsewhere() -> None:
    driver = Driver(a_manifest(lanes=1, profiles=(1,)), scheduler=a_scheduler((1,))).ready()
    driver.faults = iter([Fault(), Fault(refuse=ReturnCode.INVALID_SHAPE)])
    own, waiting = driver.submit(1), driver.submit(2)
    driver.until(lambda: own.ended and waiting.ended)
    assert (own.error, waiting.error) == ("artifact_rejected", "board_failed")
    assert driver.lanes(KvSequenceState.FREE) == 1, "its KV is kept, and freed"


def test_bad_numbers_fail_their_batch_alone_and_golden_clears_the_board() -> None:
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,))).ready()
    bad, good = driver.submit(1, max_new_tokens=10), driver.submit(2, max_new_tokens=30)
    driver.run(40 * MS)
    driver.faults = iter([Fault(bad_row=0)])
    driver.until(lambda: bad.ended or good.ended)
    survivor, dead = (good, bad) if bad.ended else (bad, good)
    assert dead.error == "bad_output" and driver.state == "READY"
    driver.until(lambda: survivor.ended)
    assert survivor.finish == "length"
    assert [event.data["passed"] for event in driver.events_of(history.BOARD_GOLDEN)] == [True, True]
    assert not driver.engine.report(driver.now).wants_reset
    idle(driver)


def test_nobody_new_gets_a_lane_before_golden_has_cleared_the_board() -> None:
    driver = one_lane()
    driver.faults = iter([Fault(bad_row=0)])
    bad, waiting = driver.submit(1), driver.submit(2)
    driver.until(lambda: bad.ended)
    driver.until(lambda: waiting.pieces)
    golden = [event.t for event in driver.events_of(history.BOARD_GOLDEN)]
    bound = [event.t for event in driver.events_of(history.BOARD_LANE_BOUND) if event.request == 2]
    assert golden[-1] <= bound[0]
    idle(driver)


def test_bad_numbers_in_the_golden_re_test_too_ask_for_a_reset() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(bad_row=0)] * 2)
    told = driver.submit(1)
    driver.until(lambda: driver.state == "RECOVERING")
    assert told.error == "bad_output" and driver.engine.report(driver.now).wants_reset
    driver.grant()
    driver.until(lambda: driver.state == "READY")
    idle(driver)


def test_a_fault_while_stopping_ends_the_process_as_unavailable() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(lose=ReturnCode.TIMEOUT)])
    driver.submit(1)
    driver.command(wire.StopWorker, deadline_ms=100_000)
    driver.until(lambda: driver.exit)
    assert driver.exit is not None and driver.exit.code == 75


def test_answers_to_an_earlier_generation_are_ignored() -> None:
    driver = Driver().ready()
    driver.feed(events.LaneReleased(9, 0, ReturnCode.OK))
    driver.feed(events.JobRefused(999, ReturnCode.DEVICE_UNAVAILABLE))
    driver.feed(events.JobLost(999, ReturnCode.TIMEOUT))
    driver.feed(events.DeviceConfigured(9, ReturnCode.OTHER))
    driver.feed(events.DeviceReset(ReturnCode.OTHER))
    assert driver.state == "READY" and driver.exit is None


# ------------------------------------------------------------------------------------------------ views
def test_progress_grows_while_jobs_are_in_flight() -> None:
    driver = Driver().ready()
    driver.submit(1, max_new_tokens=60)
    steps = driver.engine.report(driver.now).steps
    driver.run(100 * MS)
    report = driver.engine.report(driver.now)
    assert report.inflight == 1 and report.steps >= steps + 9


def test_load_counts_what_is_owed() -> None:
    driver = one_lane()
    driver.submit(1, [1] * 10, 20), driver.submit(2, [1] * 5, 7)
    load = driver.engine.load()
    assert (load.active, load.lanes, load.waiting, load.waiting_tokens, load.cost) == (1, 1, 1, 5, 42.0)
    driver.run(40 * MS)
    assert driver.engine.load().cost < 42 - 10


def test_gauges_and_hello_before_and_after_a_load() -> None:
    driver = Driver()
    assert driver.engine.gauges(driver.now).state == "UNLOADED" and driver.engine.hello().generation == 0
    driver.ready()
    driver.submit(1, [1] * 10, 20)
    gauges = driver.engine.gauges(driver.now)
    assert gauges.kv_tokens == {"used": 0, "reserved": 30, "total": 256} and gauges.lanes["UPDATING"] == 1
    hello = driver.engine.hello()
    assert (hello.state, hello.generation, hello.alias, hello.board) == ("READY", 1, "toy", "board0")


def test_nothing_is_left_to_wait_for_when_nothing_runs() -> None:
    driver = Driver().ready()
    told = driver.submit(1)
    driver.until(lambda: told.ended)
    assert driver.engine.next_wakeup_ns() is None


def test_the_toy_model_never_says_eos_by_itself() -> None:
    assert all(next_token([number]) != EOS for number in range(200)) and a_package().golden


# ------------------------------------------------------------------------------------------------ rehearsals
@pytest.mark.parametrize(("ahead_us", "on_host", "rehearses"), [(1_000, False, True), (0, False, False), (1_000, True, False), (3_000, False, False)])
def test_a_long_step_is_rehearsed_shortly_before_its_end(ahead_us: int, on_host: bool, rehearses: bool) -> None:
    driver = Driver(scheduler=a_scheduler(executor={"rehearse_ahead_us": ahead_us}), on_host=on_host).ready()
    told = driver.submit(1, max_new_tokens=6)
    driver.until(lambda: told.ended)
    steps = [action for action in driver.actions if isinstance(action, actions.SubmitJob) and action.job.kind is JobKind.DECODE][-3:]
    for step in steps:
        assert (step.rehearse_ns is not None) is rehearses, "a step of 10 ms is not four times as long as 3 ms"
    if rehearses:
        ends = [event.t for event in driver.events_of(history.BOARD_JOB)][-3:]
        assert [end - 1 * MS for end in ends] == [step.rehearse_ns for step in steps]


@pytest.mark.parametrize(("polls", "step_ns", "brief"), [(True, 0, True), (True, 10 * MS, False), (False, 0, False)])
def test_only_a_step_that_is_known_to_be_brief_is_looked_for_and_only_where_the_device_lets_itself_be_asked(
    polls: bool, step_ns: int, brief: bool
) -> None:
    driver = Driver(polls=polls)
    driver.board.step_ns = step_ns
    told = driver.ready().submit(1, max_new_tokens=6)
    driver.until(lambda: told.ended)
    jobs = [action for action in driver.actions if isinstance(action, actions.SubmitJob)]
    assert not jobs[0].brief, "nobody knows yet how long a job takes"
    assert [job.brief for job in jobs if job.job.kind is JobKind.DECODE][-3:] == [brief] * 3


# ------------------------------------------------------------------------------------------------ what a completion must still fit
@pytest.mark.parametrize("wrong", ["lanes swapped", "lane given away", "generation", "lane not written", "row out of range"])
def test_an_output_whose_sequences_and_lanes_are_not_those_it_was_sent_with_is_nobodys(wrong: str) -> None:
    """Scheduling §7.4: it would be somebody else's text."""
    driver = Driver().ready()
    told = [driver.submit(number, max_new_tokens=20) for number in (1, 2)]
    driver.until(lambda: driver.board.jobs[-1].kind is JobKind.DECODE and len(driver.board.jobs[-1].token_ids) == 2)
    serving, (first, second) = driver.engine.serving, driver.engine.attempts.registry.live()
    assert serving is not None and first.hardware_lane is not None
    texts = [one.text for one in told]
    lane = serving.kv.lanes[first.hardware_lane]
    if wrong == "lanes swapped":
        first.hardware_lane, second.hardware_lane = second.hardware_lane, first.hardware_lane
    elif wrong == "lane given away":
        lane.seq_id = 99
    elif wrong == "generation":
        second.generation += 1
    elif wrong == "lane not written":
        lane.state = KvSequenceState.ACTIVE
    else:
        (entry,) = serving.inflight._jobs.values()
        rows, entry.job = entry.job, msgspec.structs.replace(entry.job, lanes=entry.job.lanes + 100)
        assert rows.lanes.max() < 100
    verdict = serving.mismatch(next(iter(serving.inflight._jobs.values())))
    assert verdict is not None and "the job wrote lane" in verdict
    if wrong in ("lanes swapped", "row out of range"):  # what can be put right afterwards, for the rest of the way
        driver.step()
        assert driver.state == "FAILED" and [one.error for one in told] == ["board_failed"] * 2
        assert [one.text for one in told] == texts, "nothing of it was shown"


def test_every_result_of_admission_has_its_status() -> None:
    """Scheduling §5.2: 400, 429, 503."""
    driver = one_lane(max_waiting_requests=1)
    driver.submit(1, max_new_tokens=50), driver.submit(2)
    assert [driver.submit(3).error, driver.submit(4, [1] * 100).error] == ["over_capacity", "over_capacity"], "before it is tokenized"
    found = {}
    for error in ERROR_TYPES.values():
        found[error.code] = error.http_status
    empty = one_lane()
    assert found[empty.submit(1, [1] * 100).error or ""] == 400 and found["over_capacity"] == 429
    for leave in (wire.DrainBoard, None):
        board = one_lane()
        if leave is None:
            board.command(wire.StopWorker, deadline_ms=1_000)
        else:
            board.command(leave)
        refusal = board.engine.control.refusal()
        assert isinstance(refusal, RejectUnavailable) and refusal.error.http_status == 503
        assert board.submit(9).error == refusal.error.code
    recovering = one_lane()
    recovering.faults = iter([Fault(status=OutputStatus.CCU_EXCEPTION)])
    recovering.submit(1)
    recovering.until(lambda: recovering.state == "RECOVERING")
    assert found[recovering.submit(2).error or ""] == 503 and isinstance(recovering.engine.control.refusal(), RejectUnavailable)


def test_what_is_ready_and_finds_no_output_buffer_waits_asleep_and_is_shown() -> None:
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,), executor={"max_inflight": 2})).ready()
    assert driver.engine.serving is not None
    buffers = driver.engine.serving.buffers
    for number in (901, 902):  # as if two jobs' ends were not proven
        buffers.lease(number)
        buffers.quarantine(number)
    told, start = driver.submit(1), driver.now
    driver.run(3 * S)
    gauges = driver.engine.gauges(driver.now)
    assert gauges.buffers == {"total": 2, "leased": 0, "quarantined": 2, "free": 0} and not told.pieces
    assert gauges.buffer_wait_s == pytest.approx((driver.now - start) / S)
    assert (driver.engine.next_wakeup_ns() or 0) - driver.now > 100 * S, "nothing wakes it but a deadline"
    buffers.give_back(901)
    driver.feed(events.TimeCame())
    driver.until(lambda: told.ended)
    assert told.text == text_of([1, 2, 3], 4) and driver.engine.gauges(driver.now).buffer_wait_s == 0


# ------------------------------------------------------------------------------------------------ what nothing else would notice
def test_a_cancelled_request_leaves_nothing_to_say_behind() -> None:
    driver = Driver().ready()
    told = driver.submit(1, max_new_tokens=30)
    driver.until(lambda: told.pieces)
    driver.until(lambda: driver.engine.report(driver.now).inflight == 1)
    said = len(told.pieces)
    driver.cancel(1)
    driver.run(2 * S)
    assert driver.engine.serving is not None
    assert len(told.pieces) == said and not driver.engine.serving.answers._by_seq


def test_who_joins_late_takes_turns_from_then_on_and_catches_nothing_up() -> None:
    driver = Driver(a_manifest(lanes=2, profiles=(1,)), scheduler=a_scheduler((1,))).ready()
    first = driver.submit(1, max_new_tokens=55)
    driver.until(lambda: sum(piece.tokens for piece in first.pieces) == 25)
    second = driver.submit(2, max_new_tokens=55)
    driver.until(lambda: sum(piece.tokens for piece in second.pieces) == 11)
    assert 8 <= sum(piece.tokens for piece in first.pieces) - 25 <= 13, "one row, and two that go by turns"


def test_a_class_is_charged_what_its_jobs_took_on_the_device() -> None:
    """Prompts that take twenty times what their tokens promised are no reason to let decode wait for them any longer."""
    driver = Driver(a_manifest(lanes=4, profiles=(1, 4)), scheduler=a_scheduler((1, 4))).ready()
    running = driver.submit(1, max_new_tokens=55)
    driver.until(lambda: running.pieces)
    driver.board.token_ns = 20 * MS
    start, number = driver.now, 1
    others = list[Any]()
    while driver.now < start + 4 * S and not running.ended:
        others = [told for told in others if not told.ended]
        while len(others) < 3:
            number += 1
            others.append(driver.submit(number, [number % 50, 2, 3], 1))
        driver.step()
    jobs = [event.data for event in driver.events_of(history.BOARD_JOB) if event.t > start]
    spent = Counter[str]()
    for job in jobs:
        spent[job["queue"]] += job["ns"]
    assert 1.4 < spent["decode"] / spent["short"] < 2.7, "8 to 4, in device time"


def test_only_who_had_to_wait_for_a_lane_counts_for_the_rate_at_which_the_queue_drains() -> None:
    driver = one_lane()
    told = [driver.submit(number, max_new_tokens=2) for number in range(1, 12)]
    driver.until(lambda: all(one.ended for one in told))
    queued = [event.data["queued"] for event in driver.events_of(history.ATTEMPT_ADMITTED)]
    assert queued == [False] + [True] * 10 and driver.engine.serving is not None
    assert driver.engine.serving.drain_rate.wait_s(10, driver.now) is not None, "ten left the queue: that is a rate"


def test_a_board_whose_last_job_has_not_ended_takes_no_other_model() -> None:
    driver = Driver().ready()
    driver.faults = iter([Fault(refuse=ReturnCode.INVALID_SHAPE)])
    scheduler_free = driver.engine.serving
    assert scheduler_free is not None
    told = driver.submit(1)
    driver.until(lambda: told.ended and driver.state == "FAILED")
    scheduler_free.buffers.lease(900)
    scheduler_free.buffers.quarantine(900)
    driver.load()
    assert "has not ended" in (driver.engine.report(driver.now).command_error or "") and driver.state == "FAILED"
    scheduler_free.buffers.give_back(900)
    driver.load()
    driver.until(lambda: driver.state == "READY")


@pytest.mark.parametrize("jump_ns", [3_600 * S, 5 * S, -200 * MS], ids=["an hour on", "seconds on", "back"])
def test_a_clock_that_jumps_ends_who_is_late_and_disturbs_nobody_else(jump_ns: int) -> None:
    """CLOCK_MONOTONIC does neither; a suspended machine, or a virtual one that was moved, looks so."""
    driver = Driver(scheduler=a_scheduler(executor={"max_inflight": 1})).ready()
    told = [driver.submit(number, max_new_tokens=20, deadline_ns=driver.now + 1_000 * S) for number in (1, 2, 3)]
    waits = [driver.submit(number, max_new_tokens=4, deadline_ns=driver.now + 10_000 * S) for number in range(4, 9)]
    driver.until(lambda: told[0].pieces)
    driver.run(60 * MS)
    driver.now += jump_ns
    driver.feed(events.TimeCame())
    driver.until(lambda: all(one.ended for one in told + waits))
    expected = ["deadline_exceeded"] * 3 if jump_ns > 1_000 * S else [None] * 3
    assert [one.error for one in told] == expected and [one.error for one in waits] == [None] * 5
    for number, one in enumerate(told + waits, 1):
        whole = text_of([number, 2, 3], 20 if number <= 3 else 4)
        assert whole.startswith(one.text) and (one.error or one.text == whole)
    report = driver.engine.report(driver.now)
    assert (report.state, report.inflight, report.active, report.kv_tokens_reserved) == ("READY", 0, 0, 0) and not driver.board.leased


@pytest.mark.parametrize("fault", [Fault(status=OutputStatus.CCU_EXCEPTION), Fault(refuse=ReturnCode.DEVICE_BUSY)], ids=["ccu", "busy"])
def test_a_step_that_was_held_back_when_everything_stopped_leaves_no_wake_up_behind(fault: Fault) -> None:
    """A wake-up that has passed would be armed again and again: a busy loop until the board recovers."""
    scheduler = a_scheduler((1, 2), executor={"max_inflight": 2, "busy_backoff_ms": 50}, batch={"batching_window_us": 20_000})
    driver = Driver(a_manifest(lanes=2, profiles=(1, 2)), scheduler=scheduler).ready()
    first = driver.submit(1, max_new_tokens=20)
    driver.until(lambda: first.pieces)
    driver.faults = once_at_prefill(driver, fault)
    driver.submit(2, [5] * 8)
    for _ in range(40):  # each event asserts that the next wake-up is in the future
        driver.run(1 * MS)
        driver.feed(events.TimeCame())
    if fault.refuse is None:
        assert driver.state == "RECOVERING" and driver.engine.next_wakeup_ns() is None


def once_at_prefill(driver: Driver, fault: Fault) -> Iterator[Fault | None]:
    struck = False
    while True:
        assert driver.engine.serving is not None
        entry = list(driver.engine.serving.inflight._jobs.values())[-1]
        hit = not struck and entry.job.kind is JobKind.PREFILL
        struck = struck or hit
        yield fault if hit else None
