"""configs/prometheus: alerts name only what a scrape has, and promtool agrees with the rules and their tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders_promql import labels_of, problems, series

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
ALERTS: list[dict[str, Any]] = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
each = pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])


@each
def test_an_alert_names_only_series_and_labels_of_the_catalogue(alert: dict[str, Any]) -> None:
    assert problems(alert["expr"]) == []


@each
def test_an_alert_says_what_happened_how_bad_it_is_and_where_to_read_on(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    assert set(alert["labels"]) == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"
    used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    grouped = re.search(r"\bby \(([^)]*)\)", alert["expr"])
    known = {one.strip() for one in grouped[1].split(",")} if grouped else labels_of(series(alert["expr"]))
    assert used <= known


def test_names_of_alerts_are_unique() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("calculet_router_request_total > 0", "no series calculet_router_request_total"),
        ("calcluet_router_inflight", "no series calcluet_router_inflight"),
        ('calculet_router_inflight{board="b"}', "calculet_router_inflight has no label board"),
        ("sum by (tenant) (rate(calculet_router_requests_total[5m]))", "calculet_router_requests_total has no label tenant"),
        ('calculet_supervisor_workers{state="QUARANTINED"}', "calculet_supervisor_workers: state is never 'QUARANTINED'"),
        ("calculet_worker_generation / on (model) calculet_worker_generation", "calculet_worker_generation has no label model"),
    ],
)
def test_the_check_finds_what_a_scrape_does_not_have(expression: str, problem: str) -> None:
    assert problem in problems(expression)


# ---------------------------------------------------------------- promtool
@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "configs/prometheus/alerts.yml"),
        ("check", "config", "configs/prometheus/prometheus.yml"),
        *(("test", "rules", str(path.relative_to(ROOT))) for path in sorted((ROOT / "tests" / "prometheus").glob("*.test.yml"))),
    ],
    ids=lambda arguments: f"{arguments[0]} {Path(arguments[2]).name}",
)
def test_promtool_accepts(promtool: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    fires: set[str] = set()
    for path in (ROOT / "tests" / "prometheus").glob("*.test.yml"):
        for case in yaml.safe_load(path.read_text())["tests"]:
            for query in case.get("promql_expr_test", ()):
                if query["exp_samples"]:
                    fires |= set(re.findall(r'alertname="(\w+)", alertstate="firing"', query["expr"]))
    assert fires == {alert["alert"] for alert in ALERTS}
