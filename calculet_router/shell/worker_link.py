"""One life of a worker as this router reaches it: a DEALER socket, a lease, and the process's pidfd.

The link greets until it is answered, then every interval, and renews its lease with the number of the last message it got. So
silence means something, and a hello that was lost with a connection is not lost for good. The process's pidfd turns readable when
it ends, which is seen within milliseconds; on another host, or in another pid namespace, silence has to do.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import zmq

from calculet_core import wire
from calculet_core.errors import NoReadyWorker
from calculet_core.shell.curve import CurveKeys
from calculet_core.shell.link import Frames, Link, connect_dealer
from calculet_router import events

GREETING_S = 0.02
"""Between greetings that nobody has taken yet."""
LAST_WORDS_S = 0.001
"""From a process's end, or its last message, to saying so: what it sent just before is still on its way through ZeroMQ's thread."""
log = logging.getLogger("calculet.worker_link")


class WorkerLink:
    """Feeds `events` of one worker; `bad` counts frames that are no message. `curve` has the keys for a tcp endpoint.

    Raises:
        ConfigError: the endpoint is tcp and there are no keys.
        zmq.ZMQError: it is no endpoint.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        view: wire.BoardView,
        incarnation: int,
        lease_s: float,
        feed: Callable[[events.Event], None],
        bad: Callable[[str], None],
        curve: Callable[[], CurveKeys] | None = None,
    ) -> None:
        self.board, self.epoch = view.board, view.epoch
        self._incarnation, self._lease_s, self._feed, self._bad = incarnation, lease_s, feed, bad
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._pid = 0
        self._acked = 0
        self._outbox: list[wire.Submit | wire.Cancel | wire.Lookup] = []
        self._closed = False
        identity = b"r%08x-%08x" % (incarnation, view.epoch & 0xFFFFFFFF)
        self._link: Link = connect_dealer(
            context, view.endpoint, self._on_frames, identity, curve, lambda: bad("oversize")
        )
        self._timer: asyncio.Handle = self._loop.call_soon(self._greet)

    def send(self, message: wire.Submit | wire.Cancel | wire.Lookup) -> None:
        """At the end of this loop pass, so that ZeroMQ's thread wakes once for all; a submission that cannot go is `Unsent`."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        send, encode = self._link.send, wire.encode
        for message in outbox:
            if not send(encode(message)) and (unsent := unsent_event(self.board, self.epoch, message)) is not None:
                self._feed(unsent)

    def renew(self) -> None:
        """Greet and renew the lease at once, before anything else is sent: the worker may have given us up."""
        if not self._closed:
            self._timer.cancel()
            self._renew()

    def close(self) -> None:
        """Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._unwatch()
        self._link.close()

    def _greet(self) -> None:
        """The first greeting, as soon as there is somebody to take it."""
        taken = self._link.send(wire.encode(wire.RouterHello(self._incarnation, os.getpid())))
        self._timer = self._loop.call_later(self._lease_s if taken else GREETING_S, self._renew if taken else self._greet)

    def _renew(self) -> None:
        self._link.send(wire.encode(wire.RouterHello(self._incarnation, os.getpid())))
        self._link.send(wire.encode(wire.Lease(self._incarnation, self.epoch, self._acked)))
        self._timer = self._loop.call_later(self._lease_s, self._renew)

    def _on_frames(self, frames: Frames) -> None:
        try:
            kind, body = frames
            message = wire.decode(kind, body)
        except (wire.WireError, ValueError):
            self._bad("malformed")
            return
        if isinstance(message, wire.Tick):
            self._acked = message.seq
            self._feed(events.TickArrived(self.board, self.epoch, message))
        elif isinstance(message, wire.LookupAnswer):
            self._feed(events.LookupAnswered(self.board, self.epoch, message))
        elif isinstance(message, wire.WorkerHello):
            self._feed(events.HelloArrived(self.board, self.epoch, message))
            if not self._closed and (message.board, message.epoch) == (self.board, self.epoch):
                self._watch(message.pid)
        else:
            self._bad("unexpected")

    def _watch(self, pid: int) -> None:
        if pid == self._pid or not self._link.endpoint.startswith("ipc://"):
            return
        self._unwatch()
        self._pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            log.warning("board %s: pid %d cannot be watched (%s); its silence has to tell", self.board, pid, error.strerror)
            return
        self._loop.add_reader(self._pidfd, self._process_ended)

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _process_ended(self) -> None:
        self._unwatch()
        log.warning("board %s: worker process %d (epoch %d) ended", self.board, self._pid, self.epoch)
        self._timer.cancel()
        self._timer = self._loop.call_later(LAST_WORDS_S, self._last_words, self._link.received)

    def _last_words(self, received: int) -> None:
        """It is declared dead once nothing more of what it said comes out: much may have waited while this process stood still."""
        if self._link.received > received:
            self._timer = self._loop.call_later(LAST_WORDS_S, self._last_words, self._link.received)
        else:
            self._feed(events.WorkerEnded(self.board, self.epoch, "died"))


def unsent_event(board: str, epoch: int, message: wire.Submit | wire.Cancel | wire.Lookup) -> events.Event | None:
    """What to tell about a message that could not go; a cancel that cannot is no loss."""
    if isinstance(message, wire.Submit):
        return events.Unsent(board, epoch, message.request_id, message.attempt)
    if isinstance(message, wire.Lookup):
        error = wire.ErrorInfo(NoReadyWorker.code, f"the link to {board} is down")
        return events.LookupAnswered(board, epoch, wire.LookupAnswer(message.request_id, epoch, error=error))
    return None
