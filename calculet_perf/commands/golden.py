"""`calculet-perf golden MANIFEST`: the fixed cases alone, checked or recorded."""

from __future__ import annotations

import json
from pathlib import Path

import click

from calculet_perf.commands.common import Exit, end, json_option

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("manifest", type=FILE)
@click.option("--record", "file", type=FILE, help="Write the answers, which must agree with each other, as a golden file.")
@click.option("--passes", type=click.IntRange(2), help="How often each case is asked.  [default: twice per board]")
@json_option
def golden(manifest: Path, file: Path | None, passes: int | None, as_json: bool) -> None:
    """Ask the golden cases of MANIFEST's matrix and compare (acceptance §8.3).

    Exit codes: 0 all as expected, 1 one was not, 2 the manifest or golden file is wrong, 3 the server cannot be reached.
    """
    import uvloop

    raise SystemExit(uvloop.run(_golden(manifest, file, passes, as_json)))


async def _golden(path: Path, file: Path | None, passes: int | None, as_json: bool) -> int:
    from calculet_core.shell.files import write_atomic
    from calculet_perf import validity
    from calculet_perf.assemble import Assembler
    from calculet_perf.commands.run import client_of, prepare, read_inputs
    from calculet_perf.golden import golden_lines, golden_requests, judge
    from calculet_perf.manifest import ManifestError
    from calculet_perf.plan import Cut

    inputs = read_inputs(path)
    client = client_of(inputs)
    setup = await prepare(client, inputs, Cut())
    sender = setup.sender
    expected = {} if file is not None else setup.expected.hashes
    times = passes or max(2, 2 * (setup.facts.boards or 1))
    assembler = Assembler(inputs.manifest, setup.facts, exact_prompts=sender.sends_ids)
    records = []
    for one_pass in golden_requests(sender, inputs.matrix.golden, times, inputs.manifest.run_id, "golden"):
        for planned in one_pass:
            records.append(assembler.request(planned, await client.ask(planned.asked, sender.path), concurrency=1))
    client.close()
    if all(validity.went_away([record]) for record in records):
        end(Exit.INFRASTRUCTURE, f"no request reached {client.target.name}")
    if trouble := validity.refused(records, sender.path, foreign=setup.facts.foreign, ids=sender.sends_ids):
        raise ManifestError(trouble)
    learned, failures = judge(records, expected)
    if file is not None and not failures:
        write_atomic(file, golden_lines(records, learned, sender), 0o644)
    if as_json:
        recorded = len(learned) if file is not None and not failures else 0
        click.echo(json.dumps({"answers": len(records), "failures": failures, "recorded": recorded}, indent=2))
        return Exit.CORRECTNESS if failures else Exit.PASS
    for failure in failures:
        click.echo(failure)
    if failures:
        end(Exit.CORRECTNESS, f"golden failed: {len(failures)} of {len(records)} answers")
    if file is not None:
        click.echo(f"{file}: {len(learned)} cases recorded")
    else:
        click.echo(f"golden passed: {len(records)} answers, expectations from {setup.expected.source}")
    return Exit.PASS
