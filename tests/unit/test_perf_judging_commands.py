"""`report`, `compare` and `verify` on runs that a simulated board gave: exit codes, files, signatures."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import jsonschema_rs
import pytest
from builders_perf import a_run_folder
from builders_perf_board import BoardRun
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from calculet_perf.cli import main
from calculet_perf.runinfo import Invalid


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@cache
def board_run(seed: int, slower: float = 1.0, count: int = 300, lanes: int = 1, swap: int | None = None) -> BoardRun:
    return BoardRun(seed=seed, slower=slower, lanes=lanes, swap_in_group=swap).run(count)


def folder_of(path: Path, made: BoardRun, **info: object) -> Path:
    return a_run_folder(path, made.requests, steps=made.steps, **info)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Private and public key files."""
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


# ---------------------------------------------------------------- verdicts
@pytest.mark.parametrize("seed", range(3))
def test_a_board_eight_percent_slower_is_exit_four_and_the_same_board_is_zero(tmp_path: Path, seed: int) -> None:
    base = folder_of(tmp_path / "base", board_run(seed))
    slow = folder_of(tmp_path / "slow", board_run(seed + 100, 1.08))
    same = folder_of(tmp_path / "same", board_run(seed + 200))
    found = run("compare", base, slow, "--seed", seed)
    assert found.exit_code == 4, found.output
    assert "TPOT P50: worse by" in found.output
    again = run("compare", base, same, "--seed", seed)
    assert again.exit_code == 0, again.output
    assert "satisfies M1" in again.output


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_a_board_eight_percent_slower_is_found_in_twenty_seeds_of_twenty(tmp_path: Path, seed: int) -> None:
    test_a_board_eight_percent_slower_is_exit_four_and_the_same_board_is_zero(tmp_path, 1_000 + 13 * seed)


def test_a_token_swapped_between_lanes_is_exit_one(tmp_path: Path) -> None:
    good = folder_of(tmp_path / "good", board_run(1, count=80, lanes=4))
    bad = folder_of(tmp_path / "bad", board_run(1, count=80, lanes=4, swap=9))
    assert run("report", good, "--no-pdf").exit_code == 0
    found = run("report", bad, "--no-pdf")
    assert found.exit_code == 1 and "2 of 80 greedy answers are not those of their samples" in found.output


def test_a_stopped_clock_is_exit_three_and_a_changed_manifest_two(tmp_path: Path) -> None:
    made = board_run(1, count=60)
    stopped = folder_of(tmp_path / "stopped", made, invalid=[Invalid(code="clock", message="CLOCK_MONOTONIC stood still")])
    found = run("report", stopped, "--no-pdf")
    assert found.exit_code == 3 and "CLOCK_MONOTONIC stood still" in found.output
    changed = folder_of(tmp_path / "changed", made)
    (changed / "manifest.yaml").write_bytes((changed / "manifest.yaml").read_bytes().replace(b"balanced", b"turbo"))
    found = run("report", changed, "--no-pdf")
    assert found.exit_code == 2 and "manifest.yaml was changed after the run began" in found.output


