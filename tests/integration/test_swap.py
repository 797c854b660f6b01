"""A model is swapped under load, goes back when it fails, and what cannot be loaded is refused without changing anything."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders_fleet import Fleet, Packages, until
from builders_packages import copy_of, edit_manifest, sign, with_wrong_golden
from builders_swap import PROMPTS, TOKENS, Load, ask, held, rollout, until_over

from calculet_core.history import check
from calculet_core.shell.control_client import ControlError
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import read_journal
from calculet_core.shell.packages import read_package


@pytest.fixture(scope="module")
def blue(packages: Packages) -> Path:
    return packages.get("sim-batch", "--step-ms", "2")


@pytest.fixture(scope="module")
def green(packages: Packages) -> Path:
    return packages.get("sim-b1", "--step-ms", "1", "--lanes", "16")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, packages: Packages, blue: Path) -> Iterator[Fleet]:
    """Four boards that serve blue; every test leaves them so."""
    rollouts = {"canary": {"hold_s": 0.2, "min_requests": 20, "max_p99_ratio": 1000.0}}
    with Fleet(tmp_path_factory.mktemp("swap") / "fleet", blue, packages.key.with_suffix(".pub"), boards=4, rollout=rollouts) as fleet:
        yield fleet


def references(fleet: Fleet) -> dict[str, str]:
    return {prompt: fleet.completion(prompt, max_tokens=TOKENS).text for prompt in PROMPTS}


# ------------------------------------------------------------------------------------------------ a good swap
def test_a_swap_and_its_way_back_lose_no_request_and_mix_no_answer(fleet: Fleet, blue: Path, green: Path) -> None:
    old, new = read_package(blue).digest, read_package(green).digest
    texts = {old: references(fleet)}
    pids = fleet.pids()
    with Load(fleet) as load:
        load.more(24)
        done = fleet.cli("load", "toy", str(green), "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(held(fleet).values()) == {new}
        load.more(24)
        texts[new] = references(fleet)
        done = fleet.cli("rollback", "toy", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        load.more(24)
    assert load.failed == []
    assert load.fewest >= 2, "the floor of half the boards"
    assert texts[old] != texts[new]
    seen = {digest for _, digest, _ in load.answers}
    assert seen == {old, new}
    wrong = [answer for answer in load.answers if answer[2] != texts[answer[1]][answer[0]]]
    assert wrong == [], "an answer that is not wholly one generation's"
    assert set(held(fleet).values()) == {old}
    assert fleet.pids() == pids, "no process had to be replaced"
    generations = json.loads(fleet.cli("generations", "--json").stdout)
    (alias,) = generations["aliases"]
    assert (alias["artifact"]["digest"], alias["previous"]["digest"]) == (old, new)


def test_a_swap_is_refused_while_another_is_under_way_and_an_operator_can_turn_it_round(fleet: Fleet, blue: Path, green: Path) -> None:
    begun = ask(fleet, "load", alias="toy", package=str(green), canary=0.5)
    with pytest.raises(ControlError, match=f"rollout {begun['rollout']} of toy is under way") as second:
        ask(fleet, "load", alias="toy", package=str(green))
    assert "rollback toy" in (second.value.hint or "")
    with pytest.raises(ControlError, match="is under way"):
        ask(fleet, "unload", alias="toy")
    until(lambda: rollout(fleet)["share"] == 0.5, "the canary")
    digests = {fleet.completion("x").json()["system_fingerprint"] for _ in range(8)}
    assert digests == {read_package(blue).digest, read_package(green).digest}
    done = fleet.cli("rollback", "toy", "--yes")
    assert done.returncode == 1 and "ROLLED_BACK: an operator" in done.stderr, done.stderr
    assert set(held(fleet).values()) == {read_package(blue).digest}


def test_a_canary_that_looks_well_goes_on_by_itself(fleet: Fleet, blue: Path, green: Path) -> None:
    with Load(fleet, 6) as load:
        done = fleet.cli("load", "toy", str(green), "--canary", "25%", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
    assert load.failed == []
    assert "the canary is good" in done.stdout
    assert fleet.cli("rollback", "toy", "--yes").returncode == 0


@pytest.mark.long
def test_a_canary_that_is_much_slower_gets_nothing_more_and_goes_back(tmp_path: Path, packages: Packages, blue: Path) -> None:
    slow = packages.get("sim-batch", "--step-ms", "100")
    rollouts = {"canary": {"hold_s": 0.2, "min_requests": 20, "max_p99_ratio": 3.0}}
    with Fleet(tmp_path / "fleet", blue, packages.key.with_suffix(".pub"), rollout=rollouts) as fleet:
        with Load(fleet, 8) as load:
            done = fleet.cli("load", "toy", str(slow), "--canary", "50%", "--yes")
        assert done.returncode == 1
        assert "canary: P99 of " in done.stderr, done.stdout + done.stderr
        assert load.failed == []
        assert set(held(fleet).values()) == {read_package(blue).digest}


# ------------------------------------------------------------------------------------------------ a bad one
def test_green_that_fails_its_golden_cases_goes_back_and_nobody_notices(fleet: Fleet, packages: Packages, blue: Path, green: Path, tmp_path: Path) -> None:
    bad = with_wrong_golden(green, tmp_path / "bad", packages.key)
    with Load(fleet, 6) as load:
        load.more(6)
        done = fleet.cli("load", "toy", str(bad), "--yes")
        load.more(6)
    assert done.returncode == 1
    assert "board0: golden: " in done.stderr and "rolls back: board0: golden: " in done.stdout
    assert load.failed == []
    assert {digest for _, digest, _ in load.answers} == {read_package(blue).digest}
    assert set(held(fleet).values()) == {read_package(blue).digest}
    # Whose fault is it? The next trial begins on another board; when it fails there too, the artifact is set aside.
    done = fleet.cli("load", "toy", str(bad), "--yes")
    assert "board1: golden: " in done.stderr, done.stderr
    digest = read_package(bad).digest
    done = fleet.cli("load", "toy", str(bad), "--yes")
    assert f"({digest[:12]}) was set aside: it failed on board1 and on board0" in done.stderr, done.stderr
    assert fleet.cli("release", digest[:12]).returncode == 0
    assert "golden: " in fleet.cli("load", "toy", str(bad), "--yes").stderr
    assert set(held(fleet).values()) == {read_package(blue).digest}


def test_green_that_a_board_does_not_take_at_configure_goes_back_and_nobody_notices(
    fleet: Fleet, packages: Packages, blue: Path, green: Path, tmp_path: Path
) -> None:
    bad = edit_manifest(copy_of(green, tmp_path / "bad"), lambda manifest: manifest["backend_options"].update(no_such_option=1))
    sign(bad, packages.key)
    with Load(fleet, 6) as load:
        load.more(6)
        done = fleet.cli("load", "toy", str(bad), "--yes")
        load.more(6)
    assert done.returncode == 1 and "configuring returned" in done.stderr and "ROLLED_BACK" in done.stderr, done.stderr
    assert load.failed == []
    assert {digest for _, digest, _ in load.answers} == {read_package(blue).digest}
    assert set(held(fleet).values()) == {read_package(blue).digest}


Spoil = Callable[[Path, Path, Path], Path]


def a_swapped_file(package: Path, folder: Path, key: Path) -> Path:
    (copy_of(package, folder) / read_package(package).manifest.image).write_bytes(b"something else")
    return folder


def a_truncated_image(package: Path, folder: Path, key: Path) -> Path:
    path = copy_of(package, folder) / read_package(package).manifest.image
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def an_unsigned_package(package: Path, folder: Path, key: Path) -> Path:
    (copy_of(package, folder) / "manifest.sig").unlink()
    return folder


def a_changed_manifest(package: Path, folder: Path, key: Path) -> Path:
    return edit_manifest(copy_of(package, folder), lambda manifest: manifest.update(version="2"))


def a_stranger_s_key(package: Path, folder: Path, key: Path) -> Path:
    stranger = Packages(folder.parent).key
    return sign(copy_of(package, folder), stranger)


def a_traversal(package: Path, folder: Path, key: Path) -> Path:
    copy_of(package, folder)
    edit_manifest(folder, lambda manifest: manifest.update(golden="../../etc/passwd"))
    (folder / "manifest.sig").unlink()
    return folder


def a_newer_schema(package: Path, folder: Path, key: Path) -> Path:
    return edit_manifest(copy_of(package, folder), lambda manifest: manifest.update(schema="calculet-artifact/v2"))


def a_symbolic_link(package: Path, folder: Path, key: Path) -> Path:
    (copy_of(package, folder) / "extra").symlink_to("/etc/passwd")
    return folder


def a_folder_that_everybody_can_write_to(package: Path, folder: Path, key: Path) -> Path:
    copy_of(package, folder).chmod(0o777)
    return folder


def a_package_that_is_not_there(package: Path, folder: Path, key: Path) -> Path:
    return folder


def another_board_s(package: Path, folder: Path, key: Path) -> Path:
    return sign(edit_manifest(copy_of(package, folder), lambda manifest: manifest.update(backend="llamacpp")), key)


def another_driver_s(package: Path, folder: Path, key: Path) -> Path:
    wanted = {"driver": ["9.9.9"]}
    return sign(edit_manifest(copy_of(package, folder), lambda manifest: manifest.update(compatibility=wanted)), key)


def one_that_is_too_large(package: Path, folder: Path, key: Path) -> Path:
    def change(manifest: dict[str, Any]) -> None:
        manifest["capacity"]["reserved_bytes"] = 40 << 30

    return sign(edit_manifest(copy_of(package, folder), change), key)


def what_serves_already(package: Path, folder: Path, key: Path) -> Path:
    return package


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (a_swapped_file, "step 2, signature and hashes: .* was changed: sha256"),
        (a_truncated_image, "step 2, signature and hashes: .* was changed: sha256"),
        (an_unsigned_package, "manifest.sig is missing: the package is not signed"),
        (a_changed_manifest, "the signature does not match manifest.yaml"),
        (a_stranger_s_key, "which is not trusted"),
        (a_traversal, r"\$\.golden"),
        (a_newer_schema, r"\$\.schema.*calculet-artifact/v2"),
        (a_symbolic_link, "step 1, trusted path: .*extra is a symbolic link"),
        (a_folder_that_everybody_can_write_to, "everybody can write to it"),
        (a_package_that_is_not_there, "no such package folder"),
        (another_board_s, "step 3, compatibility: .*'llamacpp'; board0 is 'sim'"),
        (another_driver_s, "step 3, compatibility: board0 has driver .*, built for 9.9.9"),
        (one_that_is_too_large, r"step 4, capacity: .*40.000 GiB > 32.000 GiB of board DRAM"),
        (what_serves_already, "toy already serves"),
    ],
)
def test_what_is_wrong_is_refused_at_its_step_and_nothing_changes(
    fleet: Fleet, packages: Packages, blue: Path, tmp_path: Path, spoil: Spoil, words: str
) -> None:
    before, view = ask(fleet, "generations"), load_fleet(fleet.config).fleet_view.read_bytes()
    package = spoil(blue, tmp_path / "package", packages.key)
    number = ask(fleet, "load", alias="toy", package=str(package))["rollout"]
    found = until_over(fleet, number)
    assert found["state"] == "REFUSED" and found["reason"].endswith("Nothing was changed")
    assert re.search(words, found["reason"]), found["reason"]
    assert ask(fleet, "generations") == before
    assert load_fleet(fleet.config).fleet_view.read_bytes() == view
    assert not [path for path in (load_fleet(fleet.config).state_dir / "artifacts").iterdir() if path.name.startswith(".")]
    assert fleet.completion().status == 200


def test_a_second_model_is_refused_with_the_arithmetic(fleet: Fleet, packages: Packages) -> None:
    large = packages.get("qwen3-sim")
    done = fleet.cli("load", "another", str(large), "--yes")
    assert done.returncode == 1
    assert "C3, unproven" in done.stderr and "GiB of board DRAM" in done.stderr and "1.125 + 28.150" in done.stderr, done.stderr


def test_capacity_that_is_not_there_is_not_taken(fleet: Fleet, green: Path) -> None:
    done = fleet.cli("load", "toy", str(green), "--yes", "--floor", "4")
    assert done.returncode == 1 and "moving one leaves 3, below the floor of 4" in done.stderr
    assert fleet.cli("drain", "board3").returncode == 0
    done = fleet.cli("load", "toy", str(green), "--yes")
    assert done.returncode == 1 and "board3 (drained)" in done.stderr, done.stderr
    assert fleet.cli("resume", "board3").returncode == 0
    until(lambda: all(held(fleet).values()), "four boards")
    assert fleet.cli("load", "toy", str(green)).returncode == 2, "nobody is there to say yes"


def test_the_journals_of_all_this_hold_every_promise(fleet: Fleet) -> None:
    def broken() -> list[Any]:
        """What the journals show by now: the end of the last request is written a moment after it."""
        found = [event for path in (fleet.folder / "log").glob("*.jsonl") for event in read_journal(path)]
        assert sum(event.event == "fleet.rollout" for event in found) > 20
        return check(sorted(found, key=lambda event: event.t))

    until(lambda: broken() == [], "journals without a broken promise", 10.0)


# ------------------------------------------------------------------------------------------------ one board
def test_an_artifact_without_a_boards_own_profile_is_refused_before_anything_is_drained(tmp_path: Path, packages: Packages) -> None:
    fleet = Fleet(tmp_path / "fleet", packages.get("sim-batch"), packages.key.with_suffix(".pub"), boards=1)
    config = json.loads(fleet.config.read_text())
    config["boards"][0]["profiles"] = [4]
    fleet.config.write_text(json.dumps(config))
    with fleet:
        before = ask(fleet, "generations")
        done = fleet.cli("load", "toy", str(packages.get("sim-b1")), "--yes", "--allow-downtime")
        assert done.returncode == 1 and "$.boards[0].profiles[0]: B4 is not in manifest" in done.stderr, done.stderr
        assert "Nothing was changed" in done.stderr and ask(fleet, "generations") == before


def test_one_board_needs_a_word_for_the_time_without_service_and_tells_how_long_it_was(tmp_path: Path, packages: Packages, blue: Path, green: Path) -> None:
    configured = copy_of(blue, tmp_path / "blue")
    with Fleet(tmp_path / "fleet", configured, packages.key.with_suffix(".pub"), boards=1) as fleet:
        done = fleet.cli("load", "toy", str(green), "--yes")
        assert done.returncode == 1 and "--allow-downtime" in done.stderr, done.stderr
        done = fleet.cli("load", "toy", str(green), "--yes", "--allow-downtime")
        assert done.returncode == 0, done.stdout + done.stderr
        assert rollout(fleet)["dark_s"] > 0 and "nobody served for" in done.stdout
        assert fleet.completion().json()["system_fingerprint"] == read_package(green).digest
        shutil.rmtree(configured)  # nobody needs it any more, as it seems
        dead = fleet.kill("supervisor")
        until(lambda: fleet.pid("supervisor") not in (dead, None) and fleet.status(), "the supervisor is back")
        assert fleet.cli("rollback", "toy", "--yes", "--allow-downtime").returncode == 0, fleet.logs()
        assert fleet.completion().json()["system_fingerprint"] == read_package(blue).digest
        done = fleet.cli("unload", "toy", "--yes")
        assert done.returncode == 0, done.stderr
        refused = fleet.completion()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "no_ready_worker")
        assert fleet.cli("rollback", "toy", "--yes").returncode == 0, "back to what was unloaded"
        assert fleet.completion().status == 200


def test_a_runtime_without_a_verified_unload_changes_its_model_with_its_process(
    tmp_path: Path, packages: Packages, blue: Path, green: Path
) -> None:
    trust = packages.key.with_suffix(".pub")
    with Fleet(tmp_path / "fleet", blue, trust, boards=1, options={"unconfigures": False}) as fleet:
        first = fleet.pid("worker", "board0")
        done = fleet.cli("load", "toy", str(green), "--yes", "--allow-downtime")
        assert done.returncode == 0, done.stderr
        assert fleet.pid("worker", "board0") not in (None, first)
        assert fleet.completion().json()["system_fingerprint"] == read_package(green).digest
        row = (fleet.status() or {})["boards"][0]
        assert (row["failures"], row["restarts_left"]) == (0, 5), "it was no failure and cost no restart"
        assert fleet.cli("unload", "toy", "--yes").returncode == 0
