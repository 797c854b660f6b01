"""`calculet-perf capacity MANIFEST`: the highest stable rate."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import msgspec

from calculet_perf.commands.common import Exit, end
from calculet_perf.commands.run import FILE, Inputs, client_of, prepare, read_inputs, resumed, until_stopped, verdict
from calculet_perf.manifest import ManifestError
from calculet_perf.plan import Cut
from calculet_perf.runinfo import Shortened
from calculet_perf.shell.run_dir import INFO, MANIFEST, MATRIX, RunReader, RunWriter, drop_unfinished


@click.command()
@click.argument("manifest", type=FILE)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder.  [default: runs/RUN_ID-capacity]")
@click.option("--window", "window_s", type=click.FloatRange(min=1), help="Seconds of a full window; below 1800 is labelled.")
@click.option("--screen", "screen_s", type=click.FloatRange(min=1), help="Seconds of a screen.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted search: windows that are done stay.")
@click.option("--idle", "idle_s", type=click.FloatRange(0), help="Idle sampling in seconds; below 300 is labelled.")
@click.option("--warmups", type=click.IntRange(0), help="Warm-ups; below 10 is labelled.")
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Client processes.")
@click.option("--quiet", is_flag=True, help="Print nothing but the end.")
def capacity(
    manifest: Path, out: Path | None, window_s: float | None, screen_s: float | None, resume: bool, idle_s: float | None,
    warmups: int | None, processes: int, quiet: bool,
) -> None:  # fmt: skip
    """Find the highest rate at which errors, latency and queue hold over a whole window (acceptance §14.3), by the `capacity`
    section of MANIFEST's matrix.

    Exit codes: 0 found, 1 golden failed, 2 the manifest or matrix is wrong, 3 the measurement is invalid, 4 no rate was stable.
    """
    import uvloop

    inputs = read_inputs(manifest)
    spec = inputs.matrix.capacity
    if spec is None:
        raise ManifestError(f"{inputs.matrix_path}: $.capacity: is missing")
    changes = {"window_s": window_s, "screen_s": screen_s}
    spec = msgspec.structs.replace(spec, **{key: value for key, value in changes.items() if value is not None})
    inputs = Inputs(
        inputs.manifest, msgspec.structs.replace(inputs.matrix, capacity=spec), inputs.manifest_bytes, inputs.matrix_bytes,
        inputs.matrix_path, inputs.folder,
    )  # fmt: skip
    folder = out or Path("runs") / f"{inputs.manifest.run_id}-capacity"
    code = uvloop.run(_main(inputs, Cut(idle_s, None, warmups), folder, processes, quiet, resume))
    if code:
        raise SystemExit(code)


async def _main(inputs: Inputs, cut: Cut, folder: Path, processes: int, quiet: bool, resume: bool) -> int:
    from calculet_perf.capacity import WINDOW_S, Outcome
    from calculet_perf.shell.capacity import CAPACITY, CapacityRunner, so_far
    from calculet_perf.shell.runner import new_info
    from calculet_perf.shell.screen import Screen
    from calculet_perf.shell.shards import Shards

    spec = inputs.matrix.capacity
    assert spec is not None
    with Screen(quiet=quiet) as screen:
        client = client_of(inputs)
        setup = await prepare(client, inputs, cut, need_cells=False)
        # Cells of the matrix are not run here, so that nothing of theirs is cut or not applicable.
        cuts = [short for short in setup.plan.shortened if not short.what.startswith("samples of")]
        if spec.window_s < WINDOW_S:
            cuts.append(Shortened(what="capacity window", asked=WINDOW_S, done=spec.window_s, unit="s", clause="14.3"))
        setup.plan = replace(setup.plan, items=[], not_applicable=[], shortened=cuts)
        writer = RunWriter(folder, resume=resume)
        windows: list[Outcome] = []
        if (folder / INFO).exists():
            info, windows = resumed(folder, inputs, setup), so_far(folder, spec)
            done = {outcome.trial.number for outcome in windows}
            drop_unfinished(folder, {(case.case, case.round) for case in RunReader(folder).cases() if case.round in done})
        else:
            info = new_info(setup, client.target.name, version("calculet"), inputs.sums, processes)
            writer.put(MANIFEST, inputs.manifest_bytes)
            writer.put(MATRIX, inputs.matrix_bytes)
        writer.put_info(info)
        async with Shards(client.target, setup.sender.path, inputs.manifest.timeout_s, processes) as shards:
            runner = CapacityRunner(setup, info, writer, client, shards, screen)
            runner.begin(spec, windows)
            await until_stopped(runner)
        client.close()
    if code := verdict(info, folder, "capacity"):
        return code
    result = runner.result
    if result.stable_qps is None:
        end(Exit.REGRESSION, f"no rate was stable; see {folder / CAPACITY}")
    label = f" (shortened: windows of {spec.window_s:g} s, not {WINDOW_S:g} s)" if spec.window_s < WINDOW_S else ""
    bound = f"; {result.unproven}" if result.unproven else ""
    click.echo(f"stable up to {result.stable_qps:.3f} requests/s{label}{bound}")
    return Exit.PASS
