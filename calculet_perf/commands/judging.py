"""What `report` and `compare` share: options, writing the report, signing it, and saying the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from calculet_perf.commands.common import Exit, end

F = TypeVar("F", bound=Callable[..., Any])
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
MARKS = {"pass": "passed   ", "fail": "FAILED   ", "insufficient_evidence": "not shown", "not_asked": "not asked"}


def judging_options(command: F) -> F:
    """Which claim, which rules, which key."""
    options = (
        click.option(
            "--claim",
            "claim_name",
            metavar="NAME",
            help="What is claimed: a key of the rules' claims. One that needs numbers is a file.",
        ),
        click.option(
            "--claim-file", type=FILE, help="The claim with its numbers (calculet-claim/v1), written before the measurement."
        ),
        click.option("--rules", "rules_file", type=FILE, help="Other rules than the shipped calculet-rules/v1."),
        click.option(
            "--journal",
            "journals",
            type=click.Path(path_type=Path, exists=True),
            multiple=True,
            help="Journal of a process of the fleet, or the folder of all of them (LOG_DIR); may be repeated.",
        ),
        click.option(
            "--faults", type=FILE, multiple=True, help="faults.jsonl of `calculet-perf faults` on the same build; may be repeated."
        ),
        click.option("--key", type=FILE, help="Private Ed25519 key (PEM) to sign the folder with."),
        click.option(
            "--seed", type=int, default=1, show_default=True, help="Of every resampling; the same seed gives the same report."
        ),
        click.option("--pdf/--no-pdf", default=None, help="Write report.pdf; without either: when fpdf2 is installed."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def write_report(
    out: Path, report: Any, key: Path | None, pdf: bool | None, inputs: dict[str, dict[str, str]] | None = None
) -> None:
    """Write report.json, report.html and report.pdf into `out`, then sign all of `out`.

    Args:
        inputs: files that were judged but are elsewhere, by run: they are named in the signed statement.
    """
    from calculet_core.artifact import key_id
    from calculet_core.shell.files import write_atomic
    from calculet_perf.attestation import ATTESTATION_NAME, AttestationError
    from calculet_perf.report import html
    from calculet_perf.report import pdf as pdf_report
    from calculet_perf.shell.attest import load_private_key, sign_folder
    from calculet_perf.shell.loading import encode_report, template

    try:
        private = load_private_key(key) if key else None
        if private is not None:
            report.signed_by = key_id(private.public_key())
        # A signature over an older report must not stand beside a newer one.
        (out / ATTESTATION_NAME).unlink(missing_ok=True)
        write_atomic(out / "report.json", encode_report(report), 0o644)
        write_atomic(out / "report.html", html.render(report, template(html.TEMPLATE_NAME)), 0o644)
        if pdf or (pdf is None and pdf_report.available()):
            write_atomic(out / "report.pdf", pdf_report.render(report), 0o644)
        else:
            (out / "report.pdf").unlink(missing_ok=True)
        if private is not None:
            count = sign_folder(out, predicate(report, inputs or {}), private)
            click.echo(f"{out}: {count} files signed by key {report.signed_by}", err=True)
    except AttestationError as error:
        end(Exit.INVALID, str(error))
    except ImportError as error:
        end(Exit.INVALID, f"no PDF: {error}", "pip install 'calculet[perf]', or --no-pdf")
    except OSError as error:
        end(Exit.INFRASTRUCTURE, f"{error.filename}: {error.strerror}")


def predicate(report: Any, inputs: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What the signed statement says besides the files."""
    verdict = report.verdict
    return {
        "run_id": report.run.run_id,
        "base_run_id": report.base.run_id if report.base else None,
        "exit_code": verdict.exit_code,
        "conclusion": verdict.conclusion,
        "claim": verdict.claim,
        "milestone": verdict.milestone,
        "labels": verdict.labels,
        "rules": {"version": verdict.rules_version, "sha256": verdict.rules_sha256},
        "created_utc": report.created_utc,
        "inputs": inputs,
    }


def say(verdict: Any, where: Path | None) -> None:
    """The verdict, then why, on stdout; what passed is only counted."""
    click.echo(f"{verdict.headline} (exit {verdict.exit_code}): {verdict.claim_title}")
    if verdict.milestone:
        click.echo(f"satisfies {verdict.milestone}")
    for label in verdict.labels:
        click.echo(f"  ! {label}")
    for check in verdict.reasons():
        click.echo(f"  {MARKS[str(check.result)]}  {check.title} ({check.clause}): {check.why}")
        for line in check.details[1:6]:
            click.echo(f"             {line}")
        if len(check.details) > 6:
            click.echo(f"             and {len(check.details) - 6} more in the report")
    passed = sum(str(check.result) == "pass" for check in verdict.checks)
    click.echo(f"  {passed} of {len(verdict.checks)} checks passed" + (f"; the report is {where / 'report.html'}" if where else ""))


def now_utc() -> str:
    """For the report's date only."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def trusted(paths: Sequence[Path]) -> list[Any]:
    """Public keys."""
    from calculet_core.errors import ConfigError
    from calculet_core.shell.packages import load_keys

    try:
        return load_keys(paths)
    except ConfigError as error:
        end(Exit.INVALID, str(error))


def finish(code: int) -> None:
    """End with the verdict's code."""
    sys.exit(code)
