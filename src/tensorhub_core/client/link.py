"""One ZeroMQ connection to the reference server, owned by one thread: sockets and nothing else."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from tensorhub_core.client.search import MOST_ADDRESSES, MOST_PAUSE_S
from tensorhub_core.errors import ConfigError, TransportError
from tensorhub_core.limits import ZMQ_FILES, check_files, no_files
from tensorhub_core.wire.codec import MAX_MESSAGE_BYTES
from tensorhub_core.wire.curve import ClientKeys, protect

SILENT = "it does not answer"
"""What is wrong where nothing was refused or lost."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_RETRY_MS = 50


class LinkEvent(Enum):
    """What happened to the connection since one looked last."""

    UP = "up"
    DOWN = "down"
    """A connection that stood is gone."""
    REFUSED = "refused"
    """Nobody listens, for the moment: ZeroMQ tries again by itself."""
    REJECTED = "rejected"
    """Somebody listens who does not let this client in; ZeroMQ may not try again."""


@dataclass(slots=True)
class _Sockets:
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


class Link:
    """A DEALER that is connected, or tries to be; after a loss it comes back as a new socket with a new identity.

    A new identity, because a ROUTER ignores a peer whose identity it still takes for connected. All calls but `wake`
    belong to one thread.
    """

    def __init__(self, addresses: tuple[str, ...], keys: ClientKeys | None = None) -> None:
        """Begin to connect to the first address, by CURVE if there are `keys`; the others are for `renew`.

        Raises ConfigError if an address is malformed, TransportError if files run out.
        """
        self.address = addresses[0]
        self._keys = keys
        self._troubles: dict[str, str] = {}
        self.connected = False
        self.most_pause_s = MOST_PAUSE_S
        check_files(ZMQ_FILES, "a connection to the server")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_lock = threading.RLock()  # a signal handler may call what it has interrupted
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        try:
            for other in addresses[1:]:
                self._check(other)
            self._sockets: _Sockets | None = self._open(self.address)
        except BaseException:
            self._end()
            raise

    @property
    def trouble(self) -> str:
        """Say what is wrong with the connection, at each address that was tried."""
        if self._troubles.keys() - {self.address}:
            known = {**self._troubles, self.address: self._troubles.get(self.address, SILENT)}
            return "; ".join(f"{address}: {text}" for address, text in known.items())
        return next(iter(self._troubles.values()), "no connection")

    @trouble.setter
    def trouble(self, text: str) -> None:
        self._troubles.pop(self.address, None)
        self._troubles[self.address] = text
        if len(self._troubles) > MOST_ADDRESSES:
            del self._troubles[next(iter(self._troubles))]

    def _open(self, address: str) -> _Sockets:
        """Begin to connect by new sockets; raises ConfigError, or TransportError if there are no files for them."""
        try:
            dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransportError(no_files("a connection to the server", error)) from None
        try:
            return self._connect(dealer, address)
        except BaseException:
            dealer.disable_monitor()
            dealer.close(0)
            raise

    def _connect(self, dealer: zmq.Socket[bytes], address: str) -> _Sockets:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, b"w" + secrets.token_bytes(15))
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.IPV6, int("[" in address))
        dealer.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, round(self.most_pause_s * 1000))
        dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
        dealer.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        dealer.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        dealer.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        protect(dealer, address, self._keys)
        try:
            monitor: zmq.Socket[bytes] = dealer.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:
            raise TransportError(no_files("a connection to the server", error)) from None
        try:
            _connect(dealer, address)
        except ConfigError:
            monitor.close(0)
            raise
        return _Sockets(dealer, monitor)

    def _check(self, address: str) -> None:
        """Raise ConfigError now, and not in the hour of need, if nobody could ever connect to an address."""
        with self._context.socket(zmq.DEALER) as probe:
            probe.setsockopt(zmq.LINGER, 0)
            probe.setsockopt(zmq.IPV6, int("[" in address))
            _connect(probe, address)

    def renew(self, address: str | None = None) -> None:
        """Drop the connection and begin to connect again, to another address if one is given.

        Where this process has no files left for it, `wait` tries again.
        """
        self._close()
        self.connected = False
        if address is not None and address != self.address:
            if self.address not in self._troubles:
                self.trouble = SILENT
            self.address = address
        try:
            self._sockets = self._open(self.address)
        except TransportError as error:
            self.trouble = str(error)

    def wake(self) -> None:
        """Make `wait` return; any thread, also after `close`."""
        with self._wake_lock, contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def wait(self, timeout_s: float, writable: bool = False) -> None:
        """Wait until something arrives, somebody wakes the link, or room to send if `writable`; at most `timeout_s`."""
        if self._sockets is None:
            self.renew()
        poller = zmq.Poller()
        if self._sockets is not None:
            poller.register(self._sockets.dealer, zmq.POLLIN | (zmq.POLLOUT if writable else 0))
            poller.register(self._sockets.monitor, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        poller.poll(max(0, math.ceil(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def events(self) -> list[LinkEvent]:
        """Return what happened to the connection, oldest first."""
        found: list[LinkEvent] = []
        while self._sockets is not None:
            try:
                message = recv_monitor_message(self._sockets.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return found
            found.append(self._event(message["event"], message["value"]))
        return found

    def _event(self, event: int, value: int) -> LinkEvent:
        """Note what ZeroMQ tells; return what it means."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._troubles.clear()
            return LinkEvent.UP
        if event == zmq.EVENT_DISCONNECTED:
            if not self.connected:
                return LinkEvent.REJECTED
            self.connected = False
            self.trouble = "the connection was closed"
            return LinkEvent.DOWN
        if event == zmq.EVENT_CLOSED:
            self.trouble = "the connection was refused"
            return LinkEvent.REFUSED
        self.trouble = self._rejection(event, value)
        return LinkEvent.REJECTED

    def _rejection(self, event: int, value: int) -> str:
        """Say why the handshake failed, as far as ZeroMQ tells."""
        known = self._troubles.get(self.address, "")
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and known.startswith("it speaks"):
            return known  # of two events the one that says more
        keys = self._keys if self.address.startswith("tcp://") else None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            key = "" if keys is None else f" {keys.public.decode()}"
            return f"it refused this client's key{key}: add its certificate to the server's curve_clients folder"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if keys is None:
                return "it speaks CURVE, this client without it: set curve_server and curve_client"
            return "it speaks without CURVE, this client with it: start it with curve_secret, or unset curve_server"
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return f"the peer does not speak ZeroMQ ({zmq.Event(event).name}, {value})"
        if keys is None:
            return "it closed the connection in the handshake: it is no TensorHub server, or one that speaks CURVE"
        return "it closed the connection in the handshake: curve_server is not its key, or it speaks without CURVE"

    def send(self, frames: list[bytes]) -> bool:
        """Send a message if there is a connection with room for it; tell whether it was sent."""
        if self._sockets is None:
            return False
        try:
            self._sockets.dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if none has arrived."""
        if self._sockets is None:
            return None
        try:
            return self._sockets.dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close everything at once; what was not sent yet is lost. Idempotent."""
        if self._wake_read < 0:
            return
        self._close()
        self._end()

    def _close(self) -> None:
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        sockets.dealer.disable_monitor()
        sockets.monitor.close(0)
        sockets.dealer.close(0)

    def _end(self) -> None:
        self._context.destroy(0)  # not term(), which waits for sockets that an error has left open
        with self._wake_lock:  # nobody may write to a number that some other file has by then
            os.close(self._wake_write)
            os.close(self._wake_read)
            self._wake_write = self._wake_read = -1


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.connect(address)
    except (zmq.ZMQError, UnicodeError) as error:
        raise ConfigError(f"{address!r} is not an address: write tcp://HOST:PORT ({error})") from None
