"""Weighted fair queueing over arbitrary loads: shares, no starvation, no credit for idleness (scheduling §5.3)."""

from __future__ import annotations

import random

from builders_engine import a_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from calculet_core.config import TenantConfig
from calculet_core.requests import SequenceState
from calculet_core.states.request import RequestState
from calculet_worker.scheduling.fairness import FairQueue
from calculet_worker.scheduling.selection import POLICIES

costs = st.integers(1, 400)
weights = st.integers(1, 8)


class Load:
    """A queue, and what each tenant was served, in cost over weight."""

    def __init__(self, tenants: dict[str, float]) -> None:
        self.weights = tenants
        self.fair = FairQueue([TenantConfig(name, weight=weight) for name, weight in tenants.items()], 1.0)
        self.served = dict.fromkeys(tenants, 0.0)
        self.number = 0

    def put(self, tenant: str, cost: int) -> SequenceState:
        self.number += 1
        seq = a_sequence(self.number, cost, 0, tenant=tenant)
        seq.virtual_finish_time = self.fair.stamp(tenant, 1.0, cost, 0)
        self.fair.push(seq)
        return seq

    def take(self) -> SequenceState | None:
        seq = self.fair.head()
        if seq is not None:
            self.fair.take(seq)
            self.fair.ended(seq)
            self.served[seq.tenant] += seq.prompt_tokens / self.weights[seq.tenant]
        return seq


@settings(deadline=None)
@given(st.integers(0, 2**32), weights, weights, st.integers(1, 60))
def test_backlogged_tenants_are_never_further_apart_than_one_request_each(seed: int, first: int, second: int, turns: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 400), rng.randint(1, 400)) for _ in range(60)]
    load = Load({"a": float(first), "b": float(second)})
    for mine, theirs in sizes:
        load.put("a", mine), load.put("b", theirs)
    for _ in range(turns):
        load.take()
        bound = max(mine for mine, _ in sizes) / first + max(theirs for _, theirs in sizes) / second
        assert abs(load.served["a"] - load.served["b"]) <= bound + 1e-6


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_three_to_one_weights_share_three_to_one(seed: int) -> None:
    load, rng = Load({"heavy": 3.0, "light": 1.0}), random.Random(seed)
    for _ in range(400):
        load.put("heavy", rng.randint(1, 400)), load.put("light", rng.randint(1, 400))
    for _ in range(300):
        load.take()
    heavy, light = load.served["heavy"] * 3.0, load.served["light"]
    assert abs(heavy / (heavy + light) - 0.75) < 0.03


@settings(deadline=None)
@given(st.integers(1, 200), costs, st.lists(costs, min_size=1, max_size=30))
def test_whoever_was_idle_starts_at_the_present(turns: int, mine: int, theirs: list[int]) -> None:
    load = Load({"busy": 1.0, "idle": 1.0})
    for _ in range(turns + 40):
        load.put("busy", mine)
    for _ in range(turns):
        load.take()
    before = load.served["busy"]
    for cost in theirs:
        load.put("idle", cost)
    while load.served["idle"] < sum(theirs):
        assert load.take() is not None
        gained = load.served["idle"] - (load.served["busy"] - before)
        if load.fair.head() is None or load.served["busy"] - before >= 40 * mine:
            break
        assert gained <= max(theirs) + mine, "the past was paid back"


@settings(deadline=None)
@given(st.integers(1, 4_000), st.integers(1, 20))
def test_a_huge_request_is_reached_under_a_stream_of_small_ones(huge: int, small: int) -> None:
    load = Load({"huge": 1.0, "small": 1.0})
    wanted = load.put("huge", huge)
    for _ in range(5):
        load.put("small", small)
    limit = huge // small + 10
    for _ in range(limit):
        if load.take() is wanted:
            return
        load.put("small", small)
    raise AssertionError(f"not served within {limit} requests")


@settings(deadline=None)
@given(st.lists(st.sampled_from(["put a", "put b", "take", "remove", "end"]), max_size=120), st.integers(0, 2**32))
def test_counts_and_limits_hold_in_any_order(steps: list[str], seed: int) -> None:
    fair, rng = FairQueue([TenantConfig("a", max_active=2), TenantConfig("b")], 1.0), random.Random(seed)
    waiting: list[SequenceState] = []
    active: list[SequenceState] = []
    for number, step in enumerate(steps):
        if step.startswith("put"):
            seq = a_sequence(number, rng.randint(1, 50), 0, tenant=step[-1])
            seq.virtual_finish_time = fair.stamp(seq.tenant, 1.0, seq.prompt_tokens, 0)
            fair.push(seq)
            waiting.append(seq)
        elif step == "take" and (head := fair.head()) is not None:
            fair.take(head)
            waiting.remove(head)
            active.append(head)
        elif step == "remove" and waiting:
            fair.remove(waiting.pop(rng.randrange(len(waiting))))
        elif step == "end" and active:
            fair.ended(active.pop(rng.randrange(len(active))))
        mine = sum(seq.tenant == "a" for seq in active)
        assert mine <= 2
        assert (len(fair), fair.tokens) == (len(waiting), sum(seq.prompt_tokens for seq in waiting))
        startable = [seq for seq in waiting if seq.tenant == "b" or mine < 2]
        head = fair.head()
        assert head is min(startable, key=lambda seq: (seq.virtual_finish_time, seq.tenant, seq.seq_id), default=None)


@settings(deadline=None)
@given(st.data())
def test_every_policy_keeps_shares_and_wastes_no_row(data: st.DataObject) -> None:
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    rows, share = data.draw(st.integers(1, 16)), data.draw(st.floats(0.05, 1.0))
    names = data.draw(st.lists(st.sampled_from("abc"), max_size=40))
    ready = [
        a_sequence(
            number, tenant=name, state=RequestState.DECODE_READY, asked=data.draw(st.booleans()),
            deadline_ns=data.draw(st.integers(1, 10**12)), virtual_finish_time=float(data.draw(st.integers(0, 100))),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    chosen = policy(list(ready), rows, share)
    assert len({id(seq) for seq in chosen}) == len(chosen) == min(rows, len(ready))
    limit = max(1, int(rows * share))
    for name in set(names):
        mine = sum(seq.tenant == name for seq in chosen)
        left_out = {seq.tenant for seq in ready if seq not in chosen} - {name}
        if mine > limit:
            assert all(sum(seq.tenant == other for seq in chosen) >= limit for other in left_out)
