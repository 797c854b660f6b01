"""Where prompts may be cut is proven on the device, or they are not cut (scheduling §6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders_sim import a_sim_package
from click.testing import CliRunner

from calculet_core.config import BoardConfig
from calculet_core.jobs import EngineBank, Job, JobHandle, JobKind, ReturnCode
from calculet_core.shell.packages import load_keys, read_package, read_private_key, verify_package
from calculet_worker.commands.build_package import build_package, make_keys
from calculet_worker.commands.prove import BOUNDARIES, PROOF_FILE, CutProof, ability_of, prove_command, prove_cuts
from calculet_worker.commands.recipes import Options
from calculet_worker.device.base import Device
from calculet_worker.device.sim import open_sim

QUICK = {"decode_ns": {"8": 0}, "prefill_token_ns": 0, "jitter": 0.0}


def proof_of(wrap: Callable[[Device], Any] = lambda device: device, candidates: tuple[int, ...] = (16, 32), **options: Any) -> CutProof:
    package = a_sim_package(context=512, **(QUICK | options))
    device = open_sim(BoardConfig("board", "sim"))
    assert device.configure(package, 1) is ReturnCode.OK
    try:
        return prove_cuts(wrap(device), package, candidates)
    finally:
        device.close()


class Wrapped:
    """A device whose prompts are something else's."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def submit(self, job: Job, engine: EngineBank = EngineBank.AUTO) -> JobHandle | ReturnCode:
        later = job.kind is JobKind.PREFILL and int(job.positions[0]) > 0
        changed = self.later_part(job) if later else job
        return changed if isinstance(changed, ReturnCode) else self.device.submit(changed, engine)

    def later_part(self, job: Job) -> Job | ReturnCode:
        raise NotImplementedError


class WithoutCuts(Wrapped):
    def later_part(self, job: Job) -> Job | ReturnCode:
        return ReturnCode.INVALID_SHAPE


class BlindToPositions(Wrapped):
    """Takes every part for the next one, wherever it says that it belongs: a fault that would hide misplaced tokens."""

    def later_part(self, job: Job) -> Job | ReturnCode:
        return msgspec.structs.replace(job, positions=job.positions - job.positions[0] + self.lengths())

    def lengths(self) -> int:
        graph = self.device._board._graph  # type: ignore[attr-defined]
        return int(graph.lengths[0])


def test_the_smallest_granularity_whose_every_cut_is_exact_is_earned() -> None:
    proof = proof_of(exact_cuts=1)
    assert proof.granularity == 16 and proof.continues and proof.misplaced_part_shows
    lengths = {trial.length for trial in proof.trials}
    assert {15 * 2, 17 * 2, 31, 32, 33, 47, 48, 49} <= lengths
    assert {odd for trial in proof.trials for odd in trial.cuts} >= {*BOUNDARIES, 31, 33}
    assert ability_of(proof) is not None


def test_a_proof_without_times_is_the_same_every_time() -> None:
    package = a_sim_package(context=512, **QUICK)
    proofs = []
    for _ in range(2):
        device = open_sim(BoardConfig("board", "sim"))
        assert device.configure(package, 1) is ReturnCode.OK
        proofs.append(prove_cuts(device, package, (16,), timed=False))
        device.close()
    assert proofs[0] == proofs[1] and proofs[0].candidates[0].cost_ratio is None


def test_cuts_that_change_numbers_are_recorded_as_such_and_never_used() -> None:
    proof = proof_of(exact_cuts=32)
    assert proof.granularity == 32
    exact = {tuple(trial.cuts): trial.exact for trial in proof.trials}
    assert exact[(32,)] and not exact[(16,)] and not exact[(31,)] and not exact[(33,)] and not exact[(15,)]
    assert [candidate.exact for candidate in proof.candidates] == [False, True]


def test_an_artifact_that_computes_no_cut_exactly_earns_none() -> None:
    proof = proof_of(exact_cuts=0)
    assert proof.granularity is None and ability_of(proof) is None and "never cut" in proof.conclusion
    assert proof.trials and not any(trial.exact for trial in proof.trials)


def test_a_device_that_refuses_to_continue_earns_none() -> None:
    proof = proof_of(WithoutCuts)
    assert not proof.continues and proof.granularity is None and proof.trials[0].greatest_difference is None


def test_a_device_that_does_not_mind_positions_earns_none_however_exact_its_cuts_are() -> None:
    proof = proof_of(BlindToPositions)
    assert all(candidate.exact for candidate in proof.candidates)
    assert not proof.misplaced_part_shows and proof.granularity is None and "position" in proof.conclusion


def test_a_candidate_too_large_for_the_context_is_not_tried() -> None:
    assert [candidate.granularity for candidate in proof_of(candidates=(16, 256)).candidates] == [16]


# ------------------------------------------------------------------------------------------------ packages
@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path / "keys", "dev")


def test_a_proven_package_is_another_artifact_signed_and_whole(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = tmp_path / "package"
    before = build_package("sim-b1", folder, read_private_key(keys[0]), Options(step_ms=0.0, context=256, lanes=2))
    assert "incremental_prefill" not in before.manifest.abilities
    done = CliRunner().invoke(prove_command, [str(folder), "--granularity", "16", "--key", str(keys[0])])
    assert done.exit_code == 0, done.output
    after = verify_package(folder, load_keys([keys[1]]))
    ability = after.manifest.abilities["incremental_prefill"]
    assert after.digest != before.digest and ability.granularity == 16 and PROOF_FILE in ability.evidence
    assert PROOF_FILE in after.manifest.files
    assert msgspec.json.decode((folder / PROOF_FILE).read_bytes(), type=CutProof).granularity == 16
    assert after.golden == read_package(folder).golden != ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "package"]


def test_the_simulated_baseline_earns_no_cut_and_without_a_key_nothing_is_written(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    folder = tmp_path / "qwen3"
    before = build_package("qwen3-sim", folder, read_private_key(keys[0]), Options(step_ms=0.0))
    done = CliRunner().invoke(prove_command, [str(folder), "--granularity", "16", "--granularity", "64"])
    assert done.exit_code == 1 and "never cut" in done.output
    assert verify_package(folder, load_keys([keys[1]])).digest == before.digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--option", "colour=red"], "colour"), (["--key", "gone.pem"], "gone.pem: No such file"), (["--granularity", "1"], "--granularity")],
)
def test_wrong_arguments_of_prove_get_one_clear_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    folder = tmp_path / "package"
    build_package("sim-b1", folder, None, Options(step_ms=0.0, context=256, lanes=2))
    done = CliRunner().invoke(prove_command, [str(folder), *arguments])
    assert done.exit_code in (1, 2) and message in done.output and "Traceback" not in done.output
