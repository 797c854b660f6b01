"""What every check gets and gives."""

from __future__ import annotations

import enum

import msgspec

from calculet_perf.comparison import Comparison
from calculet_perf.evidence import Evidence
from calculet_perf.rules import Claim, Kind, Rules


class Result(enum.StrEnum):
    """What became of a check."""

    PASS = "pass"
    FAIL = "fail"
    INSUFFICIENT = "insufficient_evidence"
    NOT_ASKED = "not_asked"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check, with what it saw."""

    check: str
    kind: Kind
    clause: str
    title: str
    result: Result
    why: str
    details: list[str] = []


class Context(msgspec.Struct, frozen=True):
    """What the checks look at."""

    evidence: Evidence
    rules: Rules
    claim: Claim
    base: Evidence | None
    comparison: Comparison | None
    stage_of: Evidence
    needs_stage: str | None
    """The stage that the claim asks for; None: the run's own."""


Answer = tuple[Result, str, list[str]]
"""The result, why, and every instance of it."""
