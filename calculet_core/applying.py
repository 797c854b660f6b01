"""What a change of the configuration asks of the processes that run: `calculet config plan` and `apply`.

A configuration with its scheduler files is a tree of leaves. One table says of every leaf who takes it, and when: live, or only at
its start. From that table alone follow the plan (what a difference needs) and two digests that each process tells in its reports:
of what it took at its start, and of what it holds live. So whether a process runs a configuration is a comparison, not a memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec

from calculet_core.config import FleetConfig, SchedulerConfig

Path = tuple[str, ...]
Leaves = dict[Path, Any]
NAMED = {"boards": "name", "tenants": "name", "models": "alias"}
"""Lists whose entries are told apart by a name, not by their place."""
SCHEDULERS = "schedulers"
ROLES = ("worker", "router")
DIGEST_LENGTH, VOCABULARY_LENGTH = 16, 8


class Take(StrEnum):
    """When a process takes a leaf."""

    LIVE = "live"
    START = "start"


LIVE, START = Take.LIVE, Take.START


@dataclass(frozen=True, slots=True)
class Rule:
    """Of the leaves below `pattern` (`*` is one name; the rest of the path is free). The supervisor takes everything by being born
    again, which nobody notices; None: the process has no use for it."""

    pattern: tuple[str, ...]
    worker: Take | None = None
    router: Take | None = None
    refused: str | None = None


def _rule(pattern: str, worker: Take | None = None, router: Take | None = None, refused: str | None = None) -> Rule:
    return Rule(tuple(pattern.split(".")), worker, router, refused)


MOVING = "everything that runs has its files there: stop the fleet, move them, start it"
KEEPER = "`calculet up` takes it when it starts"
RULES: tuple[Rule, ...] = (
    _rule("schema"),
    _rule("run_dir", refused=MOVING),
    _rule("state_dir", refused=MOVING),
    _rule("log_dir", refused=MOVING),
    _rule("boards.*.pool"),
    _rule("boards.*", worker=START, router=LIVE),
    _rule("models.*", router=LIVE),
    _rule("schedulers.*.admission", worker=START, router=LIVE),
    _rule("schedulers.*", worker=START),
    _rule("trusted_keys", worker=START),
    _rule("tenants", worker=LIVE, router=LIVE),
    _rule("router.listen", router=START),
    _rule("router.admin_listen", router=START),
    _rule("router.tls", router=START),
    _rule("router.lease_interval_ms", worker=START, router=START),
    _rule("router", router=LIVE),
    _rule("supervision.heartbeat_ms", worker=START),
    _rule("supervision.drain_timeout_ms", worker=START),
    _rule("supervision.service_timeout_ms", refused=KEEPER),
    _rule("supervision"),
    _rule("recovery", worker=START),
    _rule("rollout"),
    _rule("recall"),
    _rule("journal", worker=START, router=START),
    _rule("crashes"),
    _rule("usage", router=START),
    _rule("trace", worker=START),
    _rule("tracing", worker=START, router=START),
    _rule("constraints", worker=START, router=START),
    _rule("fault_injection", worker=START),
    _rule("chaos", worker=START, router=START),
    _rule("log", worker=LIVE, router=LIVE),
)
"""The first that matches."""


def rule_of(path: Path) -> Rule:
    """What holds of a leaf.

    Raises:
        KeyError: no rule does; a test holds the table against every key there is.
    """
    for rule in RULES:
        if len(rule.pattern) <= len(path) and all(want in ("*", name) for want, name in zip(rule.pattern, path, strict=False)):
            return rule
    raise KeyError(".".join(path))


# ------------------------------------------------------------------------------------------------ trees
@dataclass(frozen=True, slots=True)
class Standing:
    """One configuration with its scheduler files (None: the alias has none)."""

    fleet: FleetConfig
    schedulers: Mapping[str, SchedulerConfig | None]

    def encode(self) -> bytes:
        """For keeping; canonical."""
        schedulers = msgspec.to_builtins(self.schedulers, str_keys=True)
        tree = {"fleet": msgspec.to_builtins(self.fleet, str_keys=True), SCHEDULERS: schedulers}
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes) -> Standing:
    """Of what was kept; keys that are new since have their defaults.

    Raises:
        msgspec.ValidationError, ValueError: it was kept by a version whose keys are not known here.
    """
    tree = json.loads(data)
    schedulers = {
        alias: None if value is None else msgspec.convert(value, SchedulerConfig, strict=False)
        for alias, value in tree[SCHEDULERS].items()
    }
    return Standing(msgspec.convert(tree["fleet"], FleetConfig), schedulers)


def leaves_of(standing: Standing) -> Leaves:
    """Path -> value. Empty sections are leaves, too."""
    tree = msgspec.to_builtins(standing.fleet, str_keys=True)
    for section, key in NAMED.items():
        tree[section] = {entry[key]: {name: value for name, value in entry.items() if name != key} for entry in tree[section]}
    schedulers = msgspec.to_builtins(standing.schedulers, str_keys=True)
    tree[SCHEDULERS] = {alias: value for alias, value in schedulers.items() if value is not None}
    found: Leaves = {}

    def walk(value: Any, path: Path) -> None:
        if isinstance(value, dict) and value:
            for name, below in value.items():
                walk(below, (*path, str(name)))
        elif not isinstance(value, dict) or path[0] not in (*NAMED, SCHEDULERS):
            found[path] = value

    walk(tree, ())
    return found


def alias_of(leaves: Leaves, board: str) -> str | None:
    """The model that is placed on a board."""
    for path, value in leaves.items():
        if path[0] == "models" and path[2:] == ("boards",) and (not value or board in value):
            return path[1]
    return None


def boards_in(leaves: Leaves) -> list[str]:
    """In the order of the file."""
    return list(dict.fromkeys(path[1] for path in leaves if path[0] == "boards"))


# ------------------------------------------------------------------------------------------------ digests
def digest_of(leaves: Mapping[Path, Any]) -> str:
    """Short, and the same for the same leaves in any order."""
    data = json.dumps(sorted((list(path), value) for path, value in leaves.items()), separators=(",", ":"))
    return hashlib.sha256(data.encode()).hexdigest()[:DIGEST_LENGTH]


@cache
def vocabulary() -> str:
    """Which keys, defaults and rules this version of Calculet knows. Digests of two versions say nothing about each other."""

    def keys(cls: Any) -> list[Any]:
        found = []
        for field in msgspec.structs.fields(cls):
            info = msgspec.inspect.type_info(field.type)
            item = getattr(info, "item_type", info)
            below = keys(item.cls) if isinstance(item, msgspec.inspect.StructType) else None
            found.append([field.name, repr(field.default) if below is None else "", below])
        return found

    rules = [[rule.pattern, rule.worker, rule.router] for rule in RULES]
    data = json.dumps([keys(FleetConfig), keys(SchedulerConfig), rules])
    return hashlib.sha256(data.encode()).hexdigest()[:VOCABULARY_LENGTH]


def holds(told: str, wanted: str) -> bool | None:
    """Whether a process that tells one digest holds what the other one says; None: it does not say, or is of another version."""
    if not told or told.partition(".")[0] != wanted.partition(".")[0]:
        return None
    return told == wanted


def started_with(leaves: Leaves, role: str, board: str | None = None) -> str:
    """Digest, with the vocabulary, of what a worker of the board, or a router, takes only at its start."""
    alias = alias_of(leaves, board) if board is not None else None
    part = {path: value for path, value in leaves.items() if _take(path, role) is START and _is_about(path, board, alias)}
    return f"{vocabulary()}.{digest_of({**part, ('alias',): alias})}"


def live_with(leaves: Leaves, role: str) -> str:
    """The same of what a process of the role takes while it runs."""
    return f"{vocabulary()}.{digest_of({path: value for path, value in leaves.items() if _take(path, role) is LIVE})}"


def _take(path: Path, role: str) -> Take | None:
    rule = rule_of(path)
    return rule.worker if role == "worker" else rule.router


def _is_about(path: Path, board: str | None, alias: str | None) -> bool:
    if board is None or path[0] not in ("boards", SCHEDULERS):
        return True
    return path[1] == (board if path[0] == "boards" else alias)


# ------------------------------------------------------------------------------------------------ plans
@dataclass(frozen=True, slots=True)
class Change:
    """One difference. A named entry, or a scheduler file, that is there on one side only is one change; None: absent there."""

    path: Path
    old: Any
    new: Any
    live: bool
    """Whether somebody takes it while running (the supervisor is born again for it)."""
    boards: tuple[str, ...]
    """Whose worker is replaced after its drain, one at a time."""
    routers: bool
    """Routers take it only when their process is restarted."""
    refused: str | None

    @property
    def where(self) -> str:
        """`$.tenants[team-a].max_active`."""
        text = "$"
        for place, name in enumerate(self.path):
            text += f"[{name}]" if place == 1 and self.path[0] in (*NAMED, SCHEDULERS) else f".{name}"
        return text

    @property
    def how(self) -> str:
        """In a word or two, for people and programs."""
        if self.refused is not None:
            return "refused"
        if self.path[0] == "boards" and len(self.path) == 2:
            return "its worker drains and ends" if self.new is None else "its worker starts"
        parts = [f"restart of {', '.join(self.boards)}"] if self.boards else []
        parts += ["restart of the routers"] if self.routers else []
        return " and ".join(parts) or "live"


def changes(old: Leaves, new: Leaves, same_package: Callable[[str], bool]) -> list[Change]:
    """What differs, in the order of the new file, then what is gone.

    Args:
        same_package: whether the package that the new configuration names for an alias is what the alias stands for anyway.
    """
    kept = [board for board in boards_in(new) if board in boards_in(old)]
    moved = {board for board in kept if alias_of(old, board) != alias_of(new, board)}
    found: dict[Path, Change] = {}
    for path in dict.fromkeys((*new, *old)):
        if old.get(path, _ABSENT) == new.get(path, _ABSENT):
            continue
        is_named = path[0] in (*NAMED, SCHEDULERS)
        whole = path[:2] if is_named and not (_has(old, path[:2]) and _has(new, path[:2])) else path
        if whole not in found:
            found[whole] = _change(whole, old, new, kept, moved, same_package)
    return list(found.values())


def _change(
    path: Path, old: Leaves, new: Leaves, kept: list[str], moved: set[str], same_package: Callable[[str], bool]
) -> Change:
    rule = rule_of((*path, "*"))
    is_entry = path[0] in NAMED and len(path) == 2
    refused = rule.refused
    if path[0] == "models" and path[2:] == ("package",) and not same_package(path[1]):
        refused = f"a model is swapped with `calculet load {path[1]} DIR`, board by board and back when it fails"
    boards: tuple[str, ...] = ()
    if path[0] == "models":
        boards = tuple(board for board in kept if board in moved and path[1] in (alias_of(old, board), alias_of(new, board)))
    elif rule.worker is START and not (is_entry and path[0] == "boards"):
        boards = tuple(board for board in kept if _is_about(path, board, alias_of(new, board)))
    routers = rule.router is START
    return Change(path, _value(old, path), _value(new, path), not boards and not routers, boards, routers, refused)


_ABSENT = object()


def _has(leaves: Leaves, entry: Path) -> bool:
    return any(path[:2] == entry for path in leaves)


def _value(leaves: Leaves, path: Path) -> Any:
    """A leaf's, or an entry's leaves together."""
    if path in leaves:
        return leaves[path]
    below = {".".join(leaf[len(path) :]): value for leaf, value in leaves.items() if leaf[: len(path)] == path}
    return below or None
