"""configs/grafana: every panel asks for what a scrape has, and every metric has its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders_promql import EXPOSED, labels_of, problems, series

from calculet_core.metrics import CATALOGUE

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "grafana"
DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = [
    pytest.param(panel, id=f"{name} {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
NOT_SHOWN = {
    "calculet_router_limit", "calculet_supervisor_limit", "calculet_supervisor_worker_up", "calculet_router_lookups",
    "calculet_router_open_lookups", "calculet_worker_requests", "calculet_worker_tokens", "calculet_worker_resets",
    "calculet_worker_tenant_tokens", "calculet_worker_tenant_active", "calculet_supervisor_bad_messages",
    "calculet_worker_tenant_waiting_tokens", "calculet_supervisor_chaos_enabled", "calculet_supervisor_chaos_orders",
}  # fmt: skip
"""Limits are compared with in alerts; the others are shown in another form (the router's or the supervisor's view of the same)."""


def grouped(expression: str) -> set[str] | None:
    """Labels that an aggregation keeps; None when there is no aggregation."""
    if not re.search(r"\b(?:sum|max|min|count|avg)\b", expression):
        return None
    return {one.strip() for listed in re.findall(r"\bby\s*\(([^)]*)\)", expression) for one in listed.split(",")}


def test_there_is_a_dashboard_for_requests_runtime_and_system() -> None:
    assert set(DASHBOARDS) == {"requests", "runtime", "system"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 3


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_names_only_series_and_labels_of_the_catalogue(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        expression = target["expr"]
        assert problems(expression) == []
        kept = grouped(expression)
        known = labels_of(series(expression)) if kept is None else kept
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, expression


@pytest.mark.parametrize("panel", PANELS)
def test_counters_are_shown_as_rates_and_never_raw(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name in re.findall(r"\b(calculet_\w+)\{", target["expr"]):
            metric = EXPOSED[name][0]
            if metric.kind != "gauge":
                assert re.search(rf"(?:rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", target["expr"]), target["expr"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_variables_are_defined_and_come_from_series_that_exist(name: str) -> None:
    variables = {one["name"]: one for one in DASHBOARDS[name]["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARDS[name]["panels"])))
    assert used <= set(variables)
    for one in variables.values():
        if one["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", one["definition"]).groups()  # type: ignore[union-attr]
            assert problems(selector) == []
            assert label in labels_of(series(selector))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_metric_is_on_a_dashboard_or_known_not_to_be() -> None:
    shown = set(re.findall(r"calculet_\w+", json.dumps([dashboard["panels"] for dashboard in DASHBOARDS.values()])))
    names = {EXPOSED[name][0].name for name in shown}
    assert names | NOT_SHOWN == {metric.name for metric in CATALOGUE}
    assert not names & NOT_SHOWN


# ---------------------------------------------------------------- the specification's rows
def asked() -> list[tuple[str, str, list[str], str]]:
    """(row, what is asked for, metrics, panels) of the table in docs/how-to/monitor.md."""
    page = (FOLDER.parents[1] / "docs" / "how-to" / "monitor.md").read_text()
    rows = re.findall(r"^\| (§1[06][^|]*?) \| ([^|]*) \| ([^|]*) \|([^|]*)\|$", page, re.M)
    return [(row, what, re.findall(r"`(\w+)`", metrics), panels.strip()) for row, what, metrics, panels in rows]


WORDS = {
    "§10.1": "rate success 4xx 5xx timeout cancel TTFT TPOT E2E model prompt output concurrency tokens/s sequences queue admission slot",
    "§10.2": "flight pending finished left H2D infer D2H OutputBuf total free leased quarantine wait allocated reject length CCU timeout busy reset generation",
    "§10.3": "RSS CPU threads descriptors DRAM SRAM temperature power frequency throttle D2D DDR PCIe",
    "§16 admission": "requests tokens admit reject timeout quota", "§16 queues": "depth oldest decode short medium long",
    "§16 batch": "compiled active fill wait waste", "§16 KV": "state used reserved wait unknown free",
    "§16 executor": "flight ping pong submit wait status counters", "§16 model": "generation state load configure warm-up drain unload",
    "§16 fairness": "tokens lag starvation", "§16 recovery": "fault jobs buffers KV reset restart recovery",
}  # fmt: skip
"""What acceptance §10 and scheduling §16 name."""


@pytest.mark.parametrize("section", WORDS)
def test_everything_that_the_specification_names_has_a_row(section: str) -> None:
    said = " ".join(what for row, what, _, _ in asked() if row == section)
    assert [word for word in WORDS[section].split() if word not in said] == []


@pytest.mark.parametrize("row", asked(), ids=lambda row: f"{row[0]} {row[1]}")
def test_a_row_has_its_metrics_and_panels_that_show_them(row: tuple[str, str, list[str], str]) -> None:
    _, what, metrics, panels = row
    if what.startswith("D2D"):
        assert not metrics and not panels  # the vendor's
        return
    known = {metric.name for metric in CATALOGUE}
    titles = {
        panel["title"]: json.dumps(panel["targets"])
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        if "targets" in panel
    }
    rest, shown = panels, ""
    for title in sorted(titles, key=len, reverse=True):
        pattern = rf"(?:^|(?<=; )){re.escape(title)}(?=; |$)"
        if re.search(pattern, rest):
            rest, shown = re.sub(pattern, "", rest), shown + titles[title]
    assert rest.strip("; ") == "", f"no panel is called {rest}"
    assert metrics and set(metrics) <= known
    assert [name for name in metrics if name not in shown] == []
