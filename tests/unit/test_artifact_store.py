"""Packages to go back to: complete or not there, nobody else's to change, and gone when nobody can want them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders_supervisor import a_package

from calculet_core.config import parse_fleet
from calculet_core.errors import ArtifactError
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import load_keys, read_package
from calculet_supervisor.shell.artifacts import ArtifactStore, check_trusted, recall, remember


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_a_package_is_copied_verified_and_can_be_read_again(tmp_path: Path, store: ArtifactStore) -> None:
    source, trust = a_package(tmp_path / "source")
    keys = load_keys([trust])
    kept = store.take(source, keys)
    assert kept.root == store.path(kept.digest) != source
    (source / "image.bin").write_bytes(b"changed later")
    assert store.verify(kept.digest, keys).digest == kept.digest
    assert all(path.stat().st_mode & 0o222 == 0 for path in kept.root.rglob("*"))


def test_a_package_that_is_not_what_it_says_leaves_nothing_behind(tmp_path: Path, store: ArtifactStore) -> None:
    source, trust = a_package(tmp_path / "source")
    (source / "image.bin").write_bytes(b"swapped")
    with pytest.raises(ArtifactError, match=r"image\.bin was changed") as refused:
        store.take(source, load_keys([trust]))
    assert str(source) in str(refused.value) and str(tmp_path / "artifacts") not in str(refused.value), "names what was given"
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_what_is_kept_already_does_not_excuse_a_damaged_source_or_a_damaged_copy(tmp_path: Path, store: ArtifactStore) -> None:
    source, trust = a_package(tmp_path / "source")
    keys = load_keys([trust])
    kept = store.take(source, keys)
    (source / "image.bin").write_bytes(b"swapped")
    with pytest.raises(ArtifactError, match=r"image\.bin was changed"):
        store.take(source, keys)
    copy = kept.root / "image.bin"
    copy.chmod(0o640)
    copy.write_bytes(b"rotten")
    with pytest.raises(ArtifactError, match=r"image\.bin was changed"):
        store.verify(kept.digest, keys)


def test_links_outlive_the_folder_they_came_from(tmp_path: Path, store: ArtifactStore) -> None:
    source, trust = a_package(tmp_path / "source")
    package = read_package(source)
    assert store.keep(package) and store.keep(package)
    for path in sorted(source.iterdir()):
        path.unlink()
    source.rmdir()
    assert store.verify(package.digest, load_keys([trust])).digest == package.digest


def test_what_nobody_wants_and_what_a_crash_left_is_swept(tmp_path: Path, store: ArtifactStore) -> None:
    digests = []
    for number in range(3):
        source, trust = a_package(tmp_path / f"source{number}")
        (source / "manifest.yaml").write_text((source / "manifest.yaml").read_text().replace('"1"', f'"1.{number}"'))
        digests.append(read_package(source).digest)
        assert store.keep(read_package(source)) and trust
    (tmp_path / "artifacts" / f".{digests[0]}.99").mkdir()
    store.sweep({digests[1]})
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == [digests[1]]


# ------------------------------------------------------------------------------------------------ the trusted path
def test_a_path_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    source, _ = a_package(tmp_path / "source")
    assert check_trusted(source) == source.resolve()
    for path in (source / "image.bin", source, tmp_path / "source"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(ArtifactError, match="everybody can write to it"):
            check_trusted(source)
        path.chmod(mode)
    assert check_trusted(source)


def test_a_link_in_a_package_is_refused_and_a_link_to_it_is_followed(tmp_path: Path) -> None:
    source, _ = a_package(tmp_path / "source")
    (tmp_path / "current").symlink_to(source)
    assert check_trusted(tmp_path / "current") == source.resolve()
    (source / "out").symlink_to("/etc")
    with pytest.raises(ArtifactError, match="out is a symbolic link"):
        check_trusted(source)
    with pytest.raises(ArtifactError, match="no such package folder"):
        check_trusted(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_strangers_file_is_not_trusted(tmp_path: Path) -> None:
    source, _ = a_package(tmp_path / "source")
    os.chown(source / "image.bin", 12_345, -1)
    with pytest.raises(ArtifactError, match="belongs to uid 12345"):
        check_trusted(source)


def test_what_a_package_says_of_itself_is_kept_from_those_who_edit_it_in_place(tmp_path: Path, store: ArtifactStore) -> None:
    source, trust = a_package(tmp_path / "source")
    package = read_package(source)
    assert store.keep(package)
    assert (store.path(package.digest) / "image.bin").stat().st_ino == (source / "image.bin").stat().st_ino, "large files are links"
    for name in ("manifest.yaml", "manifest.sig", "golden.jsonl"):
        (source / name).write_bytes(b"edited in place")
    assert store.verify(package.digest, load_keys([trust])).digest == package.digest


def test_a_package_that_is_gone_or_replaced_by_now_is_not_kept_as_what_it_was(tmp_path: Path, store: ArtifactStore) -> None:
    source, _ = a_package(tmp_path / "source")
    package = read_package(source)
    source.rename(tmp_path / "away")
    assert not store.keep(package) and not store.holds(package.digest)
    source.mkdir()
    for path in (tmp_path / "away").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    manifest = (source / "manifest.yaml").read_text()
    (source / "manifest.yaml").write_text(manifest.replace('"version": "1"', '"version": "2"'))
    assert not store.keep(package) and not store.holds(package.digest)
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_manifests_of_what_is_served_are_remembered_and_those_of_others_forgotten(tmp_path: Path) -> None:
    text = b"{schema: calculet-fleet/v1, boards: [{name: b0, device: sim}], models: [{alias: toy, package: p}]}"
    fleet = Fleet(parse_fleet(text, "fleet.yaml"), tmp_path / "fleet.yaml", tmp_path, tmp_path / "state", tmp_path)
    package = read_package(a_package(tmp_path / "one")[0])
    remember(fleet, [package])
    assert (found := recall(fleet, package.digest)) is not None and found.manifest == package.manifest
    gone = replace(package, root=tmp_path / "nowhere")
    remember(fleet, [gone])
    assert recall(fleet, package.digest) is not None, "it stays when the package cannot be read any more"
    path = next(fleet.manifests.iterdir())
    path.chmod(0o640)
    path.write_bytes(path.read_bytes() + b" ")
    assert recall(fleet, package.digest) is None, "what was damaged is not believed"
    remember(fleet, [])
    assert list(fleet.manifests.iterdir()) == []
