"""Files, locks, journals, links and the operators' channel, on the real operating system."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from calculet_core.history import Event
from calculet_core.metrics import metrics_of
from calculet_core.shell.control_client import ControlError, call, pack, unpacker
from calculet_core.shell.files import FileLock, LockHeld, next_number, read_bounded, write_atomic
from calculet_core.shell.fleet import load_fleet
from calculet_core.shell.journal import Journal, read_journal
from calculet_core.shell.link import Frames, bind_router, connect_dealer
from calculet_core.shell.listening import bind, listens_at
from calculet_core.shell.sd_notify import sd_notify
from calculet_core.shell.telemetry import Collectors, fetch_metrics, merge_expositions, serve_metrics

DEADLINE_S = 10.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "view.json", b"1")
    write_atomic(tmp_path / "a" / "view.json", b"2")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["view.json"]
    assert read_bounded(tmp_path / "a" / "view.json") == b"2"


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bounded(tmp_path / "big", 10)


def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "board0.lock")
    with pytest.raises(LockHeld, match=f"pid {os.getpid()}"):
        FileLock(tmp_path / "board0.lock")
    lock.release()
    lock.release()
    FileLock(tmp_path / "board0.lock").release()


def test_a_lock_goes_with_a_killed_process_and_no_child_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "board0.lock"
    script = (
        "import subprocess, sys; from pathlib import Path; from calculet_core.shell.files import FileLock\n"
        f"lock = FileLock(Path({str(path)!r})); child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        with pytest.raises(LockHeld):
            FileLock(path)
        process.kill()
        process.wait(DEADLINE_S)
        FileLock(path).release()
    finally:
        os.kill(child, 9)


def test_numbers_are_handed_out_once(tmp_path: Path) -> None:
    assert [next_number(tmp_path / "epoch") for _ in range(3)] == [1, 2, 3]


def test_a_journal_rotates_and_reads_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", max_bytes=2_000, keep=2, now_ns=lambda: 7)
    for number in range(60):
        journal.write("request.done", request=number, outcome="completed")
        journal.flush()
    journal.close()
    events = read_journal(tmp_path / "j.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.jsonl", "j.jsonl.1", "j.jsonl.2"]
    requests = [event.request for event in events]
    assert requests == sorted(requests) and requests[-1] == 59
    assert events[-1] == Event("request.done", 7, request=59, data={"outcome": "completed"}, wall=events[-1].wall)
    assert all(path.stat().st_size <= 2_000 for path in tmp_path.iterdir())


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", 10_000, 1)
    journal.write("a")
    journal.close()
    with (tmp_path / "j.jsonl").open("ab") as file:
        file.write(b'{"event":"b","t"')
    assert [event.event for event in read_journal(tmp_path / "j.jsonl")] == ["a"]


def test_a_full_disk_loses_events_and_nothing_else() -> None:
    journal = Journal(Path("/dev/full"), 10_000, 0)
    journal.write("a")
    journal.flush()
    assert journal.lost == 1


def test_an_event_that_cannot_be_written_is_lost_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 1 << 20, 0)
    for name, value in (("one", 1), ("two", object()), ("three", 3)):
        journal.write(name, value=value)
    journal.close()
    assert [event.event for event in read_journal(tmp_path / "journal.jsonl")] == ["one", "three"]
    assert journal.lost == 1


def test_links_carry_messages_both_ways_and_a_lost_peer_is_no_silence(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        got: list[Frames] = []
        answers: list[Frames] = []
        server = bind_router(context, tmp_path / "s.sock", got.append)
        client = connect_dealer(context, str(tmp_path / "s.sock"), answers.append)
        await until(lambda: client.send([b"k", b"1"]))
        for number in range(1, 1000):
            client.send([b"k", b"%d" % number])
        await until(lambda: len(got) == 1000)
        assert [int(frames[2]) for frames in got[1:]] == list(range(1, 1000))
        assert server.send([got[0][0], b"k", b"back"])
        await until(lambda: answers == [[b"k", b"back"]])
        client.close()
        client.close()
        await until(lambda: not server.send([got[0][0], b"k", b"anybody?"]))
        assert server.dropped
        assert (tmp_path / "s.sock").stat().st_mode & 0o777 == 0o600
        server.close()
        context.term()

    asyncio.run(run())


def test_nothing_is_queued_for_a_peer_that_is_not_there(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = connect_dealer(context, str(tmp_path / "nobody.sock"), lambda frames: None)
        assert not client.send([b"k", b"for the dead"])
        got: list[Frames] = []
        server = bind_router(context, tmp_path / "nobody.sock", got.append)
        await until(lambda: client.send([b"k", b"for the living"]))
        await until(lambda: got)
        assert {frames[2] for frames in got} == {b"for the living"}
        client.close()
        server.close()
        context.term()

    asyncio.run(run())


def test_a_handlers_bug_does_not_end_a_link(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        got: list[bytes] = []

        def handle(frames: Frames) -> None:
            if frames[1] == b"bad":
                raise RuntimeError("bug")
            got.append(frames[1])

        server = bind_router(context, tmp_path / "s.sock", handle)
        client = connect_dealer(context, str(tmp_path / "s.sock"), lambda frames: None)
        await until(lambda: client.send([b"bad"]))
        client.send([b"good"])
        await until(lambda: b"good" in got)
        client.close()
        server.close()
        context.term()

    asyncio.run(run())


def serve_once(path: Path, answers: list[bytes]) -> threading.Thread:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            incoming = unpacker()
            incoming.feed(connection.recv(65_536))
            assert next(iter(incoming))["verb"] == "status"
            for answer in answers:
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_the_operators_channel_gives_answers_progress_and_refusals(tmp_path: Path) -> None:
    seen: list[object] = []
    good = pack({"progress": "half"}) + pack({"ok": True, "boards": 2})
    serve_once(tmp_path / "a.sock", [good[:5], good[5:]])
    assert call(tmp_path / "a.sock", "status", on_progress=seen.append)["boards"] == 2
    assert seen == ["half"]
    serve_once(tmp_path / "b.sock", [pack({"ok": False, "error": "no", "hint": "try yes"})])
    with pytest.raises(ControlError, match="no") as caught:
        call(tmp_path / "b.sock", "status")
    assert caught.value.hint == "try yes"
    serve_once(tmp_path / "c.sock", [])
    with pytest.raises(ControlError, match="closed the connection"):
        call(tmp_path / "c.sock", "status")
    with pytest.raises(ControlError, match="no supervisor listens"):
        call(tmp_path / "nobody.sock", "status")


def test_metrics_of_two_workers_merge_into_one_valid_exposition(tmp_path: Path) -> None:
    async def run() -> bytes:
        parts = []
        for board in ("board0", "board1"):
            collectors = Collectors("worker", board=board)
            collectors("calculet_worker_faults", kind="other").inc()
            server = await serve_metrics(tmp_path / board, collectors.exposition)
            parts.append(await fetch_metrics(tmp_path / board))
            server.close()
        parts.append(await fetch_metrics(tmp_path / "nobody"))
        return merge_expositions(parts)

    text = asyncio.run(run()).decode()
    assert text.count("# TYPE calculet_worker_faults_total counter") == 1
    assert 'calculet_worker_faults_total{board="board0",kind="other"} 1.0' in text
    assert 'calculet_worker_faults_total{board="board1",kind="other"} 1.0' in text
    assert "histogram" in text


def test_an_uncatalogued_metric_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Collectors("router")("calculet_router_surprise")


def test_sd_notify_speaks_to_a_manager_and_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not sd_notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert sd_notify("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_a_fleets_paths_start_at_its_file(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "fleet.yaml"
    file.write_text("schema: calculet-fleet/v1\nboards: [{name: b, device: sim}]\nmodels: [{alias: q, package: ../p}]\nrun_dir: /run/x\n")
    fleet = load_fleet(file)
    assert fleet.state_dir == tmp_path / ".calculet" / "state"
    assert fleet.resolve(fleet.model_of("b").package) == tmp_path / "p"
    assert fleet.worker_socket("b", 7) == Path("/run/x/w-b-7.sock")


def test_each_process_tells_what_it_takes_of_the_machine() -> None:
    text = merge_expositions(
        Collectors(*name, **labels).exposition()
        for name, labels in ((("router",), {}), (("router",), {"router": "router-2"}), (("worker",), {"board": "b0"}), (("supervisor",), {}))
    ).decode()
    told = {
        (family.name, sample.labels["process"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name.startswith("calculet_process_")
    }
    names = {metric.name for metric in metrics_of("process").values()}
    assert set(told) == {(name, process) for name in names for process in ("router", "router-2", "worker-b0", "supervisor")}
    assert told["calculet_process_resident_bytes", "router"] > 1_000_000
    assert 0 < told["calculet_process_open_fds", "supervisor"] <= told["calculet_process_max_fds", "supervisor"]
    assert abs(told["calculet_process_start_timestamp_seconds", "worker-b0"] - psutil.Process().create_time()) < 1
    assert told["calculet_process_cpu_seconds", "router"] > 0
    assert told["calculet_process_threads", "router"] >= 1


def test_a_lost_journal_line_is_in_the_metrics(tmp_path: Path) -> None:
    def lost() -> float:
        value = Collectors("supervisor").registry.get_sample_value("calculet_process_journal_lost_total", {"process": "supervisor"})
        assert value is not None
        return value

    before, journal = lost(), Journal(tmp_path / "journal.jsonl", 1 << 20, 0)
    os.close(journal._fd)
    journal._fd = os.open(os.devnull, os.O_RDONLY)  # every write fails
    journal.write("one")
    journal.write("two")
    journal.flush()
    assert lost() - before == 2
    journal.close()


def test_a_socket_is_at_an_address_by_port_and_by_any_name_of_its_host() -> None:
    with bind("127.0.0.1:0") as sock:
        port = sock.getsockname()[1]
        assert listens_at(sock, f"127.0.0.1:{port}") and listens_at(sock, f"localhost:{port}") and listens_at(sock, "127.0.0.1:0")
        assert not listens_at(sock, "127.0.0.1:1") and not listens_at(sock, f"0.0.0.0:{port}") and not listens_at(sock, f"[::1]:{port}")
