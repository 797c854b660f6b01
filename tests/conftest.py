"""Builders are modules beside this file: `import builders_engine`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Iterator

import pytest
from builders_fleet import Packages
from builders_stage import Stage
from hypothesis import settings

settings.register_profile("calculet", deadline=None)  # an example that took long met a busy machine, not a bug
settings.load_profile("calculet")


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

