"""Adapt the user's torch and numpy tensors: names, dtypes, addresses; refuse by name what cannot be registered."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.overlap import Extent, overlapping_pairs, overlaps_itself
from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.canonical import dtype_bytes

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
_BLOCK = 256


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """Bytes with a torch dtype name, for dtypes that numpy lacks: `buffer` is u8 [bytes] in C order of `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class View:
    """Where one tensor lies now; `allocation` is the span of the live memory block around it, if known.

    `owner` keeps that memory alive, also if the tensor is given other memory (`parameter.data = ...`).
    """

    extent: Extent
    dtype: str
    device: str
    writable: bool
    allocation: tuple[int, int] | None
    owner: object

    @property
    def place(self) -> tuple[object, ...]:
        """Return what has to stay as it is between register and publish or replicate."""
        strides = None if self.extent.contiguous else self.extent.strides
        return (self.device, self.extent.address, self.extent.shape, strides, self.dtype)

    def is_there(self) -> bool:
        """Tell whether the owner still has the bytes that the tensor had when it was described."""
        low, high = self.extent.hull()
        if isinstance(self.owner, np.ndarray):  # only one that owns its bytes, in a row, can be resized
            begin = self.owner.__array_interface__["data"][0] if self.extent.contiguous else low
            end = begin + self.owner.nbytes if self.extent.contiguous else high
        else:
            storage: Any = self.owner
            begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return low == high or (begin <= low and high <= end)


def named_tensors(tensors: Tensors) -> dict[str, Any]:
    """Check the names of a mapping or of an iterable of (name, tensor); raises RegistrationError naming the fault."""
    named: dict[str, Any] = {}
    for position, pair in enumerate(_pairs(tensors)):
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            raise RegistrationError(f"item {position} is not a (name, tensor) pair") from None
        if not isinstance(name, str) or not name:
            raise RegistrationError(
                f"the tensor at position {position} needs a name that is non-empty text, not {name!r}"
            )
        if not _encodable(name):
            raise RegistrationError(f"the name {name!r} at position {position} is not valid unicode")
        name = str.__str__(name)  # a subclass, such as numpy's, would not be encoded as text
        if name in named:
            raise RegistrationError(f"two tensors are named {name!r}: every name may be registered once")
        named[name] = tensor
    if not named:
        raise RegistrationError("nothing to register: give at least one tensor")
    return named


def _pairs(tensors: object) -> Iterable[Any]:
    if isinstance(tensors, Mapping):
        return tensors.items()
    if not isinstance(tensors, Iterable):
        kind = type(tensors).__qualname__
        raise RegistrationError(f"register() takes a mapping or an iterable of (name, tensor) pairs, not a {kind}")
    return tensors


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def view_of(name: str, tensor: Any) -> View:
    """Describe where a tensor lies; raises RegistrationError naming it and saying why it cannot be registered."""
    torch_tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # another thread may be importing torch now
    if torch_tensor is not None and isinstance(tensor, torch_tensor):
        try:
            view = _torch_view(name, tensor)
        except (RuntimeError, ValueError, NotImplementedError) as error:  # such as uninitialized parameters
            raise RegistrationError(f"{name!r} has no memory that can be registered: {error}") from None
    elif isinstance(tensor, np.ndarray):
        view = _numpy_view(name, tensor)
    elif isinstance(tensor, RawTensor):
        view = _raw_view(name, tensor)
    else:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise RegistrationError(f"{name!r} is a {kind}: only torch tensors and numpy arrays can be registered")
    try:
        item_bytes = dtype_bytes(view.dtype)
    except RegistrationError as error:
        raise RegistrationError(f"{name!r} cannot be registered: {error}") from None
    if item_bytes != view.extent.item_bytes:
        raise RegistrationError(
            f"{name!r} has elements of {view.extent.item_bytes} bytes, {view.dtype} has {item_bytes}"
        )
    return view


def marks_of(tensors: Sequence[Any]) -> Iterator[object]:
    """Yield what is quickly compared to see that tensors lie where they lay; None where only `view_of` can tell.

    An install waits for this: in blocks that fit into a cache, most of it by `map`, and nothing is kept.
    """
    for begin in range(0, len(tensors), _BLOCK):
        yield _mark(tensors[begin : begin + _BLOCK])


def _mark(tensors: Sequence[Any]) -> tuple[object, ...] | None:
    torch_tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if torch_tensor is not None and all(isinstance(tensor, torch_tensor) for tensor in tensors):
        try:
            return tuple(
                list(map(method, tensors))
                for method in (torch_tensor.data_ptr, torch_tensor.stride, attrgetter("shape", "dtype"))
            )
        except (RuntimeError, ValueError, NotImplementedError):
            return None
    if all(isinstance(tensor, np.ndarray) for tensor in tensors):
        return tuple((t.__array_interface__["data"], t.shape, t.strides, t.dtype) for t in tensors)
    return None


def _torch_view(name: str, tensor: torch.Tensor) -> View:
    refusal = _torch_refusal(tensor)
    if refusal:
        raise RegistrationError(f"{name!r} {refusal}")
    item_bytes = tensor.element_size()
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    extent = Extent(tensor.data_ptr(), tuple(tensor.shape), strides, item_bytes)
    storage = tensor.untyped_storage()
    allocation = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    low, high = extent.hull()
    if low != high and not (allocation[0] <= low and high <= allocation[1]):
        raise RegistrationError(f"{name!r} lies outside its storage: the storage was resized or freed")
    return View(extent, str(tensor.dtype).removeprefix("torch."), str(tensor.device), True, allocation, storage)


def _torch_refusal(tensor: torch.Tensor) -> str:
    """Return why the tensor's bytes are not its values, or an empty text."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__qualname__}, which wraps others: register those (`to_local()` for a DTensor)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is stored as {tensor.layout}: register its dense parts (values, indices) or `to_dense()`"
    if tensor.is_quantized:
        return "is a quantized tensor: register its `int_repr()` and its scales"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on device {tensor.device}: only cpu and cuda memory can be registered"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view: register `resolve_conj().resolve_neg()`"
    return ""


def _numpy_view(name: str, array: NDArray[Any]) -> View:
    if isinstance(array, np.ma.MaskedArray):
        raise RegistrationError(f"{name!r} is a masked array: register its `data` and its `mask`")
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.subdtype is not None:
        raise RegistrationError(f"{name!r} has dtype {array.dtype}: only plain numbers can be registered")
    if not array.dtype.isnative:
        raise RegistrationError(
            f"{name!r} has dtype {array.dtype.str}: only the machine's own byte order can be registered"
        )
    address, read_only = array.__array_interface__["data"]
    extent = Extent(address, array.shape, array.strides, array.dtype.itemsize)
    return View(extent, array.dtype.name, "cpu", not read_only, None, array)


def _raw_view(name: str, tensor: RawTensor) -> View:
    buffer, shape = tensor.buffer, tensor.shape
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise RegistrationError(f"{name!r} has a buffer that is not a flat array of bytes")
    try:
        item_bytes = dtype_bytes(tensor.dtype)
    except RegistrationError as error:
        raise RegistrationError(f"{name!r} cannot be registered: {error}") from None
    length_bytes = item_bytes * math.prod(shape)
    if buffer.nbytes != length_bytes:
        raise RegistrationError(
            f"{name!r} of {tensor.dtype} {shape} takes {length_bytes:,} bytes, its buffer has {buffer.nbytes:,}"
        )
    strides = tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    address, read_only = buffer.__array_interface__["data"]
    return View(Extent(address, shape, strides, item_bytes), tensor.dtype, "cpu", not read_only, None, buffer)


def check_geometry(views: Mapping[str, View]) -> dict[tuple[object, ...], list[str]]:
    """Group the names by the bytes they share; raises RegistrationError if tensors overlap in any other way.

    Names of one group have the same place, dtype and shape. Empty tensors share nothing.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, view in views.items():
        place = view.place if view.extent.length_bytes else ("empty", name)
        groups.setdefault(place, []).append(name)
    by_device: dict[str, list[str]] = {}
    for names in groups.values():
        view = views[names[0]]
        if not view.extent.contiguous and overlaps_itself(view.extent):
            raise RegistrationError(
                f"{names[0]!r} overlaps itself (strides {view.extent.strides} bytes, shape {view.extent.shape}), as "
                "`expand()` makes it: register `contiguous()`"
            )
        by_device.setdefault(view.device, []).append(names[0])
    for names in by_device.values():
        for a, b in overlapping_pairs([views[name].extent for name in names]):
            raise RegistrationError(
                f"{names[a]!r} and {names[b]!r} overlap without being the same tensor: register only one of them"
            )
    return groups
