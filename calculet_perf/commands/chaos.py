"""`calculet-perf chaos`: breaks a running fleet on purpose, and says whether it kept its promises."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calculet_perf.commands.common import Exit, end

if TYPE_CHECKING:
    from calculet_core.shell.fleet import Fleet
    from calculet_perf.chaos import Catalogue, Outcome, Scenario
    from calculet_perf.shell.chaos_run import Wishes
    from calculet_perf.shell.tls import TlsSettings

CATALOGUE = "chaos.yaml"
CONFIG_FILE = click.Path(path_type=Path, dir_okay=False)
catalogue_option = click.option("--catalogue", type=CONFIG_FILE, help="Another file of scenarios.")


@click.group()
def chaos() -> None:
    """Disturb a running fleet whose configuration says `chaos: {enabled: true}`."""


@chaos.command(name="list")
@catalogue_option
@click.option("--json", "as_json", is_flag=True, help="The scenarios as JSON.")
def list_command(catalogue: Path | None, as_json: bool) -> None:
    """List the scenarios and what is expected of them."""
    import msgspec

    found = _catalogue(catalogue)
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    for scenario in found.scenarios:
        click.echo(f"{scenario.id:24} {scenario.injects}\n{'':24} -> {scenario.expected}")


@chaos.command()
@click.argument("scenario")
@click.option("--config", "-c", type=CONFIG_FILE, envvar="CALCULET_CONFIG", show_envvar=True, required=True, help="The fleet's.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the faults' times and boards, and the load.")
@click.option("--requests", type=click.IntRange(0), default=0, help="Send at least so many.  [default: as long as the faults take]")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests a second.  [default: the scenario's]")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), help="`random`: seconds.  [default: the scenario's]")
@click.option("--interval", type=click.FloatRange(min=0, min_open=True), help="`random`: mean seconds between faults.")
@click.option("--model", help="The alias that is asked.  [default: the first one]")
@click.option("--api-key", envvar="CALCULET_API_KEY", show_envvar=True, help="Where the fleet asks for one.")
@click.option("--ca-file", type=CONFIG_FILE, help="HTTPS: authorities to believe, PEM.  [default: the fleet's own certificate]")
@click.option("--server-name", help="HTTPS: the name in the certificate.  [default: its first one]")
@catalogue_option
@click.option("--out", type=CONFIG_FILE, help="File for the outcome as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON, schema calculet-perf-chaos/v1.")
def run(
    scenario: str, config: Path, seed: int, requests: int, rate: float | None, duration: float | None, interval: float | None,
    model: str | None, api_key: str | None, ca_file: Path | None, server_name: str | None, catalogue: Path | None, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Run SCENARIO on the fleet that runs: ask it undisturbed, send a load, order faults, look at everything.

    It may be killed at any time: whoever carries a fault ends it by its own clock.

    Exit codes: 0 every promise was kept, 1 one was broken, 2 wrong usage or a fleet that does not allow chaos, 3 invalid: the
    fleet is not there, or a planned fault did not fire.
    """
    import msgspec
    import uvloop

    from calculet_core.errors import ConfigError
    from calculet_core.shell.fleet import load_fleet
    from calculet_perf.shell.chaos_run import Wishes

    known = {one.id: one for one in _catalogue(catalogue).scenarios}
    if scenario not in known:
        end(Exit.INVALID, f"there is no scenario {scenario!r}", "`calculet-perf chaos list` names them")
    chosen = known[scenario]
    if (duration or interval) and chosen.random is None:
        end(Exit.INVALID, "--duration and --interval are for random scenarios")
    if rate is not None:
        chosen = msgspec.structs.replace(chosen, load=msgspec.structs.replace(chosen.load, rate=rate))
    try:
        fleet = load_fleet(config)
    except ConfigError as error:
        end(Exit.INVALID, str(error))
    if not fleet.config.chaos.enabled:
        why = "this fleet does not allow chaos"
        end(Exit.INVALID, f"{fleet.path}: $.chaos.enabled is false: {why}", "only fleets that are there to be broken should")
    aliases = [one.alias for one in fleet.config.models]
    if model is not None and model not in aliases:
        end(Exit.INVALID, f"there is no model {model!r}", f"models: {', '.join(aliases)}")
    wishes = Wishes(seed, requests, duration, interval)
    tls = _tls(fleet, ca_file, server_name)
    outcome = uvloop.run(_run(chosen, wishes, fleet, model or aliases[0], api_key, tls, quiet=as_json))
    encoded = msgspec.json.format(msgspec.json.encode(outcome), indent=2)
    if out is not None:
        out.write_bytes(encoded + b"\n")
    if as_json:
        click.echo(encoded)
    else:
        _show(outcome)
    raise SystemExit(_code(outcome))


