"""Weighted fair queueing and tenants' limits (scheduling §5.3)."""

from __future__ import annotations

import random

from builders_engine import a_sequence

from calculet_core.config import TenantConfig
from calculet_core.limits import LocalLimits
from calculet_core.requests import SequenceState
from calculet_worker.scheduling.fairness import FairQueue


def queue(*tenants: TenantConfig, decode_weight: float = 1.0) -> FairQueue:
    return FairQueue(tenants, decode_weight)


def put(fair: FairQueue, number: int, tenant: str, prompt: int = 10, output: int = 10, weight: float = 1.0) -> SequenceState:
    seq = a_sequence(number, prompt, output, tenant=tenant, weight=weight)
    seq.virtual_finish_time = fair.stamp(tenant, weight, prompt, output)
    fair.push(seq)
    return seq


def take(fair: FairQueue) -> SequenceState | None:
    seq = fair.head()
    if seq is not None:
        fair.take(seq)
    return seq


def drain(fair: FairQueue, count: int) -> list[str]:
    return [seq.tenant for _ in range(count) if (seq := take(fair)) is not None]


def test_cost_is_prompt_plus_weighted_output() -> None:
    fair = queue(decode_weight=2.0)
    assert fair.stamp("a", 1.0, 100, 50) == 200.0


def test_three_to_one_weights_give_three_to_one_turns() -> None:
    fair = queue(TenantConfig("a", weight=3.0), TenantConfig("b"))
    for number in range(40):
        put(fair, number, "a" if number % 2 else "b")
    assert drain(fair, 16).count("a") == 12


def test_ten_thousand_requests_share_three_to_one_within_five_percent() -> None:
    fair, rng, served = queue(TenantConfig("a", weight=3.0), TenantConfig("b")), random.Random(5), {"a": 0, "b": 0}
    number = 0
    for _ in range(10_000):
        for tenant in ("a", "b"):  # both always have something waiting
            while len([seq for seq in fair.waiting() if seq.tenant == tenant]) < 4:
                number += 1
                put(fair, number, tenant, prompt=rng.randint(1, 400), output=rng.randint(1, 100))
        seq = take(fair)
        assert seq is not None
        served[seq.tenant] += seq.prompt_tokens + seq.max_new_tokens
        fair.ended(seq)
    assert abs(served["a"] / served["b"] - 3.0) < 0.15


def test_a_weight_of_the_configuration_wins_over_the_message() -> None:
    fair = queue(TenantConfig("a", weight=4.0))
    assert fair.stamp("a", 100.0, 4, 4) == 2.0


def test_an_idle_tenant_starts_at_the_present() -> None:
    fair = queue(TenantConfig("a"), TenantConfig("b"))
    for number in range(20):
        put(fair, number, "a")
    drain(fair, 10)
    for number in range(20, 40):
        put(fair, number, "b")
    assert 4 <= drain(fair, 10).count("b") <= 6, "ten turns of idleness earn nothing"


def test_a_burst_of_one_tenant_does_not_hold_up_another() -> None:
    fair = queue(TenantConfig("a"), TenantConfig("b"))
    for number in range(100):
        put(fair, number, "a")
    put(fair, 200, "b")
    assert "b" in drain(fair, 2)


def test_a_tenant_at_its_active_limit_is_passed_over_until_one_ends() -> None:
    fair = queue(TenantConfig("a", max_active=1), TenantConfig("b"))
    first = put(fair, 1, "a")
    put(fair, 2, "a"), put(fair, 3, "b", prompt=1_000)
    assert drain(fair, 3) == ["a", "b"]
    assert fair.head() is None and len(fair) == 1
    fair.ended(first)
    assert drain(fair, 3) == ["a"]


def test_a_tenant_may_let_only_so_many_tokens_wait() -> None:
    fair = queue(TenantConfig("a", max_waiting_tokens=25))
    first, second = put(fair, 1, "a", prompt=20), put(fair, 2, "a", prompt=5)
    assert fair.take_quota(first, 20) is None
    refusal = fair.take_quota(second, 6)
    assert refusal is not None and refusal.code == "tenant_quota" and "20 prompt tokens wait" in refusal.message and "25" in refusal.message
    assert fair.take_quota(second, 5) is None
    assert fair.take_quota(put(fair, 3, "b"), 1_000_000) is None
    fair.remove(first)
    assert fair.take_quota(put(fair, 4, "a", prompt=20), 20) is None, "what left the queue was given back"


