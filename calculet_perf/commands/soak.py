"""`calculet-perf soak MANIFEST --stage NAME`: one load for hours (acceptance §13)."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import click

from calculet_perf.commands.common import Exit, end
from calculet_perf.commands.run import FILE, Inputs, client_of, prepare, read_inputs, until_stopped, verdict
from calculet_perf.plan import Cut
from calculet_perf.runinfo import Shortened
from calculet_perf.shell.run_dir import MANIFEST, MATRIX, RunWriter
from calculet_perf.workloads.stages import LOADS


@click.command()
@click.argument("manifest", type=FILE)
@click.option("--stage", type=click.Choice(list(LOADS)), required=True, help="Which load, and for how long by the rules.")
@click.option("--target-qps", type=click.FloatRange(min=0, min_open=True), help="The target rate; every stage but smoke needs it.")
@click.option("--seconds", type=click.FloatRange(min=1), help="How long; less than the stage asks for is labelled.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder.  [default: runs/RUN_ID-STAGE]")
@click.option("--rules", "rules_file", type=FILE, help="Other rules than the shipped calculet-rules/v1.")
@click.option("--idle", "idle_s", type=click.FloatRange(0), help="Idle sampling in seconds; below 300 is labelled.")
@click.option("--warmups", type=click.IntRange(0), help="Warm-ups of a shape; below 10 is labelled.")
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Client processes.")
@click.option("--quiet", is_flag=True, help="Print nothing but the end.")
def soak(
    manifest: Path, stage: str, target_qps: float | None, seconds: float | None, out: Path | None, rules_file: Path | None,
    idle_s: float | None, warmups: int | None, processes: int, quiet: bool,
) -> None:  # fmt: skip
    """Keep one load up for a stage's time. `calculet-perf report` then says whether the stage was passed: leaks, errors, faults.

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
    folder = out or Path("runs") / f"{inputs.manifest.run_id}-{stage}"
    cut = Cut(idle_s, None, warmups)
    code = uvloop.run(_main(inputs, cut, folder, processes, quiet, (stage, asked_s, seconds or asked_s, target_qps)))
    if code:
        raise SystemExit(code)


async def _main(
    inputs: Inputs, cut: Cut, folder: Path, processes: int, quiet: bool, stage: tuple[str, float, float, float | None]
) -> int:
    from calculet_perf.shell.runner import new_info
    from calculet_perf.shell.screen import Screen, span
    from calculet_perf.shell.shards import Shards
    from calculet_perf.shell.soak import SoakRunner

    name, asked_s, seconds, target_qps = stage
    with Screen(quiet=quiet) as screen:
        client = client_of(inputs)
        setup = await prepare(client, inputs, cut, need_cells=False)
        setup.plan.items.clear()
        info = new_info(setup, client.target.name, version("calculet"), inputs.sums, processes)
        info.shortened = [short for short in info.shortened if not short.what.startswith("samples of")]
        if seconds < asked_s:
            info.shortened.append(Shortened(what=f"stage {name}", asked=asked_s, done=seconds, unit="s", clause="13"))
        writer = RunWriter(folder)
        writer.put(MANIFEST, inputs.manifest_bytes)
        writer.put(MATRIX, inputs.matrix_bytes)
        writer.put_info(info)
        screen.say(f"{folder}: stage {name} for {span(seconds)} against {client.target.name}")
        async with Shards(client.target, setup.sender.path, inputs.manifest.timeout_s, processes) as shards:
            runner = SoakRunner(setup, info, writer, client, shards, screen)
            runner.begin(name, asked_s, seconds, target_qps)
            await until_stopped(runner)
        client.close()
    return verdict(info, folder)
