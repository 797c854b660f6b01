"""The fleet's configuration as read from disk, and where everything of a fleet lives.

Every process gets the same `--config FILE` and finds the rest from it. `run_dir` holds sockets and dies with the boot; `state_dir`
holds what must survive; `log_dir` holds journals.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from calculet_core.applying import Standing
from calculet_core.config import (
    BoardConfig,
    FleetConfig,
    ModelConfig,
    SchedulerConfig,
    boards_of,
    check_profiles,
    check_sizes,
    parse_fleet,
    parse_scheduler,
    run_dir_for,
)
from calculet_core.errors import ConfigError
from calculet_core.shell.files import read_bounded

STANDING = "standing.json"
"""In the run folder (`calculet_core.shell.standing`)."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A parsed `calculet-fleet/v1` file with its paths resolved."""

    config: FleetConfig
    path: Path
    run_dir: Path
    state_dir: Path
    log_dir: Path
    held: str | None = None
    """Why the file cannot be used: this is what was in force before. None: this is what the file says."""
    schedulers: Mapping[str, SchedulerConfig | None] | None = None
    """Of what is held; None: they are read from their files."""

    # ---------------------------------------------------------------- sockets
    @property
    def supervisor_socket(self) -> Path:
        """ZeroMQ ROUTER that workers and routers connect to."""
        return self.run_dir / "supervisor.sock"

    @property
    def control_socket(self) -> Path:
        """The operators' channel (`control_client`)."""
        return self.run_dir / "control.sock"

    @property
    def keeper_socket(self) -> Path:
        """The development keeper's channel, spoken by the supervisor only."""
        return self.run_dir / "keeper.sock"

    def worker_socket(self, board: str, epoch: int) -> Path:
        """Data socket of one life of a worker; a fresh path for every epoch."""
        return self.run_dir / f"w-{board}-{epoch}.sock"

    def metrics_socket(self, process: str) -> Path:
        """Where a process serves its metrics: `router`, `supervisor`, `worker-BOARD`."""
        return self.run_dir / f"m-{process}.sock"

    def limits(self, quantity: str) -> Path:
        """The ledger in which the fleet's processes share tenants' limits: `active` of the routers, `waiting` of the workers."""
        return self.run_dir / f"limits-{quantity}"

    # ---------------------------------------------------------------- files
    def board_lock(self, board: str) -> Path:
        """flock of the process that owns the board."""
        return self.state_dir / "boards" / f"{board}.lock"

    def board_epoch(self, board: str) -> Path:
        """Durable counter of the board's worker epochs; written under the board's lock."""
        return self.state_dir / "boards" / f"{board}.epoch"

    def board_exit(self, board: str) -> Path:
        """Exit class that a worker writes before it goes; absent after a kill."""
        return self.run_dir / f"exit-{board}.json"

    @property
    def standing(self) -> Path:
        """The configuration that a supervisor was in force with last, since the boot or `calculet up`."""
        return self.run_dir / STANDING

    @property
    def manifests(self) -> Path:
        """Copies of the manifests of what is served: a fleet goes on being managed when its packages cannot be read."""
        return self.state_dir / "manifests"

    @property
    def fleet_view(self) -> Path:
        """Last published `wire.FleetView`, as JSON."""
        return self.state_dir / "fleet-view.json"

    @property
    def store(self) -> Path:
        """The supervisor's SQLite memory."""
        return self.state_dir / "supervisor.sqlite"

    @property
    def keys(self) -> Path:
        """API keys, hashed (`calculet-keys/v1`); absent: nobody needs one."""
        return self.state_dir / "keys.json"

    @property
    def curve(self) -> Path:
        """Folder of the keys for tcp endpoints (`calculet_core.shell.curve`)."""
        return self.state_dir / "curve"

    @property
    def usage(self) -> Path:
        """Folder of the usage records, one file a day."""
        return self.state_dir / "usage"

    @property
    def supervisor_lock(self) -> Path:
        """flock of the fleet's one supervisor."""
        return self.state_dir / "supervisor.lock"

    def router_lock(self, name: str) -> Path:
        """flock of the router of that name: what its journal leaves open is its own affair while it lives."""
        return self.state_dir / f"{name}.lock"

    def log(self, process: str) -> Path:
        """What a process says: `router`, `supervisor`, `worker-BOARD`. Under the keeper its stderr; under systemd a copy."""
        return self.log_dir / f"{process}.log"

    def stacks(self, process: str) -> Path:
        """Where a worker's threads were when it was asked, or when it died (`calculet_core.shell.stacks`)."""
        return self.log_dir / f"{process}.stacks"

    @property
    def crashes(self) -> Path:
        """Folder of crash bundles."""
        return self.log_dir / "crashes"

    def journal(self, process: str) -> Path:
        """A process's journal: `router`, `supervisor`, `worker-BOARD`."""
        return self.log_dir / f"{process}.jsonl"

    def step_trace(self, board: str) -> Path:
        """A board's step trace (`calculet-step/v1`), while `trace.steps` is on."""
        return self.log_dir / "trace" / f"steps-{board}.jsonl"

    # ---------------------------------------------------------------- look-ups
    def resolve(self, path: str) -> Path:
        """A path of the configuration; relative ones start at the file's folder."""
        return (self.path.parent / path).resolve() if not Path(path).is_absolute() else Path(path)

    def board(self, name: str) -> BoardConfig:
        """The board of that name.

        Raises:
            ConfigError: there is none.
        """
        for board in self.config.boards:
            if board.name == name:
                return board
        known = ", ".join(board.name for board in self.config.boards)
        raise ConfigError(f"{self.path}: $.boards: no board named {name!r} (boards: {known})")

    def models_of(self, board: str) -> tuple[ModelConfig, ...]:
        """The models that are placed on the board: one, or more that take turns."""
        return tuple(model for model in self.config.models if board in boards_of(self.config, model))

    def model_of(self, board: str) -> ModelConfig:
        """The model that is placed on the board; of several that take turns the first."""
        return self.models_of(board)[0]

    def scheduler_of(self, alias: str) -> SchedulerConfig | None:
        """The alias's `calculet-scheduler/v1` file, or None when it names none.

        Raises:
            ConfigError: the file is missing or wrong, or is for another alias.
        """
        model = next((model for model in self.config.models if model.alias == alias), None)
        if model is None or model.scheduler is None:
            return None
        if self.schedulers is not None:
            return self.schedulers.get(alias)
        path = self.resolve(model.scheduler)
        config = parse_scheduler(read_config(path), str(path))
        if config.model_alias != alias:
            raise ConfigError(f"{path}: $.model_alias: {config.model_alias!r}, but {self.path} uses it for {alias!r}")
        return config

    def fingerprint(self) -> str:
        """Stands for all that the configuration says now: the fleet's file, its scheduler files, trusted keys; what cannot be read
        counts as empty."""
        named = [self.resolve(model.scheduler) for model in self.config.models if model.scheduler is not None]
        digest = hashlib.sha256()
        for path in (self.path, *named, *map(self.resolve, self.config.trusted_keys)):
            with suppress(OSError):
                digest.update(read_bounded(path))
            digest.update(b"\0")
        return digest.hexdigest()

    def check_profiles(self, alias: str, board: BoardConfig, proven: tuple[int, ...], digest: str) -> None:
        """Whether an artifact with the `proven` compiled batches has what the board, or else the alias's scheduler file, asks for.

        Raises:
            ConfigError: it has not, naming file and path; or the scheduler file is wrong.
        """
        if board.profiles is not None:
            check_sizes(board.profiles, proven, digest, f"{self.path}: $.boards[{self.config.boards.index(board)}].profiles")
        elif (scheduler := self.scheduler_of(alias)) is not None:
            model = next(model for model in self.config.models if model.alias == alias)
            check_profiles(scheduler, proven, digest, str(self.resolve(model.scheduler or "")))


