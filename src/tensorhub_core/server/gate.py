"""Let those clients in whose public keys lie in a folder, and say in the log who was turned away.

ZeroMQ asks at every handshake over an inproc socket (ZAP, RFC 27), which the loop's thread answers: no thread of its
own is needed, and a key that was just added or taken away counts at the next handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tensorhub_core.errors import ConfigError
from tensorhub_core.server.counters import RateLimitedLog
from tensorhub_core.wire.curve import ServerKeys, public_key

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
LOOK_EVERY_S = 0.5
MOST_KEYS = 65_536
REFUSED_LINES = 20
"""Refused clients that are named in the log in five seconds."""
BATCH = 64
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_QUESTION_FRAMES = 7
_KEY_BYTES = 32
_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class AllowedKeys:
    """The public keys of a folder's `*.key` files, by name, read again when the files have changed."""

    folder: Path
    log: RateLimitedLog
    _names: dict[bytes, str] = field(default_factory=dict)
    _stamp: _Stamp | None = None
    _looked_s: float | None = None

    def name_of(self, key: bytes, now: float) -> str | None:
        """Return the name of the file that holds this Z85 key, None if there is none."""
        if self._looked_s is None or now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            self._look(now)
        return self._names.get(key)

    def _look(self, now: float) -> None:
        try:
            stamp = self._stamp_now()
        except OSError as error:
            text = f"the folder of clients {self.folder} cannot be read ({error.strerror}): nobody new is let in"
            self.log.log("gate", logging.ERROR, text, now)
            self._names, self._stamp = {}, None
            return
        if stamp == self._stamp:
            return
        names: dict[bytes, str] = {}
        for name, *_ in stamp[:MOST_KEYS]:
            try:
                names[public_key(self.folder / name, "curve_clients")] = name.removesuffix(".key")
            except ConfigError as error:
                self.log.log("gate file", logging.WARNING, f"left out: {error}", now, most=REFUSED_LINES)
        if self._stamp is not None or not names:
            self.log.logger.info("%d clients may connect, by the keys in %s", len(names), self.folder)
        self._names, self._stamp = names, stamp

    def _stamp_now(self) -> _Stamp:
        found: list[tuple[str, int, int]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".key"):
                    with contextlib.suppress(OSError):  # a link that leads nowhere
                        about = entry.stat()
                        found.append((entry.name, about.st_mtime_ns, about.st_size))
        return tuple(sorted(found))


class Gate:
    """Answer ZeroMQ's questions about clients; belongs to the loop's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys, log: RateLimitedLog) -> None:
        """Be there before the router listens: from then on its handshakes wait for answers."""
        self._log = log
        self._allowed = None if keys.clients is None else AllowedKeys(keys.clients, log)
        self._questions: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ZAP_ENDPOINT)
        self._router: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def register(self, poller: zmq.Poller) -> None:
        """Have the loop woken when there is something to do."""
        poller.register(self._questions, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)

    def watch(self, router: zmq.Socket[bytes]) -> None:
        """Hear of handshakes that fail before there is anything to ask."""
        self._router, self._monitor = router, router.get_monitor_socket(_FAILED)

    def turn(self, now: float) -> None:
        """Answer what was asked since."""
        for _ in range(BATCH):
            try:
                question = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._questions.send_multipart(self._answer(question, now))
        for _ in range(BATCH):
            try:
                if self._monitor is None:
                    break
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            text = "a handshake failed: a client does not speak CURVE, or has another key for this server"
            self._log.log("handshake", logging.WARNING, text, now)

    def close(self) -> None:
        """Close the sockets, before the router."""
        if self._router is not None and self._monitor is not None:
            self._router.disable_monitor()
            self._monitor.close(0)
        self._questions.close(0)

    def _answer(self, question: list[bytes], now: float) -> list[bytes]:
        """Return a ZAP reply: version, request id, status, its text, user id, metadata."""
        version, request = [*question, b"1.0", b""][:2]
        if len(question) != _QUESTION_FRAMES or question[5] != b"CURVE" or len(question[6]) != _KEY_BYTES:
            return [version, request, b"400", b"CURVE is needed", b"", b""]
        address, key = question[3], z85.encode(question[6])
        name = "anybody" if self._allowed is None else self._allowed.name_of(key, now)
        if name is None:
            where = address.decode(errors="replace")
            text = f"refused a client at {where}: its key {key.decode()} is not in {self._folder()}"
            self._log.log("refused", logging.WARNING, text, now, most=REFUSED_LINES)
            return [version, request, b"400", b"unknown key", b"", b""]
        return [version, request, b"200", b"OK", key, b""]

    def _folder(self) -> str:
        return "" if self._allowed is None else str(self._allowed.folder)
