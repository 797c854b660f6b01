"""The fleet under a real systemd as PID 1, installed by `calculet install`, on simulated boards: start, reload, watchdog, kill -9 of
each process under load through real HTTP, what the unprivileged supervisor may do, and the drain on stop.

One machine serves all tests of this module, in their order; each leaves it serving, but the last, which stops it.
"""

from __future__ import annotations

import json
import signal
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from builders_fleet import Packages, until
from builders_systemd import CONFIG, PREFIX, ROUTER, SECOND, SOCKET, SUPERVISOR, Front, Load, Machine, need_a_machine, worker

from calculet_core.history import Event
from calculet_core.shell.files import FileLock
from calculet_core.shell.journal import read_journal
from calculet_supervisor.shell.crashes import bundles

pytestmark = pytest.mark.timeout(300)
BOARDS = ("board0", "board1")
WHOLE_AGAIN_S = 60.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Machine]:
    need_a_machine()
    machine = Machine(tmp_path_factory.mktemp("machine"), packages)
    try:
        machine.must("calculet", "install", "--prefix", PREFIX)
        machine.systemctl("start", "calculet.target")
        machine.wait_ready()
        yield machine
    finally:
        code = machine.power_off()
    assert code == 0


@contextmanager
def load(machine: Machine, clients: int = 6) -> Iterator[Load]:
    """Clients that ask without a pause, until the block ends; what failed is in `.failures`."""
    running = Load(machine, clients)
    try:
        until(lambda: running.answered >= clients, "the load is on")
        yield running
        seen = running.answered
        until(lambda: running.answered >= seen + 2 * clients, "the load goes on")
    finally:
        running.stop()


def pids(machine: Machine, *units: str) -> list[int]:
    return [machine.pid(unit) for unit in units]


def the_workers(machine: Machine) -> list[int]:
    return pids(machine, *(worker(board) for board in BOARDS))


def wait_for_another(machine: Machine, unit: str, pid: int) -> None:
    until(lambda: machine.pid(unit) not in (0, pid) and machine.active(unit), f"{unit} is started again", WHOLE_AGAIN_S)


