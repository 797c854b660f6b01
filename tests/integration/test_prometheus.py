"""A real Prometheus scrapes a running fleet: our exposition parses, our rules evaluate, and a healthy fleet fires nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders_fleet import Fleet, Packages, free_port, until

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "prometheus"
RULES = CONFIGS / "alerts.yml"


class Prometheus:
    """A Prometheus over one fleet, with our own example configuration; only quicker, and elsewhere."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        folder.mkdir()
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{fleet.port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port, self.log = free_port(), folder / "log"
        command = [
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=debug",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def get(self, path: str, **query: str) -> bytes:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            return b"" if error.code == 503 else bytes(error.read())  # 503: it is starting
        except OSError:
            return b""

    def api(self, name: str, **query: str) -> Any:
        """`data` of an API's answer; None while there is none."""
        answer = self.get(f"/api/v1/{name}", **query)
        if not answer:
            return None
        found = json.loads(answer)
        assert found["status"] == "success", f"{query}: {found}"
        return found["data"]

    def values(self, expression: str) -> list[float]:
        found = self.api("query", query=expression)
        return [float(one["value"][1]) for one in found["result"]] if found else []

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture
def pair(tmp_path: Path, packages: Packages) -> Iterator[tuple[Fleet, Prometheus]]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt install prometheus)")
    with Fleet(tmp_path / "fleet", packages.get("sim-batch"), packages.key.with_suffix(".pub"), boards=2) as fleet:
        prometheus = Prometheus(tmp_path / "prometheus", fleet)
        try:
            yield fleet, prometheus
        finally:
            prometheus.stop()


def evaluated(prometheus: Prometheus) -> list[dict[str, Any]]:
    """All rules, once each was evaluated."""
    found = prometheus.api("rules")
    rules = [rule for group in found["groups"] for rule in group["rules"]] if found else []
    return rules if rules and all(rule["health"] != "unknown" for rule in rules) else []


def dashboard_expressions() -> list[str]:
    """Every panel's, with Grafana's variables filled in."""
    found = []
    for path in sorted((ROOT / "configs" / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found.append(re.sub(r'"\$\w+"', '".*"', target["expr"].replace("$__rate_interval", "1m")))
    assert found
    return found


def test_prometheus_scrapes_a_whole_fleet_and_a_healthy_one_fires_no_alert(pair: tuple[Fleet, Prometheus]) -> None:
    fleet, prometheus = pair
    until(lambda: prometheus.values('up{job="calculet"}') == [1.0], "a scrape that parses")
    for number in range(4):
        assert fleet.completion(f"prompt {number}", max_tokens=4).status == 200
    until(lambda: sum(prometheus.values("calculet_router_requests_total")) == 4, "the requests in Prometheus")
    # One scrape has every process, once.
    def processes() -> list[str]:
        return sorted(one["metric"]["process"] for one in prometheus.api("query", query="calculet_process_resident_bytes")["result"])

    until(lambda: processes() == ["router", "supervisor", "worker-board0", "worker-board1"], "every process in one scrape")
    for expression, expected in {
        "sum(calculet_worker_sequence_tokens_count{kind='total'})": 4.0,
        "sum(calculet_router_tpot_seconds_count)": 4.0,
        "sum(calculet_supervisor_board_ready)": 2.0,
        "count(calculet_supervisor_limit{limit='recovery.max_resets_per_10min'})": 1.0,
    }.items():
        until(lambda: prometheus.values(expression) == [expected], expression)  # noqa: B023
    (target,) = prometheus.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = until(lambda: evaluated(prometheus), "every rule evaluated")
    assert {rule["name"] for rule in rules} == {r["alert"] for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    for expression in dashboard_expressions():
        prometheus.api("query", query=expression)  # asserts that it evaluates
    own = prometheus.get("/metrics").decode()
    for trouble in ("sample_duplicate_timestamp", "sample_out_of_order", "sample_out_of_bounds"):
        assert f"prometheus_target_scrapes_{trouble}_total 0\n" in own
    assert "level=error" not in prometheus.log.read_text()


def test_an_armed_fault_injector_fires_an_alert(tmp_path: Path, packages: Packages) -> None:
    """From the board to the alert, without anything in between being ours to fake."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt install prometheus)")
    options = {"faults": [{"fault": "busy", "at": [1_000_000]}]}
    trust = packages.key.with_suffix(".pub")
    with Fleet(tmp_path / "fleet", packages.get("sim-batch"), trust, boards=1, options=options, fault_injection=True) as fleet:
        prometheus = Prometheus(tmp_path / "prometheus", fleet)
        try:
            expression = 'ALERTS{alertname="CalculetFaultInjectionArmed", board="board0", alertstate="firing"}'
            until(lambda: prometheus.values(expression) == [1.0], "the alert")
        finally:
            prometheus.stop()
