"""What the verbs share: the `--config` option, talking to the supervisor, and ending with the right exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet

DEFAULT_CONFIG = "configs/fleet.yaml"
BEGUN_CONFIG = "fleet.yaml"
"""What `calculet init` writes."""
INSTALLED_CONFIG = "/etc/calculet/fleet.yaml"
LEFT_BY_MAKE = ".calculet/fleet"
UNREACHABLE = 69
"""EX_UNAVAILABLE: the supervisor cannot be reached."""
F = TypeVar("F", bound=Callable[..., Any])


def default_config() -> str:
    """The fleet that `make up` runs in this folder (it leaves the file's name in .calculet/fleet), else configs/fleet.yaml, else
    the fleet.yaml of `calculet init`, else that of `calculet install`."""
    try:
        left = Path(LEFT_BY_MAKE).read_text().strip()
    except OSError:
        left = ""
    here = [path for path in (left, DEFAULT_CONFIG, BEGUN_CONFIG, INSTALLED_CONFIG) if path and Path(path).is_file()]
    return here[0] if here else DEFAULT_CONFIG


def config_option(command: F) -> F:
    """`--config FILE`, else CALCULET_CONFIG, else `default_config`."""
    return click.option(
        "--config", "-c", type=click.Path(path_type=Path), envvar="CALCULET_CONFIG", default=default_config,
        show_default="what `make up` runs here, else configs/fleet.yaml, fleet.yaml, /etc/calculet/fleet.yaml",
        show_envvar=True, help="The fleet's configuration (calculet-fleet/v1).",
    )(command)  # fmt: skip


def completed_by(name: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion by a function of `completing`, which is imported when somebody completes."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from calculet_supervisor.commands import completing

        found: list[str] = getattr(completing, name)(ctx, param, incomplete)
        return found

    return complete


def board_argument(command: F) -> F:
    """The board's name."""
    return click.argument("board", shell_complete=completed_by("boards"))(command)


def alias_argument(command: F) -> F:
    """A model's alias."""
    return click.argument("alias", shell_complete=completed_by("aliases"))(command)


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object.")(command)


def say(answer: dict[str, Any], as_json: bool, words: str) -> None:
    """The answer of a verb, for programs or for people."""
    if as_json:
        import json

        click.echo(json.dumps({name: value for name, value in answer.items() if name != "ok"}, indent=2))
    else:
        click.echo(words)


def end(code: int, message: str, hint: str | None = None) -> NoReturn:
    """Say what is wrong, and what to do, on stderr."""
    click.echo(f"calculet: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
    sys.exit(code)


def open_fleet(config: Path) -> Fleet:
    """The parsed configuration; while the file is broken, what was in force in a fleet that runs; else ends with 78."""
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.fleet import load_fleet
    from calculet_core.shell.standing import held

    try:
        return load_fleet(config)
    except ConfigError as error:
        before = held(config, str(error))
        if before is None:
            end(ExitCode.CONFIG, str(error), _hint(config))
        click.echo(f"calculet: what was in force goes on, since the file cannot be used: {error}", err=True)
        return before


def open_file(config: Path) -> Fleet:
    """What the file says, for those who are about the file itself; ends with 78 when it is wrong."""
    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.fleet import load_fleet

    try:
        return load_fleet(config)
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error), _hint(config))


def _hint(config: Path) -> str | None:
    return "name the fleet's file with --config FILE or CALCULET_CONFIG" if not config.exists() else None


def ask(fleet: Fleet, verb: str, **arguments: Any) -> dict[str, Any]:
    """The supervisor's answer; ends with 1 when it refuses and 69 when it is not there."""
    from calculet_core.errors import ExitCode
    from calculet_core.shell.control_client import ControlError, SupervisorUnreachable, call

    try:
        return call(fleet.control_socket, verb, arguments)
    except SupervisorUnreachable as error:
        end(UNREACHABLE, error.message, error.hint)
    except ControlError as error:
        end(ExitCode.FAILURE, error.message, error.hint)


def say_drain(what: str, limit_s: float, key: str, code: str) -> None:
    """Before an act: how long running answers may still take, where that is configured, and how longer ones end."""
    click.echo(f"{what}: running answers may take {limit_s:g} s more ({key}); longer ones end with the error {code}", err=True)
