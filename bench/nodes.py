"""A process with one worker that does what a script tells it; what `remote.Remote("nodes.py")` starts.

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable
from typing import Any

from content import SENTINEL, Arrays, digest, make
from rawread import batches, read_all
from remote import Say, answer

from tensorhub_core import Worker, connect
from tensorhub_core.transport.base import Region, Transport
from tensorhub_core.transport.registry import make_transport


def cpu_s() -> float:
    """Return the CPU seconds that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Node:
    """The worker of this process, its arrays, and raw reads beside it."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.worker: Worker | None = None
        self.arrays: Arrays = {}
        self._raw: Transport | None = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        """Return what this node can be told."""
        names = [name for name in dir(self) if name.startswith("do_")]
        return {name.removeprefix("do_"): getattr(self, name) for name in names}

    def do_connect(self, **arguments: Any) -> None:
        """Connect a worker, in place of the last one."""
        if self.worker is not None:
            self.worker.close()
        self.worker = connect(**arguments)

    def do_make(self, total_bytes: int, count: int, seed: int, blank: bool = False) -> str:
        """Make the arrays, random or all SENTINEL, or fill those that were made before; return their digest."""
        made = make(total_bytes, count, seed)
        if self.arrays:
            for name, array in made.items():
                self.arrays[name][:] = array
        else:
            self.arrays = made
        if blank:
            self.do_fill(SENTINEL)
        return digest(self.arrays)

    def do_register(self) -> None:
        """Register the arrays."""
        assert self.worker is not None
        self.worker.register(self.arrays)

    def do_publish(self, version: int, fresh: bool = False) -> int:
        """Publish the arrays."""
        assert self.worker is not None
        return int(self.worker.publish(version, fresh=fresh))

    def do_unpublish(self, timeout_s: float) -> dict[str, float]:
        """Take them back; say when that began and ended."""
        assert self.worker is not None
        began = time.monotonic()
        self.worker.unpublish(timeout_s)
        return {"began_s": began, "ended_s": time.monotonic()}

    def do_replicate(self, version: int | str = "latest", timeout_s: float = 60.0, update: bool = False) -> Any:
        """Read a version; say when it began, had its first verified byte, ended, and who was read from."""
        assert self.worker is not None
        first: dict[str, float] = {}

        def progress(done_bytes: int, total_bytes: int, source: str) -> None:
            if done_bytes:
                first.setdefault(source, time.monotonic())
            self._say([done_bytes, total_bytes, source])

        call = self.worker.update if update else self.worker.replicate
        began = time.monotonic()
        got = call(version, timeout_s=timeout_s, progress=progress)
        return {"version": int(got), "began_s": began, "ended_s": time.monotonic(), "first_s": first}

    def do_version(self) -> int | None:
        """Return the version that is held."""
        assert self.worker is not None
        return None if self.worker.version is None else int(self.worker.version)

    def do_counters(self) -> dict[str, int]:
        """Return the worker's counters."""
        assert self.worker is not None
        return dataclasses.asdict(self.worker.counters)

    def do_digest(self) -> str:
        """Return the digest of the arrays as they are."""
        return digest(self.arrays)

    def do_fill(self, value: int) -> None:
        """Overwrite every byte."""
        for array in self.arrays.values():
            array[:] = value

    def do_is_filled(self, value: int) -> bool:
        """Tell whether every byte is `value`."""
        return all(bool((array == value).all()) for array in self.arrays.values())

    def do_cpu(self) -> float:
        """Return the CPU seconds taken so far."""
        return cpu_s()

    def do_raw_serve(self, transport: str, interface: str | None = None) -> dict[str, Any]:
        """Serve the arrays through a transport alone."""
        self._raw = make_transport(transport, interface=interface)
        self._raw.register([Region(array.ctypes.data, array.nbytes) for array in self.arrays.values()])
        addresses = [array.ctypes.data for array in self.arrays.values()]
        return {"description": self._raw.describe().hex(), "addresses": addresses}

    def do_raw_read(
        self, transport: str, description: str, addresses: list[int], chunk_bytes: int, interface: str | None = None
    ) -> dict[str, float]:
        """Fill the arrays by raw reads of a node that `raw_serve`s."""
        if self._raw is None:
            self._raw = make_transport(transport, interface=interface)
            self._raw.register([Region(array.ctypes.data, array.nbytes) for array in self.arrays.values()])
        mine = self.arrays.values()
        runs = [(array.ctypes.data, there, array.nbytes) for array, there in zip(mine, addresses, strict=True)]
        began = time.monotonic()
        peer = self._raw.attach(bytes.fromhex(description))
        read_all(self._raw, peer, batches(runs, chunk_bytes))
        return {"began_s": began, "ended_s": time.monotonic()}

    def close(self) -> None:
        """Close the worker and the raw transport."""
        if self.worker is not None:
            self.worker.close()
        if self._raw is not None:
            self._raw.shutdown()


def main() -> None:
    """Serve commands until the input ends."""
    made: list[Node] = []

    def begin(say: Say) -> dict[str, Callable[..., Any]]:
        made.append(Node(say))
        return made[0].commands()

    answer(begin)
    made[0].close()


if __name__ == "__main__":
    main()
