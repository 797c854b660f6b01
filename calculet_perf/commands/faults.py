"""`calculet-perf faults`: breaks a fleet on purpose, scenario by scenario (acceptance §11, §12)."""

from __future__ import annotations

import asyncio
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
import msgspec

from calculet_perf.commands.common import Exit, end, json_option

if TYPE_CHECKING:
    from calculet_perf.faults import Scenario
    from calculet_perf.shell.fault_fleet import Packages

PACKAGE = Path(".calculet/packages/sim-batch")
SECOND = Path(".calculet/packages/qwen3-sim")
TRUST = Path(".calculet/keys/dev.pub")


@click.command()
@click.argument("scenarios", nargs=-1)
@click.option("--package", type=click.Path(path_type=Path), default=PACKAGE, show_default=True, help="The artifact that is served.")
@click.option("--second", type=click.Path(path_type=Path), default=SECOND, show_default=True, help="Another one, for swaps.")
@click.option("--trust", type=click.Path(path_type=Path), default=TRUST, show_default=True, help="Public key of its signature.")
@click.option("--device", default="sim", show_default=True, help="The boards' backend.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for faults.jsonl and the fleets' files.")
@click.option("--jobs", type=click.IntRange(1, 32), default=1, show_default=True, help="Scenarios at a time, a fleet each.")
@click.option("--catalogue", type=click.Path(path_type=Path, dir_okay=False), help="Another file of scenarios.")
@click.option("--list", "only_list", is_flag=True, help="List the scenarios and what is expected of them.")
@json_option
def faults(
    scenarios: tuple[str, ...], package: Path, second: Path, trust: Path, device: str, out: Path | None, jobs: int,
    catalogue: Path | None, only_list: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run SCENARIOS, or all, each on a fresh fleet whose board0 has an injector around its device.

    A scenario is valid only when every planned fault fired. Exit codes: 0 all as expected, 1 one was not, 2 wrong usage or package,
    3 a fleet did not come up or a planned fault did not fire.
    """
    import uvloop

    from calculet_core.shell.files import read_bounded
    from calculet_perf.faults import parse_catalogue
    from calculet_perf.shell.fault_fleet import Packages

    if catalogue is None:
        source, data = "faults.yaml", (files("calculet_perf") / "scenarios" / "faults.yaml").read_bytes()
    else:
        source, data = str(catalogue), read_bounded(catalogue)
    found = parse_catalogue(data, source)
    if only_list and as_json:
        click.echo(msgspec.json.encode(found))
        return
    if only_list:
        for scenario in found.scenarios:
            click.echo(f"{scenario.id:20} {scenario.clause}  {scenario.injects}\n{'':26}-> {scenario.expected}")
        for other in found.not_run:
            click.echo(f"{other.id:20} {other.clause}  not run: {other.reason}")
        return
    known = {scenario.id: scenario for scenario in found.scenarios}
    if unknown := [name for name in scenarios if name not in known]:
        end(Exit.INVALID, f"there is no scenario {', '.join(unknown)}", "--list names them")
    chosen = [known[name] for name in scenarios] or list(found.scenarios)
    swaps = any(scenario.load.kind == "swap" for scenario in chosen)
    for path in (package / "manifest.yaml", trust, *([second / "manifest.yaml"] if swaps else [])):
        if not path.is_file():
            end(Exit.INVALID, f"{path}: there is no such file", "make packages builds simulated ones")
    folder = out or Path(tempfile.mkdtemp(prefix="calculet-faults-"))
    packages = Packages(package, second if swaps else None, trust)
    raise SystemExit(uvloop.run(_run(chosen, folder, packages, device, jobs, as_json)))


async def _run(chosen: list[Scenario], folder: Path, packages: Packages, device: str, jobs: int, as_json: bool) -> int:
    from calculet_core.errors import ConfigError
    from calculet_perf.faults import Outcome, verdict
    from calculet_perf.records import to_line
    from calculet_perf.shell.fault_fleet import FleetError
    from calculet_perf.shell.fault_run import run_scenario
    from calculet_perf.shell.run_dir import FAULTS

    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}
    todo = iter(chosen)

    async def one_after_the_other(file: BinaryIO) -> None:
        for scenario in todo:
            try:
                outcome = await run_scenario(scenario, folder / scenario.id, packages, device)
            except FleetError as error:
                failed[scenario.id] = str(error)
                click.echo(f"{scenario.id:20} could not be run: {error}", err=as_json)
                continue
            outcomes.append(outcome)
            file.write(to_line(outcome))
            file.flush()
            word = "as expected" if outcome.as_expected else "WRONG" if outcome.valid else "INVALID"
            reasons = "".join(f"\n{'':23}{reason}" for reason in outcome.reasons)
            click.echo(f"{scenario.id:20} {word}: {outcome.observed}{reasons}", err=as_json)

    with (folder / FAULTS).open("ab") as file:
        try:
            await asyncio.gather(*(one_after_the_other(file) for _ in range(jobs)))
        except ConfigError as error:
            end(Exit.INVALID, str(error))
    counts = verdict(outcomes)
    if as_json:
        answer = {"counts": counts, "outcomes": outcomes, "not_run": failed, "file": str(folder / FAULTS)}
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))
    else:
        click.echo(f"{counts['as_expected']} of {len(chosen)} as expected; {folder / FAULTS}")
    if counts["wrong"]:
        return Exit.CORRECTNESS
    return Exit.INFRASTRUCTURE if counts["invalid"] or failed else Exit.PASS
