"""`calculet-perf soak MANIFEST --stage NAME`: one load for hours (acceptance §13)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from calculet_perf.commands.common import Exit, end
from calculet_perf.commands.run import FILE, Inputs, client_of, prepare, read_inputs, resumed, until_stopped, verdict
from calculet_perf.plan import Cut
from calculet_perf.runinfo import Shortened
from calculet_perf.shell.loading import STAGE, read_stage
from calculet_perf.shell.run_dir import INFO, MANIFEST, MATRIX, RunDirError, RunReader, RunWriter, drop_unfinished
from calculet_perf.stability import StageRun
from calculet_perf.swapping import CYCLES_ASKED, kind_of
from calculet_perf.workloads.stages import LOADS

if TYPE_CHECKING:
    from calculet_perf.shell.runner import Setup
    from calculet_perf.shell.swap_fleet import SwapFleet
    from calculet_perf.workloads.cells import Cell

RESUMED_IDLE_S = 10.0
"""Idle sampling of a stage that is resumed: the baseline is the first session's, and the load should go on."""


@click.command()
@click.argument("manifest", type=FILE)
@click.option("--stage", type=click.Choice(list(LOADS)), required=True, help="Which load, and for how long by the rules.")
@click.option("--target-qps", type=click.FloatRange(min=0, min_open=True), help="The target rate; every stage but smoke needs it.")
@click.option("--seconds", type=click.FloatRange(min=1), help="How long; less than the stage asks for is labelled.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder.  [default: runs/RUN_ID-STAGE]")
@click.option("--resume", is_flag=True, help="Go on with an interrupted stage: give the options that it was started with.")
@click.option("--dry-run", is_flag=True, help="Print the load, its length and what is shortened; ask the server only what it is.")
@click.option("--rules", "rules_file", type=FILE, help="Other rules than the shipped calculet-rules/v1.")
@click.option("--idle", "idle_s", type=click.FloatRange(0), help="Idle sampling in seconds; below 300 is labelled.")
@click.option("--warmups", type=click.IntRange(0), help="Warm-ups of a shape; below 10 is labelled.")
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Client processes.")
@click.option("--quiet", is_flag=True, help="Print nothing but the end.")
def soak(
    manifest: Path, stage: str, target_qps: float | None, seconds: float | None, out: Path | None, rules_file: Path | None,
    resume: bool, dry_run: bool, idle_s: float | None, warmups: int | None, processes: int, quiet: bool,
) -> None:  # fmt: skip
    """Keep one load up for a stage's time. `calculet-perf report` then says whether the stage was passed: leaks, errors, faults.

    Where the manifest says `fleet.swaps.allow: true`, the model is swapped meanwhile, on the fleet of `fleet.config`: M4 is judged
    from that.

    Exit codes: 0 measured, 1 golden failed or resources did not come back, 2 usage or manifest wrong, 3 the measurement is invalid.
    """
    import uvloop

    from calculet_perf.shell.loading import load_rules

    if LOADS[stage].share is not None and target_qps is None:
        end(Exit.INVALID, f"stage {stage} needs --target-qps", "calculet-perf capacity finds the highest stable rate")
    inputs = read_inputs(manifest)
    rules, _ = load_rules(rules_file)
    if stage not in rules.stages:
        end(Exit.INVALID, f"the rules have no stage {stage}")
    asked_s = rules.stages[stage].duration_s
    run = StageRun(stage=stage, asked_s=asked_s, done_s=0, planned_s=seconds or asked_s, load_share=LOADS[stage].share)
    folder = out or Path("runs") / f"{inputs.manifest.run_id}-{stage}"
    how = Session(folder, processes, quiet, resume, dry_run, target_qps)
    code = uvloop.run(_main(inputs, Cut(idle_s, None, warmups), how, run))
    if code:
        raise SystemExit(code)


@dataclass(frozen=True, slots=True)
class Session:
    """How this call goes on with the stage."""

    folder: Path
    processes: int
    quiet: bool
    resume: bool
    dry_run: bool
    target_qps: float | None


async def _main(inputs: Inputs, cut: Cut, how: Session, stage: StageRun) -> int:
    from calculet_perf.shell.runner import new_info
    from calculet_perf.shell.screen import Screen, span
    from calculet_perf.shell.shards import Shards
    from calculet_perf.shell.soak import SoakRunner

    seconds, folder = stage.planned_s or stage.asked_s, how.folder
    with Screen(quiet=how.quiet) as screen:
        client = client_of(inputs)
        swaps = await _swaps_before(inputs, how)
        setup = await prepare(client, _any_generation(inputs) if swaps else inputs, cut, need_cells=False)
        cuts = [short for short in setup.plan.shortened if not short.what.startswith("samples of")]
        if seconds < stage.asked_s:
            cuts.append(Shortened(what=f"stage {stage.stage}", asked=stage.asked_s, done=seconds, unit="s", clause="13"))
        if swaps is not None:
            await _look(swaps, setup.facts.generations)
            if swaps.part.cycles < CYCLES_ASKED:
                cut_cycles = Shortened(
                    what="load/unload cycles", asked=CYCLES_ASKED, done=swaps.part.cycles, unit="cycles", clause="scheduling §19 M4"
                )
                cuts.append(cut_cycles)
        # The matrix's cells are not run here, so that nothing of theirs is cut or not applicable.
        setup.plan = replace(setup.plan, items=[], not_applicable=[], shortened=cuts)
        if how.dry_run:
            click.echo("\n".join([*_plan(setup, stage, how.target_qps), *_swap_lines(swaps, seconds)]))
            return Exit.PASS
        writer = RunWriter(folder, resume=how.resume)
        segments, last_ns = 0, None
        if (folder / INFO).exists():
            info = resumed(folder, inputs, setup)
            stage, segments, last_ns = _so_far(folder, stage)
            setup.plan = replace(setup.plan, idle_s=min(setup.plan.idle_s, RESUMED_IDLE_S))
        else:
            info = new_info(setup, client.target.name, version("calculet"), inputs.sums, how.processes)
            writer.put(MANIFEST, inputs.manifest_bytes)
            writer.put(MATRIX, inputs.matrix_bytes)
        writer.put_info(info)
        left = f", {span(seconds - stage.done_s)} of it left," if segments else ""
        screen.say(f"{folder}: stage {stage.stage} for {span(seconds)}{left} against {client.target.name}")
        async with Shards(client.target, setup.sender.path, inputs.manifest.timeout_s, how.processes) as shards:
            runner = SoakRunner(setup, info, writer, client, shards, screen)
            cycles = sum(not cycle.interrupted and cycle.kind != "home" for cycle in RunReader(folder).swaps()) if swaps else 0
            runner.begin(stage, how.target_qps, segments, last_ns, swaps, cycles)
            await until_stopped(runner)
        client.close()
        if swaps is not None and info.status == "interrupted" and not await swaps.at_home():
            screen.say(f"the fleet does not serve what it did at the begin ({swaps.home.package}); --resume loads that first")
    return verdict(info, folder, "soak")


