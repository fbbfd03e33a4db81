"""Assemble the copies recorded for a parameter into physical tensors with boxes; prove that they cover it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorhub_core.engine.geometry import Piece, overlap, subtract
from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.layout.types import Box

PADDING_VALUES = (0.0, 1.0)
"""Constants that weight loaders pad with (1 for scales); another one was most likely computed from a weight."""
Region = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded copy into a parameter; `order` tells which came later."""

    logical: LogicalTensor
    piece: Piece
    order: int


@dataclass(frozen=True, slots=True)
class Fill:
    """One recorded fill of a box of a parameter with a constant."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    value: float
    order: int


@dataclass(frozen=True, slots=True)
class View:
    """How a physical tensor lies in its parameter: fix the axes of `select`, then permute to `order`.

    `order` [axes of the view]: an axis of the parameter, or None for a new axis of size 1.
    """

    select: tuple[tuple[int, int], ...]
    order: tuple[int | None, ...]

    def of(self, tensor: Any) -> Any:
        """Return the view of a tensor with `select`, `permute` and `unsqueeze`."""
        left = list(range(tensor.dim()))
        for axis, index in sorted(self.select, reverse=True):
            tensor = tensor.select(axis, index)
            left.remove(axis)
        tensor = tensor.permute([left.index(axis) for axis in self.order if axis is not None])
        for place in [place for place, axis in enumerate(self.order) if axis is None]:
            tensor = tensor.unsqueeze(place)
        return tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One physical tensor to register."""

    name: str
    view: View
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The physical tensors of one parameter; `padding` = (start, shape, value) boxes of the parameter outside them."""

    parts: list[Part] = field(default_factory=list)
    padding: list[tuple[tuple[int, ...], tuple[int, ...], float]] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)


def assemble(name: str, shape: tuple[int, ...], entries: Sequence[Entry], fills: Sequence[Fill]) -> Assembly:
    """Turn the copies and fills recorded for a parameter of `shape` into physical tensors.

    What cannot be expressed is named in `obstacles`: then nothing of the rest may be used.
    """
    result = Assembly()
    result.obstacles.extend(
        f"{name}: the loader fills it with {fill.value}" for fill in fills if fill.value not in PADDING_VALUES
    )
    living = _living(name, shape, entries, fills, result)
    if not result.obstacles and living:
        _add_parts(name, shape, living, result)
    return result


def _dest_shape(entry: Entry, rank: int) -> tuple[int, ...]:
    sizes = [1] * rank
    for _, axis, size in entry.piece.axes:
        sizes[axis] = size
    return tuple(sizes)


def _living(
    name: str, shape: tuple[int, ...], entries: Sequence[Entry], fills: Sequence[Fill], result: Assembly
) -> list[Entry]:
    """Return the copies whose bytes are still there at the end, and note the padding around them."""
    rank = len(shape)
    boxes: list[tuple[Region, Entry | Fill]] = [
        *(((entry.piece.dest_start, _dest_shape(entry, rank)), entry) for entry in entries),
        *(((fill.start, fill.shape), fill) for fill in fills),
    ]
    dropped: set[int] = set()
    for (early, one), (late, other) in _overlapping(boxes):
        if isinstance(one, Fill):
            continue
        if overlap(early, late) == early:
            dropped.add(id(one))
        elif id(one) not in dropped:
            result.obstacles.append(f"{name}: the loader writes a part of it twice ({_source(one)}, {_source(other)})")
    living = [entry for entry in entries if id(entry) not in dropped]
    _note_padding(name, shape, living, fills, result)
    return living


def _source(write: Entry | Fill) -> str:
    return write.logical.name if isinstance(write, Entry) else f"fill with {write.value}"


def _overlapping(
    boxes: Iterable[tuple[Region, Entry | Fill]],
) -> Iterable[tuple[tuple[Region, Entry | Fill], tuple[Region, Entry | Fill]]]:
    """Yield (earlier, later) pairs of writes that overlap, by a sweep along the first axis."""
    active: list[tuple[Region, Entry | Fill]] = []
    for box in sorted(boxes, key=lambda box: box[0][0][:1]):
        (start, shape), write = box
        if start:
            active = [other for other in active if other[0][0][0] + other[0][1][0] > start[0]]
        for other in active:
            if overlap(other[0], (start, shape)) is not None:
                yield (other, box) if other[1].order < write.order else (box, other)
        active.append(box)


def _note_padding(
    name: str, shape: tuple[int, ...], living: Sequence[Entry], fills: Sequence[Fill], result: Assembly
) -> None:
    rank = len(shape)
    copied = [(entry.piece.dest_start, _dest_shape(entry, rank)) for entry in living]
    if sum(math.prod(box[1]) for box in copied) == math.prod(shape):
        return
    for rest in subtract((0,) * rank, shape, copied):
        uncovered = list(subtract(*rest, [(fill.start, fill.shape) for fill in fills]))
        if uncovered:
            result.obstacles.append(f"{name}{list(shape)}: nothing is written to {_text(uncovered[0])}")
        for fill in sorted(fills, key=lambda fill: fill.order):
            common = overlap(rest, (fill.start, fill.shape))
            if common is not None:
                result.padding.append((*common, fill.value))


def _text(box: Region) -> str:
    return "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(*box, strict=True)) + "]"


def _add_parts(name: str, shape: tuple[int, ...], living: Sequence[Entry], result: Assembly) -> None:
    ranks = {len(entry.logical.shape) for entry in living}
    rank = max(ranks)
    if len(ranks) > 1:
        result.obstacles.append(f"{name}: its sources have different numbers of axes")
        return
    lead = len(shape) - rank
    if lead >= 0 and all(b == a + lead for entry in living for a, b, _ in entry.piece.axes):
        # Boxes of fewer axes are aligned to the tensor's last axes: an expert is one index of the first axis.
        whole = View((), tuple(range(len(shape))))
        result.parts.append(Part(name, whole, tuple(_box(entry, whole) for entry in living)))
        return
    mapped: dict[int, int] = {}
    for entry in living:
        for a, b, _ in entry.piece.axes:
            if mapped.setdefault(a, b) != b:
                result.obstacles.append(f"{name}: its sources are laid out along different axes")
                return
    if len(set(mapped.values())) < len(mapped):
        result.obstacles.append(f"{name}: two axes of a source lie along one axis of it")
        return
    _add_views(name, shape, living, tuple(mapped.get(axis) for axis in range(rank)), result)


def _add_views(
    name: str, shape: tuple[int, ...], living: Sequence[Entry], order: tuple[int | None, ...], result: Assembly
) -> None:
    """Split a parameter along the axes that no source has (experts, for example), one physical tensor per index."""
    split = [axis for axis in range(len(shape)) if axis not in order]
    by_index: dict[tuple[int, ...], list[Entry]] = {}
    for entry in living:
        by_index.setdefault(tuple(entry.piece.dest_start[axis] for axis in split), []).append(entry)
    for index in itertools.product(*(range(shape[axis]) for axis in split)):
        if (found := by_index.get(index)) is None:
            continue
        view = View(tuple(zip(split, index, strict=True)), order)
        suffix = "".join(f"[{i}]" for i in index)
        result.parts.append(Part(name + suffix, view, tuple(_box(entry, view) for entry in found)))


def _box(entry: Entry, view: View) -> Box:
    sizes = [1] * len(entry.logical.shape)
    for axis, _, size in entry.piece.axes:
        sizes[axis] = size
    local = tuple(0 if axis is None else entry.piece.dest_start[axis] for axis in view.order)
    return Box(entry.logical.name, entry.piece.source_start, tuple(sizes), local)
