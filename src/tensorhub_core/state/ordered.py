"""A set that remembers in which order its members came: what a machine decides must not hang on the hashes of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


class OrderedSet(dict[T, None]):
    """What a step uses of a set's interface. A dictionary itself, because every step makes two and asks for nothing."""

    __slots__ = ()

    def add(self, member: T) -> None:
        """Put a member behind the others, unless it is there."""
        self[member] = None

    def add_all(self, members: Iterable[T]) -> None:
        """Put members behind the others."""
        for member in members:
            self[member] = None

    def discard(self, member: T) -> None:
        """Take a member out, if it is there."""
        self.pop(member, None)

    def take(self) -> T:
        """Take out and return the oldest member; raises StopIteration if there is none."""
        member = next(iter(self))
        del self[member]
        return member
