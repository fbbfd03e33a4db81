"""Append everything that the server decides on to a file, for `tensorhub replay`: one life after another.

A record is a mark, its length, a checksum, and msgpack. A life begins with a header, so that a reader finds the next
one behind whatever a crash left half written. The loop never waits for the disk: a thread of the journal's own writes,
and a journal that cannot be written, or has reached its limit, ends with one warning while the server goes on.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from tensorhub_core.ids import SessionId
from tensorhub_core.state.events import Disconnected, Event, Received, Tick
from tensorhub_core.state.messages import PROTOCOL, Request
from tensorhub_core.state.records import MachineConfig
from tensorhub_core.wire.codec import MAX_MESSAGE_BYTES

HEADER_MARK, EVENT_MARK = b"\xf5TJH", b"\xf5TJE"
_PREFIX = struct.Struct(">4sII")
FLUSH_EVERY_S = 1.0
MOST_WAITING_BYTES = 256 << 20
"""Not written yet: a disk that is slower than this loses the journal, not the server."""
MOST_RECORD_BYTES = MAX_MESSAGE_BYTES + (1 << 20)
_JOIN_S = 10.0


class LifeHeader(msgspec.Struct, frozen=True):
    """How a life of the server began."""

    protocol: int
    started_s: float
    config: MachineConfig


class EventRecord(msgspec.Struct, frozen=True, array_like=True):
    """An event and when it reached the machine; `counter` is the machine's count of ids before it."""

    now: float
    counter: int
    kind: str
    session: bytes = b""
    request: int = 0
    message: Request | None = None

    def event(self) -> Event:
        """Return the event; raises ValueError if it is none."""
        if self.kind == "received" and self.message is not None:
            return Received(SessionId(self.session), self.request, self.message)
        if self.kind == "disconnected":
            return Disconnected(SessionId(self.session))
        if self.kind == "tick":
            return Tick()
        raise ValueError(f"an event of kind {self.kind!r}")


class Gap(msgspec.Struct, frozen=True):
    """Bytes of the file that are no records: a torn tail, or damage."""

    at: int
    size: int


Item = LifeHeader | EventRecord | Gap


def record_of(now: float, event: Event, counter: int) -> EventRecord:
    """Return what the journal keeps of an event."""
    if isinstance(event, Received):
        return EventRecord(now, counter, "received", event.session, event.request, event.message)
    if isinstance(event, Disconnected):
        return EventRecord(now, counter, "disconnected", event.session)
    return EventRecord(now, counter, "tick")


def framed(mark: bytes, body: bytes) -> bytes:
    """Return a record as it stands in the file."""
    return _PREFIX.pack(mark, len(body), xxhash.xxh32_intdigest(body)) + body


class Journal:
    """The journal of one life of the server; `begin` and `append` belong to the loop's thread and never raise."""

    def __init__(self, path: Path, limit_bytes: int, logger: logging.Logger) -> None:
        """Open the file to append to it; raises OSError."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        self._left_bytes = limit_bytes - os.fstat(handle).st_size
        self._path, self._limit_bytes, self._logger = path, limit_bytes, logger
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._over = False
        self._closing = False
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="tensorhub-journal", daemon=True)
        self._thread.start()

    def begin(self, config: MachineConfig, started_s: float) -> None:
        """Note that a life begins."""
        header = LifeHeader(PROTOCOL, started_s, config)
        self._add(framed(HEADER_MARK, self._encoder.encode(header)))

    def append(self, now: float, event: Event, counter: int) -> None:
        """Note an event before the machine takes it."""
        if not self._over:
            self._add(framed(EVENT_MARK, self._encoder.encode(record_of(now, event, counter))))

    def close(self) -> None:
        """Write the rest and close the file; idempotent, bounded."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(_JOIN_S)

    def _add(self, record: bytes) -> None:
        if len(record) > self._left_bytes:
            return self._end(f"it has reached its limit of {self._limit_bytes:,} bytes (journal_limit_bytes)")
        with self._lock:
            if self._waiting_bytes + len(record) > MOST_WAITING_BYTES:
                over = True
            else:
                over = False
                self._waiting.append(record)
                self._waiting_bytes += len(record)
                self._left_bytes -= len(record)
        if over:
            self._end("the disk is too slow for it")

    def _end(self, why: str) -> None:
        """Say once that nothing more is noted."""
        if not self._over:
            self._over = True
            self._logger.warning("the journal %s ends here: %s; the server goes on", self._path, why)

    def _write_all(self) -> None:
        """Write what waits, once a second."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing, FLUSH_EVERY_S)
                closing = self._closing
                data, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
            try:
                self._write(data)
            except OSError as error:
                self._end(f"it cannot be written ({error.strerror or error})")
            if closing or self._over:
                break
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            view = view[written:]


def read_journal(file: BinaryIO, size: int) -> Iterator[Item]:
    """Yield the records of a journal of `size` bytes; what is none is yielded as one gap up to the next life."""
    headers, events = msgspec.msgpack.Decoder(LifeHeader), msgspec.msgpack.Decoder(EventRecord)
    at = 0
    while at < size:
        item, length = _record_at(file, at, headers, events)
        if item is None:
            end = _next_life(file, at + 1, size, headers, events)
            yield Gap(at, end - at)
            at = end
        else:
            yield item
            at += length


_Headers = msgspec.msgpack.Decoder[LifeHeader]
_Events = msgspec.msgpack.Decoder[EventRecord]


def _record_at(file: BinaryIO, at: int, headers: _Headers, events: _Events) -> tuple[Item | None, int]:
    """Return the record that begins here and its length; None if there is none."""
    file.seek(at)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None, 0
    mark, length, checksum = _PREFIX.unpack(prefix)
    if mark not in (HEADER_MARK, EVENT_MARK) or length > MOST_RECORD_BYTES:
        return None, 0
    body = file.read(length)
    if len(body) < length or xxhash.xxh32_intdigest(body) != checksum:
        return None, 0
    try:
        item: Item = headers.decode(body) if mark == HEADER_MARK else events.decode(body)
        if isinstance(item, EventRecord):
            item.event()
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None, 0
    return item, _PREFIX.size + length


def _next_life(file: BinaryIO, at: int, size: int, headers: _Headers, events: _Events) -> int:
    """Return where the next life begins from here on, or the end of the file."""
    window = 1 << 20
    while at < size:
        file.seek(at)
        data = file.read(window + len(HEADER_MARK) - 1)
        found = data.find(HEADER_MARK)
        if found < 0:
            at += window
        elif isinstance(_record_at(file, at + found, headers, events)[0], LifeHeader):
            return at + found
        else:
            at += found + 1
    return size
