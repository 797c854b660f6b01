"""`calculet-perf report DIR`: judge a run, write report.json, report.html and report.pdf into its folder, and sign all of it."""

from __future__ import annotations

from pathlib import Path

import click

from calculet_perf.commands.common import Exit, end
from calculet_perf.commands.judging import FOLDER, finish, judging_options, now_utc, say, write_report


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@judging_options
def report(
    folder: Path, claim_name: str | None, claim_file: Path | None, rules_file: Path | None,
    journals: tuple[Path, ...], faults: tuple[Path, ...],
    key: Path | None, seed: int, pdf: bool | None,
) -> None:  # fmt: skip
    """Judge the run in DIR and write its report there: report.json, report.html, report.pdf; with --key also attestation.dsse.json,
    which covers every file of DIR.

    Exit codes: 0 pass, 1 correctness, 2 configuration, 3 invalid measurement or insufficient evidence, 4 performance.
    """
    from calculet_perf.report.model import report_of
    from calculet_perf.rules import RulesError
    from calculet_perf.shell.loading import load_claim, load_evidence, load_rules
    from calculet_perf.verdict import judge

    try:
        rules, digest = load_rules(rules_file)
        claim = load_claim(claim_name, claim_file, rules, "baseline")
    except RulesError as error:
        end(Exit.INVALID, str(error))
    evidence = load_evidence(folder, rules, digest, journals, faults)
    verdict = judge(evidence, rules, digest, claim)
    write_report(folder, report_of(evidence, verdict, created_utc=now_utc(), seed=seed), key, pdf)
    say(verdict, folder)
    finish(verdict.exit_code)
