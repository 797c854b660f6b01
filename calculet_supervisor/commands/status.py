"""`calculet status`: a table for people, JSON for programs (`calculet_supervisor.shell.status` documents it)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import ask, config_option, open_fleet

if TYPE_CHECKING:
    from rich.console import Group

    from calculet_core.shell.fleet import Fleet

WATCH_S = 1.0
COLUMNS = 100
"""Width of the table where the terminal does not tell."""
BOARD_COLUMNS = ("board", "device", "worker", "state", "gen", "alias", "lanes", "queues", "wait", "tokens", "faults")
ROUTER_COLUMNS = ("router", "pid", "url", "view", "in flight", "requests", "failed", "resent")
STATE_STYLES = {"READY": "green", "FAILED": "red", "RECOVERING": "yellow", "DRAINING": "yellow"}


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema calculet-status/v1.")
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
def status(config: Path, as_json: bool, watch: bool) -> None:
    """Show boards, workers, generations, lanes, queues and routers."""
    fleet = open_fleet(config)
    try:
        if as_json:
            _print_json(fleet, watch)
        else:
            _print_table(fleet, watch)
    except KeyboardInterrupt:
        return


def _print_json(fleet: Fleet, watch: bool) -> None:
    """Once, indented; or an object a line, every second."""
    while True:
        answer = ask(fleet, "status")
        del answer["ok"]
        click.echo(json.dumps(answer, indent=None if watch else 2))
        if not watch:
            return
        time.sleep(WATCH_S)


def _print_table(fleet: Fleet, watch: bool) -> None:
    answer = ask(fleet, "status")
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=COLUMNS)
    if not watch:
        console.print(render(answer))
        return
    with Live(render(answer), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(render(ask(fleet, "status")), refresh=True)


def render(answer: dict[str, Any]) -> Group:
    """Two tables, and a line for each board that has something wrong."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    wrong = [f"[red]{escape(row['board'])}[/]: {escape(_trouble(row))}" for row in answer["boards"] if _trouble(row)]
    if answer.get("breaker"):
        wrong.insert(0, f"[red]automatic action is stopped[/]: {escape(answer['breaker'])} (calculet breaker --close)")
    unusable = answer.get("unusable") or {"configuration": None, "packages": {}}
    reasons = [*([unusable["configuration"]] if unusable["configuration"] else []), *unusable["packages"].values()]
    wrong[:0] = [f"[red]what was in force goes on[/]: {escape(reason)} (`calculet config check`)" for reason in reasons]
    for one in answer.get("rollouts", ()):
        wrong.append(f"[yellow]rollout {one['id']}[/] of {escape(one['alias'])}: {one['state']}, {escape(one['text'])}")
    wrong += [f"[yellow]{escape(row['board'])}[/]: {escape(_turns(row))}" for row in answer["boards"] if row.get("time_shared")]
    parts: list[Any] = [_boards(answer["boards"]), _routers(answer["routers"])]
    return Group(*parts, *(Text.from_markup(line) for line in wrong))


def _boards(rows: list[dict[str, Any]]) -> Any:
    table = _table(BOARD_COLUMNS, right={"gen", "lanes", "wait", "tokens", "faults"})
    for row in rows:
        worker = f"{row['pid']}/{_show(row['epoch'])}" if row["pid"] else row["process"].lower()
        state = row["state"] or "-"
        if row["draining"] and state == "READY":
            state = "DRAINING"
        lanes = f"{row['lanes_used']}/{row['lanes_total']}" if row["lanes_total"] is not None else "-"
        queues = " ".join(f"{name[0]}{depth}" for name, depth in (row["queues"] or {}).items() if depth) or "-"
        style = STATE_STYLES.get(state, "")
        table.add_row(
            row["board"], row["device"], worker, f"[{style}]{state}[/]" if style else state, _show(row["generation"]), row["alias"],
            lanes, queues, _show(row["waiting"]), _short(row["tokens"]), str(row["faults"]),
        )  # fmt: skip
    return table


def _routers(rows: list[dict[str, Any]]) -> Any:
    table = _table(ROUTER_COLUMNS, right=set(ROUTER_COLUMNS) - {"router", "url"})
    for row in rows:
        table.add_row(
            row["router"], str(row["pid"]), row["url"], str(row["view_version"]), str(row["inflight"]), _short(row["requests"]),
            _short(row["failed"]), _short(row["resent"]),
        )  # fmt: skip
    return table if rows else "no router reports"


def _table(columns: tuple[str, ...], right: set[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _trouble(row: dict[str, Any]) -> str:
    if row.get("condemned"):
        return f"set aside: {row['condemned']}; `calculet probation {row['board']}` lets it prove itself"
    if not row["up"]:
        return f"stopped by an operator; `calculet start {row['board']}` brings it back"
    if row["why"] is None and row.get("probation"):
        return "on probation: it gets a small share of work until it has proved itself"
    if row["why"] is None:
        return f"loading: {row['load_step']}" if row["load_step"] else ""
    retry = "" if row["retry_in_s"] is None else f"; tried again in {max(0.0, row['retry_in_s']):.0f} s"
    if row["process"] == "QUARANTINED" and row["retry_in_s"] is None:
        retry = f"; `calculet restart {row['board']}` tries again"
    return f"{row['why']}{retry}"


def _turns(row: dict[str, Any]) -> str:
    shared = row["time_shared"]
    waiting = [f"{found['requests']} for {alias} since {found['oldest_s']:.0f} s" for alias, found in shared["waiting"].items()]
    others = ", ".join(alias for alias in shared["aliases"] if alias != shared["resident"])
    return f"turn of {shared['resident']}, shared with {others or 'nobody'}; waiting: {', '.join(waiting) or 'none'}"


def _show(value: Any) -> str:
    return "-" if value is None else str(value)


def _short(number: int | None) -> str:
    """At most five characters: 12345, 123k, 12M."""
    if number is None:
        return "-"
    for limit, divisor, unit in ((100_000, 1, ""), (10_000_000, 1_000, "k"), (10_000_000_000, 1_000_000, "M")):
        if number < limit:
            return f"{number // divisor}{unit}"
    return f"{number // 10**9}G"
