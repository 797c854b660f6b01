"""Where signed packages are kept for rollback: a folder per digest, complete and synced or not there (scheduling §11).

What an operator loads is copied, and the copy is verified and then used, so that nobody can change it afterwards under its path.
What the configuration names is kept by hard links where the file system allows it: enough to go back to when its folder is
replaced.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from calculet_core.artifact import MANIFEST_NAME, SIGNATURE_NAME, Package, parse_manifest, sha256_hex
from calculet_core.errors import ArtifactError
from calculet_core.shell.files import read_bounded, sync_folder, write_atomic
from calculet_core.shell.fleet import Fleet
from calculet_core.shell.packages import read_package, verify_package

MAX_MANIFEST_BYTES = 4 << 20
log = logging.getLogger("calculet.artifacts")


class ArtifactStore:
    """Packages by digest in `folder`. Its methods block on the disk: call them on a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Where that package is, or would be."""
        return self._folder / digest

    def holds(self, digest: str) -> bool:
        """Whether it is kept."""
        return self.path(digest).is_dir()

    def take(self, source: Path, keys: Sequence[Ed25519PublicKey]) -> Package:
        """Copy a package, verify the copy, and keep it.

        Raises:
            ArtifactError: it is not what its signature says; nothing is kept of it.
            OSError: the disk.
        """
        digest = read_package(source).digest
        if self.holds(digest):
            verify_package(source, keys)
            return self.verify(digest, keys)
        temporary = self._empty(digest)
        try:
            _copy(source, temporary)
            try:
                found = verify_package(temporary, keys)
            except ArtifactError as error:  # people know where they put it, not where it was copied to
                raise ArtifactError(str(error).replace(str(temporary), str(source))) from None
            if found.digest != digest:
                raise ArtifactError(f"{source}: it changed while it was copied")
            self._settle(temporary, digest)
        except BaseException:
            _remove(temporary)
            raise
        return read_package(self.path(digest))

    def verify(self, digest: str, keys: Sequence[Ed25519PublicKey]) -> Package:
        """A kept package, verified in full.

        Raises:
            ArtifactError: it is not there, or was damaged.
        """
        found = verify_package(self.path(digest), keys)
        if found.digest != digest:
            raise ArtifactError(f"{self.path(digest)}: holds {found.digest[:12]}")
        return found

    def keep(self, package: Package) -> bool:
        """Keep what lies elsewhere, large files by hard links; False where that cannot be done, or where something else lies there
        by now. What it says of itself is copied: who edits it in place shall not edit what is kept."""
        if self.holds(package.digest):
            return True
        temporary = self._empty(package.digest)
        said = (MANIFEST_NAME, SIGNATURE_NAME, package.manifest.golden)
        try:
            for path, name in _walk(package.root):
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                if name in said:
                    shutil.copyfile(path, temporary / name, follow_symlinks=False)
                    (temporary / name).chmod(0o440)
                else:
                    os.link(path, temporary / name)
            if read_package(temporary).digest != package.digest:
                raise ArtifactError(f"{package.root}: holds another package by now")
            self._settle(temporary, package.digest, shared=True)
        except (OSError, ArtifactError) as error:
            log.info("package %s is not kept by links: %s", package.digest[:12], error)
            _remove(temporary)
            return False
        return True

    def sweep(self, wanted: Collection[str]) -> None:
        """Remove what nobody can go back to any more, and what a crash has left."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in wanted:
                log.info("removes %s", path.name[:12])
                _remove(path)

    def _empty(self, digest: str) -> Path:
        temporary = self._folder / f".{digest}.{os.getpid()}"
        _remove(temporary)
        temporary.mkdir(parents=True, mode=0o750)
        return temporary

    def _settle(self, temporary: Path, digest: str, shared: bool = False) -> None:
        """Everything of it reaches the disk before its name does. The mode of files that are shared is left alone."""
        for folder, _, names in os.walk(temporary, topdown=False):
            for name in names:
                path = Path(folder) / name
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                    if not shared:
                        os.fchmod(fd, 0o440)
                finally:
                    os.close(fd)
            sync_folder(Path(folder))
            Path(folder).chmod(0o550)
        temporary.rename(self.path(digest))
        sync_folder(self._folder)


def artifacts_of(fleet: Fleet) -> ArtifactStore:
    """Where a fleet keeps them."""
    return ArtifactStore(fleet.state_dir / "artifacts")


def remember(fleet: Fleet, packages: Collection[Package]) -> None:
    """Copy the manifests of what is served, whatever file system the packages are on, and forget others'. Blocks on the disk."""
    for package in packages:
        target = _manifest(fleet, package.digest)
        if target.exists():
            continue
        with suppress(OSError):
            data = read_bounded(package.root / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            if sha256_hex(data) == package.digest:
                write_atomic(target, data)
    known = {_manifest(fleet, package.digest) for package in packages}
    for path in fleet.manifests.iterdir() if fleet.manifests.is_dir() else ():
        if path not in known:
            path.unlink(missing_ok=True)


def recall(fleet: Fleet, digest: str) -> Package | None:
    """A remembered package: its manifest, and nothing that could be loaded; None: it is not remembered, or was damaged."""
    path = _manifest(fleet, digest)
    with suppress(OSError, ArtifactError):
        data = read_bounded(path, MAX_MANIFEST_BYTES)
        if sha256_hex(data) == digest:
            return Package(path, parse_manifest(data, str(path)), digest, ())
    return None


def _manifest(fleet: Fleet, digest: str) -> Path:
    return fleet.manifests / f"{digest}.yaml"


def check_trusted(path: Path) -> Path:
    """The package's real folder, if nobody but its owner could have written it (scheduling §11 step 1).

    Raises:
        ArtifactError: there is none, or somebody else can write to it or to a folder on the way.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: no such package folder ({getattr(error, 'strerror', None) or error})") from None
    if not real.is_dir():
        raise ArtifactError(f"{real}: not a folder")
    for folder in (real, *real.parents):
        _check_owner(folder)
    for found, _ in _walk(real):
        _check_owner(found)
    return real


def _check_owner(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise ArtifactError(f"{path}: belongs to uid {found.st_uid}; a trusted path belongs to root or to uid {os.geteuid()}")
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise ArtifactError(f"{path}: everybody can write to it (mode {stat.S_IMODE(found.st_mode):o}): chmod o-w {path}")
    if found.st_mode & stat.S_IWGRP and not sticky and found.st_gid not in (0, os.getegid()):
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise ArtifactError(f"{path}: group {found.st_gid} can write to it (mode {mode}): chmod g-w {path}")


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """Files with their relative names; symbolic links and anything odd are refused."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            raise ArtifactError(f"{root}: {name} is a symbolic link; a package holds only plain files")
        if path.is_file():
            yield path, name
        elif not path.is_dir():
            raise ArtifactError(f"{root}: {name} is neither a file nor a folder")


def _copy(source: Path, target: Path) -> None:
    for path, name in _walk(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        shutil.copyfile(path, target / name, follow_symlinks=False)


def _remove(path: Path) -> None:
    for folder, _, _ in os.walk(path):
        with suppress(OSError):
            Path(folder).chmod(0o750)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
