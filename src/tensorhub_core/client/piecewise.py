"""Hold a version that is larger than the memory it passes through: portions come in, are used, and make room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.portions import Portion, arena_bytes, cut_portions
from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.client.runner import StagedVersion
from tensorhub_core.client.staged_memory import Arena
from tensorhub_core.client.sums import segment_sums
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError, DeadlineExceeded
from tensorhub_core.layout.canonical import digest_of, encode_layout
from tensorhub_core.layout.segments import SegmentTable, segment_table
from tensorhub_core.layout.types import Layout
from tensorhub_core.transport.base import Region


class StartOver(Exception):
    """What was handed over does not count: the version is read again from its beginning."""


class PassingMemory(RegisteredMemory):
    """What the hub knows of memory that never holds all of a version: its layout, but no address to read it at."""

    def __init__(self, layout: Layout, arena: Arena) -> None:
        """Stand for `layout`, plain and without aliases; reads land in the arena."""
        self._tensors, self._views, self._marks, self._arena = {}, {}, [], arena
        self.layout, self.layout_blob = layout, encode_layout(layout)
        self.fingerprint, self.table = digest_of(self.layout_blob), segment_table(layout)
        self.storages, self.buffers = (), ()
        self.addresses = np.zeros(len(layout.storages), np.uint64)
        self.devices = ("cpu",) * len(layout.storages)
        self.total_bytes = self.table.total_bytes
        self.page = PrefixPage()

    def regions(self) -> list[Region]:
        """Return the arena: where reads may land."""
        return self._arena.regions()


@dataclass(frozen=True, slots=True)
class _Passed:
    """A portion that is ready to be used; its room is taken until then."""

    portion: Portion
    ticket: int


class Passage:
    """Portions on their way through one bounded memory, from the thread that reads them to the one that uses them.

    What belongs to the reading thread is the `FilledMemory` of its round: the memory of the portion that is read now.
    """

    def __init__(self, whole: Layout, limit_bytes: int) -> None:
        """Allocate at most `limit_bytes`, or what the largest tensor takes; raises ConfigError if that is not there."""
        half_bytes = limit_bytes // 2 & -64
        self.portions: Sequence[Portion] = cut_portions(whole, half_bytes)
        size, self._half_bytes = arena_bytes(self.portions, half_bytes), half_bytes
        try:
            self._arena = Arena([size])
        except MemoryError:
            raise ConfigError(
                f"a piece of the version takes {size:,} bytes of host memory, which there are not"
            ) from None
        self.memory = PassingMemory(whole, self._arena)
        self._lock = threading.RLock()  # entered in one step: no interruption leaves it held
        self._changed = threading.Condition(self._lock)
        self._passed = Bell()
        """Rung for who uses the portions."""
        self._rooms: dict[int, tuple[int, int]] = {}
        """(begin, end) of the rooms that are taken, by ticket."""
        self._tickets = 0
        self._ready: deque[_Passed] = deque()
        self._life = 0
        self._end: StagedVersion | BaseException | None = None
        self._given_up: BaseException | None = None
        self._tell: Callable[[BaseException], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._at, self._ticket, self._sums = 0, 0, list[NDArray[np.uint64]]()

    # --- the reading thread: the portion that is read now -----------------------------------------------------------

    @property
    def portion(self) -> Portion:
        """Return the portion that is read now, the last one at the end."""
        return self.portions[min(self._at, len(self.portions) - 1)]

    @property
    def layout(self) -> Layout:
        """Return its layout."""
        return self.portion.layout

    @property
    def table(self) -> SegmentTable:
        """Return its segments."""
        return self.portion.table

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Return where its storages lie, u64 [storages]; only once there is room."""
        begin, _ = self._rooms[self._ticket]
        return np.uint64(self._arena.address + begin) + self.portion.offsets_bytes

    @property
    def page(self) -> PrefixPage:
        """Return where the words of sources land; what passes is shown to nobody."""
        return self.memory.page

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the device of each of its storages."""
        return ("cpu",) * len(self.layout.storages)

    @property
    def buffers(self) -> tuple[NDArray[np.uint8] | None, ...]:
        """Return the memory of each of its storages."""
        return tuple(tensor.buffer for tensor in self.portion.tensors(self._room(self._ticket)))

    def collect(self) -> None:
        """Do nothing: every byte is read."""

    def spread(self) -> None:
        """Do nothing: the portions are used as they come."""

    def sums(self) -> NDArray[np.uint64]:
        """Return the checksum of every segment of the whole version, u64 [segments], once all portions have passed."""
        return np.concatenate(self._sums)

    @property
    def begun(self) -> bool:
        """Tell whether a portion has been handed over."""
        return self._at > 0

    @property
    def complete(self) -> bool:
        """Tell whether the portion that is read now is the last one, or that has been handed over too."""
        return self._at >= len(self.portions) - 1

    def take_room(self, timeout_s: float = 0.0) -> bool:
        """Take room for the portion that is read now, if there is any within `timeout_s`; again is no matter."""
        with self._lock:
            if self._at >= len(self.portions) or self._ticket in self._rooms:
                return True
            room = self._changed.wait_for(self._free_room, timeout_s)
            if room is None:
                return False
            self._tickets += 1
            self._ticket = self._tickets
            self._rooms[self._ticket] = room
            return True

    def pass_on(self) -> None:
        """Hand over the portion that was read, verified as it is; the next one comes to be read."""
        if self._at >= len(self.portions):
            return
        self._sums.append(segment_sums(self.table, self.addresses, self.layout.checksum))
        with self._lock:
            self._ready.append(_Passed(self.portion, self._ticket))
            self._at, self._ticket = self._at + 1, 0
        self._passed.ring()

    def start_over(self) -> None:
        """Begin again with the first portion; whoever uses them hears of it at the next one."""
        with self._lock:
            for passed in self._ready:
                self._rooms.pop(passed.ticket)
            self._ready.clear()
            self._rooms.pop(self._ticket, None)
            self._life += 1
            self._reset()
            self._changed.notify_all()
        self._passed.ring()

    def on_given_up(self, tell: Callable[[BaseException], None]) -> None:
        """Have `tell(error)` called, on the using thread, when that gives up."""
        with self._lock:
            self._tell, given_up = tell, self._given_up
        if given_up is not None:
            tell(given_up)

    def ended(self, end: StagedVersion | BaseException) -> None:
        """Note the end of the round: the version, all of which has passed or is held already, or what broke it."""
        with self._lock:
            self._end = end
        self._passed.ring()

    def _free_room(self) -> tuple[int, int] | None:
        size = self.portion.room_bytes
        for begin in (0, self._half_bytes) if size <= self._half_bytes else (0,):
            if all(begin + size <= low or high <= begin for low, high in self._rooms.values()):
                return begin, begin + size
        return None

    def _room(self, ticket: int) -> NDArray[np.uint8]:
        begin, end = self._rooms[ticket]
        return self._arena.buffers[0][begin:end]

    # --- the using thread -------------------------------------------------------------------------------------------

    @property
    def life(self) -> int:
        """Return how often the version has been begun anew."""
        return self._life

    def wait_begun(self, timeout_s: float) -> bool:
        """Wait for the first portion; False: the version is held already. Raises what broke the round before."""
        self._wait(lambda: bool(self._ready) or self._end is not None, timeout_s)
        with self._lock:
            if isinstance(self._end, BaseException):
                raise self._end
            return self._end is None or self._end.sums is not None

    def tensors(self, life: int, timeout_s: float) -> Generator[RawTensor, None, None]:
        """Yield all tensors of the version as they come; each is to be copied before the next one is asked for.

        Raises StartOver if the version has been begun anew since `life`, or what broke the round. Waits no longer than
        `timeout_s` for a portion.
        """
        for _ in self.portions:
            passed = self._next(life, timeout_s)
            try:
                yield from passed.portion.tensors(self._room(passed.ticket))
            finally:
                with self._lock:
                    self._rooms.pop(passed.ticket, None)
                    self._changed.notify_all()

    def is_spoilt(self, life: int) -> bool:
        """Tell whether what is handed over does not count (any more)."""
        return self._life != life or isinstance(self._end, BaseException)

    def wait_end(self, life: int, timeout_s: float) -> StagedVersion:
        """Wait for the end of the round and return the version; raises StartOver or what broke the round."""
        self._wait(lambda: self._end is not None or self._life != life, timeout_s)
        with self._lock:
            return self._checked(life)

    def give_up(self, error: BaseException) -> None:
        """Break the round, unless it has ended: what was handed over cannot be used."""
        with self._lock:
            if self._end is not None or self._given_up is not None:
                return
            self._given_up, tell = error, self._tell
        if tell is not None:
            tell(error)

    def _next(self, life: int, timeout_s: float) -> _Passed:
        self._wait(lambda: bool(self._ready) or self._life != life or self._end is not None, timeout_s)
        with self._lock:
            if self._life != life or not self._ready or isinstance(self._end, BaseException):
                self._checked(life)
            return self._ready.popleft()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        if not self._passed.wait_for(condition, timeout_s):
            raise DeadlineExceeded(f"nothing more of the version came within {timeout_s:g} s")

    def _checked(self, life: int) -> StagedVersion:
        if isinstance(self._end, BaseException):
            raise self._end
        if self._life != life:
            raise StartOver
        assert self._end is not None
        return self._end
