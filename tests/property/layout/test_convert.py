"""Numbers are converted as torch converts them, and plans that convert bring what slicing and torch bring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.casting import CASTABLE
from tensorhub_core.layout.convert import STORED, convert_into
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.scatter import Scatter, cast_box
from tests.property.layout import strategies as draw_layout
from tests.property.layout.strategies import Logical
from tests.property.layout.world import Bytes, execute, expected, fill, sums_of

PAIRS = list(permutations(CASTABLE, 2))
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
FRACTION_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def bits_of(dtype: str) -> type[np.unsignedinteger[Any]]:
    return UNSIGNED[dtype_bytes(dtype)]


def of_torch(bits: NDArray[Any], source: str, dtype: str) -> NDArray[Any]:
    """Return the bits of what torch makes of numbers that are given by their bits."""
    numbers = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(getattr(torch, source))
    return numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(bits_of(dtype)).reshape(bits.shape)


def ours(bits: NDArray[Any], source: str, dtype: str) -> NDArray[Any]:
    made = np.zeros(bits.shape, bits_of(dtype))
    convert_into(bits.view(STORED[source]), source, made.view(STORED[dtype]), dtype)
    return made


def is_nan(bits: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Tell by the bits: all of the exponent is set, and some of the fraction."""
    width, fraction = 8 * dtype_bytes(dtype), FRACTION_BITS[dtype]
    infinity = ((1 << (width - 1 - fraction)) - 1) << fraction
    return np.asarray((bits & np.array((1 << (width - 1)) - 1, bits.dtype)) > infinity)


def check(bits: NDArray[Any], source: str, dtype: str) -> None:
    """Compare with torch bit by bit; a NaN is one NaN, whatever torch makes of it in this loop or that."""
    made, right, nan = ours(bits, source, dtype), of_torch(bits, source, dtype), is_nan(bits, source)
    np.testing.assert_array_equal(made[~nan], right[~nan])
    assert is_nan(right[nan], dtype).all()
    assert is_nan(made[nan], dtype).all()
    assert made[nan].tolist() == [nan_of(int(each), source, dtype) for each in bits[nan].tolist()]


def nan_of(bits: int, source: str, dtype: str) -> int:
    """Return the one NaN that another one becomes: its sign and the leading bits of its payload, quiet; in bfloat16
    the one that torch's plain loops make, and from it the bits as they are."""
    if dtype == "bfloat16":
        return 0x7FC0
    width, fraction = 8 * dtype_bytes(source), FRACTION_BITS[source]
    into, kept = 8 * dtype_bytes(dtype), FRACTION_BITS[dtype]
    sign, payload = bits >> (width - 1), bits & ((1 << fraction) - 1)
    payload = payload << (kept - fraction) if kept > fraction else payload >> (fraction - kept)
    quiet = 0 if (source, dtype) == ("bfloat16", "float32") else 1 << (kept - 1)
    return (sign << (into - 1)) | (((1 << (into - 1 - kept)) - 1) << kept) | payload | quiet


@pytest.mark.parametrize(("source", "dtype"), [pair for pair in PAIRS if dtype_bytes(pair[0]) == 2])
def test_every_number_of_two_bytes_is_converted_as_torch_does(source: str, dtype: str) -> None:
    check(np.arange(1 << 16, dtype=np.uint16), source, dtype)


def edges(source: str, dtype: str) -> NDArray[Any]:
    """Return numbers of a long dtype around every number of a short one and around the middle of two neighbours."""
    if dtype_bytes(dtype) == 2:
        every = np.arange(1 << 16, dtype=np.uint16)
    else:
        rng = np.random.default_rng(5)
        every = rng.integers(0, 1 << (8 * dtype_bytes(dtype)), 20_000, bits_of(dtype), endpoint=False)
        special = [0, 1, (1 << 23) - 1, 1 << 23, 0x7F7FFFFF, 0x7F800000]
        every = np.concatenate([every, np.array(special, every.dtype)])
    at = of_torch(every, dtype, source)
    half = 1 << max(0, FRACTION_BITS[source] - FRACTION_BITS[dtype] - 1)
    steps = [0, 1, half - 1, half, half + 1, 2 * half - 1, (1 << 8 * dtype_bytes(source)) - 1]
    with np.errstate(over="ignore"):
        around = np.concatenate([at + np.array(step, at.dtype) for step in steps])
    return np.concatenate([around, around ^ np.array(1 << (8 * dtype_bytes(source) - 1), at.dtype)])


@pytest.mark.parametrize(("source", "dtype"), [pair for pair in PAIRS if dtype_bytes(pair[0]) > 2])
def test_longer_numbers_are_rounded_as_torch_does_at_every_edge(source: str, dtype: str) -> None:
    check(edges(source, dtype), source, dtype)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(PAIRS), st.integers(0, 2**32 - 1))
