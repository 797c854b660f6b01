"""Sockets of dead workers go; those of the living, and of whoever starts meanwhile, stay."""

from __future__ import annotations

from pathlib import Path

from calculet_core.shell.fleet import load_fleet, make_folders
from calculet_supervisor.shell.sweeping import epochs_begun, sweep_dead


def test_only_lives_that_are_over_lose_their_sockets(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "{schema: calculet-fleet/v1, run_dir: r, state_dir: s, log_dir: l, models: [{alias: a, package: p}],"
        " boards: [{name: b, device: sim}, {name: b-1, device: sim}, {name: new, device: sim}]}"
    )
    fleet = load_fleet(tmp_path / "fleet.yaml")
    make_folders(fleet)
    fleet.board_epoch("b").write_text("7\n")
    fleet.board_epoch("b-1").write_text("3\n")
    begun = epochs_begun(fleet)
    for board, epoch in (("b", 6), ("b", 7), ("b", 8), ("b-1", 2), ("b-1", 3), ("new", 1)):
        fleet.worker_socket(board, epoch).touch()
    sweep_dead(fleet, begun, {"b-1": 4711})
    assert begun == {"b": 7, "b-1": 3}
    assert sorted(path.name for path in fleet.run_dir.iterdir()) == ["w-b-1-3.sock", "w-b-8.sock", "w-new-1.sock"]
