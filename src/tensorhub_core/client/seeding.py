"""Hold the newest versions of a model in host memory, in the layout of whoever holds them (`tensorhub seed`).

There is one buffer more than versions to hold, each a replica of its own: the oldest one is filled anew while the
others serve, so that no version goes before its successor is whole. A shard of a version is a worker of this process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

from tensorhub_core.client.host_memory import available_bytes
from tensorhub_core.client.observer import Held, Observer
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import (
    ConfigError,
    DeadlineExceeded,
    ServerUnreachable,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.types import Layout
from tensorhub_core.limits import start_thread
from tensorhub_core.observe.log import get_logger

MOST_VERSIONS = len(ascii_lowercase) - 1
_LOOK_EVERY_S = 0.5
_AGAIN_S = 1.0
_POLL_S = 0.02

Connect = Callable[[str, int, int], Worker]
"""Connect as (replica, shard, num_shards)."""
Layouts = tuple[Layout, ...]
"""Those of all shards of one replica, by shard."""


@dataclass(slots=True)
class Buffer:
    """Memory for one version: a replica of this process."""

    replica: str
    workers: list[Worker] = field(default_factory=list)
    layouts: Layouts = ()
    version: Version | None = None


class Seeder:
    """The buffers of one process; its calls come from one thread, `stopped` may turn true at any time."""

    def __init__(
        self,
        connect: Connect,
        name: str,
        versions: int,
        stopped: Callable[[], bool],
        limit_bytes: int | None = None,
    ) -> None:
        """Hold up to `versions` versions as replicas `name`-a, `name`-b, ...; raises ConfigError for another count.

        `limit_bytes`: the most memory to take for all of them; None = what the machine has.
        """
        if not 1 <= versions <= MOST_VERSIONS:
            raise ConfigError(f"a seed holds 1 to {MOST_VERSIONS} versions, not {versions}")
        self._connect, self._stopped, self._limit_bytes = connect, stopped, limit_bytes
        self.buffers = [Buffer(f"{name}-{letter}") for letter in ascii_lowercase[: versions + 1]]

    def follow(self, observer: Observer, holds: Callable[[Version], None]) -> None:
        """Take every newest version until `stopped()`; `holds` hears of each that is held.

        What goes wrong is logged and tried again, but for memory that is not there: raises ConfigError.
        """
        for buffer in self.buffers:  # so that a keeper is known to be there before the first version is published
            buffer.workers.append(self._connect(buffer.replica, 0, 1))
        newest: Version | None = None
        while not self._stopped():
            try:
                version = observer.wait(None if newest is None else newest.key, timeout_s=_LOOK_EVERY_S)
                layouts = self._choose(observer.holders(int(version), timeout_s=10.0)[1])
                if layouts is not None and self.take(version, layouts):
                    newest = version
                    holds(version)
                    continue
            except ConfigError:
                raise
            except (DeadlineExceeded, ServerUnreachable):
                continue
            except VersionUnavailable as error:  # another one has come meanwhile, or will
                get_logger("client").info("%s", error)
            except TensorHubError as error:
                get_logger("client").warning("trying again in %g s: %s", _AGAIN_S, error)
            self._pause(_AGAIN_S)

    def take(self, version: Version, layouts: Layouts) -> bool:
        """Fill the oldest buffer with a version, laid out like this; return False if `stopped()` came first.

        Raises what the workers raise: then the buffer holds nothing.
        """
        buffer = min(self.buffers, key=lambda each: (-1, -1) if each.version is None else each.version.key)
        buffer.version = None
        try:
            if buffer.layouts != layouts:
                self._prepare(buffer, layouts)
            calls = [lambda worker=worker: worker.update(int(version)) for worker in buffer.workers]
            if not together(calls, self._stopped):
                return False
        except (DeadlineExceeded, VersionUnavailable):
            raise
        except BaseException:
            self._empty(buffer)
            raise
        buffer.version = version
        return True

    def close(self) -> None:
        """Hand over and leave with all workers at once; bounded by what their `close()` takes."""
        workers = [worker for buffer in self.buffers for worker in buffer.workers]
        together([worker.close for worker in workers])

    def _prepare(self, buffer: Buffer, layouts: Layouts) -> None:
        """Make a buffer's workers anew: memory of the old layout goes before that of the new one is taken."""
        others = [each.layouts for each in self.buffers if each is not buffer]
        check_memory(layouts, others, self._limit_bytes, available_bytes())
        self._empty(buffer)
        for shard in range(len(layouts)):
            buffer.workers.append(self._connect(buffer.replica, shard, len(layouts)))
        for worker, layout in zip(buffer.workers, layouts, strict=True):
            worker.mirror(layout)
        buffer.layouts = layouts

    def _empty(self, buffer: Buffer) -> None:
        workers, buffer.workers, buffer.layouts = buffer.workers, [], ()
        together([worker.close for worker in workers])

    def _choose(self, held: Iterable[Held]) -> Layouts | None:
        known = [buffer.layouts for buffer in self.buffers if buffer.layouts]
        return choose_layouts(held, {buffer.replica for buffer in self.buffers}, known)

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self._stopped() and time.monotonic() < end_s:
            time.sleep(_POLL_S)


