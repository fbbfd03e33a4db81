"""Convert floating numbers between dtypes as torch does, without torch: numpy knows no bfloat16.

Sources of one version have to give every reader the same bits, on whatever machine, so nothing is left to chance that
torch leaves to it: of a NaN it gives 0x7FC0 or 0xFFFF in bfloat16 by whether its loop is vectorised. Here a NaN becomes
0x7FC0 in bfloat16; elsewhere it keeps its sign and the leading bits of its payload, and is quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[Any]

STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
"""How numpy holds the elements of each dtype: bfloat16 as its bits."""

_BLOCK = 1 << 16
"""Elements that are converted at a time: they and what is made of them stay in a cache."""


def convert_into(source: _Array, source_dtype: str, destination: _Array, dtype: str) -> None:
    """Fill an array with another one's numbers, rounded to nearest, ties to even; both have one shape, any strides.

    The arrays are of `STORED[source_dtype]` and `STORED[dtype]`, two different ones. Takes scratch memory for a block
    of elements, not for all. Any thread.
    """
    convert = _CONVERSIONS[source_dtype, dtype]
    operands: Any = np.nditer(
        [source, destination],
        ["external_loop", "buffered", "zerosize_ok"],
        [["readonly"], ["writeonly"]],
        order="C",
        buffersize=_BLOCK,
    )
    # Too large is infinity, as is meant; what a signalling NaN raises is of no interest.
    with np.errstate(all="ignore"), operands:
        for given, filled in operands:
            filled[...] = convert(given)


def _bf16_to_fp32(bits: _Array) -> _Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fp32_to_bf16(values: _Array) -> _Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def _fp16_to_fp32(values: _Array) -> _Array:
    wide = values.astype(np.float32)
    nan = np.isnan(values)
    if nan.any():
        bits = values[nan].view(np.uint16).astype(np.uint32)
        kept = ((bits & np.uint32(0x8000)) << np.uint32(16)) | ((bits & np.uint32(0x3FF)) << np.uint32(13))
        wide.view(np.uint32)[nan] = kept | np.uint32(0x7FC00000)
    return wide


def _fp32_to_fp16(values: _Array) -> _Array:
    narrow = values.astype(np.float16)
    nan = np.isnan(values)
    if nan.any():
        bits = values[nan].view(np.uint32)
        kept = ((bits >> np.uint32(16)) & np.uint32(0x8000)) | ((bits >> np.uint32(13)) & np.uint32(0x3FF))
        narrow.view(np.uint16)[nan] = (kept | np.uint32(0x7E00)).astype(np.uint16)
    return narrow


def _fp32_to_fp64(values: _Array) -> _Array:
    return values.astype(np.float64)


def _fp64_to_fp32(values: _Array) -> _Array:
    return values.astype(np.float32)


_Convert = Callable[[_Array], _Array]


def _by_way_of_fp32(first: _Convert, second: _Convert) -> _Convert:
    """Return both, one behind the other: so torch does, rounding fp64 to the short dtypes twice."""
    return lambda values: second(first(values))


_TO_FP32: dict[str, _Convert] = {"bfloat16": _bf16_to_fp32, "float16": _fp16_to_fp32, "float64": _fp64_to_fp32}
_FROM_FP32: dict[str, _Convert] = {"bfloat16": _fp32_to_bf16, "float16": _fp32_to_fp16, "float64": _fp32_to_fp64}
_CONVERSIONS: dict[tuple[str, str], _Convert] = {
    **{(dtype, "float32"): convert for dtype, convert in _TO_FP32.items()},
    **{("float32", dtype): convert for dtype, convert in _FROM_FP32.items()},
    **{
        (one, other): _by_way_of_fp32(into, out_of)
        for one, into in _TO_FP32.items()
        for other, out_of in _FROM_FP32.items()
        if one != other
    },
}