def test_what_a_tenant_lets_wait_counts_on_every_board() -> None:
    ledger, tenant = LocalLimits(), TenantConfig("a", max_waiting_tokens=25)
    here, there = (FairQueue([tenant], 1.0, limits=ledger) for _ in range(2))
    seq = put(here, 1, "a", prompt=20)
    assert here.take_quota(seq, 20) is None
    assert there.take_quota(put(there, 1, "a", prompt=6), 6) is not None
    here.take(seq)
    assert there.take_quota(put(there, 2, "a", prompt=25), 25) is None and ledger.total("a") == 25


def test_a_request_that_leaves_from_anywhere_is_not_taken() -> None:
    fair = queue(TenantConfig("a"))
    first, middle, last = put(fair, 1, "a"), put(fair, 2, "a"), put(fair, 3, "a")
    fair.remove(middle)
    fair.remove(first)
    assert (len(fair), fair.tokens) == (1, 10)
    assert take(fair) is last and take(fair) is None
    assert (len(fair), fair.tokens) == (0, 0)


def test_tenants_nobody_configured_are_forgotten_when_they_are_done() -> None:
    fair = queue()
    for number in range(50):
        put(fair, number, f"stranger {number}")
    for seq in [seq for _ in range(50) if (seq := take(fair)) is not None]:
        fair.ended(seq)
    put(fair, 99, "stranger 0", prompt=1)
    assert len(fair._tenants) <= 2


def test_the_oldest_wait_is_found_across_tenants() -> None:
    fair = queue()
    put(fair, 1, "a").waiting_since_ns = 50
    put(fair, 2, "b").waiting_since_ns = 20
    assert fair.oldest_ns() == 20


# ------------------------------------------------------------------------------------------------ the quota of long prompts (§6)
def long_queue(max_long: int = 1, *tenants: TenantConfig) -> FairQueue:
    return FairQueue(tenants, 1.0, long_above=100, max_long=max_long)


def numbers(fair: FairQueue) -> list[int]:
    taken = []
    while (seq := take(fair)) is not None:
        taken.append(seq.seq_id)
    return taken


def test_long_prompts_beyond_the_quota_wait_and_hold_up_nobody() -> None:
    fair = long_queue()
    first, second = put(fair, 1, "a", prompt=500), put(fair, 2, "a", prompt=500)
    put(fair, 3, "a"), put(fair, 4, "b", prompt=400), put(fair, 5, "b", prompt=100)
    assert sorted(numbers(fair)) == [3, 4, 5], "of three long ones the cheapest started; no short one waited for them"
    assert (fair.long_prefills, len(fair)) == (1, 2)
    assert not fair.may_start("c", 101) and fair.may_start("c", 100)
    del first, second


def test_a_long_prompt_in_kv_makes_room_for_the_next() -> None:
    fair = long_queue()
    first = put(fair, 1, "a", prompt=500)
    put(fair, 2, "a", prompt=500), put(fair, 3, "b", prompt=2_000)
    assert numbers(fair) == [1]
    fair.prefilled(first)
    assert numbers(fair) == [2]
    fair.ended(first)
    assert numbers(fair) == [], "its end frees nothing a second time"


def test_a_long_prompt_that_ends_before_its_first_token_makes_room_too() -> None:
    fair = long_queue()
    first = put(fair, 1, "a", prompt=500)
    put(fair, 2, "b", prompt=500)
    assert numbers(fair) == [1]
    fair.ended(first)
    assert numbers(fair) == [2]


def test_a_tenant_at_its_active_limit_starts_neither_long_nor_short() -> None:
    fair = long_queue(2, TenantConfig("a", max_active=1))
    first = put(fair, 1, "a")
    put(fair, 2, "a", prompt=500), put(fair, 3, "a")
    assert numbers(fair) == [1]
    fair.ended(first)
    assert len(numbers(fair)) == 1


def test_without_a_quota_long_prompts_keep_their_place_in_the_line() -> None:
    fair = queue()
    put(fair, 1, "a", prompt=5_000), put(fair, 2, "a")
    assert numbers(fair) == [1, 2]
