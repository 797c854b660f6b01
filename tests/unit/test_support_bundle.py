"""`calculet support-bundle`: complete, bounded, without secrets, with everything down."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from builders_fleet import until
from click.testing import CliRunner, Result

from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import Fleet, load_fleet, make_folders
from calculet_supervisor.cli import main
from calculet_supervisor.shell.bundling import redact

SCHEDULER = "schema: calculet-scheduler/v1\nmodel_alias: a\n"
STUCK = """
import sys, time
from pathlib import Path
from calculet_core.shell.files import FileLock
from calculet_core.shell.stacks import keep_stacks
lock = FileLock(Path(sys.argv[1]))
keep_stacks(Path(sys.argv[2]), "title")
def where_it_is_stuck():
    print("up", flush=True)
    time.sleep(1000)
where_it_is_stuck()
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.yaml").write_text(
        "schema: calculet-fleet/v1\nrun_dir: r\nstate_dir: s\nlog_dir: l\nboards: [{name: b, device: sim}]\n"
        "models: [{alias: a, package: p, scheduler: sched.yaml}]\n"
    )
    (tmp_path / "sched.yaml").write_text(SCHEDULER)
    fleet = load_fleet(tmp_path / "fleet.yaml")
    make_folders(fleet)
    return fleet


def call(fleet: Fleet, *options: str) -> Result:
    out = fleet.path.parent / "out.tar.gz"
    return CliRunner().invoke(main, ["support-bundle", "--config", str(fleet.path), "--output", str(out), *options])


def content(fleet: Fleet) -> dict[str, str]:
    with tarfile.open(fleet.path.parent / "out.tar.gz") as tar:
        names = [member.name for member in tar.getmembers()]
        assert all(name.startswith("out/") for name in names)
        return {name.removeprefix("out/"): tar.extractfile(name).read().decode() for name in names}  # type: ignore[union-attr]


def test_it_is_made_with_everything_down_and_says_what_is_missing(fleet: Fleet) -> None:
    fleet.log("worker-b").write_text("the last words\n")
    fleet.journal("router").write_text('{"event":"request.done"}\n')
    fleet.keys.write_text('{"secret": "a-hash-of-a-key"}')
    (fleet.crashes / "20261130T031500Z-b-e7").mkdir(parents=True)
    (fleet.crashes / "20261130T031500Z-b-e7/exit.json").write_text("{}")
    done = call(fleet)
    assert done.exit_code == 0 and "no supervisor listens" in done.stderr
    files = content(fleet)
    manifest = json.loads(files["MANIFEST.json"])
    assert manifest["schema"] == "calculet-support/v1" and set(manifest["files"]) == set(files) - {"MANIFEST.json"}
    assert "no supervisor listens" in manifest["missing"]["status"]
    assert files["logs/worker-b.log"] == "the last words\n" and files["journals/router.jsonl"] and files["config/sched.yaml"] == SCHEDULER
    assert "crashes/20261130T031500Z-b-e7/exit.json" in files and "calculet==" in files["system/packages.txt"]
    assert "a-hash-of-a-key" not in "".join(files.values())
    assert (fleet.path.parent / "out.tar.gz").stat().st_mode & 0o777 == 0o600


def test_a_living_worker_is_asked_where_it_is(fleet: Fleet) -> None:
    command = [sys.executable, "-c", STUCK, str(fleet.board_lock("b")), str(fleet.stacks("worker-b"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert call(fleet).exit_code == 0
        files = content(fleet)
        assert "where_it_is_stuck" in files["stacks/worker-b.stacks"] and process.poll() is None
        assert process.pid in [found["pid"] for found in json.loads(files["system/processes.json"])]
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]
    until(lambda: FileLock(fleet.board_lock("b")).release() is None, "the lock goes with it")


def test_a_bundle_is_bounded_and_keeps_what_tells_most(fleet: Fleet) -> None:
    for number in range(4):
        fleet.journal(f"worker-{number}").write_text("x" * 1023 + "\n" + ("y" * 1023 + "\n") * 5000)
    done = call(fleet, "--max-mib", "6")
    assert done.exit_code == 0 and "larger than its limit" in done.stderr
    files = content(fleet)
    assert sum(map(len, files.values())) < 6.2 * 1024 * 1024 and "config/fleet.yaml" in files


def test_an_output_that_cannot_be_written_is_refused_and_leaves_nothing(fleet: Fleet) -> None:
    done = call(fleet, "--output", "/proc/no/such/place.tar.gz")
    assert done.exit_code == 1 and "/proc/no/such/place.tar.gz" in done.stderr and "--output" in done.stderr
    assert CliRunner().invoke(main, ["support-bundle", "--config", "/nowhere.yaml"]).exit_code == 78
    assert [path.name for path in fleet.path.parent.iterdir() if "tar" in path.name] == []


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("  api_key: abc", "  api_key: '*** (left out)'"), ("curve_secret: x y", "curve_secret: '*** (left out)'"),
        ("  - private_key: z", "  - private_key: '*** (left out)'"), ("max_tokens: 5", "max_tokens: 5"),
        ("trusted_keys: [a.pub]", "trusted_keys: [a.pub]"), ("require_keys: true", "require_keys: true"),
    ],
)  # fmt: skip
def test_what_sounds_like_a_secret_is_left_out(line: str, kept: str) -> None:
    assert redact(f"a: 1\n{line}\nb: 2\n") == f"a: 1\n{kept}\nb: 2\n"
