"""`python -m simulation`: a long run, a search over many seeds, a night of it, the story of one seed. All time is virtual."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calculet_core.shell.files import write_atomic
from simulation.explain import Story
from simulation.scenario import DEVICE_FAULTS, HOST_FAULTS, Scenario, day, rough
from simulation.search import Outcome, as_code, judge, search, shrink
from simulation.world import World

LOG_EVERY = 25
"""Runs between two looks at how far a search is."""
VIRTUAL = "virtual time: a rehearsal on simulated boards, not a lab soak"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The whole fleet in virtual time."""


@main.command("day")
@click.option("--hours", type=click.FloatRange(min=0.01), default=24.0, show_default=True)
@click.option("--boards", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option("--per-s", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Requests per second, besides bursts.")
@click.option("--seed", type=int, default=7, show_default=True)
def day_command(hours: float, boards: int, per_s: float, seed: int) -> None:
    """Ordinary traffic and trouble for so long."""
    outcome = judge(day(seed, hours, boards, per_s))
    click.echo(_report_of([outcome], outcome.cpu_s))
    sys.exit(bool(outcome.violations))


@main.command("seeds")
@click.argument("first", type=int)
@click.argument("last", type=int)
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), default=45.0, show_default=True, help="Virtual seconds of faults and traffic.")
@click.option("--shrink/--no-shrink", "smaller", default=True, show_default=True, help="Make the first failing run small.")
@click.option("--requests", type=int, default=None, help="Go on until so many requests were checked.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Keep the report so far here, as it grows.")
def seeds_command(first: int, last: int, processes: int, seconds: float, smaller: bool, requests: int | None, log: Path | None) -> None:
    """Short rough runs with the seeds FIRST to LAST."""
    began, outcomes, failed, seen = time.monotonic(), [], [], 0
    seeds: Iterable[int] = range(first, last + 1) if requests is None else range(first, first + 10_000_000)
    try:
        for outcome in search((rough(seed, seconds) for seed in seeds), processes):
            outcomes.append(outcome)
            seen += outcome.requests
            if log is not None and len(outcomes) % LOG_EVERY == 0:
                write_atomic(log, _report_of(outcomes, time.monotonic() - began).encode() + b"\n")
            if outcome.violations:
                failed.append(outcome)
                click.echo(f"seed {outcome.scenario.seed}: {outcome.worst()}")
            if requests is not None and seen >= requests:
                break
    except KeyboardInterrupt:
        click.echo("interrupted: this is what was done")
    report = _report_of(outcomes, time.monotonic() - began)
    if log is not None:
        write_atomic(log, report.encode() + b"\n")
    click.echo(report)
    if failed and smaller:
        _shrink(min(failed, key=lambda one: one.scenario.seed))
    sys.exit(bool(failed))


@main.command("explain")
@click.argument("seed", type=int)
@click.option("--about", default="", help="Only lines with one of these words, comma separated.")
@click.option("--from-s", type=float, default=0.0, help="Not before this second.")
@click.option("--seconds", type=click.FloatRange(min=1), default=45.0, show_default=True)
@click.option("--small", is_flag=True, help="Make it small first.")
def explain_command(seed: int, about: str, from_s: float, seconds: float, small: bool) -> None:
    """What happened in the rough run of a seed, line by line."""
    scenario = rough(seed, seconds)
    if small and (violations := judge(scenario).violations):
        scenario = shrink(scenario, violations[0].rule)
    story = Story(click.echo, tuple(word for word in about.split(",") if word), from_s)
    world = World(scenario, story)
    click.echo(f"{scenario.words()}; {VIRTUAL}")
    click.echo("second, who, what: requests are ID.ATTEMPT; a fault's line tells what was arranged, the lines after it what came of it")
    story.follow(world.timeline.monotonic_ns)
    world.run()
    for violation in world.checker.violations:
        click.echo(f"VIOLATION {violation.rule}: {violation.message}")
    click.echo(f"{len(world.checker.violations)} promises were broken; trace {world.trace_hash}; {VIRTUAL}")
    sys.exit(bool(world.checker.violations))


def _shrink(outcome: Outcome) -> None:
    rule = outcome.violations[0].rule
    small: Scenario = shrink(outcome.scenario, rule)
    click.echo(f"\nseed {outcome.scenario.seed} breaks {rule!r} as small as this:\n  {as_code(small)}\n  {judge(small).worst()}")


def _report_of(outcomes: list[Outcome], took_s: float) -> str:
    fired, sometimes = Counter[str](), Counter[str]()
    for outcome in outcomes:
        fired.update(outcome.fired)
        sometimes.update(outcome.sometimes)
    never = [kind for kind in (*DEVICE_FAULTS, *HOST_FAULTS) if not fired[kind]]
    report = {
        "what": VIRTUAL,
        "runs": len(outcomes),
        "virtual_hours": round(sum(outcome.virtual_s for outcome in outcomes) / 3600, 2),
        "requests": sum(outcome.requests for outcome in outcomes),
        "completed": sum(outcome.completed for outcome in outcomes),
        "cpu_s": round(sum(outcome.cpu_s for outcome in outcomes), 1),
        "took_s": round(took_s, 1),
        "faults": dict(sorted(fired.items())),
        "faults_that_never_fired": never,
        "sometimes": dict(sorted(sometimes.items())),
        "violations": [f"seed {one.scenario.seed}: {one.worst()}" for one in outcomes if one.violations],
        "trace": outcomes[0].trace_hash if len(outcomes) == 1 else None,
    }
    return json.dumps(report, indent=2)


if __name__ == "__main__":
    main()