def standing_of(fleet: Fleet) -> Standing:
    """The configuration with its scheduler files.

    Raises:
        ConfigError: a scheduler file is missing or wrong.
    """
    return Standing(fleet.config, {model.alias: fleet.scheduler_of(model.alias) for model in fleet.config.models})


def read_config(path: Path) -> bytes:
    """A configuration file's bytes.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_bounded(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def load_fleet(path: Path) -> Fleet:
    """Read and check a fleet file; creates nothing.

    Raises:
        ConfigError: names the file, the path in it and what is wrong.
    """
    path = path.resolve()
    config = parse_fleet(read_config(path), str(path))
    base = path.parent
    run_dir = run_dir_for(str((base / config.run_dir).resolve()), os.getuid())
    return Fleet(config, path, Path(run_dir), (base / config.state_dir).resolve(), (base / config.log_dir).resolve())


def make_folders(fleet: Fleet) -> None:
    """Create the fleet's folders, closed to others.

    Raises:
        ConfigError: a folder cannot be made, or the run folder belongs to somebody else.
    """
    for folder in (fleet.run_dir, fleet.state_dir, fleet.state_dir / "boards", fleet.log_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from None
    if fleet.run_dir.stat().st_uid != os.getuid():
        raise ConfigError(f"{fleet.run_dir}: belongs to another user")
