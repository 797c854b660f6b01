"""The pages on conformance and behaviours name only what exists: files, names in them, tests, metrics."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from calculet_core.metrics import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "conformance.md").read_text()
BEHAVIOURS = (ROOT / "docs" / "reference" / "behaviours.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE + BEHAVIOURS)))
HELD = sorted(set(re.findall(r"`(calculet_\w+/[\w/]+\.py): (\w+)`", PAGE)))
ACCEPTANCE = {  # Every clause of the acceptance specification; §12.3, life cycle, is with the other rows of the life cycle.
    "1": (), "2": ("2.1", "2.2", "2.3"), "3": (), "4": (), "5": (), "6": ("6.1", "6.2", "6.3"), "7": (),
    "8": tuple(f"8.{step}" for step in range(1, 9)), "9": (), "10": ("10.1", "10.2", "10.3"), "11": (), "12": ("12.1", "12.2", "12.4"),
    "13": (), "14": ("14.1", "14.2", "14.3"), "15": (), "16": (), "17": (),
}  # fmt: skip
METRICS = sorted(set(re.findall(r"`(calculet_(?:worker|router|supervisor)_\w+)`", PAGE + BEHAVIOURS)))


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@pytest.mark.parametrize(("path", "name"), TESTS, ids=lambda value: str(value).rsplit("/", 1)[-1])
def test_every_named_test_exists(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(|^class {name}\b|^{name} = ", text_of(path), re.M), f"{path} has no {name}"


@pytest.mark.parametrize(("path", "name"), HELD, ids=lambda value: str(value).rsplit("/", 1)[-1])
def test_every_named_part_exists(path: str, name: str) -> None:
    assert re.search(rf"^\s*(async )?def {name}\(|^class {name}\b|^{name}\b.* = ", text_of(path), re.M), f"{path} has no {name}"


def test_every_named_metric_exists() -> None:
    assert set(METRICS) <= {metric.name for metric in CATALOGUE}


@pytest.mark.parametrize("section", ["§1", "§2", "§3", "§4", "§5", "§6", "§7", "§8", "§9", "§10", "§11", "§12", "§13", "§14", "§15", "§16", "§17", "§18", "§19", "§20", "Acceptance §12.3"])
def test_every_section_has_its_rows(section: str) -> None:
    part = re.search(rf"^## {section} .*?(?=^## |\Z)", PAGE, re.M | re.S)
    assert part is not None and part[0].count("\n| ") >= 3, f"{section} has no table"


@pytest.mark.parametrize("section", ACCEPTANCE)
def test_every_section_of_the_acceptance_specification_has_its_rows(section: str) -> None:
    part = re.search(rf"^## Acceptance §{section} .*?(?=^## |^# |\Z)", PAGE, re.M | re.S)
    assert part is not None, f"acceptance §{section} is not there"
    rows = re.findall(r"^\| A§([\d.]+) ", part[0], re.M)
    assert len(rows) >= 3, f"acceptance §{section} has {len(rows)} rows"
    assert set(ACCEPTANCE[section]) <= set(rows), f"missing: {sorted(set(ACCEPTANCE[section]) - set(rows))}"
    assert {row.split(".")[0] for row in rows} == {section}, "a row of another section"


def test_every_row_of_the_acceptance_specification_is_shown_or_names_the_missing_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| A§")]
    assert len(rows) > 90
    for row in rows:
        assert "::" in row or "**Vendor**" in row or "**Lab**" in row, row


def test_every_scenario_check_and_stage_is_on_the_page() -> None:
    scenarios = yaml.safe_load((ROOT / "calculet_perf" / "scenarios" / "faults.yaml").read_text())["scenarios"]
    rules = yaml.safe_load((ROOT / "calculet_perf" / "rules" / "calculet-rules-v1.yaml").read_text())
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert {one["id"] for one in scenarios if one["clause"] in ("12.1", "12.2")} <= named
    assert set(rules["checks"]) <= named
    assert all(f"A§13 {stage}," in PAGE for stage in rules["stages"])


def test_every_row_is_held_or_names_the_missing_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| §")]
    assert len(rows) > 60
    for row in rows:
        assert "::" in row or "**Vendor**" in row, row


def test_every_behaviour_is_shown_by_a_test() -> None:
    rows = [line for line in BEHAVIOURS.splitlines() if line.startswith("| ") and not line.startswith(("| pain", "| ---"))]
    assert len(rows) > 50
    for row in rows:
        assert "::" in row.split(" | ")[2], row