def test_any_bits_in_any_strides_are_converted_as_torch_does(
    data: st.DataObject, pair: tuple[str, str], seed: int
) -> None:
    source, dtype = pair
    count = data.draw(st.sampled_from((0, 1, 7, 300, 70_000)))
    kind = bits_of(source)
    bits = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, 2 * count, kind, endpoint=True)
    check(bits[:count], source, dtype)
    check(bits[::2], source, dtype)
    grid = bits.reshape(2, -1)
    made = np.zeros((count, 4), bits_of(dtype))
    convert_into(grid.T.view(STORED[source]), source, made[:, 1:3].view(STORED[dtype]), dtype)
    assert np.array_equal(made[:, 1:3], ours(np.ascontiguousarray(grid.T), source, dtype))
    assert not made[:, ::3].any(), "what lies beside it was written"


def test_fp64_is_rounded_to_the_short_dtypes_by_way_of_fp32_as_torch_does() -> None:
    """To nearest at once would be the next number."""
    number = np.array([1 + 2**-11 + 2**-40])
    assert ours(number.view(np.uint64), "float64", "float16").tolist() == [0x3C00]
    assert int(number.astype(np.float16).view(np.uint16)[0]) == 0x3C01


def test_a_box_for_a_device_is_converted_alone() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    box, scatter = cast_box(
        numbers.reshape(-1).view(np.uint8), (4, 6), Scatter(3, (7,), (1, 2), (2, 3)), ("float32", "float16")
    )
    assert scatter == Scatter(3, (7,), (0, 0), (2, 3))
    assert box.view(np.float16).tolist() == [8, 9, 10, 14, 15, 16]


def contents(model: Sequence[Logical], seed: int) -> dict[str, Bytes]:
    """Draw bytes of numbers, none of them a NaN: infinities, zeros with signs, the smallest ones, and others."""
    found = {}
    for number, each in enumerate(model):
        kind, rng = bits_of(each.dtype), np.random.default_rng((seed, number))
        bits = rng.integers(0, np.iinfo(kind).max, each.shape, kind, endpoint=True)
        bits = np.where(is_nan(bits, each.dtype), np.array(1 << (8 * bits.itemsize - 1), kind), bits)
        found[each.name] = np.ascontiguousarray(bits)[..., None].view(np.uint8)
    return found


def converted(model: Sequence[Logical], others: Sequence[Logical], truth: dict[str, Bytes]) -> dict[str, Bytes]:
    """Return what torch makes of a model's numbers in other dtypes."""
    pairs = {one.name: (one, other.dtype) for one, other in zip(model, others, strict=True)}
    return {
        name: of_torch(truth[name].view(bits_of(one.dtype)), one.dtype, dtype).view(np.uint8)
        for name, (one, dtype) in pairs.items()
    }


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Logical], list[Logical]]:
    """Draw a model in floating dtypes, and the same in others."""
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    dtypes = st.sampled_from(CASTABLE)
    model = [Logical(f"t{i}", draw(dtypes), draw(shapes)) for i in range(draw(st.integers(1, 3)))]
    return model, [Logical(each.name, draw(dtypes), each.shape) for each in model]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1), models(), st.booleans())
def test_plans_that_convert_bring_what_slicing_and_torch_bring(
    data: st.DataObject, seed: int, both: tuple[list[Logical], list[Logical]], cut: bool
) -> None:
    model, others = both
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(others))
    truth = contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng(seed)) for layout in layouts]
    sums = [sums_of(*each) for each in zip(layouts, memory, strict=True)]
    policy = ExactPolicy(4, 1.0, 0) if cut else None
    plan = plan_read(destination, layouts, sums, exact=policy, cast=True)
    note(f"{destination}\n{layouts}\n{plan}")
    buffers, writes = execute(plan, destination, layouts, memory)
    # Between equal layouts the padding is copied too.
    right = memory[0] if plan.raw else expected(destination, converted(model, others, truth))
    assert all(map(np.array_equal, buffers, right))
    assert max((int(count.max()) for count in writes if len(count)), default=0) <= 1
    dtypes = {each.name: each.dtype for each in model}
    wanted = {box.logical for spec in destination.tensors for box in spec.boxes or ()}
    wanted |= {spec.name for spec in destination.tensors if spec.boxes is None}
    other = {each.name for each in others if each.dtype != dtypes[each.name]} & wanted
    if plan.casts:
        with pytest.raises(LayoutMismatch) as refused:
            plan_read(destination, layouts, sums, exact=policy)
        named = {name for name in other if any(f"dtype of '{name}'" in line for line in refused.value.differences)}
        assert named, "it says which"
        assert "connect() with cast=True" in str(refused.value)
