"""Who may not come in does not, and what is no message is counted and ignored, on every socket of a running fleet."""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from builders_fleet import BIN, Fleet, Packages, until

from calculet_core import wire
from calculet_core.shell.fleet import load_fleet

SCANNERS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600, b"\xff" * 200, b"\0" * 200,
    b"SSH-2.0-scan\r\n", b"*1\r\n$4\r\nPING\r\n", b"",
)  # fmt: skip
TRY_ALL = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
for path in sys.argv[3:]:
    try:
        if path.endswith(".sock"):
            socket.socket(socket.AF_UNIX).connect(path)
        else:
            open(path).read()
        print("reached", path)
    except PermissionError:
        print("refused", path)
"""


@pytest.fixture(scope="module")
def fleet(packages: Packages) -> Iterator[Fleet]:
    package = packages.get("sim-batch", "--step-ms", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # else the folder above would keep strangers out, and nothing be proven
        with Fleet(folder, package, packages.key.with_suffix(".pub")) as fleet:
            yield fleet
            assert fleet.completion().status == 200, "what served must still serve"


def sockets(fleet: Fleet) -> list[Path]:
    return sorted(path for path in load_fleet(fleet.config).run_dir.iterdir() if path.is_socket())


def metric(fleet: Fleet, sample: str) -> float:
    for line in fleet.get("/metrics").body.decode().splitlines():
        if line.startswith(sample + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


def grown(fleet: Fleet, sample: str, act: Callable[[], object], by: float) -> None:
    """What the act does to a counter."""
    before = metric(fleet, sample)
    act()
    until(lambda: metric(fleet, sample) >= before + by, f"{sample} has grown by {by}")


def send_raw(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        try:
            sock.sendall(data)
        except OSError:
            return  # cut off while it spoke: as good as ignored


# ---------------------------------------------------------------- who may come in
def test_sockets_and_secrets_are_for_the_fleets_own_user(fleet: Fleet) -> None:
    names = {path.name.split("-")[0] for path in sockets(fleet)}
    assert {"control.sock", "supervisor.sock", "m", "w"} <= names
    for path in sockets(fleet):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for folder in (load_fleet(fleet.config).run_dir, load_fleet(fleet.config).state_dir):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o027 == 0, folder


def test_another_user_reaches_no_socket_even_in_an_open_folder(fleet: Fleet) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    nobody = pwd.getpwnam("nobody")
    run_dir = load_fleet(fleet.config).run_dir
    paths = [str(path) for path in sockets(fleet)]
    for mode in (0o750, 0o755):  # as it is made; and as a careless operator may leave it
        run_dir.chmod(mode)
        command = [sys.executable, "-S", "-c", TRY_ALL, str(nobody.pw_uid), str(nobody.pw_gid), *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"refused {path}" for path in paths], oct(mode)
    run_dir.chmod(0o750)


def test_the_listening_port_is_only_where_it_was_configured(fleet: Fleet) -> None:
    with socket.socket() as sock:
        sock.settimeout(2)
        assert sock.connect_ex(("127.0.0.2", fleet.port)) != 0, "127.0.0.1 was configured, not every address"


# ---------------------------------------------------------------- what is no message
@pytest.mark.parametrize("data", SCANNERS, ids=lambda data: repr(data[:8]))
def test_a_scanner_is_counted_and_ignored_by_the_data_socket_and_the_supervisor(fleet: Fleet, data: bytes) -> None:
    data_socket = next(path for path in sockets(fleet) if path.name.startswith("w-board0"))
    worker = 'calculet_worker_bad_messages_total{board="board0",reason="stranger"}'
    grown(fleet, worker, lambda: send_raw(data_socket, data), 1)
    supervisor = 'calculet_supervisor_bad_messages_total{reason="stranger"}'
    grown(fleet, supervisor, lambda: send_raw(load_fleet(fleet.config).supervisor_socket, data), 1)
    assert fleet.completion().status == 200


def test_the_control_socket_closes_on_what_is_no_request(fleet: Fleet) -> None:
    control = load_fleet(fleet.config).control_socket
    bad = 'calculet_supervisor_bad_messages_total{reason="control"}'
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4verb\x05"):
        grown(fleet, bad, lambda data=data: send_raw(control, data), 1)
    send_raw(control, b"\xdd\xff\xff\xff\xff" + b"\x01" * 1_000)  # an array of four thousand million, never finished
    send_raw(control, b"\xc6\x7f\xff\xff\xff" + b"x" * 100_000)
    assert fleet.status() is not None


def test_malformed_and_oversize_messages_of_a_real_peer_are_counted_and_ignored(fleet: Fleet) -> None:
    data_socket = next(path for path in sockets(fleet) if path.name.startswith("w-board0"))
    supervisor = load_fleet(fleet.config).supervisor_socket
    deep = b"\x91" * 100_000
    frames = ([b"su", b"\xc1"], [b"su", deep], [b"??", b"\x80"], [b"su"], [b"a", b"b", b"c"], [b"rh", b"\x81\xa6router\xa1x"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for path, sample in (
            (data_socket, 'calculet_worker_bad_messages_total{board="board0",reason="malformed"}'),
            (supervisor, 'calculet_supervisor_bad_messages_total{reason="malformed"}'),
        ):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 5_000)
            peer.connect(f"ipc://{path}")
            grown(fleet, sample, lambda peer=peer: [peer.send_multipart(one) for one in frames], len(frames))
            oversize = sample.replace("malformed", "oversize")
            grown(fleet, oversize, lambda peer=peer: peer.send_multipart([b"su", b"\0" * (65 << 20)]), 1)
            peer.send_multipart([b"su", b"\0" * (129 << 20)])  # twice what may be: the connection ends while it arrives
            grown(fleet, sample, lambda peer=peer: peer.send_multipart([b"su", b"\xc1"]), 1)
            peer.close(linger=0)
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"ipc://{data_socket}")
        unknown = 'calculet_worker_bad_messages_total{board="board0",reason="unknown_router"}'
        grown(fleet, unknown, lambda: stranger.send_multipart(wire.encode(wire.Cancel(1, 1, 1, "who?"))), 1)
        stranger.close(linger=0)
    finally:
        context.destroy(linger=0)
    assert fleet.completion().status == 200


def test_no_process_listens_anywhere_else(fleet: Fleet) -> None:
    assert fleet.keeper is not None
    listening = {
        (process.name(), connection.laddr.port)
        for process in [psutil.Process(fleet.keeper.pid), *fleet.family()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {port for _, port in listening} == {fleet.port}


# ---------------------------------------------------------------- TCP
def with_tcp(folder: Path, packages: Packages) -> Fleet:
    """board0 on a Unix socket, board1 on TCP, a port of its own for each life."""
    fleet = Fleet(folder, packages.get("sim-batch", "--step-ms", "1"), packages.key.with_suffix(".pub"))
    config = json.loads(fleet.config.read_text())
    config["boards"][1]["listen"] = "127.0.0.1:0"
    fleet.config.write_text(json.dumps(config))
    return fleet


def tcp_port(fleet: Fleet) -> int | None:
    pid = fleet.pid("worker", "board1")
    try:
        found = psutil.Process(pid).net_connections("inet") if pid is not None else []
    except psutil.Error:  # it has just ended
        return None
    return next((one.laddr.port for one in found if one.status == psutil.CONN_LISTEN), None)


def test_a_board_on_tcp_serves_with_keys_and_not_without(tmp_path: Path, packages: Packages) -> None:
    fleet = with_tcp(tmp_path / "fleet", packages)
    check = [str(BIN / "calculet"), "config", "check", "--config", str(fleet.config)]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 78 and "curve/worker.secret is missing" in checked.stderr, checked.stderr
    for command in (
        [str(BIN / "calculet"), "up", "--config", str(fleet.config)],
        [sys.executable, "-m", "calculet_worker", "run", "--config", str(fleet.config), "--board", "board1"],
    ):
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 78 and "`calculet keys curve` makes them" in refused.stderr, refused.stderr
    made = subprocess.run([str(BIN / "calculet"), "keys", "curve", "--config", str(fleet.config)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0 and made.stdout.count("curve/") == 4, made.stderr
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    again = subprocess.run([str(BIN / "calculet"), "keys", "curve", "--config", str(fleet.config)], capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "--force" in again.stderr
    own = [str(BIN / "calculet"), "keys", "curve", "--router", "router", "--config", str(fleet.config)]
    made = subprocess.run(own, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0 and made.stdout.count("curve/routers/router.") == 2, made.stderr
    again = subprocess.run(own, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "routers/router.secret is there already" in again.stderr
    for name in ("router.secret", "router.public"):
        (load_fleet(fleet.config).curve / name).unlink()  # it has its own: the common pair is nobody's
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    try:
        fleet.start()
        port = tcp_port(fleet)
        assert port is not None
        answers = {fleet.completion(seed=number).text for number in range(8)}
        assert len(answers) == 1, "both boards say the same"
        worked = 'calculet_worker_requests_total{board="board1",outcome="completed"}'
        assert metric(fleet, worked) > 0
        stranger = 'calculet_worker_bad_messages_total{board="board1",reason="stranger"}'
        for data in SCANNERS:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                grown(fleet, stranger, lambda sock=sock, data=data: (sock.sendall(data), sock.close()), 1)
        denied = 'calculet_worker_bad_messages_total{board="board1",reason="denied"}'
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey = (load_fleet(fleet.config).curve / "worker.public").read_bytes().strip()
        grown(fleet, denied, lambda: peer.connect(f"tcp://127.0.0.1:{port}"), 1)
        context.destroy(linger=0)
        fleet.kill("worker", "board1")
        until(lambda: tcp_port(fleet) not in (None, port), "another life has another port")
        fleet.wait_ready(2)
        before = metric(fleet, worked)
        until(lambda: fleet.completion().status == 200 and metric(fleet, worked) > before, "the router found it")
    finally:
        fleet.stop()
