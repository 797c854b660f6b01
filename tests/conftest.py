"""Builders are modules beside this file: `import builders_engine`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from builders_fleet import Packages


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Simulated packages, built once."""
    return Packages(tmp_path_factory.mktemp("packages"))

