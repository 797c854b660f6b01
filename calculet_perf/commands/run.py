"""`calculet-perf run MANIFEST`: measures."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from calculet_perf.commands.common import Exit, end
from calculet_perf.manifest import Manifest, ManifestError, parse_manifest
from calculet_perf.plan import Cut, build_plan
from calculet_perf.runinfo import Invalid, RunInfo
from calculet_perf.shell.run_dir import INFO, MANIFEST, MATRIX, RunDirError, RunReader, RunWriter, drop_unfinished
from calculet_perf.workloads.matrix import Matrix, parse_matrix

if TYPE_CHECKING:
    from calculet_perf.shell.http import HttpClient
    from calculet_perf.shell.runner import Runner, Setup
    from calculet_perf.shell.screen import Screen
    from calculet_perf.shell.traces import StepTraces

HINTS = {"tls_failed": "name its authority in $.server.tls.ca_file, its name in $.server.tls.server_name, or say http://"}
"""What to do about a server that could not be asked, by the code of why."""
SELF_HINT = (
    "  the server did not say the same twice: a prompt cache may be the reason (llama-server: `extra_body: {cache_prompt: false}`\n"
    "  under $.server), or sampling that ignores temperature 0"
)
T = TypeVar("T")
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Both files, parsed and as they are."""

    manifest: Manifest
    matrix: Matrix
    manifest_bytes: bytes
    matrix_bytes: bytes
    matrix_path: Path
    folder: Path
    """Of the manifest: what else it names lies relative to it."""

    @property
    def sums(self) -> tuple[str, str]:
        """sha256 of both."""
        return hashlib.sha256(self.manifest_bytes).hexdigest(), hashlib.sha256(self.matrix_bytes).hexdigest()


def read_inputs(path: Path, matrix_path: Path | None = None) -> Inputs:
    """The manifest and its matrix.

    Raises:
        ManifestError: one of them cannot be read, or is wrong.
    """
    manifest_bytes = _read(path)
    manifest = parse_manifest(manifest_bytes, str(path))
    matrix_path = matrix_path or path.parent / manifest.matrix
    matrix_bytes = _read(matrix_path)
    return Inputs(manifest, parse_matrix(matrix_bytes, str(matrix_path)), manifest_bytes, matrix_bytes, matrix_path, path.parent)


def _read(path: Path) -> bytes:
    from calculet_core.shell.files import read_bounded

    try:
        return read_bounded(path)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from None


@click.command()
@click.argument("manifest", type=FILE)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The run's folder.  [default: runs/RUN_ID]")
@click.option("--matrix", "matrix_path", type=FILE, help="Another matrix than the manifest's.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run: cells that are done stay.")
@click.option("--dry-run", is_flag=True, help="Print the plan and its duration; ask the server only what it is.")
@click.option("--processes", type=click.IntRange(1, 64), help="Client processes.  [default: the manifest's, else 1]")
@click.option("--only", help="Only cells whose name contains this.")
@click.option("--idle", "idle_s", type=click.FloatRange(0), help="Idle sampling in seconds; below 300 is labelled.")
@click.option("--max-requests", type=click.IntRange(1), help="At most so many samples a cell; labelled.")
@click.option("--warmups", type=click.IntRange(0), help="Warm-ups of a shape; below 10 is labelled.")
@click.option(
    "--trace", "traces", multiple=True, type=click.Path(path_type=Path),
    help="Folder of the server's step trace (LOG_DIR/trace, on this host, with trace.steps on); may be repeated.",
)  # fmt: skip
@click.option("--selftest/--no-selftest", default=True, show_default=True, help="Test the client against a null server first.")
@click.option("--quiet", is_flag=True, help="Print nothing but the end.")
def run(
    manifest: Path, out: Path | None, matrix_path: Path | None, resume: bool, dry_run: bool, processes: int | None,
    only: str | None, idle_s: float | None, max_requests: int | None, warmups: int | None, traces: tuple[Path, ...],
    selftest: bool, quiet: bool,
) -> None:  # fmt: skip
    """Measure what MANIFEST describes, in the order of acceptance §8, into a folder.

    Exit codes: 0 measured (a verdict is made by compare and report), 1 golden failed or resources did not come back, 2 the
    manifest, the matrix or what is served is wrong, 3 the measurement is invalid (unreachable, clock, rate, interrupted).
    """
    import uvloop

    inputs = read_inputs(manifest, matrix_path)
    cut = Cut(idle_s, max_requests, warmups, only)
    folder = out or Path("runs") / inputs.manifest.run_id
    clients = processes or inputs.manifest.client.processes or 1
    code = uvloop.run(_main(inputs, cut, folder, clients, resume, dry_run, traces, selftest, quiet))
    if code:
        raise SystemExit(code)


