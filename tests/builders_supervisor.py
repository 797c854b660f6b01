"""Builders for the supervisor: reports, wishes, and a fleet of boards under a fake clock that does what the reconciler says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from calculet_core import history, wire
from calculet_core.artifact import sign_manifest
from calculet_core.batches import BatchProfile, KvLayout
from calculet_core.clock import MS, FakeClock
from calculet_core.config import RestartConfig, SupervisionConfig
from calculet_core.shell.packages import hash_file
from calculet_supervisor import world
from calculet_supervisor.reconcile import Reconciler
from calculet_supervisor.resets import Resets
from calculet_supervisor.world import BoardSeen, BoardWish, Desired, Exit, Observed, Placement

DIGEST = "d" * 64
PLACEMENT = Placement("toy", "/packages/toy", DIGEST)
ALIAS = wire.AliasView("toy", DIGEST, 4096, 1_700_000_000)


def a_report(board: str = "board0", epoch: int = 1, pid: int = 100, state: str = "UNLOADED", **fields: Any) -> wire.WorkerReport:
    return wire.WorkerReport(board, epoch, pid, wire.PROTOCOL, f"ipc:///run/w-{board}-{epoch}.sock", state, **fields)


def a_config(**restart: Any) -> SupervisionConfig:
    return SupervisionConfig(restart=RestartConfig(**restart))


class Bench:
    """Boards under a fake clock. `step` decides once and performs what a keeper and a worker would do of it."""

    def __init__(
        self,
        *boards: str,
        config: SupervisionConfig | None = None,
        resets: int = 2,
        view: wire.FleetView | None = None,
        restart_spends: Mapping[str, Iterable[int]] = {},
        asides: Mapping[str, world.WorkerAside] = {},
        fingerprint: str = "",
    ) -> None:
        names = boards or ("board0",)
        self.clock = FakeClock()
        self.config = config or SupervisionConfig()
        self.resets = Resets(dict.fromkeys(names, resets))
        self.wishes = {board: BoardWish(PLACEMENT) for board in names}
        self.aliases: tuple[wire.AliasView, ...] = (ALIAS,)
        self.decided: frozenset[str] = frozenset()
        self.frozen: str | None = None
        self.seen: dict[str, BoardSeen] = {}
        self.done: list[world.Action] = []
        self._pid, self._epoch, self._generation = 100, 0, 0
        self.reconciler = Reconciler(
            self.config, self.resets, random.Random(1), view or wire.FleetView(0), restart_spends, asides, fingerprint
        )

    # ---------------------------------------------------------------- the world
    def step(self, ms: int = 0) -> list[world.Action]:
        """Let time pass, decide, and once more after a new fault, as the shell does; only spawns are performed."""
        self.clock.advance(ms * MS)
        actions = self._decide()
        if any(isinstance(action, world.Note) and action.event == history.FLEET_FAULT_SEEN for action in actions):
            actions = [*actions, *self._decide()]
        return actions

    def _decide(self) -> list[world.Action]:
        desired = Desired(self.wishes, self.aliases, self.decided, self.frozen)
        actions = self.reconciler.decide(desired, Observed(dict(self.seen)), self.clock.now_ns())
        for action in actions:
            if isinstance(action, world.Spawn):
                self._pid += 1
                self.seen[action.board] = replace(self.seen.get(action.board, BoardSeen()), pid=self._pid)
        self.done += actions
        return actions

    def report(self, board: str = "board0", **fields: Any) -> wire.WorkerReport:
        """The worker reports; what is not said stays as it was."""
        seen = self.seen[board]
        assert seen.pid is not None
        if seen.report is None:
            self._epoch += 1
            report = a_report(board, self._epoch, seen.pid, **fields)
        else:
            report = msgspec.structs.replace(seen.report, **fields)
        self.seen[board] = replace(seen, report=report, report_ns=self.clock.now_ns())
        return report

    def exit(self, board: str = "board0", code: int | None = None, signal: int | None = 9, reason: str | None = None) -> None:
        seen = self.seen[board]
        how = Exit(code, None if code is not None else signal, reason)
        self.seen[board] = replace(seen, pid=None, report=None, exits=seen.exits + 1, last_exit=how)

    def serve(self, board: str = "board0") -> None:
        """Spawned, heard, loaded, Ready."""
        self.step()
        self.report(board)
        self.step()
        self._generation += 1
        command_seq = self.of(world.Load)[-1].seq
        self.report(board, state="READY", generation=self._generation, digest=DIGEST, alias="toy", command_seq=command_seq)
        self.step()

    def wish(self, board: str = "board0", **fields: Any) -> None:
        self.wishes[board] = replace(self.wishes[board], **fields)

    # ---------------------------------------------------------------- what was done
    def of(self, *kinds: type[Any]) -> list[Any]:
        return [action for action in self.done if isinstance(action, kinds)]

    def sent(self, kind: type[Any]) -> list[Any]:
        return [action.message for action in self.of(world.Send) if isinstance(action.message, kind)]

    def spawns(self, board: str = "board0") -> int:
        return sum(action.board == board for action in self.of(world.Spawn))

    def state(self, board: str = "board0") -> str:
        return self.reconciler.lives[board].state.name

    def view(self) -> world.Publish:
        return self.of(world.Publish)[-1]

    def crash_until_quarantined(self, limit: int = 20) -> int:
        """Let every life die at once; how many automatic restarts there were."""
        self.step()
        for restarts in range(limit):
            self.exit()
            self.step()
            if self.state() == "QUARANTINED":
                return restarts
            self.step(ms=self.config.restart.backoff_max_ms)
        raise AssertionError("it was restarted without end")


# ------------------------------------------------------------------------------------------------ real processes
def a_package(folder: Path) -> tuple[Path, Path]:
    """A signed package that nothing can run, and the public key to trust: enough for those who only start workers."""
    root = folder / "package"
    root.mkdir(parents=True)
    golden = {"name": "one", "prompt_token_ids": [1], "expected_token_ids": [2], "margins": [5.0]}
    (root / "golden.jsonl").write_text(json.dumps(golden))
    (root / "image.bin").write_bytes(b"image")
    files = {name: hash_file(root / name) for name in ("golden.jsonl", "image.bin")}
    manifest = {
        "schema": "calculet-artifact/v1", "name": "stub", "version": "1", "backend": "sim", "image": "image.bin",
        "image_sha256": files["image.bin"], "files": files, "golden": "golden.jsonl", "context": 128, "lanes": 4,
        "profiles": [msgspec.to_builtins(BatchProfile("one", 1, 128, "int32", "float32", KvLayout("dense", "float16", 2)))],
        "tokenizer": {"kind": "bytes", "vocab_size": 300},
        "capacity": {"parameters_bytes": 1, "kv_bytes": 1, "reserved_bytes": 2},
    }  # fmt: skip
    (root / "manifest.yaml").write_text(json.dumps(manifest))
    key = Ed25519PrivateKey.generate()
    (root / "manifest.sig").write_bytes(sign_manifest((root / "manifest.yaml").read_bytes(), key))
    trust = folder / "dev.pub"
    trust.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return root, trust
