"""A serving process for the conformance suite: serves seeded bytes and obeys one-word commands on stdin."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.prefix_word import word_of
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.registry import make_transport

TAG = 0x1234_5678


def seeded(seed: int, size: int) -> NDArray[np.uint8]:
    """Return the bytes that a peer of this seed serves."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def main() -> None:
    """Serve until stdin ends."""
    name, seed, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, 3, 0x22, -1, 0)
    memory = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
    memory[:] = seeded(seed, size)
    transport = make_transport(name)
    transport.register([Region(address, size)])
    say({"description": transport.describe().hex(), "address": address})
    for line in sys.stdin:
        if line.strip() == "revoke":
            # What a worker does before its memory is freed.
            transport.revoke()
            libc.munmap(address, size)
        elif line.strip() == "count":
            # What a worker does whose copy is followed.
            threading.Thread(target=count_up, args=(address,), daemon=True).start()
        elif line.strip() == "serve":
            transport.register([Region(address, size)])
            say({"description": transport.describe().hex(), "address": address})
            continue
        say({})


def count_up(address: int, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Write one word after the other at an address, in one store each."""
    word, segments = ctypes.c_uint64.from_address(address), 0
    while goes_on():
        segments += 1
        word.value = word_of(TAG, segments)


def say(message: object) -> None:
    """Print one answer."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
