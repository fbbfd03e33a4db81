"""Serve registered memory to readers over TCP: an accepting thread, and one for each connection.

The threads send straight from the registered memory, by system calls that give up the interpreter lock. A system call
that meets unmapped memory fails instead of ending the process; `stop` makes sure that none even tries.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.extents import Extents
from tensorhub_core.transport.tcp_addresses import USER_TIMEOUT_S, listen, tune
from tensorhub_core.transport.tcp_memory import Vector, address_space
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
_ACCEPT_PAUSE_S = 0.1
_RECEIVE_BYTES = 64 << 10
_SEND_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What peers may cost: `readers` are served at once, and of those that have not proved anything yet one more than
    `strangers` ends the oldest.

    A connection may take `stranger_s` to prove itself, a request `frame_s` to arrive once it has begun, and a reader
    that takes nothing for `stalled_s` is given up.
    """

    readers: int = 256
    strangers: int = 64
    stranger_s: float = 5.0
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
        self.space = address_space()
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
        self._waker, self._wake = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="tensorhub-tcp-accept", daemon=True)
        self._acceptor.start()

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
        for opened in (*self._listeners, self._waker, self._wake):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # a forked child may hold the same socket
            opened.close()
        if self._acceptor.is_alive() or any(thread.is_alive() for thread in threads):
            raise TransportError(
                "a serving thread does not end: the registered memory may still be read, so do not free it; end this "
                "process"
            )

    def admit(self, connection: _Connection) -> bool:
        """Count a connection that has proved itself; False if there are too many."""
        with self._lock:
            self._strangers.pop(connection, None)
            if self._readers >= self.limits.readers:
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

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while not self._stopped:
                for key, _ in selector.select():
                    if key.fileobj is not self._waker and not self._take(key.fileobj):  # type: ignore[arg-type]
                        self._pause()

    def _pause(self) -> None:
        """Wait for files or threads to become free, or for the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ)
            selector.select(_ACCEPT_PAUSE_S)

    def _take(self, listener: socket.socket) -> bool:
        """Accept one connection; False if this process has no files or threads left."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return True  # it went away again
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        with self._lock:
            if self._stopped or len(self._connections) >= self.limits.readers + 2 * self.limits.strangers:
                accepted.close()
                return True
            if len(self._strangers) >= self.limits.strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.interrupt()
            connection = _Connection(self, accepted)
            self._connections.add(connection)
            self._strangers[connection] = None
            try:
                connection.thread.start()
                return True
            except RuntimeError:
                self._connections.discard(connection)
                del self._strangers[connection]
        accepted.close()
        return False


class _Connection:
    """A reader's connection; all but `interrupt` on its own thread."""

    def __init__(self, server: TcpServer, accepted: socket.socket) -> None:
        self.admitted = False
        self.thread = threading.Thread(target=self._run, name="tensorhub-tcp-serve", daemon=True)
        self._server = server
        self._socket = accepted
        self._frames = FrameBuffer()

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
                self._answer(*self._frame(Kind.READ, RUN_BYTES, MOST_REQUEST_BYTES))
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
            self._refuse(0, "it serves as many readers as it can: read from another source, or try again")
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
        addresses, length_bytes = decode_runs(request)
        if not self._server.allowed.cover(addresses, length_bytes, "cpu"):
            self._refuse(number, "a run lies outside the memory that it serves")
            return
        head = encode_header(Kind.BYTES, number, int(length_bytes.sum()))
        vector = Vector(self._server.space, addresses, length_bytes, head)
        while vector.left_bytes:
            try:
                sent = self._socket.sendmsg(vector.front(_SEND_BYTES), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise _Ended from None  # the reader took nothing for SO_SNDTIMEO
            vector.advance(sent)

    def _refuse(self, number: int, reason: str) -> None:
        self._socket.sendall(encode_frame(Kind.REFUSED, number, encode_text(reason)), socket.MSG_NOSIGNAL)