def choose_layouts(held: Iterable[Held], ours: set[str], known: Sequence[Layouts]) -> Layouts | None:
    """Return the layouts of one replica that is not ours and has all shards, None if there is none.

    Those that everyone can read come before processed ones, the publisher's dtypes before converted ones, and what
    memory is there for before others.
    """
    replicas: dict[str, dict[int, Held]] = {}
    for row in held:
        if row.replica not in ours:
            replicas.setdefault(row.replica, {})[row.shard] = row
    found: list[tuple[bool, bool, bool, int, str, Layouts]] = []
    for replica, shards in replicas.items():
        layouts = tuple(shards[shard].layout for shard in sorted(shards))
        if sorted(shards) == list(range(shards[min(shards)].num_shards)):
            processed = any(layout.tag for layout in layouts)
            converted = any(row.converted for row in shards.values())
            found.append((processed, converted, layouts not in known, len(layouts), replica, layouts))
    return min(found, key=lambda entry: entry[:5])[5] if found else None


def check_memory(layouts: Layouts, others: Sequence[Layouts], limit_bytes: int | None, available: int | None) -> None:
    """Raise ConfigError if a version of these layouts does not fit beside the other buffers, filled or not yet.

    Of the limit all of them take their part; of what is available only those that hold nothing yet.
    """
    one = sum(map(bytes_of_layout, layouts))
    sizes = [sum(map(bytes_of_layout, other)) or one for other in others]
    text = f"a version takes {one:,} bytes and {len(sizes) + 1} buffers {one + sum(sizes):,}: the old one serves while "
    text += "the new one comes"
    if limit_bytes is not None and one + sum(sizes) > limit_bytes:
        raise ConfigError(f"{text}; --memory allows {limit_bytes:,}")
    missing = one + sum(size for size, other in zip(sizes, others, strict=True) if not other)
    if available is not None and missing > available:
        raise ConfigError(f"{text}; {available:,} bytes of host memory are available")


def bytes_of_layout(layout: Layout) -> int:
    """Return how much memory a shard of this layout takes."""
    specs = (layout.tensors[group[0]] for group in layout.storages)
    return sum(math.prod(spec.shape) * dtype_bytes(spec.dtype) for spec in specs)


def together(calls: Sequence[Callable[[], object]], stopped: Callable[[], bool] = lambda: False) -> bool:
    """Make calls at the same time, each on a thread; return True when all have ended, False once `stopped()`.

    Raises the first error, when all have ended. The threads do not keep the process alive.
    """
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), name="tensorhub-seed", daemon=True) for call in calls]
    for thread in threads:
        start_thread(thread)
    while any(thread.is_alive() for thread in threads):
        if stopped():
            return False
        time.sleep(_POLL_S)
    if errors:
        raise next((error for error in errors if not isinstance(error, StateError)), errors[0])
    return True
