"""Building packages: signed, repeatable, found out when anything in them is touched, and nothing is left of a failure."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from calculet_core.artifact import sign_manifest
from calculet_core.capacity import GIB
from calculet_core.errors import ArtifactError
from calculet_core.shell.packages import load_keys, read_package, read_private_key, verify_package
from calculet_worker.commands.build_package import build_package, build_package_command, keygen_command, make_keys
from calculet_worker.commands.recipes import RECIPES, Options
from calculet_worker.device.sim_rule import profile_of, reference_tokens

QUICK = Options(step_ms=0.0, context=256, lanes=8)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_keys(tmp_path_factory.mktemp("keys"), "dev")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    out = tmp_path_factory.mktemp("built") / "package"
    build_package("sim-batch", out, read_private_key(keys[0]), QUICK)
    return out


def test_a_package_verifies_with_the_key_that_signed_it(built: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    package = verify_package(built, load_keys([keys[1]]))
    assert package.verified_by is not None
    stranger = make_keys(tmp_path, "stranger")[1]
    with pytest.raises(ArtifactError, match="not trusted"):
        verify_package(built, load_keys([stranger]))


@pytest.mark.parametrize("name", ["chat_template.jinja", "golden.jsonl", "manifest.yaml", "model.sim"])
def test_any_file_that_was_touched_is_found(built: Path, keys: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    assert name in {path.name for path in copy.iterdir()}
    with (copy / name).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        verify_package(copy, load_keys([keys[1]]))


def test_a_file_that_was_added_or_taken_is_found(built: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    (copy / "extra").write_text("x")
    with pytest.raises(ArtifactError, match="extra is not listed"):
        verify_package(copy, load_keys([keys[1]]))
    (copy / "extra").unlink()
    (copy / "model.sim").unlink()
    with pytest.raises(ArtifactError, match=r"model\.sim is missing"):
        verify_package(copy, load_keys([keys[1]]))


def test_another_manifest_with_the_old_signature_is_found(built: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    text = (copy / "manifest.yaml").read_text()
    (copy / "manifest.yaml").write_text(text.replace("lanes: 8", "lanes: 9"))
    with pytest.raises(ArtifactError, match="does not match"):
        verify_package(copy, load_keys([keys[1]]))
    (copy / "manifest.sig").write_bytes(sign_manifest((copy / "manifest.yaml").read_bytes(), read_private_key(keys[0])))
    assert verify_package(copy, load_keys([keys[1]])).manifest.lanes == 9


def test_the_same_recipe_gives_the_same_digest(built: Path, tmp_path: Path) -> None:
    again = build_package("sim-batch", tmp_path / "again", None, QUICK)
    assert again.digest == read_package(built).digest
    other = build_package("sim-batch", tmp_path / "other", None, Options(step_ms=1.0, context=256, lanes=8))
    assert other.digest != again.digest


def test_golden_cases_are_what_an_honest_board_says(built: Path) -> None:
    package = read_package(built)
    assert len(package.golden) >= 3
    for case in package.golden:
        assert case.gated() == reference_tokens(package.manifest, case.prompt_token_ids, len(case.expected_token_ids))
        assert min(case.margins) >= case.min_margin > 0


def test_the_baseline_has_the_specifications_sizes_and_claims_nothing(tmp_path: Path) -> None:
    manifest = build_package("qwen3-sim", tmp_path / "qwen3", None, Options(step_ms=0.0)).manifest
    capacity = manifest.capacity
    sizes = [round(size / GIB, 3) for size in (capacity.parameters_bytes, capacity.kv_bytes, capacity.reserved_bytes)]
    assert sizes == [16.938, 3.750, 28.150] and capacity.inferred
    assert (manifest.compiled_batches, manifest.context, manifest.lanes, manifest.abilities) == ((1,), 40_960, 1, {})
    assert manifest.profile(1).kv_layout.bytes_per_token * manifest.context * manifest.lanes == capacity.kv_bytes


def test_the_baselines_shape_cannot_be_varied(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="are the product's"):
        build_package("qwen3-sim", tmp_path / "qwen3", None, Options(lanes=4))
    assert list(tmp_path.iterdir()) == [], "nothing is left of a build that failed"


def test_test_artifacts_take_their_step_time_and_shape_from_the_options(tmp_path: Path) -> None:
    manifest = build_package("sim-b1", tmp_path / "b1", None, Options(step_ms=1.5, context=128, lanes=3)).manifest
    assert (profile_of(manifest).step_ns(1), manifest.context, manifest.lanes, manifest.compiled_batches) == (1_500_000, 128, 3, (1,))
    assert "qwen" not in manifest.name


def test_an_existing_package_is_replaced_only_by_force_and_anything_else_never(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    with pytest.raises(ArtifactError, match="is there already"):
        build_package("sim-batch", copy, None, QUICK)
    build_package("sim-b1", copy, None, QUICK, force=True)
    assert read_package(copy).manifest.name == "sim-b1"
    precious = tmp_path / "precious"
    precious.mkdir()
    with pytest.raises(ArtifactError, match="is no package"):
        build_package("sim-b1", precious, None, QUICK, force=True)
    assert precious.exists()


def test_a_private_key_is_its_owners_and_is_never_replaced(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "dev")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes()
    done = CliRunner().invoke(keygen_command, [str(tmp_path), "--name", "dev"])
    assert done.exit_code == 1 and "never replaced" in done.output
    assert private.read_bytes() == before
    assert len(load_keys([public])) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--out", "x"], "'nothing' is not one of"),
        (["sim-b1", "--out", "x", "--key", "gone.pem"], "gone.pem: No such file or directory"),
        (["sim-b1", "--out", "x", "--lanes", "0"], "--lanes"),
        (["sim-b1"], "--out"),
    ],
)
def test_wrong_arguments_get_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(build_package_command, arguments)
    assert done.exit_code in (1, 2) and message in done.output
    assert "Traceback" not in done.output and list(tmp_path.iterdir()) == []


def test_there_is_a_recipe_for_everything_that_make_builds() -> None:
    assert {"qwen3-sim", "sim-batch", "sim-b1", "smollm2"} <= set(RECIPES)
