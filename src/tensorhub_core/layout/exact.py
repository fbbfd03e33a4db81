"""Choose what of a segment is read: all of it, or cuts that are (nearly) what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.cuts import Cuts, ExactPolicy, form_of_box
from tensorhub_core.layout.regions import Point

WHOLE = 0
"""The number of the choice to read a segment as it is, which is needed as it is."""
NO_CUT = -1
"""A part is needed that is not worth a cut of its own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is read of a segment: runs in bytes, and the box `start`, `length` of the segment's that they are."""

    offset_bytes: int
    run_bytes: int
    stride_bytes: int
    count: int
    start: Point
    length: Point

    @property
    def length_bytes(self) -> int:
        """Return the bytes that are read."""
        return self.run_bytes * self.count


@dataclass(frozen=True, slots=True)
class Need:
    """A box of a segment that is needed; `shape` is the segment's, everything in elements of `item_bytes`.

    `lands` tells whether it goes to one run of the destination.
    """

    start: Point
    length: Point
    shape: Point
    item_bytes: int
    lands: bool = False


class Choices:
    """What the reads of one plan take of their segments; equal choices have one number."""

    def __init__(self, policies: Sequence[ExactPolicy | None]) -> None:
        """`policies`: by source, None = whole segments."""
        self._policies = list(policies)
        self._list: list[Choice | None] = [None]
        self._numbers: dict[Choice, int] = {}
        self._found: dict[tuple[ExactPolicy, Point, Point, Point, int], Choice | None] = {}
        self._together: dict[tuple[ExactPolicy, tuple[Need, ...]], tuple[int, ...]] = {}

    def __getitem__(self, number: int) -> Choice | None:
        """Return a choice; None = the whole segment."""
        return self._list[number]

    def for_one(self, source: int, need: Need) -> int:
        """Return what to read for a need that is alone with its segment."""
        if need.length == need.shape:
            return WHOLE
        policy = self._policies[source]
        choice = None if policy is None else self._cheapest(policy, need)
        if policy is None or choice is None or not _is_worth_it(policy, need, choice.length_bytes):
            return NO_CUT
        return self._number(choice)

    def lands(self, number: int, need: Need) -> bool:
        """Tell whether a need goes to one run and nothing else would be read for it; of NO_CUT, whether it might."""
        if number == NO_CUT or not need.lands:
            return need.lands
        choice = self._list[number]
        return need.length == (need.shape if choice is None else choice.length)

    def for_several(self, source: int, needs: tuple[Need, ...]) -> tuple[int, ...]:
        """Return what to read for several needs of one segment: one number for all of them, or one for each."""
        policy = self._policies[source]
        if policy is None:
            return (WHOLE,)
        numbers = self._together.get((policy, needs))
        if numbers is None:
            numbers = self._together[policy, needs] = self._for_several(policy, needs)
        return numbers

    def _for_several(self, policy: ExactPolicy, needs: tuple[Need, ...]) -> tuple[int, ...]:
        one = needs[0]
        start = tuple(map(min, zip(*(need.start for need in needs), strict=True)))
        ends = ([at + size for at, size in zip(need.start, need.length, strict=True)] for need in needs)
        length = tuple(max(end) - at for at, end in zip(start, zip(*ends, strict=True), strict=True))
        around = self._cheapest(policy, Need(start, length, one.shape, one.item_bytes))
        if around is not None and not _is_worth_it(policy, one, around.length_bytes):
            around = None
        each = [self._cheapest(policy, need) for need in needs]
        apart = [choice for choice in each if choice is not None]
        apart_bytes = sum(choice.length_bytes for choice in apart)
        if len(apart) == len(needs) and _is_worth_it(policy, one, apart_bytes):
            # Every cut costs about as much as a run does, but what lands where it belongs is not copied once more.
            direct = all(need.lands and need.length == cut.length for need, cut in zip(needs, apart, strict=True))
            cost_bytes = 0 if direct else policy.min_run_bytes * (len(apart) - 1)
            if around is None or apart_bytes + cost_bytes <= around.length_bytes:
                return tuple(map(self._number, apart))
        return (WHOLE,) if around is None else (self._number(around),)

    def _cheapest(self, policy: ExactPolicy, need: Need) -> Choice | None:
        key = (policy, need.start, need.length, need.shape, need.item_bytes)
        if key not in self._found:
            self._found[key] = cheapest(need, policy)
        return self._found[key]

    def _number(self, choice: Choice) -> int:
        number = self._numbers.setdefault(choice, len(self._list))
        if number == len(self._list):
            self._list.append(choice)
        return number

    def lengths(self) -> NDArray[np.int64]:
        """Return the bytes of every choice, i64 [choices]; 0 for the whole segment."""
        return np.array([0 if choice is None else choice.length_bytes for choice in self._list], np.int64)

    def cuts(self, segment: NDArray[np.int32], number: NDArray[np.int64]) -> Cuts:
        """Return cuts of segments by the numbers of their choices; both are [cuts]."""
        rows = np.array(
            [(0, 0, 0, 0) if c is None else (c.offset_bytes, c.run_bytes, c.stride_bytes, c.count) for c in self._list],
            np.int64,
        )
        return Cuts(segment.astype(np.int64), *np.ascontiguousarray(rows[number].T))


def cheapest(need: Need, policy: ExactPolicy) -> Choice | None:
    """Return the fewest bytes around what is needed that are one run, or equal runs that are long enough or few."""
    best: Choice | None = None
    # What lies before an axis makes the runs' number, what lies behind it their length.
    for axis in range(len(need.shape) + 1):
        box = _filled(need, 0, axis), _filled(need, axis, len(need.shape))
        start, length = (tuple(one + other) for one, other in zip(*box, strict=True))
        form = form_of_box(start, length, need.shape)
        assert form is not None, "filled boxes have two levels"
        offset, run, stride = (part * need.item_bytes for part in form[:3])
        choice = Choice(offset, run, stride, form[3], start, length)
        if best is None or (choice.length_bytes, choice.count) < (best.length_bytes, best.count):
            best = choice if _has_fair_runs(policy, need, choice) else best
    return best


def _has_fair_runs(policy: ExactPolicy, need: Need, choice: Choice) -> bool:
    cost_bytes = choice.length_bytes + choice.count * policy.min_run_bytes
    return choice.count == 1 or choice.run_bytes >= policy.min_run_bytes or _is_worth_it(policy, need, cost_bytes)


def _filled(need: Need, begin: int, end: int) -> tuple[Point, Point]:
    """Widen a box on axes `begin..end` until it is one run on them: behind the first that matters, all are full."""
    start, length, shape = need.start[begin:end], need.length[begin:end], need.shape[begin:end]
    first = next((axis for axis, size in enumerate(length) if size > 1), len(length)) + 1
    return (*start[:first], *(0,) * len(start[first:])), (*length[:first], *shape[first:])


def _is_worth_it(policy: ExactPolicy, need: Need, read_bytes: int) -> bool:
    segment_bytes = need.item_bytes * prod(need.shape)
    return segment_bytes >= policy.min_segment_bytes and read_bytes <= policy.max_share * segment_bytes
