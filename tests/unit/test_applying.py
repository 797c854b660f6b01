"""What a change of the configuration asks of whom: from one table, complete, with digests that tell who holds what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from builders_engine import a_sequence

from calculet_core import applying
from calculet_core.applying import Change, Standing, Take, changes, decode, digest_of, leaves_of, live_with, rule_of, started_with
from calculet_core.config import FleetConfig, SchedulerConfig, TenantConfig, parse_fleet, parse_scheduler
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.holding import Holding
from calculet_router.tenants import Tenants
from calculet_worker.scheduling.fairness import FairQueue

BASE: dict[str, Any] = {
    "schema": "calculet-fleet/v1",
    "boards": [{"name": "b0", "device": "sim"}, {"name": "b1", "device": "sim"}, {"name": "b2", "device": "sim"}],
    "models": [{"alias": "toy", "package": "toy", "boards": ["b0", "b1"], "scheduler": "toy.yaml"}, {"alias": "chat", "package": "chat", "boards": ["b2"]}],
    "tenants": [{"name": "default"}, {"name": "team", "max_active": 4}],
}  # fmt: skip


def a_standing(scheduler: dict[str, Any] | None = None, **sections: Any) -> Standing:
    fleet = parse_fleet(json.dumps({**BASE, **sections}).encode(), "fleet.yaml")
    toy = parse_scheduler(yaml.safe_dump({"schema": "calculet-scheduler/v1", "model_alias": "toy", **(scheduler or {})}).encode(), "toy.yaml")
    return Standing(fleet, {model.alias: toy if model.alias == "toy" else None for model in fleet.models})


def plan(scheduler: dict[str, Any] | None = None, same: bool = False, **sections: Any) -> list[Change]:
    return changes(leaves_of(a_standing()), leaves_of(a_standing(scheduler, **sections)), lambda alias: same)


def only(found: list[Change]) -> tuple[str, str]:
    assert len(found) == 1, found
    return found[0].where, found[0].how


# ---------------------------------------------------------------- the table
def test_every_key_there_is_has_a_rule_and_no_rule_is_idle() -> None:
    def paths(cls: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = []
        for field in msgspec.structs.fields(cls):
            info = msgspec.inspect.type_info(field.type)
            item = getattr(info, "item_type", info)
            if isinstance(item, msgspec.inspect.StructType):
                name = ("x",) if field.name in applying.NAMED else ()
                found += paths(item.cls, (*path, field.name, *name))
            else:
                found.append((*path, field.name))
        return found

    known = paths(FleetConfig, ()) + paths(SchedulerConfig, (applying.SCHEDULERS, "x"))
    assert len(known) > 120
    used = {rule_of(path).pattern for path in known}
    assert used == {rule.pattern for rule in applying.RULES}
    with pytest.raises(KeyError, match="nonsense"):
        rule_of(("nonsense", "x"))


@pytest.mark.parametrize(
    ("sections", "where", "how"),
    [
        ({"tenants": [{"name": "default"}, {"name": "team", "max_active": 8}]}, "$.tenants[team].max_active", "live"),
        ({"tenants": [{"name": "default"}]}, "$.tenants[team]", "live"),
        ({"router": {"max_inflight_requests": 9}}, "$.router.max_inflight_requests", "live"),
        ({"router": {"listen": "127.0.0.1:9"}}, "$.router.listen", "restart of the routers"),
        ({"router": {"lease_interval_ms": 9}}, "$.router.lease_interval_ms", "restart of b0, b1, b2 and restart of the routers"),
        ({"log": {"level": "debug"}}, "$.log.level", "live"),
        ({"rollout": {"stall_timeout_s": 9}}, "$.rollout.stall_timeout_s", "live"),
        ({"supervision": {"heartbeat_ms": 9}}, "$.supervision.heartbeat_ms", "restart of b0, b1, b2"),
        ({"supervision": {"restart": {"max_restarts": 9}}}, "$.supervision.restart.max_restarts", "live"),
        ({"state_dir": "elsewhere"}, "$.state_dir", "refused"),
        ({"chaos": {"enabled": True}}, "$.chaos.enabled", "restart of b0, b1, b2 and restart of the routers"),
    ],
)
def test_what_a_key_needs(sections: dict[str, Any], where: str, how: str) -> None:
    assert only(plan(**sections)) == (where, how)


def test_nothing_that_differs_is_nothing_to_do_whatever_the_file_looks_like() -> None:
    assert plan() == []
    assert plan(router={"max_inflight_requests": 4096}, boards=list(reversed(BASE["boards"]))) == [], "defaults and order are no change"


def test_a_board_is_restarted_for_its_own_keys_only() -> None:
    boards = [{"name": "b0", "device": "sim", "options": {"step_ms": 7}}, *BASE["boards"][1:]]
    assert only(plan(boards=boards)) == ("$.boards[b0].options.step_ms", "restart of b0")
    pools = [{"name": "b0", "device": "sim", "pool": "latency"}, *BASE["boards"][1:]]
    assert only(plan(boards=pools)) == ("$.boards[b0].pool", "live")


def test_a_scheduler_file_restarts_the_boards_of_its_alias() -> None:
    assert only(plan({"queues": {"decode_weight": 9}})) == ("$.schedulers[toy].queues.decode_weight", "restart of b0, b1")


def test_a_scheduler_file_that_comes_or_goes_is_one_change() -> None:
    new = a_standing()
    found = changes(leaves_of(new), leaves_of(Standing(new.fleet, {"toy": None, "chat": None})), lambda alias: True)
    assert only(found) == ("$.schedulers[toy]", "restart of b0, b1") and found[0].new is None
    assert found[0].old["queues.decode_weight"] == 8


def test_boards_come_and_go_and_touch_nobody_else() -> None:
    models = [{**BASE["models"][0], "boards": ["b0", "b1", "b3"]}, BASE["models"][1]]
    found = {change.where: change for change in plan(boards=[*BASE["boards"], {"name": "b3", "device": "sim"}], models=models)}
    assert found["$.boards[b3]"].how == "its worker starts" and found["$.models[toy].boards"].how == "live"
    gone = [{**BASE["models"][0], "boards": ["b0"]}, BASE["models"][1]]
    found = {change.where: change for change in plan(boards=[BASE["boards"][0], BASE["boards"][2]], models=gone)}
    assert found["$.boards[b1]"].how == "its worker drains and ends" and found["$.models[toy].boards"].how == "live"


def test_a_board_that_moves_to_another_model_is_restarted() -> None:
    models = [{**BASE["models"][0], "boards": ["b0"]}, {**BASE["models"][1], "boards": ["b1", "b2"]}]
    assert {change.where: change.how for change in plan(models=models)} == {
        "$.models[toy].boards": "restart of b1", "$.models[chat].boards": "restart of b1",
    }  # fmt: skip


def test_another_package_is_refused_with_the_way_that_swaps_it_unless_it_serves_already() -> None:
    models = [{**BASE["models"][0], "package": "other"}, BASE["models"][1]]
    (change,) = plan(models=models)
    assert change.how == "refused" and "calculet load toy" in str(change.refused)
    assert plan(same=True, models=models)[0].how == "live"


# ---------------------------------------------------------------- digests
def test_the_digests_say_what_the_plan_says() -> None:
    """For every change of the table above: a board's start digest changes exactly when the plan restarts it, and so on."""
    old = leaves_of(a_standing())
    variants: list[dict[str, Any]] = [
        {"tenants": [{"name": "default"}]}, {"router": {"listen": "127.0.0.1:9"}}, {"router": {"max_body_bytes": 9}}, {"rollout": {"stall_timeout_s": 9}},
        {"router": {"lease_interval_ms": 9}}, {"log": {"level": "debug"}}, {"trace": {"steps": True}}, {"scheduler": {"queues": {"decode_weight": 9}}},
        {"scheduler": {"admission": {"deadline_default_ms": 9}}}, {"boards": [{**BASE["boards"][0], "dram_gib": 8}, *BASE["boards"][1:]]},
        {"models": [{**BASE["models"][0], "boards": ["b0"]}, {**BASE["models"][1], "boards": ["b1", "b2"]}]},
    ]  # fmt: skip
    for variant in variants:
        new = leaves_of(a_standing(**variant))
        found = changes(old, new, lambda alias: True)
        restarted = {board for change in found for board in change.boards}
        assert {board for board in ("b0", "b1", "b2") if started_with(old, "worker", board) != started_with(new, "worker", board)} == restarted, variant
        assert (started_with(old, "router") != started_with(new, "router")) == any(change.routers for change in found), variant
        for role in ("worker", "router"):
            lives = [change for change in found if getattr(rule_of((*change.path, "*")), role) is Take.LIVE]
            assert (live_with(old, role) != live_with(new, role)) == bool(lives), (variant, role)


