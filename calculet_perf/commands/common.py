"""What the verbs share: exit codes (acceptance §15) and ending with a straight answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Exit:
    """Exit codes of `calculet-perf`, by acceptance §15. Precedence when several apply: 2, 1, 3 for an invalid
    measurement, 4, 3 for insufficient evidence, 0 (decision 9)."""

    PASS = 0
    CORRECTNESS = 1
    """Correctness or reliability failed: golden, crosstalk, NaN in a success."""
    INVALID = 2
    """Artifact, manifest, configuration or usage."""
    INFRASTRUCTURE = 3
    """The measurement itself is invalid: clock, network, an unreachable server, a crash or interruption of this program."""
    REGRESSION = 4
    """Slower than the rules allow."""


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object.")(command)


def end(code: int, message: str, hint: str | None = None) -> NoReturn:
    """Say what is wrong, and what to do, on stderr."""
    click.echo(f"calculet-perf: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
    sys.exit(code)