def _so_far(folder: Path, stage: StageRun) -> tuple[StageRun, int, int | None]:
    """The stage as it was left, its segments, and when the last one ended; what a segment that did not finish wrote is dropped.

    Raises:
        RunDirError: the folder holds another stage.
    """
    cases = list(RunReader(folder).cases())
    drop_unfinished(folder, {(case.case, case.round) for case in cases})
    left = read_stage(folder / STAGE)
    if left is None:
        return stage, len(cases), max((case.end_ns for case in cases), default=None)
    if (left.stage, left.asked_s, left.planned_s) != (stage.stage, stage.asked_s, stage.planned_s):
        was = f"{left.stage} for {left.planned_s or left.asked_s:g} s"
        raise RunDirError(f"{folder} holds a stage {was}: give the options that it was started with")
    return left, max((case.round for case in cases), default=-1) + 1, max((case.end_ns for case in cases), default=None)


async def _swaps_before(inputs: Inputs, how: Session) -> SwapFleet | None:
    """The driver of the manifest's swaps, with the fleet brought back to where an interrupted session found it; None: no swaps.

    Ends with 3 when the fleet cannot be asked.

    Raises:
        ManifestError: the section is wrong, or the fleet could not be brought back.
    """
    from calculet_perf.shell.swap_fleet import FleetUnreachable, Loaded, SwapFleet

    part = inputs.manifest.fleet
    if part is None or part.swaps is None or not part.swaps.allow:
        return None
    manifest = inputs.manifest
    fleet = SwapFleet.open(inputs.folder / part.config, manifest.model.alias, part.swaps, inputs.folder, manifest.run_id)
    first = None
    if how.resume and not how.dry_run and (how.folder / INFO).exists():
        first = next((cycle for cycle in RunReader(how.folder).swaps() if cycle.from_digest and cycle.from_package), None)
    if first is not None and first.from_digest is not None and first.from_package is not None:
        try:
            await fleet.go_home(Loaded(first.from_digest, first.from_package))
        except FleetUnreachable as error:
            end(Exit.INFRASTRUCTURE, str(error))
    return fleet


async def _look(swaps: SwapFleet, generations: dict[str, int]) -> None:
    from calculet_perf.shell.swap_fleet import FleetUnreachable

    try:
        await swaps.look(generations)
    except FleetUnreachable as error:
        end(Exit.INFRASTRUCTURE, str(error))


def _any_generation(inputs: Inputs) -> Inputs:
    """Generations are what swaps change: the manifest's number is that of the begin, and binds nobody afterwards."""
    manifest = inputs.manifest
    model = msgspec.structs.replace(manifest.model, generation=None)
    return replace(inputs, manifest=msgspec.structs.replace(manifest, model=model))


def _swap_lines(swaps: SwapFleet | None, seconds: float) -> list[str]:
    if swaps is None:
        return []
    part, kinds = swaps.part, Counter[str]()
    for number in range(part.cycles):
        kinds[kind_of(number, part, to_home=number % 2 == 1)] += 1
    each = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    where = "all in pauses of the load" if part.allow_downtime else "unloads in pauses of the load, the others under it"
    return [
        f"swaps on {', '.join(swaps.boards)}: {part.cycles} cycles, one each {seconds / part.cycles:.0f} s ({each}), {where}",
        f"  {swaps.home.package}  <->  {swaps.other.package}",
    ]


def _plan(setup: Setup, stage: StageRun, target_qps: float | None) -> list[str]:
    from calculet_perf.shell.screen import cut_lines, span
    from calculet_perf.workloads.stages import segment

    load, seconds = LOADS[stage.stage], stage.planned_s or stage.asked_s
    lines = [f"stage {stage.stage}: {span(seconds)} of load, then golden; idle sampling {span(setup.plan.idle_s)} before"]
    kinds: dict[str, Cell] = {}
    for number in range(max(1, load.burst_every) * 4):
        part = segment(load, stage.stage, number, target_qps, 60, setup.facts.context, 1)
        kinds.setdefault(part.cell.id, part.cell)
    for name, cell in kinds.items():
        shapes = ", ".join(f"{shape.share:.0%} of {shape.prompt}+{shape.output}" for shape in cell.shapes)
        lines.append(f"  {name}: {shapes} tokens")
    return [*lines, *cut_lines(setup.plan)]