def test_a_process_of_another_version_is_not_restarted_for_keys_that_it_cannot_know() -> None:
    here = started_with(leaves_of(a_standing()), "worker", "b0")
    assert applying.holds(here, here) is True
    assert applying.holds(started_with(leaves_of(a_standing(trace={"steps": True})), "worker", "b0"), here) is False
    assert applying.holds("", here) is None, "a version that tells nothing"
    assert applying.holds(f"0123abcd.{here.partition('.')[2]}", here) is None, "a version with other keys, defaults or rules"


def test_what_is_kept_comes_back_and_what_a_newer_version_adds_has_its_default() -> None:
    standing = a_standing({"batch": {"profiles": [1, 4], "thresholds": {4: 2}}}, router={"max_body_bytes": 9})
    kept = standing.encode()
    assert digest_of(leaves_of(decode(kept))) == digest_of(leaves_of(standing))
    older = json.loads(kept)
    del older["fleet"]["chaos"], older["fleet"]["router"]["drain_idle_s"]
    assert digest_of(leaves_of(decode(json.dumps(older).encode()))) == digest_of(leaves_of(standing))
    older["fleet"]["gone_since"] = 1
    with pytest.raises(msgspec.ValidationError, match="gone_since"):
        decode(json.dumps(older).encode())


