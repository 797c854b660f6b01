"""The matrix as data: which cells there are, what is not applicable, what is sent and in which order."""

from __future__ import annotations

import itertools
import json
import statistics
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders_perf import MANIFEST

from calculet_perf.manifest import ManifestError, dump_manifest, parse_manifest
from calculet_perf.plan import Cut, build_plan, warm_shapes
from calculet_perf.workloads.cells import Cell, expand
from calculet_perf.workloads.facts import ServerFacts, facts_of
from calculet_perf.workloads.matrix import Matrix, parse_matrix
from calculet_perf.workloads.requests import Sender, requests_of, sender_of
from calculet_perf.workloads.stages import LOADS, segment

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "perf"
QWEN3 = ServerFacts(foreign=False, models=("toy",), context=40960, profiles=(1,), boards=2)
BATCH = ServerFacts(foreign=False, models=("toy",), context=4096, profiles=(1, 4, 8), boards=2)
FOREIGN = ServerFacts(foreign=True)
MAN = parse_manifest(dump_manifest(MANIFEST), "m")


def a_matrix(*cells: dict[str, Any], **fields: Any) -> Matrix:
    given = {"schema": "calculet-perf-matrix/v1", "name": "test", "cells": cells, **fields}
    return parse_matrix(json.dumps(given).encode(), "matrix.yaml")


def ids(cells: list[Cell]) -> list[str]:
    return [cell.id for cell in cells]


def sent(cell: Cell, count: int, *, round_: int = 0, foreign: bool = False, **fields: Any) -> list[Any]:
    sender = sender_of(MAN, a_matrix({"kind": "single", "prompts": [1], "outputs": [1]}, **fields), foreign=foreign)
    return requests_of(sender, cell, round_, count, "run")


def a_cell(**spec: Any) -> Cell:
    cells, lost = expand(a_matrix(spec), BATCH)
    assert not lost
    return cells[-1]


# ---------------------------------------------------------------- matrix -> cells
def test_the_full_matrix_has_every_cell_of_the_specification() -> None:
    matrix = parse_matrix((CONFIGS / "full.yaml").read_bytes(), "full.yaml")
    cells, lost = expand(matrix, QWEN3)
    every = {*ids(cells), *(one.case for one in lost)}
    for prompt in (1, 16, 17, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 40959):
        for output in (1, 32, 256):
            for end in ("greedy/stream", "greedy/whole", "sampled/stream", "sampled/whole"):
                assert f"single/p{prompt}/o{output}/{end}" in every
    assert (matrix.idle_s, matrix.min_requests) == (300, 30)
    assert {cell.kind for cell in cells} == {
        "single", "boundary", "closed", "poisson", "burst", "mixed", "decode_heavy", "prefill_heavy", "interference",
    }  # fmt: skip
    assert {cell.qps for cell in cells if cell.kind == "poisson"} >= {0.25, 0.5, 1, 2}
    assert {cell.concurrency for cell in cells if cell.kind == "burst"} == {2, 4, 8, 16}
    assert {cell.concurrency for cell in cells if cell.kind == "closed"} == {1, 2, 4, 8, 16}
    shares = {(shape.prompt, shape.output, shape.share) for cell in cells if cell.kind == "mixed" for shape in cell.shapes}
    assert shares == {(128, 32, 70), (2048, 128, 20), (16384, 256, 10)}
    assert [sum(case.startswith(f"lanes/B{batch}/") for case in every) for batch in (4, 8, 16)] == [4, 8, 16]


def test_the_smoke_matrix_ends_within_ten_minutes_by_its_own_assumption() -> None:
    matrix = parse_matrix((CONFIGS / "smoke.yaml").read_bytes(), "smoke.yaml")
    smollm2 = msgspec.structs.replace(BATCH, context=2048)
    plan = build_plan(MAN, matrix, smollm2)
    assert plan.seconds < 600
    assert not plan.not_applicable
    assert {item.cell.kind for item in plan.items} >= {"single", "closed", "poisson", "burst", "mixed", "boundary", "lanes"}


def test_a_full_context_succeeds_with_one_token_and_is_refused_with_more() -> None:
    cells, lost = expand(a_matrix({"kind": "boundary", "prompt": 40959}), QWEN3)
    assert not lost
    assert [(cell.shapes[0].output, cell.expect_refusal) for cell in cells] == [(1, False), (2, True), (32, True), (256, True)]


