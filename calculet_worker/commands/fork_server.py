"""The fork server of `calculet up`: a process that has loaded what a worker needs, and becomes one in milliseconds.

Loading the worker's modules takes longer than everything else between a simulated board's death and its return. The keeper asks
over a socket pair (one SEQPACKET message a worker: MessagePack `{number, command}` with three descriptors: the worker's log, the
death pipe, the go-ahead); the answer is `{number, pid}`, or `{number, error}`; `{ready}` says that everything is loaded. A worker
is forked twice, so that it becomes the keeper's own child (a subreaper), whose exit the keeper sees and whose life does not hang
on this process. It begins with the keeper's go-ahead: without one, because the keeper gave up waiting or is gone, it ends unborn.

Nothing runs here beside the loop: no thread, no lock, no device is open when it forks. It ends when the keeper closes its end.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence

import click
import msgpack
from setproctitle import setproctitle

from calculet_core.shell.death_pipe import VARIABLE
from calculet_core.shell.logs import set_up_logs

MESSAGE_BYTES = 65_536
DESCRIPTORS = 3
PRELOADED = ("calculet_worker.shell.app", "calculet_worker.shell.loading", "calculet_worker.device.sim")
BACKENDS = {"llamacpp": "calculet_worker.device.llamacpp"}
"""Modules that only boards of that device need."""
log = logging.getLogger("calculet.fork_server")


@click.command()
@click.option("--socket", "fd", required=True, type=int, help="The keeper's end of the socket pair, an inherited descriptor.")
@click.option("--devices", default="", help="Devices of the fleet, with commas: their libraries are loaded too.")
def fork_server_command(fd: int, devices: str) -> None:
    """Start workers for `calculet up` out of one process that has everything loaded. Not for people."""
    set_up_logs("fork-server")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of a terminal; the keeper says when to end
    os.close(int(os.environ.pop(VARIABLE)))  # the keeper's end of the socket tells as much
    with socket.socket(fileno=fd) as keeper:
        keeper.set_inheritable(False)
        preload(devices.split(","))
        keeper.send(msgpack.packb({"ready": True}))
        while True:
            message, fds, _, _ = socket.recv_fds(keeper, MESSAGE_BYTES, DESCRIPTORS)
            if not message:
                return
            _serve(keeper, message, fds)


def preload(devices: Sequence[str]) -> None:
    """Load what workers need; what one device lacks is that board's business, and said by its worker."""
    for module in PRELOADED:
        importlib.import_module(module)
    for device in devices:
        try:
            if device in BACKENDS:
                importlib.import_module(BACKENDS[device])
        except ImportError as error:
            log.info("not loaded for %s: %s", device, error)
    gc.collect()
    gc.freeze()  # workers share these pages for as long as nobody writes to them


def _serve(keeper: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    number = -1
    try:
        asked = msgpack.unpackb(message)
        number, command = asked["number"], [str(part) for part in asked["command"]]
        output, death, go_ahead = fds
        answer = {"number": number, "pid": _fork(keeper, command, output, death, go_ahead)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer = {"number": number, "error": f"{type(error).__name__}: {error}"}
    finally:
        for fd in fds:
            os.close(fd)
    keeper.send(msgpack.packb(answer))


def _fork(keeper: socket.socket, command: Sequence[str], output: int, death: int, go_ahead: int) -> int:
    """The worker's process id; it waits for its go-ahead.

    Raises:
        OSError: no process could be made.
    """
    read_end, write_end = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if between == 0:
        code = 1
        try:
            code = _between(keeper, command, output, death, go_ahead, write_end)
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        told = pipe.read()
    os.waitpid(between, 0)
    if not told:
        raise OSError("a worker could not be forked")
    return int(told)


def _between(
    keeper: socket.socket, command: Sequence[str], output: int, death: int, go_ahead: int, write_end: int
) -> int:
    """Its end makes the worker the keeper's child."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(write_end)
            code = _worker(keeper, command, output, death, go_ahead)
        except BaseException:
            log.critical("a forked worker cannot begin", exc_info=True)
        finally:
            os._exit(code)
    os.write(write_end, str(pid).encode())
    return 0


def _worker(keeper: socket.socket, command: Sequence[str], output: int, death: int, go_ahead: int) -> int:
    """A process of its own session, as if it had been started by `command` (PYTHON -m calculet_worker ARGS)."""
    if os.read(go_ahead, 1) != b"g":
        return 0
    os.close(go_ahead)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, place)
    for fd in (keeper.detach(), null, output):
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ[VARIABLE] = str(death)
    random.seed()
    setproctitle(" ".join(command))
    from calculet_worker.__main__ import cli

    try:
        cli(list(command[3:]), prog_name="calculet-worker")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    finally:
        logging.shutdown()
        sys.stdout.flush()
    return 0