async def _main(
    inputs: Inputs, cut: Cut, folder: Path, processes: int, resume: bool, dry_run: bool, traces: tuple[Path, ...],
    selftest: bool, quiet: bool,
) -> int:  # fmt: skip
    from calculet_perf.shell.runner import Runner, new_info
    from calculet_perf.shell.screen import Screen, plan_lines
    from calculet_perf.shell.shards import Shards

    with Screen(quiet=quiet) as screen:
        client = client_of(inputs)
        setup = await prepare(client, inputs, cut)
        setup.traces = _traces(traces)
        if dry_run:
            click.echo("\n".join(plan_lines(setup.plan)))
            return Exit.PASS
        writer = RunWriter(folder, resume=resume)
        if (folder / INFO).exists():
            info = resumed(folder, inputs, setup)
            setup.done = {(case.case, case.round) for case in RunReader(folder).cases()}
            drop_unfinished(folder, setup.done)
        else:
            info = new_info(setup, client.target.name, version("calculet"), inputs.sums, processes)
            writer.put(MANIFEST, inputs.manifest_bytes)
            writer.put(MATRIX, inputs.matrix_bytes)

        async def begun() -> None:
            writer.put_info(info)
            screen.say(f"{folder}: {len(setup.plan.items)} cells against {client.target.name}")
            if selftest and not await _selftest(setup, info, processes, screen):
                info.status = "infrastructure_invalid"
                return
            async with Shards(client.target, setup.sender.path, inputs.manifest.timeout_s, processes) as shards:
                await Runner(setup, info, writer, client, shards, screen).run()

        await stoppable(begun())
        if info.status == "running":  # stopped before the runner, which says so itself, had begun
            info.status = "interrupted"
            info.invalid.append(Invalid(code="interrupted", message="stopped before its end"))
        writer.put_info(info)
        writer.close()
        client.close()
    return verdict(info, folder)


def _traces(folders: tuple[Path, ...]) -> StepTraces | None:
    from calculet_perf.shell.traces import StepTraces, TraceError

    try:
        return StepTraces(folders) if folders else None
    except TraceError as error:
        raise ManifestError(f"--trace: {error}") from None


async def until_stopped(runner: Runner) -> None:
    """Run; SIGINT and SIGTERM end it in order, with everything written."""
    await stoppable(runner.run())


