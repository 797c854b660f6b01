"""Every block that the documentation marks `run` is executed, in the order of its page, in one shell, against a real fleet of simulated
boards: what a newcomer types is what is tested. Pages share the fleet, so that all of it takes seconds.

The folder looks like a checkout after `make up`. Ports are the fleet's own; words that a reader has to replace (PID, ID, REQUEST_ID,
KEY_ID) are replaced by what `PRELUDE` finds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders_docs import ROOT, Block, blocks, pages
from builders_fleet import BIN, Fleet, Packages, free_port

MODEL = "smollm2"
"""The simulated board's package gets the name that the pages use."""
LAST = "docs/how-to/keys-and-tenants.md"
"""From its first key on every request needs one."""
RUN = {
    page.relative_to(ROOT).as_posix(): found
    for page in pages()
    if "zh" not in page.parts  # the same commands, held by tests/unit/test_docs_commands.py
    if (found := [block for block in blocks(page) if " run" in block.kind])
}
STEPS = ["first-stream", "kill-a-worker", "swap-a-model"]
ORDER = sorted(
    RUN,
    key=lambda name: (
        name == LAST,
        not name.startswith("docs/tutorial"),
        STEPS.index(Path(name).stem) if "tutorial" in name else 0,
        name,
    ),
)
SEEN = {
    "README.md": [r"data: \[DONE\]"],
    "docs/tutorial/first-stream.md": [r"data: \[DONE\]", r"board1 +sim .* READY", r"explain|ended: completed, 8 tokens", r"router +accepted: model=smollm2 .*label=my-first"],
    "docs/tutorial/kill-a-worker.md": [r"(story-\d: HTTP 200 after [\d.]+ s\n(.*\n)*?){8}", r"(.*completed after .*\n){8}", r"killed by signal 9", r"data: (\[DONE\]|\{\"error\")"],
    "docs/tutorial/swap-a-model.md": [r"signature does not match", r"signed by key", r"\d s  done\n(200 ){40}", r"1\.1\.0 .*, by an operator; previous: smollm2 1\.0\.0", r"rollback smollm2 -> smollm2 1\.0\.0 +DONE"],
    "docs/how-to/recover-a-board.md": [r"lanes", r"accepted: model=smollm2"],
    "docs/how-to/usage.md": [r"smollm2", r'"tenant"'],
    "docs/how-to/monitor.md": [r"https://docs\.example\.com/runbooks/"],
    LAST: [r"ck-\w+", r"in force", r"revoked"],
}  # fmt: skip
"""What must show in a page's output, so that a page which does nothing is no success."""
PRELUDE = r"""
set -e
worker_pid() {{ until pgrep -f -- "calculet_worker run --config {config} --board board0"; do sleep 0.1; done; }}
request_id() {{ grep -oh '"request":[0-9]*' log/router.jsonl | tail -n 1 | cut -d: -f2 | xargs printf '%016x'; }}
key_id() {{ calculet keys list | grep -oE '^[0-9a-f]{{8}}' | tail -n 1; }}
"""
REPLACED = {"PID": "$(worker_pid)", "ID": "$(request_id)", "REQUEST_ID": "$(request_id)", "KEY_ID": "$(key_id)"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Fleet]:
    folder, trust = tmp_path_factory.mktemp("checkout"), packages.key.with_suffix(".pub")
    local = folder / ".calculet"
    (local / "packages").mkdir(parents=True)
    shutil.copytree(packages.key.parent, local / "keys")
    shutil.copytree(packages.get("sim-batch", "--step-ms", "4", "--context", "512"), local / "packages" / MODEL)
    manifest = local / "packages" / MODEL / "manifest.yaml"
    manifest.write_text(re.sub(r"^name: .*$", f"name: {MODEL}", manifest.read_text(), flags=re.M))
    sign = [str(BIN / "calculet"), "package", "sign", str(manifest.parent), "--key", str(local / "keys" / packages.key.name)]
    subprocess.run(sign, check=True, capture_output=True, timeout=60)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / ".venv").symlink_to(BIN.parent)
    (local / "fleet").write_text("fleet.yaml\n")
    admin = free_port()
    tenants = [{"name": "default"}, {"name": "search", "weight": 3.0}]
    made = Fleet(
        folder, manifest.parent, trust, model={"alias": MODEL}, router={"admin_listen": f"127.0.0.1:{admin}"}, tenants=tenants,
        supervision={"heartbeat_ms": 50, "restart": {"max_restarts": 20}},
    )  # fmt: skip
    made.admin = admin  # type: ignore[attr-defined]
    with made:
        yield made


def script(fleet: Fleet, found: list[Block]) -> str:
    """The page's blocks as one bash script; each must succeed, or fail where it says so."""
    parts = [PRELUDE.format(config=re.escape(str(fleet.config)))]
    for block in found:
        code = re.sub(r"127\.0\.0\.1:8080", f"127.0.0.1:{fleet.port}", block.code)
        code = code.replace("127.0.0.1:8081", f"127.0.0.1:{fleet.admin}")  # type: ignore[attr-defined]
        if block.kind.startswith("python"):
            code = f"{sys.executable} - <<'END_OF_PYTHON'\n{code}\nEND_OF_PYTHON"
        else:
            code = re.sub(r"\b(PID|REQUEST_ID|KEY_ID|ID)\b(?![\"'])", lambda word: REPLACED[word[1]], code)
        parts.append(f"trap 'echo \"{block} failed\" >&2' ERR")
        parts.append(
            f"if\n{code}\nthen echo '{block} should have failed' >&2; exit 1; fi" if block.kind.endswith("fails") else code
        )
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", ORDER)
def test_what_a_page_says_can_be_typed(fleet: Fleet, name: str) -> None:
    fleet.wait_ready(len(fleet.boards))
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("CALCULET_CONFIG", None)
    done = subprocess.run(
        ["bash", "-c", script(fleet, RUN[name])], cwd=fleet.folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{fleet.logs()}"
    for pattern in SEEN[name]:
        assert re.search(pattern, done.stdout + done.stderr), f"{pattern} is not in\n{done.stdout}\n{done.stderr}"