# ---------------------------------------------------------------- a process takes it
@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text("{schema: calculet-scheduler/v1, model_alias: toy}")
    (tmp_path / "fleet.yaml").write_text(json.dumps(BASE))
    return tmp_path / "fleet.yaml"


def test_a_process_takes_what_was_applied_and_nothing_else(file: Path) -> None:
    async def scene() -> None:
        holding = Holding(load_fleet(file), "router")
        start, live = holding.start, holding.live
        assert await holding.read() is None and holding.error is None, "nothing has changed"
        file.write_text(json.dumps({**BASE, "tenants": [{"name": "default"}]}))
        assert await holding.read("somebody else's") is None
        assert "has changed since" in str(holding.error) and holding.live == live
        standing = await holding.read()
        assert standing is not None and [tenant.name for tenant in standing.fleet.tenants] == ["default"]
        assert (holding.start, holding.error) == (start, None) and holding.live != live
        assert holding.live == live_with(leaves_of(standing), "router")
        file.write_text("{")
        assert await holding.read() is None and "not valid YAML" in str(holding.error)
        assert await holding.read(holding.live) is None, "it is held: the file does not matter"

    asyncio.run(scene())


# ---------------------------------------------------------------- tenants, in the router
def test_a_rate_that_changes_keeps_what_was_used_and_one_that_does_not_keeps_its_level() -> None:
    tenants = Tenants([TenantConfig("default"), TenantConfig("a", requests_per_s=2), TenantConfig("b", requests_per_s=1)], 0)
    a, b = (tenants._configs[name] for name in "ab")
    assert tenants.admit(a, 1, 0) is None and tenants.admit(a, 1, 0) is None and tenants.admit(b, 1, 0) is None
    tenants.take_configs([TenantConfig("default"), TenantConfig("a", requests_per_s=10), TenantConfig("b", requests_per_s=1)], 0)
    for name in "ab":
        assert tenants.admit(tenants._configs[name], 1, 0) is not None, f"{name}: a change of the configuration gives no burst away"
    assert tenants.admit(tenants._configs["a"], 1, 150_000_000) is None, "the new rate fills it"
    assert tenants.active == {"default": 0, "a": 3, "b": 1}


def test_what_was_let_in_runs_on_above_a_smaller_limit_and_a_tenant_that_is_gone_is_forgotten_at_its_last_end() -> None:
    tenants = Tenants([TenantConfig("default"), TenantConfig("team", max_active=4)], 0)
    team = tenants._configs["team"]
    assert tenants.admit(team, 4, 0) is None
    tenants.take_configs([TenantConfig("default"), TenantConfig("team", max_active=2)], 0)
    smaller = tenants._configs["team"]
    assert tenants.admit(smaller, 1, 0) is not None and b"remaining-active: 0" in tenants.headers(smaller, 0)
    tenants.release(team, 3)
    assert tenants.admit(smaller, 1, 0) is None
    tenants.take_configs([TenantConfig("default")], 0)
    assert tenants.active == {"default": 0, "team": 2}
    tenants.release(team, 1)
    tenants.release(smaller, 1)
    assert tenants.active == {"default": 0}


# ---------------------------------------------------------------- tenants, in the worker
def test_a_larger_limit_lets_those_that_wait_start_and_a_smaller_one_holds_them() -> None:
    fair = FairQueue([TenantConfig("a", max_active=1)], 1.0)
    for number in range(4):
        seq = a_sequence(number, 10, 10, tenant="a", weight=1.0)
        seq.virtual_finish_time = fair.stamp("a", 1.0, 10, 10)
        fair.push(seq)

    def take() -> bool:
        seq = fair.head()
        if seq is not None:
            fair.take(seq)
        return seq is not None

    assert [take(), take()] == [True, False]
    fair.take_tenants([TenantConfig("a", max_active=2)])
    assert [take(), take()] == [True, False]
    fair.take_tenants([TenantConfig("a", max_active=1)])
    assert not take() and fair.active("a") == 2, "what is active runs on"
    fair.take_tenants([])
    assert [take(), take(), take()] == [True, True, False], "a tenant that is not configured has no limit"


def test_another_weight_holds_for_what_arrives() -> None:
    fair = FairQueue([TenantConfig("a", weight=1)], 1.0)
    assert fair.stamp("a", 1.0, 10, 10) == 20
    fair.take_tenants([TenantConfig("a", weight=4)])
    assert fair.stamp("a", 1.0, 10, 10) == 25
