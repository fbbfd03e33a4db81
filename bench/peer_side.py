"""One side of the peers' bench, source or sink; what `remote.Remote("peer_side.py", ...)` starts.

peer_side.py SIDE SOURCE_FILE SINK_FILE       (numbers of inherited memory files)
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import contenders
import numpy as np
from remote import Say, answer
from shapes import Shape, memory_of, shape_of


def ways(transports: tuple[str, ...]) -> dict[str, type[contenders.Way]]:
    """Return the ways by name, those on the product's transports among them."""
    found: dict[str, type[contenders.Way]] = {
        "memcpy": contenders.Memcpy,
        "process_vm_readv": contenders.VmReadv,
        "raw TCP": contenders.RawTcp,
        "ZeroMQ": contenders.Zmq,
        "gloo": contenders.Gloo,
        "gloo flat": contenders.GlooFlat,
        "Mooncake TCP": contenders.Mooncake,
    }
    if transports:
        import ours

        for name in transports:
            found[f"raw {name}, one descriptor"] = ours.way_on(ours.OneDescriptor, name)
            found[f"raw {name}"] = ours.way_on(ours.Transported, name)
            found[f"ours {name}"] = ours.way_on(ours.Executed, name)
            found[f"ours {name}, unverified"] = ours.way_on(ours.Executed, name, checked=False)
    return found


def cpu_s() -> float:
    """Return the CPU seconds that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Side:
    """Carries out the driver's commands."""

    def __init__(self, files: tuple[int, int], is_source: bool) -> None:
        self._source, self._sink = (memory_of(file) for file in files)
        self._is_source = is_source
        self._made: dict[str, contenders.Way] = {}
        self._shape: Shape | None = None

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """Return them by name."""
        names = ("fill", "join_gloo", "offer", "accept", "run", "cpu", "blank", "wrong", "close")
        return {name: getattr(self, name) for name in names}

    def fill(self) -> None:
        """Fill the source's memory with repeating random bytes."""
        block = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
        for begin in range(0, len(self._source), len(block)):
            self._source[begin : begin + len(block)] = block[: len(self._source) - begin]

    def join_gloo(self, port: int) -> None:
        """Make gloo's process group."""
        contenders.join_gloo(0 if self._is_source else 1, port)

    def _make(self, way: str, transports: list[str], case: str, total_bytes: int) -> contenders.Way:
        if self._shape is None or self._shape.case != case:
            self._shape = shape_of(case, total_bytes)
        kind = ways(tuple(transports))[way]
        self._made[way] = kind(self._shape, self._source if self._is_source else self._sink, self._source)
        return self._made[way]

    def offer(self, **what: Any) -> Any:
        """Make a way and serve by it."""
        return self._make(**what).offer()

    def accept(self, offer: Any, **what: Any) -> None:
        """Make a way and connect to its source."""
        self._make(**what).accept(offer)

    def run(self, way: str) -> tuple[float, float]:
        """Run a way once; return the seconds and the CPU seconds."""
        made, cpu, began = self._made[way], cpu_s(), time.perf_counter()
        made.run()
        return time.perf_counter() - began, cpu_s() - cpu

    def cpu(self) -> float:
        """Return the CPU seconds so far."""
        return cpu_s()

    def blank(self) -> None:
        """Overwrite the sink's memory."""
        self._sink[:] = 0

    def wrong(self) -> int:
        """Return how many tensors of the sink differ from the source's."""
        assert self._shape is not None
        pairs = zip(self._shape.tensors(self._source), self._shape.tensors(self._sink), strict=True)
        return sum(not np.array_equal(a, b) for a, b in pairs)

    def close(self, way: str) -> None:
        """Give back what a way holds."""
        made = self._made.pop(way, None)
        if made is not None:
            made.close()


def main() -> None:
    """Serve commands until the input ends."""
    source, sink = int(sys.argv[2]), int(sys.argv[3])

    def begin(say: Say) -> Mapping[str, Callable[..., Any]]:
        return Side((source, sink), sys.argv[1] == "source").commands()

    answer(begin)


if __name__ == "__main__":
    main()
