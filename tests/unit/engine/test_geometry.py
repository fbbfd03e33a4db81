"""Strided copies against numpy: filling by boxes equals doing the copy itself, or the copy is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.engine.geometry import (
    NotABox,
    Piece,
    Strided,
    contiguous,
    coordinates,
    overlap,
    pieces,
    region,
    subtract,
    through,
)

Array = np.ndarray


def strided(view: Array, base: Array) -> Strided:
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
    return Strided(offset, view.shape, tuple(stride // view.itemsize for stride in view.strides))


def apply(found: list[Piece], source: Array, dest: Array) -> None:
    for piece in found:
        src_shape, dst_shape = [1] * source.ndim, [1] * dest.ndim
        for a, b, size in piece.axes:
            src_shape[a], dst_shape[b] = size, size
        src = source[tuple(slice(at, at + n) for at, n in zip(piece.source_start, src_shape, strict=True))]
        dst = dest[(*(slice(at, at + n) for at, n in zip(piece.dest_start, dst_shape, strict=True)), ...)]
        order_a = [a for a, _, _ in piece.axes]
        order_b = [b for _, b, _ in piece.axes]
        rest_a = [a for a in range(source.ndim) if a not in order_a]
        rest_b = [b for b in range(dest.ndim) if b not in order_b]
        sizes = tuple(size for _, _, size in piece.axes)
        block = src.transpose(order_a + rest_a).reshape(sizes)
        target = dst.transpose(order_b + rest_b)
        target[...] = block.reshape(sizes + (1,) * len(rest_b))


@st.composite
def arrays_and_views(draw: st.DrawFn) -> tuple[Array, Array, Array, Array]:
    """A source and a destination with views of equal shape, made by slicing, splitting, merging and permuting axes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    source = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    view = source
    for _ in range(draw(st.integers(0, 4))):
        view = draw(st.sampled_from(list(_views(view, draw))))
    if view.size == 0:
        view = source
    order = draw(st.permutations(range(view.ndim)))
    pads = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(view.ndim)]
    dest_shape = [size + sum(pad) for size, pad in zip(view.shape, pads, strict=True)]
    dest = np.full([dest_shape[axis] for axis in order], -1, dtype=np.int64)
    back = dest.transpose(np.argsort(order)) if view.ndim else dest
    window = back[(*(slice(pad[0], pad[0] + size) for pad, size in zip(pads, view.shape, strict=True)), ...)]
    return source, view, dest, window


