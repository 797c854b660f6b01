"""Which scheduler configuration a board gets: its alias's file, its own profiles, checked against the manifest (scheduling §8, §15)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calculet_core.artifact import Package
from calculet_core.errors import ConfigError
from calculet_core.shell.fleet import Fleet, load_fleet
from calculet_core.shell.packages import read_package, read_private_key
from calculet_supervisor.shell.checking import find_problems
from calculet_worker.commands.build_package import build_package, make_keys
from calculet_worker.commands.recipes import Options
from calculet_worker.shell.loading import check_configuration, scheduler_for


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("p") / "package"
    private, _ = make_keys(folder.parent, "dev")
    build_package("sim-batch", folder, read_private_key(private), Options(step_ms=0.0, context=128, lanes=8))
    return read_package(folder)


def a_fleet(folder: Path, package: Package, scheduler: bool, **board: object) -> Fleet:
    model = {"alias": "toy", "package": str(package.root)}
    if scheduler:
        (folder / "scheduler.yaml").write_text(
            json.dumps({"schema": "calculet-scheduler/v1", "model_alias": "toy", "batch": {"profiles": [1, 4], "batching_window_us": 300}})
        )
        model["scheduler"] = "scheduler.yaml"
    trust = [str(package.root.parent / "dev.pub")]
    config = {"schema": "calculet-fleet/v1", "trusted_keys": trust, "boards": [{"name": "b", "device": "sim", **board}], "models": [model]}
    (folder / "fleet.yaml").write_text(json.dumps(config))
    return load_fleet(folder / "fleet.yaml")


def test_a_board_without_profiles_of_its_own_has_its_aliass(tmp_path: Path, package: Package) -> None:
    fleet = a_fleet(tmp_path, package, True)
    config = scheduler_for(fleet, fleet.board("b"), "toy", package)
    assert config is not None and config.batch.profiles == (1, 4)
    assert scheduler_for(a_fleet(tmp_path, package, False), fleet.board("b"), "toy", package) is None


@pytest.mark.parametrize("scheduler", [True, False])
def test_a_board_of_a_pool_has_its_own_profiles_and_the_rest_of_the_file(tmp_path: Path, package: Package, scheduler: bool) -> None:
    fleet = a_fleet(tmp_path, package, scheduler, pool="throughput", profiles=[8])
    config = scheduler_for(fleet, fleet.board("b"), "toy", package)
    assert config is not None and config.batch.profiles == (8,)
    assert config.batch.batching_window_us == (300 if scheduler else 0)


def test_a_boards_profile_that_the_manifest_lacks_stops_the_start(tmp_path: Path, package: Package) -> None:
    fleet = a_fleet(tmp_path, package, True, profiles=[1, 16])
    with pytest.raises(ConfigError, match=r"\$\.boards\[0\]\.profiles\[1\]: B16 is not in manifest"):
        check_configuration(fleet, fleet.board("b"))
    (problem,) = find_problems(fleet)
    assert "$.boards[0].profiles[1]: B16 is not in manifest" in problem
