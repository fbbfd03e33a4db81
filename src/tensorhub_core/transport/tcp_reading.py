"""Read over TCP: one connection per peer, that only the caller's own calls drive.

Nothing but `TcpConnection.drive` and `wait` writes into the destination. So once a connection is dropped, no byte of
its reads can land any more, whatever the peer still sends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
from collections import deque
from enum import Enum

from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Progress, ReadState
from tensorhub_core.transport.tcp_addresses import tune
from tensorhub_core.transport.tcp_calls import VectoredCalls
from tensorhub_core.transport.tcp_memory import Vector
from tensorhub_core.transport.tcp_wire import (
    CHALLENGE_BYTES,
    HEADER_BYTES,
    MOST_REQUEST_BYTES,
    MOST_TEXT_BYTES,
    NONCE_BYTES,
    Endpoint,
    Header,
    Kind,
    WireError,
    decode_header,
    decode_text,
    encode_frame,
    prove,
    proves,
)

DRIVE_BYTES = 4 << 20
"""What one call receives at most, if it is there by one system call: after each the interpreter's lock is to be had
again, which takes milliseconds where another thread computes."""
WAKE_BYTES, MOST_WAKE_BYTES = 1 << 20, 4 << 20
"""Whoever waits is woken when the rest of the next read is there, within these bounds: before, there is nothing to do
with it, and each waking costs the source too, whose sending does it where both are on one machine."""
LEAST_WAKE_BYTES = 16 << 10
"""The lower bound where bytes come slowly: there a read that ended would be noticed much later."""
SLOWLY_S, SWIFTLY_S = 0.002, 0.0005
"""Waiting that took longer, or not even so long, lowers or raises the lower bound."""
WAIT_S = 0.004
MOST_READS = 1024
_MOST_UNSENT_BYTES = 4 * MOST_REQUEST_BYTES
_ENDED = "it closed the connection: its process has ended, or it has revoked its memory or given up this reader"
_STRANGER = "it is not the peer of this description, but one that got its address"
_ACTIVE = Progress(ReadState.ACTIVE)
_IDLE = Progress(ReadState.ACTIVE, idle=True)
_DONE = Progress(ReadState.DONE)


class TcpRead:
    """A read on a connection: `vector` is where its bytes go."""

    __slots__ = ("connection", "progress", "vector")

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.progress = _ACTIVE
        self.connection: TcpConnection | None = None


class _Stage(Enum):
    CONNECTING = 0
    PROVING = 1
    """HELLO is sent, CHALLENGE awaited."""
    ENTERING = 2
    """PROOF is sent, WELCOME awaited."""
    OPEN = 3
    CLOSED = 4


class TcpConnection:
    """A connection to one endpoint of a peer; a failure ends it and all its reads, and `error` says why."""

    def __init__(self, endpoint: Endpoint, agent: str, secret: bytes, clock: Clock, timeout_s: float) -> None:
        """Begin to connect; `drive` goes on. Each step of the way may take `timeout_s`."""
        self.endpoint = endpoint
        self.error = ""
        self._agent, self._secret = agent, secret
        self._clock, self._timeout_s = clock, timeout_s
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._unsent = bytearray()
        self._requests: list[bytes] = []
        """Those that wait until the connection is open."""
        self._reads: deque[tuple[int, TcpRead]] = deque()
        """Requests are answered in their order."""
        self._posted = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._header: Header | None = None
        """That of the reply that is being received."""
        self._small = memoryview(b"")
        """Where a header or a small payload goes."""
        self._got = 0
        self._owed_bytes = 0
        """What the answers to all requests come to, heads included."""
        self._wake_bytes = 1
        self._least_wake_bytes = WAKE_BYTES
        self._drained = False
        """Nothing was there when it was driven last."""
        self._calls = VectoredCalls()
        family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(f"no socket can be made: {error}") from None
        self._socket.setblocking(False)
        self._enter(_Stage.CONNECTING)
        self._expect_head()
        self.drive()

    @property
    def opened(self) -> bool:
        """Tell whether the peer has proved itself and lets this side read."""
        return self._stage is _Stage.OPEN

    @property
    def closed(self) -> bool:
        """Tell whether it is over."""
        return self._stage is _Stage.CLOSED

    @property
    def idle(self) -> bool:
        """Tell whether no read is on its way."""
        return not self._reads

    @property
    def progress(self) -> Progress:
        """Return how a read stands that has not ended."""
        return _IDLE if self._drained else _ACTIVE

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._socket.fileno()

    def awaited_events(self) -> int:
        """Return the selector's events for which it is to be driven."""
        if self._stage is _Stage.CONNECTING:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def post(self, request: bytes, read: TcpRead) -> None:
        """Ask for a read, and send what the socket takes.

        Raises TransportError if the connection has ended, or too much was asked for.
        """
        if self.closed:
            raise TransportError(f"{self.endpoint}: {self.error}")
        if len(self._reads) >= MOST_READS or len(self._unsent) > _MOST_UNSENT_BYTES:
            raise TransportError(f"{self.endpoint} has {len(self._reads):,} reads to answer: poll them first")
        self._posted = (self._posted + 1) & 0xFFFF
        frame = encode_frame(Kind.READ, self._posted, request)
        read.connection = self
        self._reads.append((self._posted, read))
        self._owed_bytes += HEADER_BYTES + read.vector.total_bytes
        if self.opened:
            self._unsent += frame
        else:
            self._requests.append(frame)
        self.drive(0)

    def drive(self, most_bytes: int = DRIVE_BYTES) -> None:
        """Do what can be done without waiting: connect, send, receive up to a bound. A failure ends the connection."""
        self._drive(most_bytes, wait=False)

    def wait(self) -> None:
        """Receive like `drive`, but wait some milliseconds for the first bytes, after `expect_bytes`."""
        self._drive(DRIVE_BYTES, wait=True)

    def waited(self, seconds: float) -> None:
        """Learn from how long there was to be waited for what was expected."""
        if seconds > SLOWLY_S:
            self._least_wake_bytes = max(LEAST_WAKE_BYTES, self._least_wake_bytes // 2)
        elif seconds < SWIFTLY_S:
            self._least_wake_bytes = min(WAKE_BYTES, 2 * self._least_wake_bytes)

    def expect_bytes(self) -> bool:
        """Be readable when there is something to do with what has come; False if there is no sense in waiting."""
        if not self.opened or self._unsent or not self._reads:
            return False
        least_bytes = max(self._least_wake_bytes, self._reads[0][1].vector.left_bytes)
        wake_bytes = min(least_bytes, MOST_WAKE_BYTES, self._owed_bytes)
        if wake_bytes != self._wake_bytes:
            with contextlib.suppress(OSError, AttributeError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes
        return True

    def _drive(self, most_bytes: int, *, wait: bool) -> None:
        if self._stage is _Stage.CLOSED:
            return
        self._drained = False
        try:
            if self._stage is _Stage.CONNECTING:
                self._connect()
            if self._unsent:
                self._send()
            if self._stage is not _Stage.CONNECTING:
                self._receive(most_bytes, wait)
        except BlockingIOError:
            self._drained = True
        except WireError as error:
            self.fail(str(error))
        except OSError as error:
            self.fail(error.strerror or str(error))
        if self._stage is not _Stage.OPEN and not self.closed and self._clock.now() >= self._end_s:
            self.fail(f"no answer within {self._timeout_s:.1f} s")

    def fail(self, reason: str) -> None:
        """End the connection, whose reads fail for this reason; nothing is received from then on."""
        if self.closed:
            return
        self._stage = _Stage.CLOSED
        self.error = reason
        failed = Progress(ReadState.FAILED, f"{self.endpoint}: {reason}")
        for _, read in self._reads:
            read.progress = failed
        self._reads.clear()
        self._requests.clear()
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold the same socket
        self._socket.close()

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        self._end_s = self._clock.now() + self._timeout_s

    def _connect(self) -> None:
        code = self._socket.connect_ex((self.endpoint.address, self.endpoint.port))
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        tune(self._socket)
        self._unsent += encode_frame(Kind.HELLO, 0, self._nonce)
        self._enter(_Stage.PROVING)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                del self._unsent[:sent]

    # --- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, most_bytes: int, wait: bool) -> None:
        """Receive into place until nothing is there (BlockingIOError) or the bound is reached; `wait` for the first."""
        left = most_bytes
        while left > 0 and self._stage is not _Stage.CLOSED:
            if self._header is None or self._header.kind is not Kind.BYTES:
                self._receive_small(0 if wait else socket.MSG_DONTWAIT)
            else:
                left -= self._receive_data(left, wait)
            wait = False

    def _receive_data(self, most_bytes: int, wait: bool) -> int:
        read = self._reads[0][1]
        count = self._calls.receive(self._socket.fileno(), read.vector.front(most_bytes), wait=wait)
        if not count:
            raise WireError(_ENDED)
        read.vector.advance(count)
        self._owed_bytes -= count
        if not read.vector.left_bytes:
            self._end_read(_DONE)
        return count

    def _receive_small(self, flags: int) -> None:
        count = self._socket.recv_into(self._small[self._got :], 0, flags)
        if not count:
            raise WireError(_ENDED if self.opened else _STRANGER)
        self._got += count
        if self._got == len(self._small):
            self._take_small()

    def _take_small(self) -> None:
        """Act on a whole header, or on a whole small payload."""
        if self._header is not None:
            header, payload = self._header, bytes(self._small)
            self._expect_head()
            self._obey(header, payload)
            return
        header = decode_header(self._head)
        self._check(header)
        if self.opened:
            self._owed_bytes -= HEADER_BYTES
        if header.kind is Kind.BYTES:
            self._header = header
            if not header.size_bytes:
                self._end_read(_DONE)
        elif header.size_bytes:
            self._header = header
            self._small, self._got = memoryview(bytearray(header.size_bytes)), 0
        else:
            self._expect_head()
            self._obey(header, b"")

    def _expect_head(self) -> None:
        self._header, self._small, self._got = None, self._head, 0

    def _check(self, header: Header) -> None:
        """Raise WireError unless a reply of this kind and size belongs here."""
        if self._stage is _Stage.PROVING:
            fits = header.kind is Kind.CHALLENGE and header.size_bytes == CHALLENGE_BYTES
        elif header.kind is Kind.REFUSED:
            fits = header.size_bytes <= MOST_TEXT_BYTES
        elif self._stage is _Stage.ENTERING:
            fits = header.kind is Kind.WELCOME and not header.size_bytes
        else:
            fits = header.kind is Kind.BYTES
        if fits and self.opened:
            fits = bool(self._reads) and self._reads[0][0] == header.number
            if fits and header.kind is Kind.BYTES:
                fits = header.size_bytes == self._reads[0][1].vector.total_bytes
        if not fits:
            raise WireError(f"a {header.kind.name} of {header.size_bytes:,} bytes came where none belongs")

    def _obey(self, header: Header, payload: bytes) -> None:
        if self._stage is _Stage.PROVING:
            theirs, proof = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
            if not proves(proof, self._secret, "source", self._agent, self._nonce, theirs):
                raise WireError(_STRANGER)
            proof = prove(self._secret, "reader", self._agent, self._nonce, theirs)
            self._unsent += encode_frame(Kind.PROOF, 0, proof)
            self._enter(_Stage.ENTERING)
        elif self._stage is _Stage.ENTERING:
            if header.kind is Kind.REFUSED:
                raise WireError(decode_text(payload))
            self._enter(_Stage.OPEN)
            self._bound_waiting()
            self._unsent += b"".join(self._requests)
            self._requests.clear()
        else:
            self._end_read(Progress(ReadState.FAILED, f"{self.endpoint}: {decode_text(payload)}"))
        self._send()

    def _bound_waiting(self) -> None:
        """Let calls wait that are not told otherwise, but only for a short time."""
        self._socket.setblocking(True)
        bound = struct.pack("@ll", 0, int(WAIT_S * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def _end_read(self, progress: Progress) -> None:
        read = self._reads.popleft()[1]
        read.progress = progress
        self._owed_bytes -= read.vector.left_bytes
        self._expect_head()