def _views(view: Array, draw: st.DrawFn):  # type: ignore[no-untyped-def]
    yield view
    if view.ndim:
        axis = draw(st.integers(0, view.ndim - 1))
        size = view.shape[axis]
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        yield view[(slice(None),) * axis + (slice(start, stop),)]
        yield view[(slice(None),) * axis + (start, ...)]
        yield view.transpose(draw(st.permutations(range(view.ndim))))
        if view.flags.c_contiguous:
            yield view.reshape(-1)
            for factor in (2, 3):
                if size % factor == 0:
                    yield view.reshape((*view.shape[:axis], factor, size // factor, *view.shape[axis + 1 :]))


@settings(max_examples=200, deadline=None)
@given(arrays_and_views())
def test_filling_by_boxes_equals_the_copy(case: tuple[Array, Array, Array, Array]) -> None:
    source, view, dest, window = case
    by_boxes = dest.copy()
    found = pieces(strided(source, source), strided(view, source), strided(dest, dest), strided(window, dest))
    apply(found, source, by_boxes)
    window[...] = view
    np.testing.assert_array_equal(by_boxes, dest)


def test_common_loader_copies_become_single_boxes() -> None:
    source, dest = np.zeros((8, 6)), np.zeros((12, 6))
    for view, window in ((source[2:5], dest[4:7]), (source[:, 1:4], dest[:8, :3]), (source, dest[4:])):
        found = pieces(strided(source, source), strided(view, source), strided(dest, dest), strided(window, dest))
        assert len(found) == 1, "row slices, column slices and whole tensors are one box each"


def test_an_expert_lies_in_one_index_of_the_first_axis() -> None:
    expert, fused = np.zeros((4, 6)), np.zeros((3, 8, 6))
    window = fused[2, 4:8]
    (piece,) = pieces(strided(expert, expert), strided(expert, expert), strided(fused, fused), strided(window, fused))
    assert piece == Piece((0, 0), (2, 4, 0), ((0, 1, 4), (1, 2, 6)))


def test_interleaved_heads_fall_into_one_box_per_head_and_part() -> None:
    heads, parts, width = 2, 3, 4
    source = np.arange(heads * parts * width).reshape(heads * parts * width, 1)
    grouped = source.reshape(heads, parts, width).transpose(1, 0, 2)
    dest = np.full(grouped.shape, -1)
    found = pieces(strided(source, source), strided(grouped, source), strided(dest, dest), strided(dest, dest))
    by_boxes = dest.copy()
    apply(found, source, by_boxes)
    np.testing.assert_array_equal(by_boxes, grouped)
    assert len(found) == heads * parts


def test_a_view_of_a_copy_is_followed_back_to_the_original() -> None:
    source = np.arange(24).reshape(6, 4)
    origin = source.reshape(2, 3, 4).transpose(1, 0, 2)
    copy = np.ascontiguousarray(origin)
    window = copy.reshape(6, 4)[1:5]
    dest = np.full((4, 4), -1)
    by_boxes = dest.copy()
    for piece in pieces(contiguous(copy.shape), strided(window, copy), contiguous(dest.shape), contiguous(dest.shape)):
        back, target = through(piece, strided(origin, source), contiguous(dest.shape))
        apply(pieces(contiguous(source.shape), back, contiguous(dest.shape), target), source, by_boxes)
    np.testing.assert_array_equal(by_boxes, window)


@pytest.mark.parametrize(
    ("source", "dest", "reason"),
    [
        (Strided(0, (4,), (0,)), Strided(0, (4,), (1,)), "broadcasts"),
        (Strided(0, (4,), (1,)), Strided(0, (2, 2), (2, 1)), "broadcasts"),
        (Strided(20, (8,), (1,)), Strided(0, (8,), (1,)), "leaves the tensor"),
    ],
)
def test_what_is_no_box_is_refused_with_the_reason(source: Strided, dest: Strided, reason: str) -> None:
    with pytest.raises(NotABox, match=reason):
        pieces(contiguous((4, 6)), source, contiguous((16,)), dest)


def test_too_many_boxes_are_refused() -> None:
    with pytest.raises(NotABox, match="more than"):
        pieces(contiguous((200, 200)), Strided(0, (9000,), (3,)), contiguous((9000,)), Strided(0, (9000,), (1,)))


def test_a_run_over_partial_rows_is_cut_at_the_rows() -> None:
    source = np.arange(24).reshape(4, 6)
    found = pieces(contiguous((4, 6)), Strided(3, (17,), (1,)), contiguous((17,)), Strided(0, (17,), (1,)))
    by_boxes = np.full(17, -1)
    apply(found, source, by_boxes)
    np.testing.assert_array_equal(by_boxes, np.arange(3, 20))
    assert len(found) <= 4


def test_coordinates_of_a_transposed_base() -> None:
    base = Strided(5, (3, 4), (1, 3))
    assert coordinates(base, 5 + 2 + 3 * 3) == (2, 3)
    with pytest.raises(NotABox, match="leaves"):
        coordinates(base, 4)


boxes = st.tuples(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(1, 4), st.integers(1, 4)))


@given(boxes, st.lists(boxes, max_size=4))
def test_subtraction_leaves_exactly_the_untouched_points(box, taken) -> None:  # type: ignore[no-untyped-def]
    def points(start, shape):  # type: ignore[no-untyped-def]
        return {(x, y) for x in range(start[0], start[0] + shape[0]) for y in range(start[1], start[1] + shape[1])}

    expected = points(*box)
    for other in taken:
        expected -= points(*other)
    left = [points(*rest) for rest in subtract(*box, taken)]
    assert sum(map(len, left)) == len(expected), "the remaining boxes must not overlap"
    assert set().union(*left) == expected


def test_region_and_overlap() -> None:
    base = contiguous((4, 6))
    assert region(base, Strided(6, (2, 6), (6, 1))) == [((1, 0), (2, 6))]
    assert overlap(((0, 0), (2, 2)), ((1, 1), (2, 2))) == ((1, 1), (1, 1))
    assert overlap(((0, 0), (2, 2)), ((2, 0), (2, 2))) is None
