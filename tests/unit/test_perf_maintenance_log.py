"""The log of maintenance windows: chained, so that nothing is taken out of it unseen; and how a window is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from calculet_perf.cli import main
from calculet_perf.maintenance import BEGIN, Health, Line, broken, chained, errors_of, grown, judge, tenants_of
from calculet_perf.records import RecordError


def health(**changes: Any) -> Health:
    given: dict[str, Any] = dict.fromkeys(Health.__struct_fields__)
    return Health(**{**given, "state": "READY", "driver": "1.4.0", "golden": ["ids:a", "ids:b"], **changes})


def a_log(*steps: str, window: str = "w1") -> list[bytes]:
    lines: list[bytes] = []
    for step in steps:
        line = Line(
            previous=BEGIN, number=0, utc="2026-01-01T00:00:00", monotonic_ns=0, window=window, step=step, operator="kim", uid=0,  # type: ignore[arg-type]
            authority="T-1", board="b0", action="device_reset", command=None,
        )  # fmt: skip
        lines.append(chained(line, lines[-1] if lines else None))
    return lines


WHOLE = ("opened", "set_aside", "acted", "brought_back", "closed")


def test_a_log_as_it_was_written_is_whole() -> None:
    assert broken(a_log(*WHOLE, *WHOLE), "log") == []


@pytest.mark.parametrize("place", range(9))
def test_a_line_that_was_taken_out_shows(place: int) -> None:
    lines = a_log(*WHOLE, *WHOLE)
    del lines[place]
    assert any("was changed, taken out or put in" in problem for problem in broken(lines, "log"))


@pytest.mark.parametrize("place", range(9))
def test_a_line_that_was_changed_shows_in_the_next(place: int) -> None:
    lines = a_log(*WHOLE, *WHOLE)
    lines[place] = lines[place].replace(b"kim", b"lee")
    assert broken(lines, "log") == [f"log:{place + 2}: does not follow the line before it: a line was changed, taken out or put in"]


def test_a_window_that_was_never_closed_is_named() -> None:
    assert broken(a_log("opened", "set_aside"), "log") == ["log:1: window w1 was never closed"]


def test_half_a_line_is_refused_by_its_number() -> None:
    lines = a_log("opened", "closed")
    with pytest.raises(RecordError, match="log:2"):
        broken([lines[0], lines[1][:30]], "log")


@pytest.mark.parametrize(
    ("after", "code", "reasons"),
    [
        (health(), None, []),
        (health(driver="1.5.0"), 0, []),
        (health(), 3, ["the command ended with 3"]),
        (health(golden=["ids:a", "ids:x"]), None, ["golden answers are not those from before"]),
        (health(golden=None), None, ["golden failed"]),
        (None, 0, ["the board did not serve again"]),
    ],
)
def test_a_window_ends_well_only_with_the_board_serving_what_it_served(after: Health | None, code: int | None, reasons: list[str]) -> None:
    found = judge(health(), after, code, 900.0)
    assert found.reasons == reasons
    assert found.recovered is (after is not None)


def test_a_new_driver_is_noted_with_what_was_there_before() -> None:
    assert judge(health(), health(driver="1.5.0"), 0, 1.0).changed == {"driver": ["1.4.0", "1.5.0"]}


def test_users_are_those_with_open_requests_and_errors_those_that_were_added() -> None:
    samples = [
        ("calculet_router_tenant_active", {"tenant": "a"}, 2.0), ("calculet_router_tenant_active", {"tenant": "b"}, 0.0),
        ("calculet_router_errors_total", {"code": "no_ready_worker"}, 7.0),
    ]  # fmt: skip
    assert tenants_of(samples) == {"a": 2}
    assert grown({"no_ready_worker": 5, "over_capacity": 3}, errors_of(samples)) == {"no_ready_worker": 2}
    assert grown({"no_ready_worker": 9}, errors_of(samples)) == {"no_ready_worker": 7}, "a router that was started anew"


def test_check_names_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "maintenance.jsonl"
    log.write_bytes(b"".join(a_log(*WHOLE)))
    assert CliRunner().invoke(main, ["maintenance", "check", str(log)]).exit_code == 0
    log.write_bytes(b"".join(a_log(*WHOLE)[1:]))
    done = CliRunner().invoke(main, ["maintenance", "check", str(log)])
    assert done.exit_code == 1 and "maintenance.jsonl:1" in done.output
    assert CliRunner().invoke(main, ["maintenance", "check", str(tmp_path / "none")]).exit_code == 2
