"""`calculet-perf verify DIR`: is a signed run or report exactly what was signed? Needs only the folder and the public key."""

from __future__ import annotations

import json
from pathlib import Path

import click

from calculet_perf.commands.common import Exit, end, json_option
from calculet_perf.commands.judging import FILE, trusted


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--trust", required=True, type=FILE, multiple=True, help="Trusted public key (PEM); may be repeated.")
@json_option
def verify(folder: Path, trust: tuple[Path, ...], as_json: bool) -> None:
    """Verify DIR: the signature, and every file's sha256. A file that was changed, is missing or was added is named.

    Exit codes: 0 exactly as signed, 2 not. What the report concluded is said, and does not change the exit code.
    """
    from calculet_perf.attestation import AttestationError
    from calculet_perf.shell.attest import verify_folder

    try:
        statement, signer = verify_folder(folder, trusted(trust))
    except AttestationError as error:
        end(Exit.INVALID, str(error))
    said = statement.predicate
    if as_json:
        answer = {"folder": str(folder), "files": len(statement.subject), "key": signer, "said": said}
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(f"{folder}: {len(statement.subject)} files are as key {signer} signed them")
    click.echo(f"  run {said.get('run_id')}, {said.get('created_utc')}: exit {said.get('exit_code')}, {said.get('conclusion')}")
    click.echo(f"  milestone: {said.get('milestone') or 'none'}")
    for label in said.get("labels") or ():
        click.echo(f"  ! {label}")
