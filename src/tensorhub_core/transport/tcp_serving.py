"""Serve registered memory to readers over TCP: an accepting thread, and one for each connection.

The threads send straight from the registered memory, by system calls that give up the interpreter lock. A system call
that meets unmapped memory fails instead of ending the process; `stop` makes sure that none even tries.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.limits import no_files, start_thread
from tensorhub_core.transport.extents import Extents
from tensorhub_core.transport.tcp_addresses import USER_TIMEOUT_S, listen, new_selector, tune
from tensorhub_core.transport.tcp_calls import VectoredCalls
from tensorhub_core.transport.tcp_memory import MOST_RUNS_OF_A_CALL, Vector
from tensorhub_core.transport.tcp_probe import reached
from tensorhub_core.transport.tcp_wire import (
    MOST_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    RUN_BYTES,
    SECRET_BYTES,
    FrameBuffer,
    Kind,
    WireError,
    decode_runs,
    encode_frame,
    encode_header,
    encode_text,
    prove,
    proves,
)

_STOP_S = 15.0
_ACCEPT_PAUSE_S = 0.05
_RECEIVE_BYTES = 64 << 10
_SEND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What peers may cost.

    `readers` are served at once: one more takes the place of the one that has asked for nothing for longest, and for at
    least `idle_s`, which costs that one a new connection when it asks again. `strangers` may try to prove themselves at
    once, each for `stranger_s`; if they are too many, the oldest makes room after `grace_s`. A request has to arrive
    within `frame_s` once it has begun, and a reader that takes nothing for `stalled_s` is given up.
    """

    readers: int = 256
    idle_s: float = 5.0
    strangers: int = 128
    stranger_s: float = 5.0
    grace_s: float = 1.0
    frame_s: float = 5.0
    stalled_s: float = USER_TIMEOUT_S


class _Ended(Exception):
    """The connection is over: the other side closed it, stopped, or does not keep to the protocol."""


class TcpServer:
    """One life of a serving side: an agent's name, a secret, listeners and the regions that may be read."""

    def __init__(self, agent: str, interface: str | None, clock: Clock, limits: ServingLimits | None = None) -> None:
        """Listen and start to serve nothing; raises TransportError if nothing can be listened on."""
        self.agent = agent
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.clock = clock
        self.allowed = Extents(())
        """What may be read; replaced as a whole, so that threads need no lock."""
        self.limits = ServingLimits() if limits is None else limits
        self._listeners, self.endpoints = listen(interface)
        self._lock = threading.Lock()
        self._stopped = False
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}
        """In the order in which they came."""
        self._readers = 0
        try:
            self.endpoints = reached(self._listeners, self.endpoints, interface)
            self._waker, self._wake = socket.socketpair()
        except (OSError, TransportError) as error:
            for listener in self._listeners:
                listener.close()
            if isinstance(error, TransportError):
                raise
            raise TransportError(no_files("the listener's waking pipe", error)) from None
        self._acceptor = threading.Thread(target=self._accept, name="tensorhub-tcp-accept", daemon=True)
        try:
            start_thread(self._acceptor)
        except TransportError:
            self._close()
            raise

    def stop(self) -> None:
        """End all connections and threads; after it no thread can touch the memory any more.

        Raises TransportError if a thread does not end in time: the memory must then not be freed.
        """
        end = self.clock.now() + _STOP_S
        with self._lock:
            self._stopped = True
            threads = [connection.thread for connection in self._connections]
            for connection in self._connections:
                connection.interrupt()
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        self._acceptor.join(_STOP_S)
        for thread in threads:
            thread.join(max(0.0, end - self.clock.now()))
        self._close()
        if self._acceptor.is_alive() or any(thread.is_alive() for thread in threads):
            raise TransportError(
                "a serving thread does not end: the registered memory may still be read, so do not free it; end this "
                "process"
            )

    def admit(self, connection: _Connection) -> bool:
        """Count a connection that has proved itself; False if there are too many that have something to do."""
        with self._lock:
            self._strangers.pop(connection, None)
            if self._readers >= self.limits.readers and not self._end_idle():
                return False
            self._readers += 1
            connection.admitted = True
            return True

    def forget(self, connection: _Connection) -> None:
        """Take out a connection that has ended, and close it."""
        with self._lock:
            # Under the lock, or `stop` could interrupt another socket that was given the same number.
            connection.close()
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            self._readers -= connection.admitted

    def _close(self) -> None:
        for opened in (*self._listeners, self._waker, self._wake):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # a forked child may hold the same socket
            opened.close()

    def _end_idle(self) -> bool:
        """End the reader that has asked for nothing for longest; False if all are busy. Under the lock."""
        longest = min((each for each in self._connections if each.admitted), key=lambda each: each.idle_since_s)
        if self.clock.now() - longest.idle_since_s < self.limits.idle_s:
            return False
        longest.interrupt()
        longest.admitted = False
        self._readers -= 1
        return True

    def _accept(self) -> None:
        with new_selector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while not self._stopped:
                for key, _ in selector.select():
                    if key.fileobj is not self._waker and not self._take(key.fileobj):  # type: ignore[arg-type]
                        self._pause()

    def _pause(self) -> None:
        """Wait until there may be room again, or for the end; meanwhile the kernel keeps who wants to connect."""
        with new_selector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            selector.select(_ACCEPT_PAUSE_S)

    def _has_room(self) -> bool:
        """Tell whether one more stranger may come, and end the oldest one for it if that had its time."""
        with self._lock:
            if len(self._connections) >= self.limits.readers + 2 * self.limits.strangers:
                return False
            if len(self._strangers) < self.limits.strangers:
                return True
            oldest = next(iter(self._strangers))
            if self.clock.now() - oldest.since_s < self.limits.grace_s:
                return False
            del self._strangers[oldest]
            oldest.interrupt()
            return True

    def _take(self, listener: socket.socket) -> bool:
        """Accept one connection; False if there is no room for it, or this process has no files or threads left."""
        if not self._has_room():
            return False
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return True  # it went away again
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        with self._lock:
            connection = _Connection(self, accepted)
            self._connections.add(connection)
            self._strangers[connection] = None
            started = False
            if not self._stopped:
                with contextlib.suppress(RuntimeError):
                    connection.thread.start()
                    started = True
        if not started:
            self.forget(connection)
        return started