# ---------------------------------------------------------------- start
def test_a_start_waits_until_everything_serves_and_runs_unprivileged(machine: Machine) -> None:
    assert machine.active("calculet.target", SUPERVISOR, ROUTER, SOCKET, *(worker(board) for board in BOARDS))
    assert "0 loaded units" in machine.run("systemctl", "--failed").stdout
    for unit in (SUPERVISOR, ROUTER, worker("board0")):
        status = machine.read(f"/proc/{machine.pid(unit)}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        assert machine.must("stat", "-c", "%U", f"/proc/{machine.pid(unit)}").strip() == "calculet"
        assert (fields["CapBnd"], fields["NoNewPrivs"], fields["Seccomp"]) == ("0000000000000000", "1", "2"), unit
    assert machine.show(worker("board0"), "Slice") == "calculet-workers.slice"
    assert "good" in machine.must("calculet", "config", "check", "--config", CONFIG)
    assert "nothing to do" in machine.must("calculet", "install", "--prefix", PREFIX)
    assert machine.front(lambda front: front.completion().status) == 200


def test_a_start_returns_when_the_supervisor_answers(machine: Machine) -> None:
    before = the_workers(machine)
    machine.systemctl("stop", SUPERVISOR)
    assert machine.status() is None and machine.front(lambda front: front.completion().status) == 200
    machine.systemctl("start", SUPERVISOR)
    assert machine.status() is not None, "READY came before it answers"
    machine.wait_ready()
    until(lambda: machine.show(SUPERVISOR, "StatusText") == "2 of 2 boards ready", "it tells systemd how it is")
    assert the_workers(machine) == before


# ---------------------------------------------------------------- the polkit rule
def test_the_unprivileged_user_may_start_workers_and_nothing_else(machine: Machine) -> None:
    machine.must("systemctl", "stop", worker("board9"))
    assert machine.run("systemctl", "--no-ask-password", "start", worker("board9"), user="calculet").returncode == 0
    until(lambda: machine.show(worker("board9"), "ExecMainStatus") == "78", "it was run, and refused an unknown board")
    before = machine.must("systemctl", "list-units", "--no-legend", "--plain", "--all", "calculet*")
    for command in (
        ("stop", worker("board0")), ("restart", worker("board0")), ("kill", worker("board0")), ("stop", ROUTER), ("start", SECOND),
        ("restart", SUPERVISOR), ("start", "calculet-worker@../../x.service"), ("start", "systemd-hostnamed.service"),
        ("set-property", "--runtime", worker("board0"), "CPUWeight=1"), ("daemon-reload",), ("poweroff",), ("mask", ROUTER),
    ):  # fmt: skip
        done = machine.run("systemctl", "--no-ask-password", *command, user="calculet")
        assert done.returncode != 0, command
        assert "auth" in done.stderr or "denied" in done.stderr or "Invalid" in done.stderr, (command, done.stderr)
    done = machine.run("systemd-run", "--no-ask-password", "--unit=calculet-worker@evil.service", "/bin/true", user="calculet")
    assert done.returncode != 0 and "auth" in done.stderr
    assert machine.must("systemctl", "list-units", "--no-legend", "--plain", "--all", "calculet*") == before
    machine.systemctl("reset-failed", worker("board9"))


# ---------------------------------------------------------------- the supervisor goes and comes
def test_a_killed_and_a_restarted_supervisor_change_nothing_for_anybody(machine: Machine) -> None:
    before = the_workers(machine)
    with load(machine) as running:
        dead = machine.kill(SUPERVISOR)
        wait_for_another(machine, SUPERVISOR, dead)
        machine.wait_ready(WHOLE_AGAIN_S)
        machine.systemctl("restart", SUPERVISOR)
        machine.wait_ready(WHOLE_AGAIN_S)
    assert running.failures == []
    assert the_workers(machine) == before


def test_a_reload_takes_the_new_configuration_in_the_same_process(machine: Machine) -> None:
    before, pid = the_workers(machine), machine.pid(SUPERVISOR)
    machine.configure(supervision={"heartbeat_ms": 50, "hang_timeout_ms": 29_000})
    with load(machine) as running:
        machine.systemctl("reload", SUPERVISOR)
        until(lambda: "reloads /etc/calculet" in machine.journal(SUPERVISOR), "the reload began")
        until(lambda: machine.show(SUPERVISOR, "SubState") == "running" and machine.status(), "and ended")
        machine.wait_ready(WHOLE_AGAIN_S)
    assert running.failures == []
    assert (machine.pid(SUPERVISOR), the_workers(machine)) == (pid, before)
    said = machine.must("journalctl", "-q", "-o", "cat", f"_PID={pid}")
    assert said.count("supervises boards=2") == 2, "one process, two images"


def test_a_reload_with_a_wrong_configuration_is_refused_in_words(machine: Machine) -> None:
    before, pid = the_workers(machine), machine.pid(SUPERVISOR)
    machine.configure(models=[{"alias": "toy", "package": f"{PREFIX}/no-such-package"}])
    done = machine.run("systemctl", "reload", SUPERVISOR)
    assert done.returncode != 0
    assert "no-such-package" in machine.journal(SUPERVISOR)
    machine.run("kill", "-HUP", str(pid))
    until(lambda: "the reload is refused" in machine.journal(SUPERVISOR), "it refuses by itself, too")
    assert (machine.pid(SUPERVISOR), the_workers(machine)) == (pid, before)
    assert machine.status() is not None and machine.front(lambda front: front.completion().status) == 200
    machine.configure()


def test_a_configuration_is_applied_under_load_without_a_failure(machine: Machine) -> None:
    before, supervisor, router = the_workers(machine), machine.pid(SUPERVISOR), machine.pid(ROUTER)
    machine.configure(tenants=[{"name": "default"}, {"name": "team", "weight": 2}], recovery={"max_resets_per_10min": 3})
    planned = machine.run("calculet", "config", "plan", "--config", CONFIG)
    assert planned.returncode == 2 and "restart of board0, board1" in planned.stdout, planned.stdout + planned.stderr
    with load(machine) as running:
        applied = machine.run("timeout", "100", "calculet", "config", "apply", "--config", CONFIG, "--yes")
        assert applied.returncode == 0, applied.stdout + applied.stderr + machine.journal(SUPERVISOR)[-4000:]
    assert running.failures == [] and "is in force" in applied.stdout
    assert (machine.pid(SUPERVISOR), machine.pid(ROUTER)) == (supervisor, router), "no process of these was restarted"
    assert not set(the_workers(machine)) & set(before), "each board's worker was"
    assert 'calculet_router_tenant_active{tenant="team"}' in machine.front(lambda front: front.get("/metrics").body.decode())
    machine.configure(recovery={"max_resets_per_10min": 3})
    machine.systemctl("reload", ROUTER)
    gone = 'calculet_router_tenant_active{tenant="team"}'
    until(lambda: gone not in machine.front(lambda front: front.get("/metrics").body.decode()), "a router alone takes tenants at a reload")
    assert machine.pid(ROUTER) == router
    machine.configure()


def test_what_a_router_reads_at_its_start_is_applied_under_load_without_a_failure(machine: Machine) -> None:
    apply = ("timeout", "100", "calculet", "config", "apply", "--config", CONFIG, "--yes")
    done = machine.run(*apply)  # what the tests before have left behind
    assert done.returncode == 0, done.stdout + done.stderr
    workers, supervisor, router = the_workers(machine), machine.pid(SUPERVISOR), machine.pid(ROUTER)
    machine.configure(usage={"keep_days": 300})
    planned = machine.run("calculet", "config", "plan", "--config", CONFIG)
    assert planned.returncode == 2 and "restart of the routers" in planned.stdout, planned.stdout + planned.stderr
    with load(machine) as running:
        applied = machine.run(*apply)
        assert applied.returncode == 0, applied.stdout + applied.stderr + machine.journal(SUPERVISOR)[-4000:]
    assert running.failures == [] and "is in force" in applied.stdout
    assert machine.pid(ROUTER) != router, "the router drained, ended, and was started again by systemd"
    assert (machine.pid(SUPERVISOR), the_workers(machine)) == (supervisor, workers), "nobody else was touched"
    machine.configure()
    with load(machine) as running:
        back = machine.run(*apply)
        assert back.returncode == 0, back.stdout + back.stderr
    assert running.failures == []


def test_killed_services_go_on_with_what_was_in_force_while_the_file_is_broken(machine: Machine) -> None:
    workers = the_workers(machine)
    machine.configure(boards=[])
    supervisor, router = machine.kill(SUPERVISOR, signal.SIGKILL), machine.kill(ROUTER, signal.SIGKILL)
    wait_for_another(machine, SUPERVISOR, supervisor)
    wait_for_another(machine, ROUTER, router)
    machine.wait_ready(WHOLE_AGAIN_S)
    shown = machine.run("calculet", "status", "--config", CONFIG)
    assert shown.returncode == 0 and "what was in force goes on" in shown.stdout, shown.stdout + shown.stderr
    assert the_workers(machine) == workers
    machine.configure()
    until(lambda: "what was in force" not in machine.run("calculet", "status", "--config", CONFIG).stdout, "the mended file is used")
    machine.wait_ready(WHOLE_AGAIN_S)
    assert the_workers(machine) == workers


@pytest.mark.parametrize("unit", (SUPERVISOR, ROUTER))
def test_the_watchdog_replaces_a_process_that_is_stuck(machine: Machine, unit: str) -> None:
    before = the_workers(machine)
    drop_in = machine.read(f"/etc/systemd/system/{unit}.d/watchdog.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text("[Service]\nWatchdogSec=3s\n")
    machine.systemctl("daemon-reload")
    machine.systemctl("restart", unit)
    machine.wait_ready(WHOLE_AGAIN_S)
    stuck = machine.kill(unit, signal.SIGSTOP)
    wait_for_another(machine, unit, stuck)
    machine.wait_ready(WHOLE_AGAIN_S)
    assert "Watchdog timeout" in machine.journal(unit)
    assert "Fatal Python error: Aborted" in machine.journal(unit), "its stacks are in the journal"
    assert the_workers(machine) == before
    drop_in.unlink()
    drop_in.parent.rmdir()
    machine.systemctl("daemon-reload")
    machine.systemctl("restart", unit)
    machine.wait_ready(WHOLE_AGAIN_S)


def test_a_worker_that_hangs_is_killed_with_all_of_its_unit_and_replaced(machine: Machine) -> None:
    machine.configure(supervision={"heartbeat_ms": 50, "heartbeat_timeout_ms": 2_000})
    machine.systemctl("reload", SUPERVISOR)
    until(lambda: machine.show(SUPERVISOR, "SubState") == "running" and machine.status(), "the short limit is taken")
    machine.wait_ready(WHOLE_AGAIN_S)
    hanging = machine.kill(worker("board0"), signal.SIGSTOP)
    wait_for_another(machine, worker("board0"), hanging)
    machine.wait_ready(WHOLE_AGAIN_S)
    killed = [event for event in journal_of(machine, "supervisor") if event.event == "fleet.worker_killed" and event.board == "board0"]
    assert [event.data["signal"] for event in killed[-2:]] == ["SIGABRT", "SIGKILL"]
    machine.configure()
    machine.systemctl("reload", SUPERVISOR)
    until(lambda: machine.show(SUPERVISOR, "SubState") == "running" and machine.status(), "all as before")
    machine.wait_ready(WHOLE_AGAIN_S)


# ---------------------------------------------------------------- kill -9 under load
def test_a_killed_worker_costs_no_request_and_only_the_supervisor_starts_it_again(machine: Machine) -> None:
    with load(machine) as running:
        dead = machine.kill(worker("board0"))
        wait_for_another(machine, worker("board0"), dead)
        machine.wait_ready(WHOLE_AGAIN_S)
    assert {kind for kind, _ in running.failures} <= {"lost"}, "only streams that had begun end, and say why"
    assert machine.show(worker("board0"), "NRestarts") == "0"
    exits = [event for event in journal_of(machine, "supervisor") if event.event == "fleet.worker_exited"]
    assert exits[-1].board == "board0" and exits[-1].data["signal"] == 9
    crash = until(lambda: bundles(machine.read("/var/log/calculet/crashes")), "a crash bundle")[-1]
    assert "waits for commands" in (crash / "log.txt").read_text(), "a copy of what went to the journal"
    assert json.loads((crash / "exit.json").read_text())["board_lock"] == "free"
    done = machine.run("calculet", "support-bundle", "--config", CONFIG, "--output", "/tmp/support.tar.gz")
    with tarfile.open(machine.read("/tmp/support.tar.gz")) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {f"crashes/{crash.name}/exit.json", "systemd/journal.txt", "systemd/files.txt", "status.json"} <= names, done.stderr
    assert {"stacks/worker-board1.stacks", "metrics/router.prom", "logs/supervisor.log"} <= names, done.stderr


def test_a_worker_that_dies_while_the_supervisor_is_down_stays_down_until_it_is_back(machine: Machine) -> None:
    machine.systemctl("stop", SUPERVISOR)
    machine.kill(worker("board1"))
    until(lambda: machine.show(worker("board1"), "ActiveState") == "failed", "systemd leaves it dead")
    assert machine.front(lambda front: front.completion().status) == 200
    machine.systemctl("start", SUPERVISOR)
    machine.wait_ready(WHOLE_AGAIN_S)


def test_a_killed_router_refuses_nobody_who_comes_meanwhile(machine: Machine) -> None:
    before = the_workers(machine)
    with load(machine) as running:
        dead = machine.kill(ROUTER)
        wait_for_another(machine, ROUTER, dead)
    assert running.failures, "nobody was connected: the test killed too late"
    assert {kind for kind, _ in running.failures} <= {"cut"}, running.failures
    assert the_workers(machine) == before
    machine.wait_ready(WHOLE_AGAIN_S)


# ---------------------------------------------------------------- a new model, a new version
def test_a_model_is_swapped_and_rolled_back_under_load_by_the_hardened_supervisor(machine: Machine) -> None:
    def digests() -> set[str]:
        return {board["digest"] for board in (machine.status() or {"boards": []})["boards"]}

    before = digests()
    with load(machine) as running:
        machine.must("calculet", "load", "toy", f"{PREFIX}/next", "--yes", "--config", CONFIG)
        assert len(digests()) == 1 and not digests() & before
        machine.must("calculet", "rollback", "toy", "--yes", "--config", CONFIG)
    assert running.failures == [] and digests() == before
    hidden = machine.run("calculet", "load", "toy", "/root/package", "--yes", "--config", CONFIG)
    assert hidden.returncode == 1 and "/root/package" in hidden.stderr
    for folder in ("/var/lib/calculet", "/var/log/calculet", "/run/calculet"):
        assert machine.must("stat", "-c", "%a %U", folder).strip() == "750 calculet"


def test_two_routers_share_the_socket_and_each_process_is_replaced_without_a_failure(machine: Machine) -> None:
    machine.systemctl("start", SECOND)
    before = pids(machine, SUPERVISOR, ROUTER, SECOND, *map(worker, BOARDS))
    shown = machine.must("calculet", "upgrade", "--config", CONFIG, "--dry-run").splitlines()
    assert shown == [f"would restart {what}" for what in (SUPERVISOR, ROUTER, SECOND, *BOARDS)]
    assert "only root" in machine.run("calculet", "upgrade", "--config", CONFIG, user="calculet").stderr
    assert pids(machine, SUPERVISOR, ROUTER, SECOND, *map(worker, BOARDS)) == before
    with load(machine, 8) as running:
        machine.must("calculet", "upgrade", "--config", CONFIG)
    assert running.failures == []
    after = pids(machine, SUPERVISOR, ROUTER, SECOND, *map(worker, BOARDS))
    assert 0 not in after and not set(after) & set(before)
    with load(machine, 8) as running:  # the unprivileged supervisor tells them, and systemd starts them again
        machine.must("calculet", "restart", "router", "--wait", "--config", CONFIG)
    assert running.failures == []
    routers = pids(machine, ROUTER, SECOND)
    assert 0 not in routers and not set(routers) & set(after)
    machine.must("calculet", "stop", "--config", CONFIG, "board1")
    until(lambda: machine.pid(worker("board1")) == 0, "board1 is stopped")
    refused = machine.run("calculet", "upgrade", "--config", CONFIG)
    assert refused.returncode == 1 and "board0 is the only board that serves toy" in refused.stderr
    machine.must("calculet", "start", "--config", CONFIG, "board1")
    machine.wait_ready(WHOLE_AGAIN_S)
    assert "router-2" in machine.front(lambda front: front.get("/metrics").body.decode())
    machine.systemctl("stop", SECOND)


# ---------------------------------------------------------------- stop
def test_a_stop_drains_streams_and_goes_from_the_router_to_the_workers(machine: Machine) -> None:
    with ThreadPoolExecutor(4, initializer=machine.enter_network) as pool:
        streams = [pool.submit(lambda: list(Front().stream({"prompt": "long", "max_tokens": 600}))) for _ in range(4)]
        until(lambda: sum(machine.active_requests()) == 4, "four streams run")
        machine.systemctl("stop", "calculet.target", "calculet-*")
        for stream in streams:
            events = stream.result()
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    units = [ROUTER, SUPERVISOR, *(worker(board) for board in BOARDS)]
    assert [machine.show(unit, "ActiveState") for unit in units] == ["inactive"] * 4
    assert {machine.show(unit, "Result") for unit in units} == {"success"}
    stopped = [int(machine.show(unit, "InactiveEnterTimestampMonotonic")) for unit in units]
    assert stopped[0] <= stopped[1] <= min(stopped[2:])
    assert [path.name for path in machine.read("/run/calculet").glob("*.sock")] == []
    for board in BOARDS:
        FileLock(machine.read(f"/var/lib/calculet/boards/{board}.lock")).release()


def test_a_wrong_configuration_is_not_started_again_and_again(machine: Machine) -> None:
    machine.configure(boards=[])
    assert machine.run("systemctl", "start", SUPERVISOR).returncode != 0
    assert (machine.show(SUPERVISOR, "ExecMainStatus"), machine.show(SUPERVISOR, "ActiveState")) == ("78", "failed")
    assert machine.show(SUPERVISOR, "NRestarts") == "0"
    assert "$.boards" in machine.journal(SUPERVISOR)
    machine.configure()


def test_uninstall_waits_for_the_stop_and_leaves_state_and_configuration(machine: Machine) -> None:
    machine.systemctl("start", "calculet.target")
    refused = machine.run("calculet", "uninstall")
    assert refused.returncode == 1 and "systemctl stop calculet.target 'calculet-*'" in refused.stderr
    machine.systemctl("enable", "calculet.target", SECOND)
    machine.systemctl("stop", "calculet.target")
    units = (SOCKET, ROUTER, SUPERVISOR, *map(worker, BOARDS))
    until(lambda: {machine.show(unit, "ActiveState") for unit in units} == {"inactive"}, "the target takes all with it")
    machine.must("calculet", "uninstall")
    left = [path.name for path in machine.read("/etc/systemd/system").rglob("calculet*")]
    assert left == [] and machine.read(CONFIG).exists() and machine.read("/var/lib/calculet/supervisor.sqlite").exists()
    assert "not-found" in machine.run("systemctl", "show", "-P", "LoadState", SUPERVISOR).stdout


def journal_of(machine: Machine, process: str) -> list[Event]:
    return read_journal(machine.read(f"/var/log/calculet/{process}.jsonl"))