def test_what_cannot_be_read_is_exit_two_and_names_file_and_line(tmp_path: Path) -> None:
    broken = folder_of(tmp_path / "broken", board_run(1, count=60))
    lines = (broken / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (broken / "requests.jsonl").write_bytes(b"".join([*lines[:6], lines[6][:40] + b"\n", *lines[7:]]))
    found = run("report", broken, "--no-pdf")
    assert found.exit_code == 2 and "requests.jsonl:7:" in found.output
    assert run("report", tmp_path).exit_code == 2


def test_the_batch_target_is_mandatory(tmp_path: Path) -> None:
    base, claim = folder_of(tmp_path / "base", board_run(1, count=60)), tmp_path / "claim.yaml"
    assert "$.target_cells: a batch claim must state it" in run("compare", base, base, "--claim", "batch").output
    claim.write_text("schema: calculet-claim/v1\nclaim: batch\ntarget_cells: ['*']\nsla: {tpot_p99_ms: 50}\n")
    found = run("compare", base, base, "--claim-file", claim)
    assert found.exit_code == 2 and "$.batch: a batch claim must state it" in found.output and "no default" in found.output


# ---------------------------------------------------------------- the report
def test_the_report_shows_its_counterexamples_and_fetches_nothing(tmp_path: Path) -> None:
    made = board_run(7, count=60)
    steps = [*made.steps]
    bad = steps[-1]
    steps[-1] = type(bad)(
        **{name: getattr(bad, name) for name in bad.__struct_fields__ if name != "output_status"}, output_status="aborted"
    )
    folder = folder_of(tmp_path / "run", BoardRun(requests=made.requests, steps=steps))
    assert run("report", folder, "--pdf").exit_code == 0
    report = json.loads((folder / "report.json").read_bytes())
    assert report["schema"] == "calculet-perf-report/v1" and report["verdict"]["exit_code"] == 0
    slow = report["run"]["slowest"]
    assert len(slow) == 20 and slow[0]["e2e_ms"] == max(item["e2e_ms"] for item in slow)
    parts = slow[0]["parts"]
    assert sum(value for name, value in parts.items() if isinstance(value, float)) == pytest.approx(slow[0]["e2e_ms"])
    assert [item["status"] for item in report["run"]["bad_steps"]] == ["aborted"]
    assert set(report["run"]["excluded"]) == {"clock_incomplete", "warmup", "network_broken", "client_interrupted"}
    page = (folder / "report.html").read_text()
    for words in (
        "20 slowest requests",
        "Runtime results other than success",
        "Resets",
        "Samples left out",
        "long contexts",
        "What this does not show",
    ):
        assert words in page
    assert "conclusions stay at the level of graph and service" in page, "no vendor counters: the report says what it cannot tell"
    assert not re.search(r"""(src|href)=["'](?!#)|<script|<link|url\(|@import""", page)
    for figure in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(figure)
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_what_a_run_and_its_report_hold_is_what_the_shipped_schemas_say(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", board_run(1, count=60))
    run("report", folder, "--no-pdf")
    texts = {"report": [(folder / "report.json").read_text()], "run": [(folder / "run.json").read_text()]}
    texts |= {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("requests", "steps")}
    for name, objects in texts.items():
        validator = jsonschema_rs.validator_for(json.loads(run("schema", name).output))
        for text in objects:
            validator.validate(json.loads(text))
        with pytest.raises(jsonschema_rs.ValidationError):
            validator.validate({**json.loads(objects[0]), "schema": "calculet-perf-other/v1"})


def test_a_report_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", board_run(1, count=60))
    texts = []
    for seed in (1, 1, 2):
        run("report", folder, "--no-pdf", "--seed", seed)
        report = json.loads((folder / "report.json").read_bytes())
        texts.append(report["run"]["cells"])
    assert texts[0] == texts[1] != texts[2]


def test_names_from_records_cannot_break_the_page(tmp_path: Path) -> None:
    requests = [*board_run(1, count=60).requests]
    evil = "<script>alert(1)</script>"
    for request in requests[:30]:
        request.case.id = evil
    page_folder = a_run_folder(tmp_path / "run", requests)
    for request in requests[:30]:
        request.case.id = "sim/c1"
    run("report", page_folder, "--no-pdf")
    assert "<script" not in (page_folder / "report.html").read_text()


# ---------------------------------------------------------------- signatures
def test_a_signed_run_verifies_elsewhere_and_one_byte_spoils_it(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    folder = folder_of(tmp_path / "run", board_run(1, count=60))
    assert run("report", folder, "--key", private).exit_code == 0
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    good = run("verify", elsewhere, "--trust", public)
    assert good.exit_code == 0 and "exit 0, pass" in good.output
    for name in ("report.html", "report.pdf", "requests.jsonl", "manifest.yaml"):
        data = bytearray((elsewhere / name).read_bytes())
        data[len(data) // 2] ^= 1
        (elsewhere / name).write_bytes(data)
        spoiled = run("verify", elsewhere, "--trust", public)
        assert spoiled.exit_code == 2 and f"{name} was changed" in spoiled.output
        data[len(data) // 2] ^= 1
        (elsewhere / name).write_bytes(data)
    assert run("verify", elsewhere, "--trust", public).exit_code == 0


def test_a_new_report_without_a_key_does_not_keep_the_old_signature(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    folder = folder_of(tmp_path / "run", board_run(1, count=60))
    run("report", folder, "--key", private, "--no-pdf")
    run("report", folder, "--no-pdf")
    assert "not signed" in run("verify", folder, "--trust", public).output


def test_a_comparison_is_signed_with_the_hashes_of_what_it_judged(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    base, same = (folder_of(tmp_path / name, board_run(seed, count=60)) for name, seed in (("base", 1), ("same", 2)))
    refused = run("compare", base, same, "--trust", public)
    assert refused.exit_code == 2 and "not signed" in refused.output
    for folder in (base, same):
        assert run("report", folder, "--key", private, "--no-pdf").exit_code == 0
    out = tmp_path / "out"
    found = run("compare", base, same, "--trust", public, "--out", out, "--key", private, "--no-pdf")
    assert found.exit_code == 3, "60 samples gate no P99"
    assert "exit 3, insufficient_evidence" in run("verify", out, "--trust", public).output
    assert {path.name for path in out.iterdir()} == {"report.json", "report.html", "attestation.dsse.json"}


def test_an_aa_control_run_sets_the_noise_floor(tmp_path: Path) -> None:
    base, same, control, shifted = (
        folder_of(tmp_path / name, board_run(seed, slower))
        for name, seed, slower in (("base", 1, 1.0), ("same", 201, 1.0), ("control", 2, 1.0), ("shifted", 3, 1.04))
    )
    found = run("compare", base, same, "--control", control, "--out", tmp_path / "out", "--no-pdf")
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert report["comparison"]["control"] == "a second run of the base"
    loud = run("compare", base, same, "--control", shifted)
    assert loud.exit_code == 3 and "two identical builds differ by" in loud.output, (
        "a base that differs from itself by 4 % measures no 3 %"
    )


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", board_run(1))
    shutil.copytree(base, tmp_path / "copy")
    done = run("compare", base, tmp_path / "copy")
    assert done.exit_code == 2, done.output
    assert "are the same run" in done.output


def test_a_file_that_is_no_journal_is_refused_and_a_folder_of_journals_is_read_whole(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", board_run(1))
    (tmp_path / "notes.txt").write_text("not a journal\n")
    done = run("report", folder, "--journal", tmp_path / "notes.txt", "--no-pdf")
    assert (done.exit_code, "it is not the journal of a process" in done.output) == (2, True), done.output
    (tmp_path / "log").mkdir()
    done = run("report", folder, "--journal", tmp_path / "log", "--no-pdf")
    assert (done.exit_code, "no journal (*.jsonl) is in it" in done.output) == (2, True), done.output
    (tmp_path / "log" / "router.jsonl").write_text('{"event":"request.accepted","t":1,"request":7}\n')
    (tmp_path / "log" / "worker-board0.jsonl").write_text('{"event":"board.idle","t":2,"board":"board0","data":{"leases":3}}\n')
    done = run("report", folder, "--journal", tmp_path / "log", "--no-pdf")
    checks = {check["check"]: check for check in json.loads((folder / "report.json").read_text())["verdict"]["checks"]}
    assert checks["promises"]["result"] == "fail", done.output
