"""The word in which a worker shows how far its unfinished copy is: eight bytes of registered memory, read by followers.

It is a hint, from anyone: what is read because of it is verified like everything else. It names the version by the
first bytes of its manifest's digest, mixed with the count, so that neither the progress of another version nor a word
of which only a part was new when it was read counts for anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.transport.base import Region

PAGE_BYTES = 4096
WORD_BYTES = 8
_LANDING_BYTES = 64
"""Where landing places begin: in another line of the cache than the worker's own word."""
MOST_LANDINGS = (PAGE_BYTES - _LANDING_BYTES) // WORD_BYTES
_LOW = (1 << 32) - 1
_ODD = 0x9E3779B1
"""Odd, so that two counts never give the same product: a word from halves of two others is none."""


def tag_of(digest: bytes) -> int:
    """Return what stands for a manifest in a word."""
    return int.from_bytes(digest[:4], "little")


def word_of(tag: int, segments: int) -> int:
    """Return the word that says how many leading segments are verified; 0 says nothing."""
    return ((tag ^ segments * _ODD) & _LOW) << 32 | segments if 0 < segments <= _LOW else 0


def segments_in(word: int, tag: int, most: int) -> int:
    """Return how many segments a word from anyone says are verified, 0 if it says nothing of this manifest."""
    segments = word & _LOW
    return segments if segments <= most and word == word_of(tag, segments) else 0


class PrefixPage:
    """A page of this process's memory: the worker's own word, and places where the words of its sources land."""

    def __init__(self) -> None:
        """Allocate; a whole page, so that nothing else is registered with it."""
        memory = np.zeros(2 * PAGE_BYTES, np.uint8)
        skip = -memory.ctypes.data % PAGE_BYTES
        self._memory: NDArray[np.uint8] = memory[skip : skip + PAGE_BYTES]
        self.address: int = self._memory.ctypes.data
        self._words = (ctypes.c_uint64 * (PAGE_BYTES // WORD_BYTES)).from_address(self.address)

    @property
    def region(self) -> Region:
        """Return what to register with a transport."""
        return Region(self.address, PAGE_BYTES)

    def show(self, tag: int, segments: int) -> None:
        """Say how much is verified of the version with this tag; any thread."""
        self._words[0] = word_of(tag, segments)

    def clear(self) -> None:
        """Say nothing; any thread."""
        self._words[0] = 0

    def landing(self, number: int) -> int:
        """Return the address of a landing place, of which there are `MOST_LANDINGS`, with nothing in it."""
        self._words[_LANDING_BYTES // WORD_BYTES + number] = 0
        return self.address + _LANDING_BYTES + WORD_BYTES * number

    def landed(self, number: int) -> int:
        """Return the word that has landed in a place."""
        return self._words[_LANDING_BYTES // WORD_BYTES + number]


def with_page(regions: Sequence[Region], page: PrefixPage) -> list[Region]:
    """Return the regions to register for memory: its own, and the page if there is anything to read."""
    return [*regions, page.region] if regions else []
