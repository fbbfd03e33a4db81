"""Names that share memory here: what is proven to be one thing there is taken, whichever shard it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.planner import Planner
from tensorhub_core.layout.types import Box, Layout
from tests.property.layout.world import fill, sums_of
from tests.unit.layout.shapes import layout, moved, refused, spec, truth

PAIR = ("embed", "head")


def boxes(*places: tuple[str, int, int, int]) -> list[Box]:
    """Return boxes of whole rows: logical tensor, first row there, how many, first row here."""
    return [Box(name, (there, 0), (count, 4), (here, 0)) for name, there, count, here in places]


def here(*tensors: Sequence[Box]) -> Layout:
    """Describe tensors of 12 rows that share their memory."""
    names = [f"name {number}" for number in range(len(tensors))]
    return layout(*(spec(name, 12, 4, boxes=each) for name, each in zip(names, tensors, strict=True)), tied=names)


def replicas(*names: str) -> list[Layout]:
    """Describe two shards that hold the same rows under some names, tied, with padding of their own around them."""
    tied = [f"padded {name}" for name in names]
    specs = [
        spec(here, 14, 4, boxes=boxes((name, 0, 12, 1)), dtype="bfloat16")
        for name, here in zip(names, tied, strict=True)
    ]
    return [layout(*specs, at=(shard, 2), tied=tied) for shard in range(2)]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_two_names_of_one_logical_tensor_that_several_shards_hold(parts: int) -> None:
    """Each name alone would be read from another shard, to share the work, and their paddings differ."""
    cut = [("w", 12 * n // parts, 12 // parts, 12 * n // parts) for n in range(parts)]
    assert len(moved(here(boxes(*cut), boxes(("w", 0, 12, 0))), replicas("w"), truth(w=(12, 4)))) <= 2
    moved(here(boxes(("w", 0, 12, 0)), boxes(*cut)), replicas("w"), truth(w=(12, 4)))


def test_two_names_that_every_shard_has_tied_as_well() -> None:
    values = truth(embed=(12, 4))
    moved(
        here(boxes(("embed", 0, 12, 0)), boxes(("head", 0, 12, 0))),
        replicas(*PAIR),
        {**values, "head": values["embed"]},
    )


def test_a_plan_for_them_is_kept_for_the_next_version() -> None:
    planner, destination, sources = Planner(), here(boxes(("w", 0, 12, 0)), boxes(("w", 0, 12, 0))), replicas("w")
    plans = []
    for seed in range(2):
        memory = [fill(each, truth(w=(12, 4)), np.random.default_rng([seed, n])) for n, each in enumerate(sources)]
        plans.append(planner.plan(destination, sources, [sums_of(*each) for each in zip(sources, memory, strict=True)]))
    assert plans[0] is plans[1]


def test_other_rows_of_one_tensor_are_not_the_same_bytes() -> None:
    swapped = boxes(("w", 6, 6, 0), ("w", 0, 6, 6))
    assert refused(here(boxes(("w", 0, 12, 0)), swapped), replicas("w"))[0].startswith("tied: 'w' and 'w'")
    part = boxes(("w", 0, 6, 0))
    assert refused(here(boxes(("w", 0, 12, 0)), part), replicas("w"))[0].startswith("tied: ")
    assert len(plan_read(here(part, part), replicas("w"))) == 1