def _tls(fleet: Fleet, ca_file: Path | None, server_name: str | None) -> TlsSettings | None:
    """How the fleet proves who it is; None: it speaks plain HTTP."""
    from calculet_perf.shell.tls import TlsSettings, own_certificate

    certificate = fleet.config.router.tls.certificate
    if certificate is None:
        return None
    believed = None if ca_file is None else str(ca_file)
    if believed is not None and server_name is not None:
        return TlsSettings(ca_file=believed, server_name=server_name)
    try:
        own = own_certificate(str(fleet.resolve(certificate)))
    except (OSError, ValueError) as error:
        end(Exit.INVALID, f"{fleet.path}: $.router.tls.certificate: {error}", "--ca-file and --server-name say what to believe")
    return TlsSettings(ca_file=believed or own.ca_file, server_name=server_name or own.server_name)


async def _run(
    scenario: Scenario, wishes: Wishes, fleet: Fleet, model: str, api_key: str | None, tls: TlsSettings | None, quiet: bool
) -> Outcome:
    from calculet_perf.shell.chaos_fleet import ChaosFleet
    from calculet_perf.shell.chaos_load import ChaosLoad
    from calculet_perf.shell.chaos_run import CannotRun, ChaosRun
    from calculet_perf.shell.http import HttpClient, Target

    host, _, port = fleet.config.router.listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    headers = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    client = HttpClient(Target(host, int(port), headers=headers, tls=tls), timeout_s=180)
    load = ChaosLoad(client, model, scenario.load, wishes.seed)

    def say(line: str) -> None:
        if not quiet:
            click.echo(line)

    try:
        return await ChaosRun(scenario, wishes, ChaosFleet(fleet, model), client, load, say).run()
    except CannotRun as error:
        refused = "does not allow chaos" in str(error)
        hint = "--api-key or CALCULET_API_KEY is the key that it is asked with" if ": 401: " in str(error) else None
        end(Exit.INVALID if refused or hint else Exit.INFRASTRUCTURE, str(error), hint)
    finally:
        client.close()


def _show(outcome: Outcome) -> None:
    failed = ", ".join(f"{count} x {code}" for code, count in outcome.codes.items()) or "none"
    click.echo(f"{outcome.fired} of {outcome.planned} faults fired in {outcome.seconds:.0f} s; seed {outcome.seed}")
    left_out = f"; {outcome.left_out} arrivals left out" if outcome.left_out else ""
    click.echo(f"{outcome.sent} requests: {outcome.ok} answered rightly; ended with an error: {failed}{left_out}")
    slowest = "" if outcome.slowest_recovery_s is None else f"; slowest recovery {outcome.slowest_recovery_s:.1f} s"
    click.echo(f"{outcome.worker_restarts} workers restarted, {outcome.board_resets} boards reset{slowest}")
    for reason in (*outcome.broken, *outcome.invalid):
        click.echo(f"  {reason}")
    click.echo("every promise was kept" if outcome.passed else "FAILED" if outcome.broken else "INVALID: nothing is shown")


def _code(outcome: Outcome) -> int:
    """A broken promise goes before an invalid run: it was seen, whatever else was not."""
    if outcome.passed:
        return Exit.PASS
    return Exit.CORRECTNESS if outcome.broken else Exit.INFRASTRUCTURE


def _catalogue(path: Path | None) -> Catalogue:
    from calculet_core.shell.files import read_bounded
    from calculet_perf.chaos import parse_catalogue

    if path is None:
        return parse_catalogue((files("calculet_perf") / "scenarios" / CATALOGUE).read_bytes(), CATALOGUE)
    try:
        return parse_catalogue(read_bounded(path), str(path))
    except OSError as error:
        end(Exit.INVALID, f"{path}: {error.strerror}")
