"""Configuration errors name the file, the path in it and what is wrong (scheduling §15)."""

from __future__ import annotations

from pathlib import Path

import pytest

from calculet_core.config import check_profiles, parse_fleet, parse_scheduler, run_dir_for
from calculet_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FLEET = """
schema: calculet-fleet/v1
boards: [{name: board0, device: sim}, {name: board1, device: sim}]
models: [{alias: qwen3, package: packages/qwen3}]
"""
SCHEDULER = "schema: calculet-scheduler/v1\nmodel_alias: qwen3\n"


def fleet_error(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text.encode(), "fleet.yaml")
    return str(caught.value)


def test_the_smallest_fleet_parses() -> None:
    config = parse_fleet(FLEET.encode(), "fleet.yaml")
    assert [board.name for board in config.boards] == ["board0", "board1"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_files_parse(path: Path) -> None:
    data = path.read_bytes()
    parse = parse_scheduler if b"calculet-scheduler/v1" in data else parse_fleet
    parse(data, path.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boards: [", "fleet.yaml: line 1, column 10: not valid YAML"),
        ("- 1", "fleet.yaml: $: expected a mapping, got list"),
        ("", "fleet.yaml: $: expected a mapping, got NoneType"),
        (FLEET + "colour: red\n", "fleet.yaml: $: Object contains unknown field `colour`"),
        (FLEET.replace("device: sim}]", "device: sim, speed: 2}]"), "fleet.yaml: $.boards[1]: Object contains unknown field `speed`"),
        (FLEET.replace("name: board1", "name: 7"), "fleet.yaml: $.boards[1].name: Expected `str`, got `int`"),
        (FLEET.replace("fleet/v1", "fleet/v2"), "fleet.yaml: $.schema: Invalid enum value 'calculet-fleet/v2'"),
        (FLEET.replace("name: board1", "name: board0"), "fleet.yaml: $.boards[1].name: 'board0' is there twice"),
        (FLEET.replace("packages/qwen3}", "packages/qwen3, boards: [board9]}"), "$.models[0].boards[0]: no board named 'board9'"),
        (FLEET.replace("packages/qwen3}", "packages/qwen3, boards: [board0]}"), "$.boards: no model is placed on board1"),
        (FLEET.replace("qwen3}]", "qwen3}, {alias: b, package: c}]"), "$.models[1].boards: board 'board0' already serves 'qwen3'"),
        (FLEET + "router: {listen: 8080}\n", "fleet.yaml: $.router.listen: Expected `str`, got `int`"),
        (FLEET + "router: {listen: nowhere}\n", "fleet.yaml: $.router.listen: Expected `str` matching regex"),
        (FLEET + "tenants: [{name: a}]\n", "$.tenants: one of them must be named 'default'"),
        (FLEET + "tenants: [{name: default, weight: 0}]\n", "fleet.yaml: $.tenants[0].weight: Expected `float` > 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_path(text: str, message: str) -> None:
    assert message in fleet_error(text)


def test_a_boards_co_residence_is_refused_by_its_level() -> None:
    assert "C3" in fleet_error(FLEET.replace("qwen3}]", "qwen3}, {alias: b, package: c}]"))


def test_the_specifications_defaults_are_kept() -> None:
    config = parse_scheduler(SCHEDULER.encode(), "s.yaml")
    assert (config.admission.max_waiting_requests, config.admission.max_waiting_prompt_tokens) == (128, 262_144)
    assert config.admission.deadline_default_ms == 120_000
    queues = config.queues
    weights = (queues.decode_weight, queues.short_prefill_weight, queues.medium_prefill_weight, queues.long_prefill_weight)
    assert weights == (8, 4, 2, 1)
    assert (queues.short_prefill_max_tokens, queues.medium_prefill_max_tokens) == (512, 4096)
    assert (config.batch.profiles, config.batch.batching_window_us) == ((1,), 0)
    assert (config.executor.max_inflight, config.executor.fixed_engine) == (1, False)
    assert (config.recovery.max_resets_per_10min, config.recovery.restart_on_unknown_dma) == (2, True)


def test_a_profile_that_the_manifest_does_not_have_stops_the_start() -> None:
    config = parse_scheduler((SCHEDULER + "batch: {profiles: [1, 8]}\n").encode(), "s.yaml")
    with pytest.raises(ConfigError) as caught:
        check_profiles(config, (1,), "3f2a" * 16, "s.yaml")
    assert str(caught.value) == "s.yaml: $.batch.profiles[1]: B8 is not in manifest 3f2a3f2a3f2a (it has B1)"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("batch: {profiles: []}", "$.batch.profiles: Expected `array` of length >= 1"),
        ("batch: {profiles: [1, 1]}", "$.batch.profiles: the same profile twice"),
        ("batch: {profiles: [1, 4], thresholds: {8: 5}}", "$.batch.thresholds[8]: B8 is not among"),
        ("batch: {profiles: [1, 4], thresholds: {4: 5}}", "$.batch.thresholds[4]: 5 ready sequences do not fit B4"),
        ("batch: {profiles: [1, 4, 8], thresholds: {4: 3, 8: 3}}", "$.batch.thresholds[8]: must be above the smaller profile's 3"),
        ("queues: {min_share: 0.3}", "$.queues.min_share: Expected `float` <= 0.25"),
        ("executor: {max_inflight: 3}", "$.executor.max_inflight: Expected `int` <= 2"),
        ("queues: {short_prefill_max_tokens: 5000}", "$.queues.medium_prefill_max_tokens: must be above"),
        ("admission: {deadline_default_ms: 700000}", "$.admission.deadline_default_ms: above deadline_max_ms"),
    ],
)
def test_scheduler_errors_name_their_path(extra: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scheduler((SCHEDULER + extra).encode(), "s.yaml")
    assert message in str(caught.value)


def test_a_deep_checkout_gets_a_short_run_folder() -> None:
    deep = "/" + "x" * 120 + "/run"
    assert run_dir_for("/run/calculet", 0) == "/run/calculet"
    assert len(run_dir_for(deep, 0)) < 60
    assert run_dir_for(deep, 0) == run_dir_for(deep, 0) != run_dir_for(deep + "2", 0)


SHARED = FLEET.replace("device: sim", "device: sim, time_shared: {min_residence_s: 5}", 1)


def test_models_may_take_turns_on_a_board_that_says_so() -> None:
    both = "qwen3, boards: [board0]}, {alias: b, package: c, boards: [board0]}, {alias: d, package: d, boards: [board1]}]"
    config = parse_fleet(SHARED.replace("qwen3}]", both).encode(), "f.yaml")
    shared = config.boards[0].time_shared
    assert shared is not None and (shared.min_residence_s, shared.max_wait_s, shared.max_waiting_requests) == (5.0, 30.0, 64)


def test_a_model_that_takes_turns_has_one_board() -> None:
    text = SHARED.replace("qwen3}]", "qwen3}, {alias: b, package: c, boards: [board0]}]")
    assert "$.models[0].boards: board 'board0' is time-shared; a model that takes turns has that board only" in fleet_error(text)


def test_co_residence_names_c3_and_what_can_be_done_instead() -> None:
    error = fleet_error(FLEET.replace("qwen3}]", "qwen3}, {alias: b, package: c}]"))
    assert "co-residence is C3: unproven" in error and "time_shared lets models take turns" in error


def test_a_model_on_one_chiplet_is_refused_by_its_level_and_what_is_missing() -> None:
    error = fleet_error(FLEET.replace("qwen3}]", "qwen3, chiplet: 0}]"))
    assert "$.models[0].chiplet" in error and "C3" in error and "configure, queue, memory and reset of one chip alone" in error


@pytest.mark.parametrize(
    "router, board, words",
    [
        ("{listen: '127.0.0.1:99999'}", "", r"\$.router.listen: 127.0.0.1:99999: the last port is 65535"),
        ("{listen: '127.0.0.1:81', admin_listen: '127.0.0.1:81'}", "", r"\$.router.admin_listen: 127.0.0.1:81 is \$.router.listen already"),
        ("{listen: '127.0.0.1:81'}", ", listen: '127.0.0.1:81'", r"\$.boards\[0\].listen: 127.0.0.1:81 is \$.router.listen already"),
    ],
)
def test_addresses_are_ports_and_nobody_has_anothers(router: str, board: str, words: str) -> None:
    text = f"{{schema: calculet-fleet/v1, models: [{{alias: a, package: p}}], router: {router}, boards: [{{name: b, device: sim{board}}}]}}"
    with pytest.raises(ConfigError, match=words):
        parse_fleet(text.encode(), "f")
