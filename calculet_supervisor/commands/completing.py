"""What the shell may offer for an argument, asked of the running fleet: boards, aliases, artifacts set aside, rollouts, keys.

Somebody presses a key and waits: there is half a second, and where no supervisor answers by then nothing is offered, and nothing is
said. Imports are in the functions, so that a command that completes nothing pays for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calculet_supervisor.commands.common import default_config

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet

ANSWER_S = 0.5
Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def boards(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The fleet's boards; for `restart` also the routers."""
    more = ["router"] if ctx.info_name == "restart" else []
    return _matching(incomplete, lambda fleet: [*(row["board"] for row in _ask(fleet, "status")["boards"]), *more], ctx)


def aliases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """What models are called."""
    return _matching(incomplete, lambda fleet: (row["alias"] for row in _ask(fleet, "generations")["aliases"]), ctx)


def digests(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Artifacts that were set aside."""
    return _matching(incomplete, lambda fleet: (row["digest"][:12] for row in _ask(fleet, "generations")["quarantined"]), ctx)


def rollouts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Numbers of model swaps, newest first."""
    return _matching(incomplete, lambda fleet: (str(row["id"]) for row in _ask(fleet, "rollouts")["rollouts"]), ctx)


def tenants(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of the configuration."""
    return _matching(incomplete, lambda fleet: (tenant.name for tenant in fleet.config.tenants), ctx)


def key_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Keys that were not revoked."""

    def found(fleet: Fleet) -> Iterable[str]:
        from calculet_core.shell.keys import read_keys

        keys = read_keys(fleet.keys)
        return (key.id for key in (keys.keys if keys else ()) if key.revoked_s is None)

    return _matching(incomplete, found, ctx)


def scenarios(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of `calculet chaos`, by asking `calculet-perf`."""
    import json
    import subprocess
    import sys

    command = [sys.executable, "-m", "calculet_perf.cli", "chaos", "list", "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    names = [one["id"] for one in json.loads(done.stdout or "{}").get("scenarios", [])]
    return [name for name in names if name.startswith(incomplete)]


def _matching(incomplete: str, find: Callable[[Fleet], Iterable[str]], ctx: click.Context) -> list[str]:
    """Whatever goes wrong: nothing."""
    try:
        from calculet_core.shell.fleet import load_fleet

        given = ctx.params.get("config")
        path = given or os.environ.get("CALCULET_CONFIG") or default_config()
        return [name for name in find(load_fleet(Path(path))) if name.startswith(incomplete)]
    except Exception:
        return []


def _ask(fleet: Fleet, verb: str) -> dict[str, Any]:
    from calculet_core.shell.control_client import call

    return call(fleet.control_socket, verb, timeout_s=ANSWER_S)
