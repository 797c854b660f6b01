"""`calculet-perf compare BASE CANDIDATE`: is the candidate what is claimed of it?"""

from __future__ import annotations

from pathlib import Path

import click

from calculet_perf.commands.common import Exit, end
from calculet_perf.commands.judging import FILE, FOLDER, finish, judging_options, now_utc, say, trusted, write_report


@click.command()
@click.argument("base", metavar="BASE", type=FOLDER)
@click.argument("candidate", metavar="CANDIDATE", type=FOLDER)
@click.option("--control", type=FOLDER, help="A second run of the base's build: the A/A control. Else splits of the base's rounds.")
@click.option("--soak", type=FOLDER, help="A run of the stage that the claim needs, of the candidate's build.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the report; without it only the verdict is said."
)
@click.option(
    "--trust", type=FILE, multiple=True, help="Trusted public key (PEM): all runs must be signed by one. May be repeated."
)
@judging_options
def compare(
    base: Path, candidate: Path, control: Path | None, soak: Path | None, out: Path | None, trust: tuple[Path, ...],
    claim_name: str | None, claim_file: Path | None, rules_file: Path | None, journals: tuple[Path, ...], faults: tuple[Path, ...],
    key: Path | None, seed: int, pdf: bool | None,
) -> None:  # fmt: skip
    """Compare the runs in BASE and CANDIDATE, cell by cell, and judge the claim (default: rebuild, no worse than the base).

    Exit codes: 0 pass, 1 correctness, 2 configuration, 3 invalid measurement or insufficient evidence, 4 performance.
    """
    from calculet_perf.attestation import AttestationError
    from calculet_perf.comparison import compare_runs
    from calculet_perf.report.model import report_of
    from calculet_perf.rules import RulesError
    from calculet_perf.shell.attest import hashes, verify_folder
    from calculet_perf.shell.loading import load_claim, load_evidence, load_rules
    from calculet_perf.verdict import judge

    if key is not None and out is None:
        raise click.UsageError("--key signs the folder of --out")
    runs = {"base": base, "candidate": candidate, "control": control, "soak": soak}
    folders = {name: folder for name, folder in runs.items() if folder is not None}
    try:
        rules, digest = load_rules(rules_file)
        claim = load_claim(claim_name, claim_file, rules, "rebuild")
        if trust:
            keys = trusted(trust)
            for folder in folders.values():
                verify_folder(folder, keys)
    except (RulesError, AttestationError) as error:
        end(Exit.INVALID, str(error))
    before, after = load_evidence(base, rules, digest), load_evidence(candidate, rules, digest, journals, faults)
    if before.info == after.info:
        end(Exit.INVALID, f"{base} and {candidate} are the same run: compared with itself, anything is as good as before")
    again = load_evidence(control, rules, digest).cells if control is not None else None
    soaked = load_evidence(soak, rules, digest) if soak is not None else None
    comparison = compare_runs(before.cells, after.cells, rules.claims[claim.claim], claim, seed, again)
    verdict = judge(after, rules, digest, claim, before, comparison, soaked)
    if out is not None:
        inputs = {name: hashes(folder) for name, folder in folders.items()}
        made = report_of(after, verdict, created_utc=now_utc(), seed=seed, base=before, comparison=comparison)
        out.mkdir(parents=True, exist_ok=True)
        write_report(out, made, key, pdf, inputs)
    say(verdict, out)
    finish(verdict.exit_code)