def test_the_same_boundary_is_not_applicable_to_a_smaller_artifact() -> None:
    cells, lost = expand(a_matrix({"kind": "boundary", "prompt": 40959}), BATCH)
    assert ids(cells) == [f"boundary/p40959/o{n}/refused/greedy/stream" for n in (2, 32, 256)]
    assert lost[0].reason == "needs 40959 + 1 tokens, the served artifact's context has 4096"


def test_a_boundary_of_the_context_follows_the_artifact() -> None:
    cells, _ = expand(a_matrix({"kind": "boundary", "prompt": "context", "refused_outputs": [2]}), BATCH)
    assert ids(cells) == ["boundary/p4095/o1/greedy/stream", "boundary/p4095/o2/refused/greedy/stream"]


def test_a_server_that_does_not_tell_its_context_proves_nothing_by_a_refusal() -> None:
    cells, lost = expand(a_matrix({"kind": "boundary", "prompt": 100}), FOREIGN)
    assert ids(cells) == ["boundary/p100/o1/greedy/stream"]
    assert len(lost) == 3


def test_only_proven_batch_profiles_are_measured_lane_by_lane() -> None:
    cells, lost = expand(a_matrix({"kind": "lanes", "profiles": [4, 16], "prompt": 8, "output": 8}), BATCH)
    assert [cell.active_lanes for cell in cells] == [1, 2, 3, 4]
    assert [cell.concurrency for cell in cells] == [2, 4, 6, 8], "on each of two boards"
    assert len(lost) == 16
    assert lost[0].reason == "the served artifact has no B16 (it has B1, B4, B8)"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([{"kind": "sideways"}], r"\$\.cells\[0\]"),
        ([{"kind": "closed", "concurrency": [0], "prompt": 1, "output": 1}], r"\$\.cells\[0\]\.concurrency\[0\]"),
        ([{"kind": "mixed", "classes": [{"name": "a", "share": 1, "prompt": 1, "output": 1}]}], "needs qps"),
        ([{"kind": "single", "prompts": [1], "outputs": [1], "speed": 3}], "speed"),
        ([], r"\$\.cells"),
    ],
)
def test_a_wrong_matrix_is_refused_by_path(cells: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        a_matrix(*cells)


# ---------------------------------------------------------------- cells -> requests
SINGLE = {"kind": "single", "prompts": [17], "outputs": [4]}


def test_a_prompt_has_exactly_its_length_and_the_request_its_limit() -> None:
    body = json.loads(sent(a_cell(**SINGLE), 1)[0].asked.body)
    assert len(body["prompt"]) == 17
    assert all(33 <= token < 123 for token in body["prompt"])
    assert body["calculet"] == {"timing": True}
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (4, 0, True, True)


def test_equal_seeds_send_equal_bytes_and_rounds_repeat_the_samples() -> None:
    first, again = sent(a_cell(**SINGLE), 5), sent(a_cell(**SINGLE), 5, round_=1)
    assert [one.asked.body for one in first] == [one.asked.body for one in again]
    assert len({one.asked.body for one in first}) == 5, "but every sample of a cell is another prompt"
    assert len({one.asked.request_id for one in (*first, *again)}) == 10
    assert uuid.UUID(first[0].asked.request_id).version == 4, "there are servers that refuse any other label"


def test_a_foreign_server_never_gets_the_same_prompt_twice() -> None:
    cell = a_cell(**SINGLE)
    bodies = [one.asked.body for round_ in (0, 1) for one in sent(cell, 5, round_=round_, foreign=True)]
    assert len(set(bodies)) == 10


def test_business_sampling_has_fixed_seeds() -> None:
    cell = a_cell(**SINGLE, sampling=["sampled"])
    seeds = [json.loads(one.asked.body)["seed"] for one in sent(cell, 3)]
    assert seeds == [1234, 1235, 1236]
    assert json.loads(sent(cell, 1)[0].asked.body)["temperature"] == 0.7


def test_chat_has_messages_of_words() -> None:
    manifest = msgspec.structs.replace(MAN, server=msgspec.structs.replace(MAN.server, api="chat"))
    sender = sender_of(manifest, a_matrix(SINGLE), foreign=False)
    body = json.loads(requests_of(sender, a_cell(**SINGLE), 0, 1, "run")[0].asked.body)
    assert len(body["messages"][0]["content"].split()) == 17
    assert sender.path == "/v1/chat/completions"


def test_extra_fields_go_into_every_body() -> None:
    server = msgspec.structs.replace(MAN.server, extra_body={"cache_prompt": False}, ignore_eos=False)
    sender = sender_of(msgspec.structs.replace(MAN, server=server), a_matrix(SINGLE), foreign=False)
    body = json.loads(requests_of(sender, a_cell(**SINGLE), 0, 1, "run")[0].asked.body)
    assert body["cache_prompt"] is False
    assert "ignore_eos" not in body


def test_poisson_gaps_are_exponential_with_the_asked_rate() -> None:
    offsets = [one.asked.offset_ns for one in sent(a_cell(kind="poisson", qps=[50], prompt=1, output=1), 4000)]
    gaps = [(after - before) / 1e9 for before, after in itertools.pairwise(offsets)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1), "an exponential's deviation is its mean"
    assert offsets == sorted(offsets)


def test_mixed_traffic_keeps_its_shares_exactly() -> None:
    classes = [
        {"name": name, "share": share, "prompt": 1 + share, "output": 1} for name, share in (("a", 70), ("b", 20), ("c", 10))
    ]
    cell = a_cell(kind="mixed", classes=classes, concurrency=[2])
    for round_ in (0, 1):
        names = [one.case.class_name for one in sent(cell, 30, round_=round_)]
        assert [names.count(name) for name in "abc"] == [21, 6, 3]
    assert [one.case.class_name for one in sent(cell, 30)] != [one.case.class_name for one in sent(cell, 30, round_=1)]


def test_long_prompts_arrive_while_short_answers_are_decoded() -> None:
    spec = {"short": 3, "short_prompt": 4, "short_output": 64, "long_prompt": 512, "after_ms": 250}
    cells, _ = expand(a_matrix({"kind": "interference", **spec}), BATCH)
    alone, both = cells
    assert (alone.group, both.group) == (3, 4)
    requests = sent(both, 5)
    assert len(requests) == 8, "whole groups only"
    assert [(one.case.class_name, one.asked.offset_ns, one.asked.group) for one in requests[:4]] == [
        ("short", 0, 0), ("short", 0, 0), ("short", 0, 0), ("long", 250_000_000, 0),
    ]  # fmt: skip


# ---------------------------------------------------------------- plan
def a_plan(*cells: dict[str, Any], cut: Cut | None = None, facts: ServerFacts = BATCH, **fields: Any) -> Any:
    return build_plan(MAN, a_matrix(*cells, **fields), facts, cut)


CELLS = (
    {"kind": "single", "prompts": [1, 16, 64, 128, 1024], "outputs": [1, 16]},
    {"kind": "closed", "concurrency": [4], "prompt": 2000, "output": 8},
)


def test_short_cells_get_100_samples_and_others_30() -> None:
    plan = a_plan(*CELLS)
    counts = {item.cell.id: item.count for item in plan.items}
    assert counts["single/p16/o16/greedy/stream"] == 100
    assert counts["single/p1024/o16/greedy/stream"] == 30
    assert counts["closed/c4/p2000/o8/greedy/stream"] == 30
    assert plan.shortened == [], "nothing is cut"


def test_everything_that_is_cut_is_labelled() -> None:
    plan = a_plan(*CELLS, cut=Cut(idle_s=5, max_requests=10, warmups=2))
    cuts = {cut.what: (cut.asked, cut.done) for cut in plan.shortened}
    assert cuts["idle sampling"] == (300, 5)
    assert cuts["warm-up of each shape"] == (10, 2)
    assert cuts["samples of single/p16/o1/greedy/stream"] == (100, 10)
    assert len(cuts) == 2 + 11


def test_rounds_split_the_samples_and_shuffle_anew_by_the_seed() -> None:
    plan = a_plan(*CELLS, rounds=3)
    orders = [[item.cell.id for item in plan.items if item.round == round_] for round_ in range(3)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert orders[0] != orders[1]
    assert [item.name for item in plan.items] == [item.name for item in a_plan(*CELLS, rounds=3).items]
    assert sum(item.count for item in plan.items if item.cell.id == "single/p16/o16/greedy/stream") == 100


def test_no_round_has_fewer_requests_than_users_or_half_a_burst() -> None:
    closed = {"kind": "closed", "concurrency": [16], "prompt": 1, "output": 1, "requests": 20}
    plan = a_plan(closed, {"kind": "burst", "sizes": [8], "prompt": 1, "output": 1, "requests": 24}, rounds=2)
    assert {(item.cell.kind, item.round): item.count for item in plan.items} == {
        ("closed", 0): 16, ("closed", 1): 16, ("burst", 0): 16, ("burst", 1): 8,
    }  # fmt: skip


def test_each_shape_is_warmed_up_once_and_refusals_never() -> None:
    cell = a_cell(**SINGLE)
    assert [(shape.prompt, shape.output) for shape in warm_shapes(cell, set())] == [(17, 4)]
    assert warm_shapes(cell, {(17, 4)}) == []
    assert warm_shapes(msgspec.structs.replace(cell, expect_refusal=True), set()) == []


# ---------------------------------------------------------------- facts
CALCULET = {
    "data": [
        {"id": "toy", "max_model_len": 4096, "calculet": {
            "calbin_sha256": "a" * 64, "profiles": [1, 4], "generations": {"board0": 3, "board1": 3}, "backend": "sim"}},
        {"id": "other", "max_model_len": 9},
    ]
}  # fmt: skip


def test_what_a_calculet_tells_is_understood() -> None:
    version = {"version": "0.1.0", "commit": "abc", "boards": [
        {"board": name, "alias": "toy", "chips": 2, "device": {"driver": "1.2", "runtime": "0.7.6", "serial_hash": name + "h"}}
        for name in ("board0", "board1")
    ]}  # fmt: skip
    facts = facts_of("toy", CALCULET, version)
    assert (facts.foreign, facts.context, facts.profiles, facts.boards, facts.generation) == (False, 4096, (1, 4), 2, 3)
    assert (facts.driver, facts.chips, facts.firmware, facts.calrt, facts.server_commit) == ("1.2", 2, None, "0.7.6", "abc")
    assert facts.board_serial_hash == "board0h,board1h"


@pytest.mark.parametrize("models", [None, {}, {"data": None}, {"data": [{"id": "toy"}]}, [], "x"])
def test_a_foreign_server_may_tell_nothing(models: Any) -> None:
    facts = facts_of("toy", models, None)
    assert (facts.foreign, facts.context, facts.profiles, facts.generation, facts.driver) == (True, None, None, None, None)


def test_boards_of_different_generations_have_no_common_one() -> None:
    models = json.loads(json.dumps(CALCULET))
    models["data"][0]["calculet"]["generations"]["board1"] = 4
    assert facts_of("toy", models, None).generation is None


def test_a_sender_is_the_same_for_the_same_inputs() -> None:
    assert isinstance(sender_of(MAN, a_matrix(SINGLE), foreign=True), Sender)
    assert sender_of(MAN, a_matrix(SINGLE), foreign=True) == sender_of(MAN, a_matrix(SINGLE), foreign=True)


# ---------------------------------------------------------------- stages
def test_every_stage_of_the_rules_has_a_load() -> None:
    from calculet_perf.shell.loading import load_rules

    assert set(LOADS) == set(load_rules()[0].stages)


def test_bursts_come_periodically_and_of_every_size() -> None:
    cells = [segment(LOADS["release"], "release", number, 2.0, 300, None, 1.0).cell for number in range(48)]
    assert [number for number, cell in enumerate(cells) if cell.arrival == "burst"] == [11, 23, 35, 47]
    assert [cell.concurrency for cell in cells if cell.arrival == "burst"] == [2, 4, 8, 16]
    assert {cell.qps for cell in cells if cell.arrival == "poisson"} == {2.0}


def test_a_development_soak_is_at_70_percent_and_a_smoke_is_one_user() -> None:
    assert segment(LOADS["dev"], "dev", 0, 10.0, 100, None, 1.0).cell.qps == pytest.approx(7.0)
    smoke = segment(LOADS["smoke"], "smoke", 0, None, 100, None, 0.5)
    assert (smoke.cell.concurrency, smoke.count) == (1, 50)


def test_traffic_that_a_context_cannot_hold_is_left_out() -> None:
    names = [shape.name for shape in segment(LOADS["candidate"], "candidate", 0, 1.0, 100, 4096, 1.0).cell.shapes]
    assert names == ["short", "medium"]
    (shape,) = segment(LOADS["dev"], "dev", 0, 1.0, 100, 40, 1.0).cell.shapes
    assert shape.prompt + shape.output <= 40
