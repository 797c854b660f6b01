"""`calculet-perf selftest`: what the client itself costs and adds."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from calculet_perf.commands.common import Exit


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--rate", type=click.FloatRange(min=1), help="Requests per second.  [default: twice MANIFEST's highest, else 20]")
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Client processes.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="How long each part lasts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def selftest(manifest: Path | None, rate: float | None, processes: int, seconds: float, as_json: bool) -> None:
    """Run the client against a null server, open loop. Exit 3 when it cannot keep the rate or loses anything."""
    import uvloop

    from calculet_perf.commands.run import read_inputs
    from calculet_perf.plan import build_plan
    from calculet_perf.shell import selftest as module
    from calculet_perf.workloads.facts import ServerFacts

    if rate is None:
        rate = 2 * module.LEAST_RATE
        if manifest is not None:
            inputs = read_inputs(manifest)
            rate = module.planned_rate(build_plan(inputs.manifest, inputs.matrix, ServerFacts(foreign=True)))
    found = uvloop.run(module.selftest(rate, processes=processes, seconds=seconds))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        click.echo(f"{found.rate_qps:g} requests/s, {found.requests} requests, {found.tokens} tokens, {processes} client processes")
        click.echo(f"  CPU      {found.cpu_us_per_request:.0f} us per request, {found.cpu_us_per_token:.1f} us per streamed token")
        click.echo(f"  adds     {found.added_p99_ms:.3f} ms to the first token at P99")
        click.echo(f"  sends    {found.send_delay_p99_ms:.3f} ms after its schedule at P99")
        click.echo("passed" if found.passed else "FAILED: the rate was not kept, or answers were lost")
    if not found.passed:
        raise SystemExit(Exit.INFRASTRUCTURE)
