"""Keep what this worker was the last to hold: offload copies, made and dropped when the server says so (law L11).

The caller waits in its `Unpublish` meanwhile, or does something else; one thread makes the copies, one after the other,
and ends when there is nothing to do. Frees come before copies, so that a copy that waits for room gets it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_core.client.host_memory import available_bytes
from tensorhub_core.client.identity import checked
from tensorhub_core.client.offload_copy import OffloadMemory, Original
from tensorhub_core.client.session import Session
from tensorhub_core.client.stock import Stock
from tensorhub_core.errors import ConfigError, CorruptTransfer, StateError, TensorHubError, error_from_wire
from tensorhub_core.ids import VersionKey
from tensorhub_core.limits import start_thread
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import (
    DropOffload,
    Held,
    Offload,
    Offloaded,
    OffloadFailed,
    OffloadKept,
    PutBlob,
    Reply,
)
from tensorhub_core.transport.base import Transport

_JOIN_S = 10.0
_LOOK_EVERY_S = 0.25
_NOTED_S = 2.0
"""How long a caller may take to note what it has just been told."""

Find = Callable[[VersionKey], Original | None]
"""Return the memory that holds a version, None if this worker does not hold it; any thread."""


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What the settings say: `limit_bytes` None = not known, `patience_s` how long a copy waits for others to go."""

    limit_bytes: int | None = None
    check: bool = True
    patience_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Entry:
    """One offload copy: being made, offered to the server (`whole`), or kept (`id`)."""

    key: VersionKey
    asked: str
    """The original's id, as the server asked for it last."""
    original: Original | None = None
    layout: PutBlob | None = None
    sums: PutBlob | None = None
    total_bytes: int = 0
    memory: OffloadMemory | None = None
    roomy: bool = False
    """It has its share of what the limit allows."""
    whole: bool = False
    id: str = ""
    dropped: bool = False