async def stoppable(work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None when SIGINT or SIGTERM cancelled it, which it gets the time to end in order for."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return None if task.cancelled() else task.result()


def verdict(info: RunInfo, folder: Path, verb: str = "run") -> int:
    """The exit code of a run that ended, said in a line. What is proven to be wrong weighs more than an invalid measurement."""
    failed = [outcome.moment for outcome in info.golden if not outcome.passed]
    kept = [one for one in info.returned if not one.returned]
    if failed:
        click.echo(f"calculet-perf: golden failed {' and '.join(failed)}; see {folder / INFO}", err=True)
        if info.foreign and info.golden[0].source == "self":
            click.echo(SELF_HINT, err=True)
        return Exit.CORRECTNESS
    if kept:
        names = ", ".join(f"{one.board} {one.resource}" for one in kept)
        click.echo(f"calculet-perf: resources did not come back: {names}", err=True)
        return Exit.CORRECTNESS
    if info.status == "interrupted":
        click.echo(f"calculet-perf: interrupted; go on with: calculet-perf {verb} ... --out {folder} --resume", err=True)
        return Exit.INFRASTRUCTURE
    if info.invalid:
        click.echo(f"calculet-perf: the measurement is invalid: {info.invalid[-1].message}", err=True)
        return Exit.INFRASTRUCTURE
    click.echo(str(folder))
    return Exit.PASS


def client_of(inputs: Inputs) -> HttpClient:
    """A client for small requests to the manifest's server.

    Raises:
        ManifestError: the key's variable or the file of authorities is not there.
    """
    from calculet_perf.shell.http import HttpClient
    from calculet_perf.shell.probe import target_of
    from calculet_perf.shell.tls import TlsSettings

    manifest = inputs.manifest
    name, tls = manifest.server.api_key_env, manifest.server.tls
    key = os.environ.get(name) if name else None
    if name and not key:
        raise ManifestError(f"$.server.api_key_env: the environment has no {name}")
    settings = None
    if tls is not None:
        ca_file = None if tls.ca_file is None else str(inputs.folder / tls.ca_file)
        settings = TlsSettings(ca_file=ca_file, server_name=tls.server_name, verify=tls.verify)
    return HttpClient(target_of(manifest.server.url, key, settings), timeout_s=manifest.timeout_s)


async def prepare(client: HttpClient, inputs: Inputs, cut: Cut, *, need_cells: bool = True) -> Setup:
    """Ask the server what it is, and plan; ends with 3 when it does not answer and 2 when it is not what the manifest says."""
    from calculet_perf.golden import parse_golden
    from calculet_perf.shell.http import AskError
    from calculet_perf.shell.probe import facts
    from calculet_perf.shell.runner import Expected, Setup
    from calculet_perf.validity import mismatches
    from calculet_perf.workloads.requests import sender_of

    manifest, matrix = inputs.manifest, inputs.matrix
    try:
        told = await facts(client, manifest.model.alias)
    except AskError as error:
        end(
            Exit.INFRASTRUCTURE,
            f"the server cannot be reached: {error}",
            HINTS.get(error.code, "is $.server.url right, and does it serve?"),
        )
    if wrong := mismatches(manifest, told):
        raise ManifestError("the served artifact is not the manifest's: " + "; ".join(wrong))
    sender = sender_of(manifest, matrix, foreign=told.foreign)
    expected = Expected({}, "self")
    if matrix.golden.file is not None:
        path = inputs.matrix_path.parent / matrix.golden.file
        expected = Expected(parse_golden(_read(path), str(path), sender, matrix.golden), path.name)
    plan = build_plan(manifest, matrix, told, cut)
    if need_cells and not plan.items:
        raise ManifestError(f"{inputs.matrix_path}: no cell is left to measure ({len(plan.not_applicable)} are not applicable)")
    return Setup(manifest, matrix, told, plan, sender, expected, set())


def resumed(folder: Path, inputs: Inputs, setup: Setup) -> RunInfo:
    """The state of the run to go on with.

    Raises:
        RunDirError: it is another run, or of another boot.
    """
    from calculet_perf.shell.runner import boot_id

    info = RunReader(folder).info
    if (info.manifest_sha256, info.matrix_sha256) != inputs.sums:
        raise RunDirError(f"{folder} holds a run of another manifest or matrix: it cannot be resumed with these")
    if info.planned != [item.name for item in setup.plan.items]:
        raise RunDirError(f"{folder} holds a run of another plan: give the options that it was started with")
    if info.boot_id != boot_id():
        raise RunDirError(f"{folder} was begun before this machine started anew: its monotonic times cannot be continued")
    info.sessions += 1
    info.status, info.ended_utc = "running", None
    info.invalid = [one for one in info.invalid if one.code not in ("interrupted", "unreachable", "crash", "selftest")]
    return info


async def _selftest(setup: Setup, info: RunInfo, processes: int, screen: Screen) -> bool:
    """The client against a null server at twice the planned rate; False when it could not keep up."""
    from calculet_perf.shell.selftest import planned_rate, selftest

    outcome = await selftest(planned_rate(setup.plan), processes=processes)
    info.selftest = outcome
    if not outcome.passed:
        message = f"the client cannot offer {outcome.rate_qps:g} requests/s, twice what is planned; try --processes {processes + 1}"
        info.invalid.append(Invalid(code="selftest", message=message))
        screen.say(message)
    return outcome.passed
