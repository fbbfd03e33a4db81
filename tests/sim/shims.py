"""Stand-ins for `threading`, `queue` and `time`, over fibers; put into the client's modules for one run."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any

import tensorhub_core.client.connect  # noqa: F401  (so that every module of the client is there)
from tests.sim.fibers import Fiber, Timeline

_PATCHED = ("tensorhub_core.client", "tensorhub_core.clock")
_SHORTEST_SLEEP_S = 4e-3
_PREEMPTED = 0.01
"""How often a thread loses the processor where it takes a lock."""


class Waiters:
    """Fibers that wait for one thing, in order."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._fibers: deque[Fiber] = deque()

    def wait(self, timeout_s: float | None) -> bool:
        """Park the calling fiber; tell whether it was woken."""
        fiber = self.timeline.current
        assert fiber is not None, "only threads can wait"
        self._fibers.append(fiber)
        woken = fiber.park(timeout_s)
        if not woken:
            with contextlib.suppress(ValueError):
                self._fibers.remove(fiber)
        return woken

    def wake(self, count: int = 1) -> None:
        """Let some go on."""
        while self._fibers and count:
            self._fibers.popleft().wake()
            count -= 1

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Park until something is so; tell whether it is."""
        fiber = self.timeline.current
        end = None if timeout_s is None else clock_of(self.timeline) + timeout_s
        while not ready():
            left_s = None if end is None else end - clock_of(self.timeline)
            if left_s is not None and left_s <= 0:
                return False
            assert fiber is not None
            self.wait(left_s)
        return True


def clock_of(timeline: Timeline) -> float:
    """Return the time as the running process sees it."""
    fiber = timeline.current
    if fiber is None or fiber.process.alive:
        return timeline.now
    fiber.process.ahead_s += 1e-3
    return timeline.now + fiber.process.ahead_s


class Lock:
    """`threading.Lock`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._waiters, self._held = timeline, Waiters(timeline), False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        fiber = self._timeline.current
        if fiber is None or not fiber.process.alive:
            return True
        if self._timeline.chance.random() < _PREEMPTED:
            fiber.park(self._timeline.chance.random() * 1e-2)
        if self._held and not blocking:
            return False
        if not self._waiters.wait_for(lambda: not self._held, None if timeout < 0 else timeout):
            return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._waiters.wake()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._owner: Fiber | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        fiber = self._timeline.current
        if fiber is None or fiber is not self._owner:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = fiber
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0
            super().release()

    def give_up(self) -> int:
        """Let others have it, however often it was taken; return how often."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    """`threading.Condition`: nobody is preempted while holding one without a lock, so that it takes nothing."""

    def __init__(self, timeline: Timeline, lock: RLock | None = None) -> None:
        self._waiters, self._lock = Waiters(timeline), lock

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        with self._released():
            return self._waiters.wait(timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        with self._released():
            return self._waiters.wait_for(predicate, timeout)

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        lock = self._lock
        depth = 0 if lock is None else lock.give_up()
        try:
            yield
        finally:
            if lock is not None:
                lock.take_back(depth)

    def notify_all(self) -> None:
        self._waiters.wake(1 << 30)

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)


class Event:
    """`threading.Event`."""

    def __init__(self, timeline: Timeline) -> None:
        self._waiters, self._set = Waiters(timeline), False

    def set(self) -> None:
        self._set = True
        self._waiters.wake(1 << 30)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.wait_for(lambda: self._set, timeout)


class Thread:
    """`threading.Thread`: a fiber of the process that makes it."""

    def __init__(
        self,
        timeline: Timeline,
        target: Callable[..., None],
        args: tuple[object, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._timeline, self.name, self._target, self._args = timeline, name, target, args
        self.fiber: Fiber | None = None

    def start(self) -> None:
        maker = self._timeline.current
        assert maker is not None
        if not maker.process.alive:
            return  # what a dead process would still start never runs
        self.fiber = Fiber(self._timeline, maker.process, self.name, lambda: self._target(*self._args))
        self.fiber.start()

    def is_alive(self) -> bool:
        return self.fiber is not None and not self.fiber.ended

    def join(self, timeout: float | None = None) -> None:
        me, fiber = self._timeline.current, self.fiber
        if fiber is not None and me is not None and not fiber.ended:
            fiber.joiners.append(me)
            Waiters(self._timeline).wait_for(lambda: fiber.ended, timeout)


class Queue:
    """`queue.Queue` and `queue.SimpleQueue`."""

    def __init__(self, timeline: Timeline, maxsize: int = 0) -> None:
        self._timeline, self._most = timeline, maxsize or 1 << 30
        self._items: deque[Any] = deque()
        self._readers, self._writers = Waiters(timeline), Waiters(timeline)

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        if self._timeline.current is not None:
            self._writers.wait_for(lambda: len(self._items) < self._most, timeout)
        self._items.append(item)
        self._readers.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._readers.wait_for(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        self._writers.wake()
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Promise:
    """What one thread awaits of another."""

    def __init__(self, timeline: Timeline) -> None:
        self._waiters, self._done = Waiters(timeline), False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        if not self._waiters.wait_for(self.done, timeout):
            raise FutureTimeout
        if self._error is not None:
            raise self._error
        return self._value

    def set_result(self, value: object) -> None:
        assert not self._done, "a future was set twice"
        self._value = value
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _end(self) -> None:
        self._done = True
        self._waiters.wake(1 << 30)
        for callback in self._callbacks:
            callback(self)


def stand_ins(timeline: Timeline) -> dict[object, object]:
    """Return what takes the place of what."""

    def sleep(seconds: float) -> None:
        Waiters(timeline).wait(max(seconds, _SHORTEST_SLEEP_S))

    def now() -> float:
        return clock_of(timeline)

    def current() -> SimpleNamespace:
        return SimpleNamespace(name="" if timeline.current is None else timeline.current.name)

    def bound(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: kind(timeline, *args, **more)

    threads = SimpleNamespace(
        **{"Lock": bound(Lock), "RLock": bound(RLock), "Condition": bound(Condition), "Event": bound(Event)},
        **{"Thread": bound(Thread), "current_thread": current, "get_ident": lambda: id(timeline.current)},
    )
    queues = SimpleNamespace(Queue=bound(Queue), SimpleQueue=bound(Queue), Empty=queue.Empty, Full=queue.Full)
    return {
        threading: threads,
        queue: queues,
        time: SimpleNamespace(monotonic=now, time=now, perf_counter=now, sleep=sleep),
    }


@contextlib.contextmanager
def installed(timeline: Timeline, more: Mapping[tuple[str, str], object]) -> Iterator[None]:
    """Let the client's modules run on a timeline; `more` takes the place of what (module, name) names."""
    places = stand_ins(timeline)
    changes = [(sys.modules[module], name, value) for (module, name), value in more.items()]
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(_PATCHED):
            changes += [
                (module, name, places[value])
                for name, value in vars(module).items()
                if isinstance(value, type(sys) | type) and value in places
            ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