class Offloads:
    """The offload copies of one worker. `on_push` is called on the session's thread, the rest from any."""

    def __init__(
        self, session: Session, make_transport: Callable[[], Transport], find: Find, policy: OffloadPolicy
    ) -> None:
        self._session, self._make_transport, self._find, self._policy = session, make_transport, find, policy
        self._lock = threading.RLock()  # entered in one step: no interruption leaves it held
        self._changed = threading.Condition(self._lock)
        self._entries: list[_Entry] = []
        self._to_make: deque[_Entry] = deque()
        self._to_free: deque[_Entry] = deque()
        self._not_to_be_freed: list[OffloadMemory | None] = []
        self._thread: threading.Thread | None = None
        self._refusing = self._closed = self._reading = False
        self._when_unread: list[Callable[[], None]] = []
        self.made = 0
        """Copies that the server took, since the worker connected."""

    def __len__(self) -> int:
        return sum(not entry.dropped for entry in list(self._entries))

    def held_bytes(self) -> int:
        """Return the host memory that copies take now, finished or not."""
        return sum(entry.total_bytes for entry in list(self._entries) if entry.roomy)

    def room_bytes(self) -> int | None:
        """Return the host memory that copies may still take, None if there is no limit."""
        limit_bytes = self._policy.limit_bytes
        return None if limit_bytes is None else max(0, limit_bytes - self.held_bytes())

    def versions(self) -> list[VersionKey]:
        """Return the versions of which there is a copy."""
        return sorted({entry.key for entry in list(self._entries) if entry.id and not entry.dropped})

    def stock(self, placement: bytes) -> Stock | None:
        """Return the copy that lies at the placement of this digest, None if there is none."""
        with self._lock:
            for entry in self._entries:
                memory, layout, sums = entry.memory, entry.layout, entry.sums
                offered = entry.whole and not entry.dropped and memory is not None
                if offered and memory and layout and sums and memory.placement.digest == placement:
                    return Stock(layout.digest, placement, sums, memory)
        return None

    def on_push(self, message: Offload | DropOffload) -> None:
        """Hear what is to be kept or freed; never blocks."""
        if isinstance(message, DropOffload):
            with self._lock:
                for entry in [entry for entry in self._entries if _means(message, entry)]:
                    self._drop(entry)
            return self._wake()
        key = (message.epoch, message.number)
        original = self._find(key)
        with self._lock:
            if self._refusing or self._closed:
                return self._fail(message.copy, StateError("the worker is leaving: what it keeps would go with it"))
            entry = self._entry_for(key, original)
            entry.asked = message.copy
            self._to_make.append(entry)
        self._wake()

    def release(self, done: Callable[[], None]) -> None:
        """Call `done()` when no copy is made of the registered memory any more: then it is the caller's again.

        At once, or on the thread that reads it; never blocks.
        """
        with self._lock:
            for entry in [entry for entry in self._entries if not entry.whole]:
                self._drop(entry)
            reading = self._reading
            if reading:
                self._when_unread.append(done)
        self._wake()
        if not reading:
            done()

    def refuse(self) -> None:
        """Make no copies any more: the worker leaves, and what it would keep would go with it."""
        with self._lock:
            self._refusing = True
            for entry in [entry for entry in self._entries if not entry.whole]:
                self._drop(entry)
        self._wake()

    def close(self) -> None:
        """Cut the readers off and free everything; joins the thread within a bounded time. Idempotent, never raises."""
        with self._lock:
            self._refusing = self._closed = True
            thread = self._thread
            for entry in list(self._entries):
                self._drop(entry)
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():  # it reads and writes what would be freed
                return get_logger("client").error("an offload copy could not be stopped: its memory is kept")
        while self._to_free:
            self._free(self._to_free.popleft())

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _entry_for(self, key: VersionKey, original: Original | None) -> _Entry:
        """Return the entry for a version in a layout: the one that there is, else a new one."""
        for entry in self._entries:
            same = original is None or entry.layout is None or entry.layout.digest == original.layout.digest
            if entry.key == key and same and not entry.dropped:
                return entry
        entry = _Entry(key, "")
        self._entries.append(entry)
        if original is not None:
            _take(entry, original)
        return entry

    def _drop(self, entry: _Entry) -> None:
        if not entry.dropped:
            entry.dropped = True
            self._to_free.append(entry)
            self._tell_hellos()

    def _tell_hellos(self) -> None:
        helds: list[Held] = []
        blobs: list[PutBlob] = []
        for entry in self._entries:
            if entry.whole and not entry.dropped and entry.memory is not None:
                helds.append(entry.memory.held)
                blobs += [b for b in (entry.layout, entry.sums, entry.memory.placement) if b is not None]
        self._session.offloads = (tuple(helds), tuple(blobs))

    # --- how --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """See to it that the thread runs and looks at what there is to do."""
        with self._lock:
            self._changed.notify_all()
            if self._thread is not None or self._closed or not (self._to_free or self._to_make):
                return
            thread = threading.Thread(target=self._run, name="tensorhub-offload", daemon=True)
            try:
                start_thread(thread)
            except TensorHubError as error:
                unmade = [entry for entry in self._to_make if not entry.whole]
                self._to_make.clear()
                for entry in unmade:
                    self._entries.remove(entry)
                    self._fail(entry.asked, error)
                return
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                free = self._to_free.popleft() if self._to_free else None
                make = self._to_make.popleft() if free is None and self._to_make else None
                if free is None and make is None:
                    self._thread = None
                    return
            if free is not None:
                self._free(free)
            elif make is not None and not make.dropped:
                self._make(make)

    def _make(self, entry: _Entry) -> None:
        """Make the copy, unless that is done, and offer it."""
        try:
            if not entry.whole and not self._fill(entry):
                return
            self._offer(entry)
        except Exception as error:
            text = f"version {entry.key[1]} could not be copied into host memory: {error}"
            if not isinstance(error, TensorHubError):
                get_logger("client").exception("an offload copy failed")
            code = error.code if isinstance(error, TensorHubError) else StateError.code
            self._fail(entry.asked, error_from_wire(code, text))
            with self._lock:
                self._drop(entry)

    def _fill(self, entry: _Entry) -> bool:
        """Fill memory with the original; return False if it was dropped meanwhile."""
        original = self._original_of(entry)
        if original is None:
            return False
        self._wait_for_room(entry)
        begun_s = time.monotonic()
        transport = self._make_transport()
        try:
            memory = OffloadMemory(original, transport)
        except MemoryError:
            transport.shutdown()
            raise StateError(f"{entry.total_bytes:,} bytes of host memory are not there") from None
        except BaseException:
            transport.shutdown()
            raise
        entry.memory = memory
        if not self._read(entry, original, memory):
            return False
        text = "version %d was copied into host memory (%d bytes, %.3f s): this replica was the last to hold it"
        get_logger("client").info(text, entry.key[1], entry.total_bytes, time.monotonic() - begun_s)
        return True

    def _read(self, entry: _Entry, original: Original, memory: OffloadMemory) -> bool:
        """Copy the bytes; return False if the entry was dropped meanwhile. Who waits to write them hears of the end."""
        with self._lock:
            if entry.dropped:
                return False
            self._reading = True
        try:
            if not memory.fill(original, lambda: entry.dropped, check=self._policy.check or not original.trusted):
                return False
            with self._lock:
                entry.whole, entry.original = not entry.dropped, None
                self._tell_hellos()  # before it is offered: a server that has taken it knows it, whatever we hear
                return entry.whole
        finally:
            with self._lock:
                self._reading, waiting, self._when_unread = False, self._when_unread, []
            for done in waiting:
                done()

    def _original_of(self, entry: _Entry) -> Original | None:
        """Return the memory to copy, None if the entry was dropped.

        The server may ask for what a caller that has just been told of its commit has not noted yet. If nothing comes,
        the server has to hear of it, or it would wait for this copy for ever: raises CorruptTransfer.
        """
        end_s = time.monotonic() + _NOTED_S
        while entry.original is None and not entry.dropped:
            original = self._find(entry.key)
            with self._lock:
                if original is not None:
                    _take(entry, original)
                elif time.monotonic() >= end_s:
                    raise CorruptTransfer("this worker does not hold it any more")
                else:
                    self._changed.wait(_LOOK_EVERY_S / 10)
        return None if entry.dropped else entry.original

    def _wait_for_room(self, entry: _Entry) -> None:
        """Wait until the limit allows the copy; other copies that are about to go may have to go first."""
        end_s, limit_bytes = time.monotonic() + self._policy.patience_s, self._policy.limit_bytes
        while not entry.dropped and limit_bytes is not None and entry.total_bytes > limit_bytes - self.held_bytes():
            with self._lock:
                free = self._to_free.popleft() if self._to_free else None
                if free is None:
                    left_s, others_bytes = end_s - time.monotonic(), self.held_bytes()
                    if not others_bytes or left_s <= 0:
                        raise ConfigError(
                            f"that takes {entry.total_bytes:,} bytes, and offload_limit_bytes = {limit_bytes:,} allows "
                            f"{max(0, limit_bytes - others_bytes):,}: raise it, set retain = 0 on the server, or run "
                            "`tensorhub seed --keep`"
                        )
                    self._changed.wait(min(left_s, _LOOK_EVERY_S))
            if free is not None:
                self._free(free)
        entry.roomy = True
        available = available_bytes()
        if available is not None and entry.total_bytes > available:
            raise StateError(f"that takes {entry.total_bytes:,} bytes of host memory, {available:,} are available")

    def _offer(self, entry: _Entry) -> None:
        """Tell the server of the copy: requests that are said again until they are answered."""
        memory, asked = entry.memory, entry.asked
        assert memory is not None
        with contextlib.suppress(TensorHubError):  # the session is over, and with it the worker
            self._session.submit(memory.placement, lambda _: None)
            self._session.submit(Offloaded(asked, memory.placement.digest), lambda r: self._answered(entry, asked, r))

    def _answered(self, entry: _Entry, asked: str, reply: Reply) -> None:
        """Take the server's word on an offered copy; on the session's thread."""
        with self._lock:
            if isinstance(reply, OffloadKept) and not entry.dropped:
                self.made += int(not entry.id)
                entry.id = reply.copy
            elif not isinstance(reply, OffloadKept) and asked == entry.asked and not entry.id:
                with contextlib.suppress(TensorHubError):
                    checked(reply)
                self._drop(entry)
        self._wake()

    def _fail(self, copy: str, error: TensorHubError) -> None:
        get_logger("client").warning("%s", error)
        with contextlib.suppress(TensorHubError):
            self._session.submit(OffloadFailed(copy, error.code, str(error)), lambda _: None)

    def _free(self, entry: _Entry) -> None:
        """End the copy's serving side, then let its memory go (law L9)."""
        try:
            if entry.memory is not None:
                entry.memory.close()
        except Exception:
            get_logger("client").exception("an offload copy cannot be freed: peers may still read it")
            self._not_to_be_freed.append(entry.memory)
        entry.original = entry.memory = None
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)
            self._changed.notify_all()


def _take(entry: _Entry, original: Original) -> None:
    entry.original, entry.total_bytes = original, original.total_bytes
    entry.layout, entry.sums = original.layout, original.sums


def _means(message: DropOffload, entry: _Entry) -> bool:
    """Tell whether a push is about an entry: by its placement, its own id, or the original's while it is unfinished."""
    if message.placement:
        return entry.memory is not None and entry.memory.placement.digest == message.placement
    return message.copy == entry.id or (not entry.id and message.copy == entry.asked)
