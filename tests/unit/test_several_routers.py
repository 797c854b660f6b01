"""Routers that share a fleet keep their files apart, and take nothing of each other for left behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from calculet_core import history
from calculet_core.errors import ConfigError
from calculet_core.shell.files import FileLock
from calculet_core.shell.fleet import Fleet, load_fleet, make_folders
from calculet_core.shell.journal import Journal
from calculet_router.shell.app import serve
from calculet_router.shell.recovering import done_of, orphans_of

FIRST_ONE, SECOND_ONE = 7 << 32, 8 << 32
"""Request ids: the upper half is the router's incarnation."""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.yaml").write_text(
        "{schema: calculet-fleet/v1, run_dir: r, state_dir: s, log_dir: l, boards: [{name: b, device: sim}], models: [{alias: a, package: p}]}"
    )
    fleet = load_fleet(tmp_path / "fleet.yaml")
    make_folders(fleet)
    return fleet


def test_an_open_request_of_another_router_is_nobodys_orphan(fleet: Fleet) -> None:
    for name, request in (("router", FIRST_ONE), ("router-2", SECOND_ONE)):
        journal = Journal(fleet.journal(name), 1 << 20, 1)
        journal.write(history.REQUEST_ACCEPTED, request=request, tenant="default", alias="a", model="a")
        journal.close()
    assert [orphan.request for orphan in orphans_of(fleet, "router-2", 9)] == [SECOND_ONE]
    assert [orphan.request for orphan in orphans_of(fleet, "router", 9)] == [FIRST_ONE]
    assert orphans_of(fleet, "router-3", 9) == []


def test_what_a_router_of_another_name_left_is_accounted_for_once_it_is_no_more(fleet: Fleet) -> None:
    for name, request in (("router", FIRST_ONE), ("router-b", SECOND_ONE)):
        journal = Journal(fleet.journal(name), 1 << 20, 1)
        journal.write(history.REQUEST_ACCEPTED, request=request, tenant="default", alias="a", model="a")
        journal.close()
    lock = FileLock(fleet.router_lock("router-b"))
    assert [orphan.request for orphan in orphans_of(fleet, "router", 9)] == [FIRST_ONE], "it lives"
    lock.release()
    assert [orphan.request for orphan in orphans_of(fleet, "router", 9)] == [FIRST_ONE], "workers may not have given up on it yet"
    os.utime(fleet.journal("router-b"), (1, 1))
    orphans = orphans_of(fleet, "router", 9)
    assert {orphan.request for orphan in orphans} == {FIRST_ONE, SECOND_ONE}
    journal = Journal(fleet.journal("router"), 1 << 20, 1)
    for orphan in orphans:
        journal.append(done_of(orphan, 5))
    journal.close()
    assert orphans_of(fleet, "router", 9) == orphans_of(fleet, "router-c", 9) == []


@pytest.mark.parametrize("name", ("worker-b", "router-", "../router", "router-a/b", ""))
def test_a_name_that_would_be_another_process_is_refused(fleet: Fleet, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a router's name"):
        asyncio.run(serve(fleet.path, name))
