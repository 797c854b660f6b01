"""What a PromQL expression names, checked against the catalogue. Reads the subset that our rules and dashboards use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from calculet_core.errors import ERROR_TYPES
from calculet_core.metrics import CATALOGUE, Metric
from calculet_core.states.kv_sequence import KvSequenceState
from calculet_core.states.model_generation import ModelState
from calculet_core.states.rollout import RolloutState
from calculet_core.states.worker_process import ProcessState
from calculet_router.fleet import LinkState
from calculet_router.retry import Trouble

OF_THE_SCRAPE = frozenset({"job", "instance"})
WORDS = frozenset(["by", "without", "on", "ignoring", "group_left", "group_right", "offset", "and", "or", "unless", "bool", "time", "inf", "nan"])
QUEUES = {"waiting", "decode", "short", "medium", "long"}
VALUES: dict[tuple[str, str], set[str]] = {
    ("calculet_router_errors", "code"): set(ERROR_TYPES),
    ("calculet_router_resends", "reason"): {one.value for one in Trouble},
    ("calculet_router_workers", "state"): {one.value for one in LinkState},
    ("calculet_router_requests", "outcome"): {"completed", "failed", "cancelled"},
    ("calculet_router_requests", "status"): {"5..", "4..", "2.."},
    ("calculet_router_tenant_tokens", "kind"): {"prompt", "generated"},
    ("calculet_supervisor_workers", "state"): {one.name.lower() for one in ProcessState},
    ("calculet_supervisor_rollouts", "state"): {one.name.lower() for one in RolloutState},
    ("calculet_supervisor_limit", "limit"): {"recovery.max_resets_per_10min", "supervision.restart.max_restarts"},
    ("calculet_worker_model_state", "state"): {one.name for one in ModelState},
    ("calculet_worker_kv_sequences", "state"): {one.name for one in KvSequenceState},
    ("calculet_worker_kv_tokens", "kind"): {"used", "reserved", "total"},
    ("calculet_worker_sequence_tokens", "kind"): {"prompt", "total"},
    ("calculet_worker_tokens", "kind"): {"prompt", "generated"},
    ("calculet_worker_buffers", "state"): {"total", "leased", "quarantined", "free"},
    ("calculet_worker_limit", "limit"): {"lanes", "max_kv_tokens", "max_waiting_requests", "max_waiting_prompt_tokens", "max_inflight"},
    ("calculet_worker_queue_depth", "queue"): QUEUES,
    ("calculet_worker_queue_oldest_seconds", "queue"): QUEUES,
}
"""Closed sets of label values; one that is compared with must be in its set."""


def exposed() -> dict[str, tuple[Metric, frozenset[str]]]:
    """Series name -> its metric and labels, as a scrape has them."""
    found = {}
    for metric in CATALOGUE:
        labels = OF_THE_SCRAPE | set(metric.labels) | ({"board"} if metric.component == "worker" else set())
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
        for suffix in suffixes:
            found[metric.name + suffix] = metric, labels | ({"le"} if suffix == "_bucket" else set())
    return found


EXPOSED = exposed()


def inside(text: str, opening: int) -> str:
    """What is between the parenthesis at `opening` and its partner."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[opening + 1 : at]
    raise ValueError(f"unbalanced: {text[opening:]}")


def series(text: str) -> list[str]:
    """Names of series in an expression without strings, selectors, ranges and label lists."""
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)|offset\s+\w+", " ", text)
    return [name for name in re.findall(r"(?<![\w$.])[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()", text) if name not in WORDS]


def names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def problems(expression: str) -> list[str]:
    """Series, labels and label values that a scrape does not have."""
    found: list[str] = []
    for name in series(expression):
        if name not in EXPOSED and name != "up":
            found.append(f"no series {name}")
    for name, selector in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        metric, labels = EXPOSED.get(name, (None, OF_THE_SCRAPE))
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', selector):
            if label not in labels:
                found.append(f"{name} has no label {label}")
            allowed = VALUES.get((metric.name, label)) if metric else None
            if allowed is not None and not value.startswith("$"):
                found += [f"{name}: {label} is never {one!r}" for one in value.split("|") if one not in allowed]
    for match in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", expression):
        for name in series(inside(expression, match.end() - 1)):
            found += [f"{name} has no label {one}" for one in names(match[1]) if one not in labels_of([name])]
    for listed in re.findall(r"\bon\s*\(([^)]*)\)", expression):
        for name in series(expression):
            found += [f"{name} has no label {one}" for one in names(listed) if one not in labels_of([name])]
    return found


def labels_of(series_names: Iterable[str]) -> frozenset[str]:
    """All labels of these series; every series has those of the scrape."""
    return OF_THE_SCRAPE.union(*(EXPOSED[name][1] for name in series_names if name in EXPOSED))
