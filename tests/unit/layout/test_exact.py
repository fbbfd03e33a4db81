"""What is read of a segment when only a part of it is needed."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.exact import Choice, Need, cheapest
from tensorhub_core.layout.plan import ReadPlan, plan_read
from tensorhub_core.layout.types import Box
from tests.unit.layout.shapes import columns, layout, rows, spec

DEFAULT = ExactPolicy()


def forms(plan: ReadPlan) -> list[tuple[int, int, int, int]]:
    """Return offset, run, stride and count of every cut."""
    cuts = plan.cuts
    numbers = np.stack([cuts.offset_bytes, cuts.run_bytes, cuts.stride_bytes, cuts.count], axis=1)
    return [tuple(row) for row in numbers.tolist()]


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_columns_behind_row_shards_are_read_exactly_and_land_in_place(shards: int) -> None:
    """A row has 16 KiB, an eighth of it 2 KiB: 256 rows are a segment."""
    trainer = [layout(rows("w", 1024, shards, at, 8192), at=(at, shards)) for at in range(shards)]
    engine = layout(columns("w", 1024, 8192, 8, 3), at=(3, 8))
    whole, plan = plan_read(engine, trainer), plan_read(engine, trainer, exact=DEFAULT)
    assert (whole.total_bytes, plan.total_bytes) == (16 << 20, 2 << 20)
    assert plan.direct.all()
    assert set(forms(plan)) == {(6144, 2048, 16384, min(256, 1024 // shards))}
    assert not whole.direct.any()


def test_a_slice_of_rows_is_one_run_of_any_length() -> None:
    engine = layout(spec("w", 3, 4096, boxes=[Box("w", (17, 0), (3, 4096), (0, 0))]))
    plan = plan_read(engine, [layout(spec("w", 100, 4096))], exact=DEFAULT)
    assert forms(plan) == [(17 * 8192, 3 * 8192, 3 * 8192, 1)]
    assert plan.direct.all()
    one = layout(spec("w", boxes=[Box("w", (17, 9), (1, 1), ())]))
    assert forms(plan_read(one, [layout(spec("w", 100, 4096))], exact=DEFAULT)) == [(17 * 8192 + 18, 2, 2, 1)]


def test_gate_and_up_of_a_fused_tensor_are_two_cuts_that_land_in_place() -> None:
    boxes = [Box("gate", (0, 0), (256, 1024), (0, 0)), Box("up", (0, 0), (256, 1024), (256, 0))]
    fused = spec("w13", 512, 1024, boxes=boxes)
    mine = [Box("gate", (64, 0), (64, 1024), (0, 0)), Box("up", (64, 0), (64, 1024), (64, 0))]
    plan = plan_read(layout(spec("w13", 128, 1024, boxes=mine)), [layout(fused)], exact=DEFAULT)
    assert forms(plan) == [(64 * 2048, 64 * 2048, 64 * 2048, 1), (320 * 2048, 64 * 2048, 64 * 2048, 1)]
    assert plan.direct.all()
    assert plan.segment.tolist() == [0, 0]


def test_neighbouring_columns_for_two_tensors_are_one_cut_around_both() -> None:
    source = layout(spec("a", 64, 4096, boxes=[Box(n, (0, 0), (64, 2048), (0, 2048 * i)) for i, n in enumerate("xy")]))
    boxes = [[Box("x", (0, 1024), (64, 1024), (0, 0))], [Box("y", (0, 0), (64, 1024), (0, 2048))]]
    engine = layout(spec("p", 64, 1024, boxes=boxes[0]), spec("q", 64, 4096, boxes=boxes[1]))
    plan = plan_read(engine, [source], exact=DEFAULT)
    assert forms(plan) == [(2048, 4096, 8192, 64)]
    assert len(plan.scatters[0]) == 2


@pytest.mark.parametrize(
    ("columns_", "cut"), [(512, True), (513, False), (1023, False), (1024, True), (1536, True), (1537, False)]
)
def test_runs_are_long_enough_or_few_enough(columns_: int, cut: bool) -> None:
    """A row has 4 KiB: a run has 2 to 3 of them, or counts as 2 KiB more and is then at most 3 KiB."""
    engine = layout(spec("w", 64, columns_, boxes=[Box("w", (0, 8), (64, columns_), (0, 0))]))
    plan = plan_read(engine, [layout(spec("w", 64, 2048))], exact=DEFAULT)
    assert forms(plan) == ([(16, 2 * columns_, 4096, 64)] if cut else [])
    assert plan.total_bytes == 64 * (2 * columns_ if cut else 4096)


def test_small_segments_are_read_whole() -> None:
    for height, cut in [(7, False), (8, True)]:
        engine = layout(spec("w", 1, 1024, boxes=[Box("w", (2, 0), (1, 1024), (0, 0))]))
        assert bool(len(plan_read(engine, [layout(spec("w", height, 1024))], exact=DEFAULT).cuts)) == cut


def test_each_source_has_its_own_policy() -> None:
    trainer = [layout(rows("w", 64, 2, at, 8192), at=(at, 2)) for at in range(2)]
    engine = layout(columns("w", 64, 8192, 4, 1), at=(1, 4))
    plan = plan_read(engine, trainer, exact=[None, DEFAULT])
    assert plan.source.tolist() == [0, 1]
    assert plan.cut.tolist() == [-1, 0]
    assert (len(plan.cuts_of(0)), len(plan.cuts_of(1))) == (0, 1)


@pytest.mark.parametrize(
    ("start", "length", "found"),
    [
        ((1, 2, 1), (2, 3, 2), Choice(32, 12, 24, 2, (1, 2, 0), (2, 3, 4))),
        ((0, 0, 1), (5, 6, 3), Choice(1, 3, 4, 30, (0, 0, 1), (5, 6, 3))),
        ((2, 0, 0), (3, 6, 4), Choice(48, 72, 72, 1, (2, 0, 0), (3, 6, 4))),
        ((0, 5, 3), (5, 1, 1), Choice(23, 1, 24, 5, (0, 5, 3), (5, 1, 1))),
    ],
)
def test_the_fewest_bytes_around_a_box(start: tuple[int, ...], length: tuple[int, ...], found: Choice) -> None:
    assert cheapest(Need(start, length, (5, 6, 4), 1), ExactPolicy(1, 1.0, 0)) == found


def test_a_quarter_of_a_million_segments_are_planned_as_arrays() -> None:
    trainer = layout(spec("w", 8192, 8192, dtype="uint8"), segment_bytes=256)
    engine = layout(spec("w", 8192, 4000, dtype="uint8", boxes=[Box("w", (0, 4096), (8192, 4000), (0, 0))]))
    plan = plan_read(engine, [trainer], exact=ExactPolicy(1, 1.0, 0))
    assert len(plan) == 8192 * 16
    assert plan.total_bytes == 8192 * 4000
    assert len(plan.cuts) == 8192, "the last of each row's segments"
    assert plan.direct.all()
    assert len(plan.scatters) == 0
