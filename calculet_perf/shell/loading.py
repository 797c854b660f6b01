"""A run's folder as evidence: reads everything once, checks what can be checked about the files themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

import msgspec

from calculet_core.artifact import sha256_hex
from calculet_core.history import Event
from calculet_core.shell.files import read_bounded
from calculet_core.shell.journal import read_journal
from calculet_perf.evidence import Evidence, gather
from calculet_perf.faults import Outcome as FaultRun
from calculet_perf.manifest import Manifest, ManifestError
from calculet_perf.records import RecordError, decoder, from_line
from calculet_perf.recovery import history
from calculet_perf.rules import RULES_FILE, Claim, Rules, RulesError, check_claim, parse_claim, parse_rules
from calculet_perf.shell.run_dir import FAULTS, MANIFEST, MATRIX, RunReader, read_lines
from calculet_perf.stability import StageRun
from calculet_perf.swapping import driven

STAGE = "stage.json"


def shipped_rules() -> bytes:
    """`calculet-rules/v1` as it comes with this version."""
    return resources.files("calculet_perf.rules").joinpath(RULES_FILE).read_bytes()


def load_rules(path: Path | None = None) -> tuple[Rules, str]:
    """The shipped rules, or those of a file; and their sha256.

    Raises:
        RulesError: they cannot be read or are wrong.
    """
    if path is None:
        data, source = shipped_rules(), RULES_FILE
    else:
        data, source = _read(path), str(path)
    return parse_rules(data, source), sha256_hex(data)


def load_claim(name: str | None, path: Path | None, rules: Rules, default: str) -> Claim:
    """The claim of a file, or one that needs no numbers by its name.

    Raises:
        RulesError: unknown, or lacking what its rules need; names the field.
    """
    if path is not None:
        claim = parse_claim(_read(path), str(path), rules)
        if name is not None and name != claim.claim:
            raise RulesError(f"{path}: $.claim: is {claim.claim!r}, but --claim says {name!r}")
        return claim
    claim = Claim(claim=name or default)
    check_claim(claim, "--claim", rules)
    return claim


def load_evidence(
    folder: Path, rules: Rules, rules_sha256: str, journals: Sequence[Path] = (), faults: Sequence[Path] = ()
) -> Evidence:
    """Read a run, with the fault scenarios that the same build went through.

    Raises:
        RunDirError, RecordError: it is no run, or a line of it is wrong; names file and line.
    """
    reader = RunReader(folder)
    manifest, problems = _manifest(reader)
    events = _journals(journals)
    told = history(events, _wall(reader.info.started_utc), _wall(reader.info.ended_utc)) if journals else None
    return gather(
        reader.info,
        manifest,
        rules,
        reader.requests(),
        reader.golden(),
        reader.steps(),
        reader.device(),
        reader.cases(),
        faults=_faults([folder / FAULTS, *faults]),
        stage=read_stage(folder / STAGE),
        journal_resets=told.resets if told else (),
        deaths=told.deaths if told else None,
        broken_promises=told.broken if told else None,
        configuration_errors=problems,
        swaps=told.swaps if told else None,
        driven=driven(reader.swaps()),
        processes=reader.processes(),
        own_rules=rules_sha256 != sha256_hex(shipped_rules()),
    )


def _journals(paths: Sequence[Path]) -> list[Event]:
    """Events of all journals by time; a folder stands for the journals in it.

    Raises:
        RecordError: one is no journal: a history without events would break no promise.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if paths and not files:
        raise RecordError(f"{paths[0]}: no journal (*.jsonl) is in it")
    events: list[Event] = []
    for file in files:
        found = read_journal(file)
        if not found and file.stat().st_size > 0:
            raise RecordError(f"{file}: holds no event: it is not the journal of a process of the fleet")
        events += found
    if files and not events:
        raise RecordError(f"{files[0]}: no event is in the journals that were given")
    return sorted(events, key=lambda event: event.t)


def _wall(utc: str | None) -> float | None:
    try:
        return datetime.fromisoformat(utc).timestamp() if utc else None
    except ValueError:
        return None


def template(name: str) -> str:
    """The text of a shipped template of the report."""
    return resources.files("calculet_perf.report").joinpath(name).read_text()


def _manifest(reader: RunReader) -> tuple[Manifest | None, list[str]]:
    """The manifest, and what is wrong with it or with the files that the run says it used."""
    problems = []
    for name, digest in ((MANIFEST, reader.info.manifest_sha256), (MATRIX, reader.info.matrix_sha256)):
        try:
            found = sha256_hex(read_bounded(reader.folder / name))
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if found != digest:
            problems.append(f"{name} was changed after the run began: sha256 {found[:12]}, the run used {digest[:12]}")
    try:
        manifest = reader.manifest()
    except (ManifestError, OSError) as error:
        return None, [*problems, str(error)]
    if manifest.run_id != reader.info.run_id:
        problems.append(f"{MANIFEST}: $.run_id: is {manifest.run_id!r}, the run is {reader.info.run_id!r}")
    return manifest, problems


def _faults(paths: Sequence[Path]) -> list[FaultRun] | None:
    """Outcomes of the fault list's scenarios; None: no file."""
    found = [path for path in paths if path.exists()]
    return [outcome for path in found for outcome in read_lines(path, FaultRun)] if found else None


def read_stage(path: Path) -> StageRun | None:
    """What stage a run was meant to be; None: none.

    Raises:
        RecordError: the file is not what it should be.
    """
    if not path.exists():
        return None
    try:
        data = read_bounded(path)
    except OSError as error:
        raise RecordError(f"{path.name}: {error.strerror}") from None
    return from_line(decoder(StageRun), data, path.name, 1)


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path)
    except OSError as error:
        raise RulesError(f"{path}: {error.strerror}") from None


def encode_report(report: msgspec.Struct) -> bytes:
    """`report.json`, indented: people read it too."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
