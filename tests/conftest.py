"""Builders are modules beside this file: `import builders_engine`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Iterator

import pytest
from builders_fleet import Packages
from builders_stage import Stage
from hypothesis import settings

from calculet_core.config import run_dir_for

settings.register_profile("calculet", deadline=None)  # an example that took long met a busy machine, not a bug
settings.load_profile("calculet")
# What was started in the background, or by nohup, ignores these; so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
RUN_DIRS = ("run", "r")
"""What configurations of tests call it."""


@pytest.fixture(scope="session", autouse=True)
def _no_run_folders_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests' folders have long names, so their sockets live in stand-ins below /tmp. A fleet that ends removes its own; one that a
    test killed cannot."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    for folder, _, _ in os.walk(base):
        for name in RUN_DIRS:
            run_dir = run_dir_for(f"{folder}/{name}", os.getuid())
            if not run_dir.startswith(base):
                shutil.rmtree(run_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Simulated packages, built once."""
    return Packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A router and fake workers; closing it checks the router's history."""
    stage = Stage(tmp_path)
    yield stage
    stage.close()

