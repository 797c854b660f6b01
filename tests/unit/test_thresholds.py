"""Thresholds of batch profiles from measured steps (scheduling §8), and the command that measures them on a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from calculet_core.config import parse_scheduler
from calculet_core.shell.packages import read_package
from calculet_worker.__main__ import cli
from calculet_worker.commands.build_package import _with_hashes
from calculet_worker.commands.recipes import Options
from calculet_worker.scheduling.profiles import ProfileChooser, usable_profiles
from calculet_worker.scheduling.thresholds import Derived, derive, turn_ns

SIZES = (1, 4, 8, 16)


def flat(**steps: float) -> dict[int, dict[int, float]]:
    """A profile's steps take the same time with any number of lanes."""
    return {int(name[1:]): dict.fromkeys(range(1, int(name[1:]) + 1), value) for name, value in steps.items()}


def by_rows(base: float, row: float) -> dict[int, dict[int, float]]:
    """A step takes what its active lanes take, whatever the profile."""
    return {size: {active: base + row * active for active in range(1, size + 1)} for size in SIZES}


def test_a_larger_profile_pays_from_where_its_step_is_shorter_than_the_turns_of_the_smaller_one() -> None:
    found = derive(flat(b1=10, b4=25, b8=40, b16=70))
    assert (found.profiles, found.thresholds) == (SIZES, {4: 3, 8: 7, 16: 15})
    assert found.best[:4] == (1, 1, 4, 4), "two turns of B1 are 20, a step of B4 is 25"


def test_steps_that_cost_the_same_whatever_they_hold_are_taken_as_soon_as_the_smaller_is_full() -> None:
    assert derive(flat(b1=10, b4=10, b8=10, b16=10)).thresholds == {4: 2, 8: 5, 16: 9}
    assert derive(by_rows(10, 1)).thresholds == {4: 2, 8: 5, 16: 9}


def test_a_profile_that_is_never_best_is_left_out() -> None:
    assert derive(flat(b1=10, b4=100, b8=30)) == Derived((1, 8), {8: 4}, (1, 1, 1, 8, 8, 8, 8, 8))
    assert derive(flat(b1=10, b4=50)) == Derived((1,), {}, (1, 1, 1, 1)), "one after the other is faster"
    assert derive(flat(b1=10, b4=5)) == Derived((4,), {}, (4, 4, 4, 4)), "faster even for one"


def test_noise_is_no_reason_to_change() -> None:
    assert derive(flat(b1=10, b4=39)).thresholds == {}, "2.5 % is noise"
    assert derive(flat(b1=10, b4=38)).thresholds == {4: 4}


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match=r"B4: measured with \[1, 4\] active lanes, 1 to 4 are needed"):
        derive({1: {1: 1.0}, 4: {1: 1.0, 4: 1.0}})


@given(st.lists(st.lists(st.floats(1, 1000), min_size=16, max_size=16), min_size=4, max_size=4))
def test_whatever_is_measured_the_result_is_a_configuration_that_chooses_no_worse_than_one_profile(raw: list[list[float]]) -> None:
    times = {size: dict(enumerate(raw[index][:size], 1)) for index, size in enumerate(SIZES)}
    found = derive(times)
    section = {"profiles": list(found.profiles), "thresholds": found.thresholds}
    config = {"schema": "calculet-scheduler/v1", "model_alias": "m", "batch": section}
    batch = parse_scheduler(yaml.safe_dump(config).encode(), "it").batch
    assert (batch.profiles, batch.thresholds) == (found.profiles, found.thresholds)
    starts = [1, *(found.thresholds[size] for size in found.profiles[1:])]
    for ready in range(1, 17):
        chosen = max(size for size, start in zip(found.profiles, starts, strict=True) if ready >= start)
        smaller = [size for size in SIZES if size < found.best[ready - 1]]
        if chosen == found.best[ready - 1]:
            assert all(turn_ns(times[chosen], chosen, ready) < turn_ns(times[size], size, ready) for size in smaller)


# ---------------------------------------------------------------- on a device
@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated artifact whose steps take 1, 2.5, 4 and 12 ms."""
    from calculet_worker.commands.build_package import build_package

    folder = tmp_path_factory.mktemp("derive") / "package"
    build_package("sim-batch", folder, None, Options(step_ms=1.0, context=256, lanes=16))
    mapping = yaml.safe_load((folder / "manifest.yaml").read_bytes())
    mapping["backend_options"]["decode_ns"] = {"1": 1_000_000, "4": 2_500_000, "8": 4_000_000, "16": 12_000_000}
    _with_hashes(folder, mapping)
    return folder


def test_the_command_measures_active_lanes_and_prints_what_a_scheduler_file_wants(package: Path, tmp_path: Path) -> None:
    record = tmp_path / "thresholds.json"
    done = CliRunner().invoke(cli, ["derive-profiles", str(package), "--rounds", "3", "--record", str(record)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    section = yaml.safe_load(done.output[done.output.index("batch:") :])
    assert section == {"batch": {"profiles": [1, 4, 8], "thresholds": {4: 3, 8: 7}}}, "a step of 12 ms is slower than two of 4"
    written = json.loads(record.read_bytes())
    assert (written["schema"], written["device"], written["rounds"]) == ("calculet-thresholds/v1", "sim", 3)
    assert [row["active"] for row in written["steps"] if row["profile"] == 4] == [1, 2, 3, 4]
    assert all(row["typical_ns"] == 2_500_000 for row in written["steps"] if row["profile"] == 4)
    assert written["batch"] == {"profiles": [1, 4, 8], "thresholds": {"4": 3, "8": 7}}
    config = parse_scheduler(b"schema: calculet-scheduler/v1\nmodel_alias: m\n" + yaml.safe_dump(section).encode(), "it")
    manifest = read_package(package).manifest
    chooser = ProfileChooser(usable_profiles(manifest, config.batch.profiles), config.batch)
    assert [chooser.choose(ready, 0, None).compiled_batch for ready in (2, 3, 6, 7, 16)] == [1, 4, 4, 8, 8]


def test_long_contexts_are_begun_anew_when_they_are_full(package: Path) -> None:
    done = CliRunner().invoke(cli, ["derive-profiles", str(package), "--rounds", "2", "--prompt-tokens", "250"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt-tokens", "256"], "a prompt of 256 tokens leaves no room for a step in a context of 256"),
        (["--rounds", "0"], "--rounds"),
        (["--option", "chips=99"], "chips"),
        (["--record", "/dev/null/all.json"], "/dev/null/all.json: File exists"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(package: Path, arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["derive-profiles", str(package), "--rounds", "1", *arguments])
    assert done.exit_code in (1, 2) and says in done.output and "Traceback" not in done.output
