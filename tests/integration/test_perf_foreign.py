"""A real server that is not ours, measured end to end: llama-cpp-python's OpenAI server with the same model file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders_fleet import BIN, free_port
from builders_smollm2 import needs_engine

from calculet_perf.records import RequestRecord
from calculet_perf.shell.run_dir import RunReader
from calculet_worker.commands.recipe_smollm2 import installed_gguf

NEEDED = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.engine,
    needs_engine,
    pytest.mark.skipif(bool(MISSING), reason=f"the foreign server needs {', '.join(MISSING)}"),
]
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A foreign server that answers."""
    port = free_port()
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(installed_gguf()), "--model_alias", "smollm2", "--host", "127.0.0.1",
               "--port", str(port), "--n_ctx", "512", "--n_threads", "1", "--chat_format", "chatml",
               # else a second request cuts the first one off
               "--interrupt_requests", "false"]  # fmt: skip
    log = tmp_path_factory.mktemp("foreign") / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def perf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "calculet-perf"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(600)
def test_a_foreign_server_is_measured_from_manifest_to_signed_report(url: str, tmp_path: Path) -> None:
    cells: list[dict[str, Any]] = [
        {"kind": "single", "prompts": [8], "outputs": [6], "stream": [True, False], "requests": 3},
        {"kind": "closed", "concurrency": [2], "prompt": 8, "output": 4, "requests": 4},
    ]
    matrix = {
        "schema": "calculet-perf-matrix/v1", "name": "foreign", "cells": cells, "corpus": {"kind": "text"}, "idle_s": 0.1, "gap_s": 0.01,
        "golden": {"prompts": [6], "output": 4},
    }  # fmt: skip
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    manifest, run = tmp_path / "foreign.yaml", tmp_path / "run"
    made = perf("manifest", "init", url, "--matrix", "matrix.yaml", "--foreign-null", "--out", manifest)
    assert made.returncode == 0, made.stderr
    done = perf("run", manifest, "--out", run, "--no-selftest", "--warmups", "1")
    assert done.returncode == 0, done.stderr
    info = RunReader(run).info
    found = [record for record in RunReader(run).requests() if not record.quality.warmup]
    assert (info.status, info.foreign, len(found)) == ("complete", True, 10)
    for record in found:
        assert record.ok and record.quality.clock_complete, record.result
        assert_honest(record)
    keys = subprocess.run([str(BIN / "calculet-worker"), "keygen", str(tmp_path), "--name", "perf"], capture_output=True, text=True)
    assert keys.returncode == 0, keys.stderr
    judged = perf("report", run, "--key", tmp_path / "perf.pem")
    assert judged.returncode == 0, judged.stdout + judged.stderr
    report = json.loads((run / "report.json").read_text())
    assert "foreign server: end-to-end numbers only" in report["verdict"]["labels"]
    assert report["run"]["compared_answers"] > 0, "the golden answers agree, by their text"
    assert perf("verify", run, "--trust", tmp_path / "perf.pub").returncode == 0


def assert_honest(record: RequestRecord) -> None:
    """What this server does not tell is null: it counts no tokens in its streams and has neither generations nor times of its own."""
    durations, stream = record.durations_ms, record.workload.stream
    assert durations.e2e is not None and durations.e2e > 0
    assert (durations.ttft is None) is not stream
    if stream:
        assert record.chunks is not None and record.chunks.events > 0
        assert (record.workload.actual_output_tokens, durations.tpot) == (None, None), "events are no tokens"
    else:
        assert record.workload.actual_output_tokens is not None, "its whole answers have a usage"
    assert (record.model_generation, record.server_ms.queue, record.runtime_ms.infer_decode) == (None, None, None)
