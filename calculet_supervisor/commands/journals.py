"""`calculet events` and `calculet explain`: what happened and why, read from the journals. They need no process to be alive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calculet_core.errors import ExitCode
from calculet_supervisor.commands.common import completed_by, config_option, end, open_fleet

if TYPE_CHECKING:
    from calculet_core.history import Event
    from calculet_core.shell.fleet import Fleet

GLANCE_S = 0.2


@click.command()
@config_option
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option("--last", "-n", type=click.IntRange(0), default=40, show_default=True, help="How many to begin with.")
@click.option("--board", help="Only of this board.", shell_complete=completed_by("boards"))
@click.option("--all", "everything", is_flag=True, help="Also every version of the fleet view.")
@click.option("--json", "as_json", is_flag=True, help="The journals' own lines.")
def events(config: Path, follow: bool, last: int, board: str | None, everything: bool, as_json: bool) -> None:
    """Show what happened to boards and models: faults, resets, exits, swaps, and who asked for what."""
    from calculet_core.shell.journal import Tail

    fleet = open_fleet(config)

    def wanted(event: Event) -> bool:
        from calculet_core import history
        from calculet_supervisor.explaining import OF_BOARDS

        if board is not None and event.board not in (board, "-"):
            return False
        if event.event == history.FLEET_VIEW_PUBLISHED:
            return everything
        return event.event.startswith(("fleet.", "chaos.")) or (event.event in OF_BOARDS and event.event != history.BOARD_LANE_LOST)

    tails = [Tail(path) for path in _paths(fleet, requests=False)]
    found = sorted((event for tail in tails for event in tail.whole() if wanted(event)), key=lambda event: event.t)
    _show(found[-last:] if last else [], as_json)
    try:
        while follow:
            time.sleep(GLANCE_S)
            known = {tail.path for tail in tails}
            tails += [Tail(path) for path in _paths(fleet, requests=False) if path not in known]
            _show(sorted((event for tail in tails for event in tail.more() if wanted(event)), key=lambda event: event.t), as_json)
    except KeyboardInterrupt:
        return


@click.command()
@click.argument("request_id")
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def explain(request_id: str, config: Path, as_json: bool) -> None:
    """Tell what became of a request and why, step by step. REQUEST_ID is the server's id (`x-request-id`, or the `id` of the
    answer), the client's own label, or the id of a trace (32 hexadecimal digits, or the whole `traceparent`)."""
    from calculet_core.ids import request_id_text
    from calculet_supervisor.explaining import explain as tell

    fleet = open_fleet(config)
    paths = list(_paths(fleet, requests=True))
    requests = _requests(request_id, paths)
    if not requests:
        end(ExitCode.FAILURE, f"no journal in {fleet.log_dir} knows {request_id!r}", "journals are size-capped: it may be too old")
    stories = []
    for request in requests:
        marker = b'"request":%d,' % request
        own = list(_decoded(line for path in paths for line in _lines(path) if marker in line))
        others = _decoded(line for path in paths for line in _lines(path) if b'"request":' not in line and _is_told(line))
        if (story := tell(request, own, others)) is not None:
            stories.append(story)
    if as_json:
        found = [
            {
                "request": request_id_text(story.request), "summary": story.summary,
                "lines": [{"at_ms": round(line.at_ns / 1e6, 3), "who": line.who, "text": line.text} for line in story.lines],
            }
            for story in stories
        ]  # fmt: skip
        click.echo(json.dumps({"schema": "calculet-explain/v1", "requests": found}, indent=2))
        return
    for story in stories:
        click.echo(story.summary)
        for line in story.lines:
            click.echo(f"{line.at_ns / 1e6:10.3f} ms  {line.who:<11} {line.text}")


# ------------------------------------------------------------------------------------------------ reading
def _paths(fleet: Fleet, requests: bool) -> Iterator[Path]:
    """Journals that exist; those of routers only where requests are asked for. A folder that is closed to us is no empty answer."""
    if fleet.log_dir.exists() and not os.access(fleet.log_dir, os.R_OK | os.X_OK):
        end(ExitCode.FAILURE, f"{fleet.log_dir}: Permission denied", "run as the user that Calculet runs as")
    for path in sorted(fleet.log_dir.glob("*.jsonl")):
        if requests or not path.name.startswith("router"):
            yield path


def _lines(path: Path) -> Iterator[bytes]:
    for number in range(99, 0, -1):
        yield from _file_lines(path.with_name(f"{path.name}.{number}"))
    yield from _file_lines(path)


def _file_lines(path: Path) -> Iterator[bytes]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from file


def _decoded(lines: Iterable[bytes]) -> Iterator[Event]:
    import msgspec

    from calculet_core.history import Event

    decoder = msgspec.json.Decoder(Event)
    for line in lines:
        with suppress(msgspec.DecodeError):
            yield decoder.decode(line)


_NAMES = (b"fleet.", b"chaos.", b"board.generation", b"board.fault", b"board.reset", b"board.golden")
TOLD = tuple(b'{"event":"%s' % name for name in _NAMES)


def _is_told(line: bytes) -> bool:
    return line.startswith(TOLD)


def _requests(text: str, paths: list[Path]) -> list[int]:
    """The request with that id, else those that bear it as a label or belong to that trace."""
    from calculet_core.ids import parse_request_id
    from calculet_core.tracing import parse_traceparent

    with suppress(ValueError):
        request = parse_request_id(text)
        marker = b'"request":%d,' % request
        if any(marker in line for path in paths for line in _lines(path)):
            return [request]
    context = parse_traceparent(text)
    found: list[int] = []
    for name, value in (("label", text), ("trace", context.trace_id if context is not None else text)):
        marker = json.dumps(value).encode()
        accepted = _decoded(line for path in paths if path.name.startswith("router") for line in _lines(path) if marker in line)
        found += [event.request for event in accepted if event.request is not None and event.data.get(name) == value]
    return list(dict.fromkeys(found))


def _show(found: Iterable[Event], as_json: bool) -> None:
    import msgspec

    from calculet_supervisor.explaining import words

    offset = time.time() - time.monotonic()
    for event in found:
        if as_json:
            click.echo(msgspec.json.encode(event))
            continue
        wall = event.wall if event.wall is not None else offset + event.t / 1e9
        when = datetime.fromtimestamp(wall).strftime("%m-%d %H:%M:%S.%f")[:-3]
        epoch = f" epoch {event.epoch}" if event.epoch else ""
        name = f"{event.event}: " if not event.event.startswith("board.") and words(event).split(" ")[0] != event.event else ""
        click.echo(f"{when}  {event.board or '-':<10}{epoch} {name}{words(event)}")
