"""Which plans convert, what they read, and what is refused and why."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.casting import NOT_AGAIN, Cast
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.planner import Planner
from tests.unit.layout.shapes import layout, rows, spec

THERE = layout(spec("w", 6, 4, dtype="float32"), spec("b", 4), spec("n", 3, dtype="int32"))
HERE = layout(spec("w", 6, 4), spec("b", 4), spec("n", 3, dtype="int32"))


def test_only_what_differs_is_staged_and_lengths_are_the_sources() -> None:
    plan = plan_read(HERE, [THERE], cast=True)
    assert (plan.casts, plan.raw) == (True, False)
    assert plan.direct.tolist() == [True, True, False]
    assert plan.length_bytes.tolist() == [8, 12, 96]
    assert not plan_read(HERE, [HERE], cast=True).casts
    assert plan_read(HERE, [HERE], cast=True).raw


def test_a_tensor_of_many_segments_is_converted_segment_by_segment() -> None:
    """Here they count in other bytes than there."""
    there, here = (layout(spec("w", 64, 8, dtype=dtype), segment_bytes=256) for dtype in ("float64", "float16"))
    plan = plan_read(here, [there], cast="float16")
    assert (len(plan), plan.direct.any()) == (16, False)
    assert plan.offset_bytes.tolist() == [64 * number for number in range(16)]
    assert plan.segment.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("cast", "hint"),
    [
        (False, "connect() with cast=True would convert dtypes"),
        ("float16", "cast='float16' converts into that one only"),
        (NOT_AGAIN, "no number is converted twice"),
    ],
)
def test_a_refusal_says_how_to_ask(cast: Cast, hint: str) -> None:
    with pytest.raises(LayoutMismatch) as refused:
        plan_read(HERE, [THERE], cast=cast)
    assert refused.value.differences == ("dtype of 'w': registered bfloat16, the version has float32",)
    assert hint in str(refused.value).splitlines()[0]


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float8_e4m3fn", "complex64", "bool"])
def test_other_dtypes_are_never_converted(dtype: str) -> None:
    for here, there in ((HERE, layout(spec("w", 6, 4, dtype=dtype), spec("b", 4), spec("n", 3, dtype="int32"))),):
        for one, other in ((here, there), (there, here)):
            with pytest.raises(LayoutMismatch) as refused:
                plan_read(one, [other], cast=True)
            assert len(refused.value.differences) == 1
            assert "cast" not in str(refused.value)


def test_all_differences_are_listed_beside_those_of_dtypes() -> None:
    there = layout(spec("w", 4, 6, dtype="float32"), spec("b", 4, dtype="int16"), spec("n", 3, dtype="int32"))
    with pytest.raises(LayoutMismatch) as refused:
        plan_read(HERE, [there], cast=True)
    assert [line.partition(":")[0] for line in refused.value.differences] == ["dtype of 'b'", "shape of 'w'"]


def test_sources_of_several_dtypes_are_not_mixed() -> None:
    """Whose bytes came would depend on who is asked."""
    halves = [rows("w", 8, 2, index, 4) for index in range(2)]
    other = spec("w", 4, 4, boxes=halves[1].boxes, dtype="float32")
    sources = [layout(halves[0], at=(0, 2)), layout(other, at=(1, 2))]
    for dtype in ("bfloat16", "float32", "float16"):
        with pytest.raises(LayoutMismatch, match="the version has bfloat16 and float32"):
            plan_read(layout(spec("w", 8, 4, dtype=dtype)), sources, cast=True)


def test_each_source_is_asked_whether_it_may_be_converted() -> None:
    halves = [spec("w", 4, 4, boxes=rows("w", 8, 2, index, 4).boxes, dtype="float32") for index in range(2)]
    sources = [layout(half, at=(index, 2)) for index, half in enumerate(halves)]
    here = layout(spec("w", 8, 4))
    assert plan_read(here, sources, cast=[True, True]).casts
    with pytest.raises(LayoutMismatch):
        plan_read(here, sources, cast=[True, NOT_AGAIN])


def test_tied_tensors_that_come_from_two_dtypes_are_not_proven_to_be_equal() -> None:
    here = layout(spec("a", 4), spec("b", 4), tied=["a", "b"])
    sums = [np.zeros(2, np.uint64)]
    with pytest.raises(LayoutMismatch, match="tied"):
        plan_read(here, [layout(spec("a", 4), spec("b", 4, dtype="float32"))], sums, cast=True)
    tied = layout(spec("a", 4, dtype="float32"), spec("b", 4, dtype="float32"), tied=["a", "b"])
    assert plan_read(here, [tied], [np.zeros(1, np.uint64)], cast=True).casts


def test_kept_plans_know_what_was_allowed() -> None:
    planner, sums = Planner(), [np.zeros(3, np.uint64)]
    plan = planner.plan(HERE, [THERE], sums, cast=True)
    assert planner.plan(HERE, [THERE], sums, cast=True) is plan
    with pytest.raises(LayoutMismatch):
        planner.plan(HERE, [THERE], sums)