class _Connection:
    """A reader's connection; all but `interrupt` on its own thread."""

    def __init__(self, server: TcpServer, accepted: socket.socket) -> None:
        self.admitted = False
        self.since_s = server.clock.now()
        self.idle_since_s = math.inf
        """Since when it waits for a request; infinite while it answers one."""
        self.thread = threading.Thread(target=self._run, name="tensorhub-tcp-serve", daemon=True)
        self._server = server
        self._socket = accepted
        self._frames = FrameBuffer()
        self._calls = VectoredCalls()

    def interrupt(self) -> None:
        """Make every system call on the connection end; from any thread, under the server's lock."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; what a forked child holds of it is of no use then."""
        self.interrupt()
        self._socket.close()

    def _run(self) -> None:
        try:
            self._socket.setblocking(True)
            tune(self._socket)
            limits = self._server.limits
            self._bound(socket.SO_RCVTIMEO, limits.stranger_s)
            self._bound(socket.SO_SNDTIMEO, limits.stranger_s)
            self._prove()
            self._bound(socket.SO_RCVTIMEO, limits.frame_s)
            self._bound(socket.SO_SNDTIMEO, limits.stalled_s)
            while True:
                self.idle_since_s = self._server.clock.now()
                number, request = self._frame(Kind.READ, RUN_BYTES, MOST_REQUEST_BYTES)
                self.idle_since_s = math.inf
                self._answer(number, request)
        except (OSError, WireError, _Ended):
            pass  # a reader's trouble is its own; it finds the connection closed
        finally:
            self._server.forget(self)

    def _bound(self, option: int, seconds: float) -> None:
        """Bound one direction; the socket stays blocking, so that a call sends as much as it can."""
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(int(seconds * 1e6), 10**6)))

    def _prove(self) -> None:
        server, end = self._server, self._server.clock.now() + self._server.limits.stranger_s
        _, theirs = self._frame(Kind.HELLO, NONCE_BYTES, NONCE_BYTES, end)
        ours = secrets.token_bytes(NONCE_BYTES)
        proof = prove(server.secret, "source", server.agent, theirs, ours)
        self._socket.sendall(encode_frame(Kind.CHALLENGE, 0, ours + proof), socket.MSG_NOSIGNAL)
        _, proof = self._frame(Kind.PROOF, PROOF_BYTES, PROOF_BYTES, end)
        if not proves(proof, server.secret, "reader", server.agent, theirs, ours):
            raise _Ended
        if not server.admit(self):
            text = encode_text("it serves as many readers as it can: read from another source, or try again")
            self._socket.sendall(encode_frame(Kind.REFUSED, 0, text), socket.MSG_NOSIGNAL)
            raise _Ended
        self._socket.sendall(encode_frame(Kind.WELCOME), socket.MSG_NOSIGNAL)

    def _frame(self, kind: Kind, least_bytes: int, most_bytes: int, end: float | None = None) -> tuple[int, bytes]:
        """Return number and payload of the next frame, which must be there at `end`, or soon after it began."""
        while (found := self._frames.take(kind, least_bytes, most_bytes)) is None:
            if end is None and len(self._frames):
                end = self._server.clock.now() + self._server.limits.frame_s
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                data = None  # nothing came for as long as SO_RCVTIMEO
            if data == b"":
                raise _Ended
            if end is not None and self._server.clock.now() >= end:
                raise _Ended
            if data is not None:
                self._frames.feed(data)
        return found

    def _answer(self, number: int, request: bytes) -> None:
        """Answer a request, and those that came along with it, by as few system calls as there can be.

        After each of them the interpreter's lock is to be had again, which takes milliseconds where another thread of
        this process computes.
        """
        vector = Vector()
        found: tuple[int, bytes] | None = (number, request)
        while found is not None:
            self._add(vector, *found)
            if len(vector) >= MOST_RUNS_OF_A_CALL or vector.total_bytes >= _SEND_BYTES:
                break
            found = self._frames.take(Kind.READ, RUN_BYTES, MOST_REQUEST_BYTES) if len(self._frames) else None
        while vector.left_bytes:
            try:
                sent = self._calls.send(self._socket.fileno(), vector.front(_SEND_BYTES))
            except BlockingIOError:
                raise _Ended from None  # the reader took nothing for SO_SNDTIMEO
            vector.advance(sent)

    def _add(self, vector: Vector, number: int, request: bytes) -> None:
        """Append the answer to a request."""
        addresses, length_bytes = decode_runs(request)
        if self._server.allowed.cover(addresses, length_bytes, "cpu"):
            vector.add_bytes(encode_header(Kind.BYTES, number, int(length_bytes.sum())))
            vector.add_runs(addresses, length_bytes)
        else:
            text = encode_text("a run lies outside the memory that it serves")
            vector.add_bytes(encode_frame(Kind.REFUSED, number, text))
