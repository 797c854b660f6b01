"""`calculet top`: the fleet at a terminal, live: lanes, queues, rates since the last look, temperatures, and what is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import ask, config_option, open_fleet

if TYPE_CHECKING:
    from rich.console import Group

SPARKS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
MAX_CELLS = 32
COLUMNS = 110
BOARD_COLUMNS = ("board", "state", "lanes", "", "queues", "wait", "kv", "tok/s", "steps/s", "temp", "alias")
ROUTER_COLUMNS = ("router", "url", "in flight", "req/s", "failed/s", "again/s")


@click.command()
@config_option
@click.option("--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look twice, print once, and end.")
def top(config: Path, interval: float, once: bool) -> None:
    """Watch the fleet: lanes, queues, rates since the last look, temperatures, and what is wrong. Ctrl-C ends it.

    Tokens count when their request ends.
    """
    from rich.console import Console
    from rich.live import Live

    fleet = open_fleet(config)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=COLUMNS)
    before, looked_s, rates = ask(fleet, "status"), time.monotonic(), list[float]()

    def look() -> Group:
        nonlocal before, looked_s
        time.sleep(interval)
        now, now_s = ask(fleet, "status"), time.monotonic()
        screen = render(now, before, now_s - looked_s, rates)
        before, looked_s = now, now_s
        return screen

    try:
        if once:
            console.print(look())
            return
        with Live(look(), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(look(), refresh=True)
    except KeyboardInterrupt:
        return


def render(now: dict[str, Any], before: dict[str, Any], seconds: float, rates: list[float]) -> Group:
    """The screen of two statuses, `seconds` apart; `rates` collects tokens/s for the curve."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    boards, ready = now["boards"], sum(_serves(row) for row in now["boards"])
    old = {row["board"]: row for row in before["boards"]}
    tokens = sum(_rate(row, old.get(row["board"]), "tokens", seconds) or 0.0 for row in boards)
    rates.append(tokens)
    del rates[:-HISTORY]
    style = "green" if ready == len(boards) else "yellow" if ready else "red"
    head = f"[bold {style}]{ready} of {len(boards)} boards ready[/]   {tokens:,.0f} tokens/s  [cyan]{spark(rates)}[/]"
    parts: list[Any] = [Text.from_markup(head), "", _boards(boards, old, seconds), "", _routers(now, before, seconds)]
    wrong = [f"[red]{escape(row['board'])}[/]: {escape(str(row['why']))}" for row in boards if row.get("why")]
    if now.get("breaker"):
        wrong.insert(0, f"[red]breaker[/]: {escape(str(now['breaker']))}")
    wrong += [f"rollout {escape(str(one['id']))}: {escape(str(one['text']))}" for one in now.get("rollouts") or ()]
    return Group(*parts, *([""] if wrong else []), *map(Text.from_markup, wrong))


def lanes_bar(used: int, total: int) -> str:
    """A cell a lane, or, where there are more than MAX_CELLS, several lanes a cell: lit in proportion, and all or none only where
    that is so."""
    cells = min(total, MAX_CELLS)
    lit = min(used, total) if total <= MAX_CELLS or used in (0, total) else min(cells - 1, max(1, round(cells * used / total)))
    lit = min(lit, cells)
    return "▮" * lit + "▯" * (cells - lit)


def spark(values: list[float]) -> str:
    """A curve of block characters, the highest value at full height."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return SPARKS[1] * len(values)
    return "".join(SPARKS[1 + round((len(SPARKS) - 2) * value / highest)] for value in values)


def _boards(rows: list[dict[str, Any]], old: dict[str, dict[str, Any]], seconds: float) -> Any:
    table = _table(BOARD_COLUMNS, right={"", "wait", "kv", "tok/s", "steps/s", "temp"})
    for row in rows:
        was = old.get(row["board"])
        state = (row["state"] or row["process"]).lower()
        state = "draining" if row["draining"] and row["state"] == "READY" else state
        style = "green" if _serves(row) else "red" if row["state"] in (None, "FAILED") else "yellow"
        used, total = row["lanes_used"], row["lanes_total"]
        cells = "" if total is None else lanes_bar(used, total)
        queues = " ".join(f"{name[0]}{depth}" for name, depth in (row["queues"] or {}).items() if depth) or "-"
        kv = f"{100 * row['kv_tokens_reserved'] / row['kv_tokens_total']:.0f}%" if row["kv_tokens_total"] else "-"
        hot = max((chip["temperature_c"] for chip in row["chips"] if chip.get("temperature_c") is not None), default=None)
        table.add_row(
            row["board"], f"[{style}]{state}[/]", cells, "-" if total is None else f"{used}/{total}", queues, _show(row["waiting"]),
            kv, _number(_rate(row, was, "tokens", seconds)), _number(_rate(row, was, "steps", seconds)),
            "-" if hot is None else f"{hot:.0f}°", row["alias"],
        )  # fmt: skip
    return table


def _routers(now: dict[str, Any], before: dict[str, Any], seconds: float) -> Any:
    old = {row["router"]: row for row in before["routers"]}
    table = _table(ROUTER_COLUMNS, right=set(ROUTER_COLUMNS) - {"router", "url"})
    for row in now["routers"]:
        was = old.get(row["router"])
        rates = [_number(_rate(row, was, name, seconds)) for name in ("requests", "failed", "resent")]
        table.add_row(row["router"], row["url"], str(row["inflight"]), *rates)
    return table if now["routers"] else "no router reports"


def _table(columns: tuple[str, ...], right: set[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _serves(row: dict[str, Any]) -> bool:
    return row["state"] == "READY" and not row["draining"] and bool(row["up"])


def _rate(row: dict[str, Any], was: dict[str, Any] | None, name: str, seconds: float) -> float | None:
    """None where it cannot be told: no earlier look, or another life of the process."""
    if was is None or row[name] is None or was[name] is None or row[name] < was[name] or seconds <= 0:
        return None
    return float(row[name] - was[name]) / seconds


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _show(value: Any) -> str:
    return "-" if value is None else str(value)
