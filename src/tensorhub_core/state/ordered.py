"""A set that remembers in which order its members came: what a machine decides must not hang on the hashes of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedSet(Generic[T]):
    """What a step uses of a set's interface; `pop` takes the oldest member."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: dict[T, None] = {}

    def add(self, member: T) -> None:
        """Put a member behind the others, unless it is there."""
        self._members.setdefault(member)

    def update(self, members: Iterable[T]) -> None:
        """Put members behind the others."""
        for member in members:
            self._members.setdefault(member)

    def discard(self, member: T) -> None:
        """Take a member out, if it is there."""
        self._members.pop(member, None)

    def pop(self) -> T:
        """Take out and return the oldest member; raises StopIteration if there is none."""
        member = next(iter(self._members))
        del self._members[member]
        return member

    def __len__(self) -> int:
        return len(self._members)
