"""Adapting torch and numpy tensors: what works keeps its bytes, what cannot work is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client.tensors import check_geometry, named_tensors, view_of
from tensorhub_core.errors import RegistrationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these kinds experimental

TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 16), (3, 5)], ids=str)
def test_every_torch_dtype_and_shape_has_a_view(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    view = view_of("t", tensor)
    assert view.dtype == str(dtype).removeprefix("torch.")
    assert view.extent.shape == shape
    assert view.extent.length_bytes == tensor.numel() * tensor.element_size()
    assert view.extent.address == tensor.data_ptr()
    assert view.device == "cpu"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float64", "complex128"])
def test_every_numpy_dtype_has_torchs_name(dtype: str) -> None:
    array = np.zeros((2, 3), dtype)
    view = view_of("t", array)
    assert view.dtype == dtype
    assert view.extent.address == array.ctypes.data
    assert view.extent.length_bytes == array.nbytes


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _wrapper() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(_Wrapper, (2, 2))  # type: ignore[attr-defined, no-any-return]


def _freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "wrapper": _wrapper,
    "freed": _freed,
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "object": lambda: np.array([object()]),
    "structured": lambda: np.zeros(2, [("a", np.float32)]),
    "text": lambda: np.array(["a"]),
    "time": lambda: np.zeros(2, "datetime64[s]"),
    "longdouble": lambda: np.zeros(2, np.longdouble),
    "big endian": lambda: np.zeros(2, ">f4"),
    "masked": lambda: np.ma.masked_array([1.0], [True]),
    "scalar": lambda: np.float32(1),
    "list": lambda: [1.0, 2.0],
    "none": lambda: None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_registered_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RegistrationError, match="layers_0_weight"):
        view_of("layers_0_weight", REFUSED[kind]())


@pytest.mark.parametrize(
    "name",
    ["a", "a/b c\nd", "λ.重み.🙂", "x" * 4096, "\x00", " "],
    ids=["plain", "odd", "unicode", "long", "nul", "space"],
)
def test_any_non_empty_unicode_name_is_accepted(name: str) -> None:
    assert list(named_tensors({name: np.zeros(1)})) == [name]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("a", 0), ("", 1)], "position 1"),
        ([("a", 0), (3, 1)], "position 1"),
        ([("a", 0), ("\ud800", 1)], "position 1"),
        ([("a.b", 0), ("c", 1), ("a.b", 2)], "'a.b'"),
        ([("a", 0), ("b",)], "item 1"),
        ([("a", 0), 7], "item 1"),
        ({}, "at least one"),
    ],
)
def test_bad_names_are_refused_naming_the_position(tensors: Any, text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        named_tensors(tensors)


def groups_of(**tensors: Any) -> list[list[str]]:
    return list(check_geometry({name: view_of(name, tensor) for name, tensor in tensors.items()}).values())


def test_names_of_the_same_bytes_are_one_group() -> None:
    w, v = torch.ones(4, 6), np.ones((4, 6), np.float32)
    assert groups_of(a=w, b=v, c=w, d=w[:], e=w.view(4, 6)) == [["a", "c", "d", "e"], ["b"]]
    assert groups_of(a=w.t(), b=w.t()) == [["a", "b"]]


def test_empty_tensors_are_never_aliases() -> None:
    empty = torch.empty(0, 16)
    assert groups_of(a=empty, b=empty, c=torch.empty(0, 16)) == [["a"], ["b"], ["c"]]


def test_interleaved_views_of_one_matrix_are_separate_tensors() -> None:
    fused = torch.zeros(8, 12)
    assert groups_of(q=fused[:, :4], k=fused[:, 4:8], v=fused[:, 8:]) == [["q"], ["k"], ["v"]]
    assert groups_of(even=fused[::2], odd=fused[1::2]) == [["even"], ["odd"]]


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.view(-1),
        lambda w: w[1:],
        lambda w: w.t(),
        lambda w: w[:, 2:4],
        lambda w: w.view(torch.int32),
        lambda w: w[3, 5],
    ],
    ids=["flat", "rows", "transposed", "columns", "other dtype", "one element"],
)
def test_partly_shared_memory_is_refused_naming_both(other: Any) -> None:
    w = torch.zeros(4, 6)
    with pytest.raises(RegistrationError, match=r"'(w|x)' and '(w|x)' overlap"):
        groups_of(w=w, x=other(w))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(()).expand(2),
        torch.zeros(8).as_strided((3, 3), (2, 1)),
        torch.zeros(8).unfold(0, 4, 1),
        np.broadcast_to(np.zeros(3), (2, 3)),
        np.lib.stride_tricks.sliding_window_view(np.zeros(8), 3),
    ],
    ids=["expand", "expand scalar", "as_strided", "unfold", "broadcast", "window"],
)
def test_a_tensor_that_overlaps_itself_is_refused_by_name(tensor: Any) -> None:
    with pytest.raises(RegistrationError, match="'x' overlaps itself"):
        groups_of(x=tensor)


def test_a_tensor_of_one_element_along_an_expanded_axis_is_fine() -> None:
    assert groups_of(x=torch.zeros(1, 4).expand(1, 4)) == [["x"]]
