"""Work on the memory of devices by address, with torch: sum it, copy it, fill it. Torch is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.weighted import weighted_sums_of
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.types import Checksum

if TYPE_CHECKING:
    import torch

Adopt = Callable[[str, int, int], "torch.Tensor"]
"""Return a run of memory, (device, address, length_bytes), as a u8 tensor [bytes] that shares it."""

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


class DeviceMemory(Protocol):
    """What the executor needs of memory that the CPU cannot see. Called on verifying threads."""

    def checksum(self, checksum: Checksum, device: str, address: int, length_bytes: int) -> int:
        """Return the checksum of a run."""

    def checksums(self, checksum: Checksum, device: str, runs: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
        """Return the checksums of runs (address, length_bytes), u64 [runs]."""

    def cut_checksums(
        self, checksum: Checksum, device: str, cuts: Sequence[tuple[int, int, int, int]]
    ) -> NDArray[np.uint64]:
        """Return the checksums of the bytes of cuts (address, run_bytes, stride_bytes, count), u64 [cuts]."""

    def write(self, device: str, address: int, data: NDArray[np.uint8]) -> None:
        """Fill a run; returns when `data` may change again and the run has its bytes."""

    def scatter(
        self,
        segment: NDArray[np.uint8],
        segment_shape: tuple[int, ...],
        scatter: Scatter,
        device: str,
        address: int,
        shape: tuple[int, ...],
        item_bytes: int,
    ) -> None:
        """Copy a box out of a segment into the tensor [shape] at `address`; see `layout.scatter.scatter_bytes`."""


class TorchMemory:
    """Memory of the devices that torch knows."""

    def __init__(self, adopt: Adopt | None = None) -> None:
        """`adopt` None: CUDA memory, adopted without a copy."""
        self._adopt = adopt_cuda if adopt is None else adopt

    def checksum(self, checksum: Checksum, device: str, address: int, length_bytes: int) -> int:
        """Return the checksum of a run; `weighted` is computed on the device."""
        return int(self.checksums(checksum, device, [(address, length_bytes)])[0])

    def checksums(self, checksum: Checksum, device: str, runs: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
        """Return the checksums of runs (address, length_bytes), u64 [runs]; waits for the device once."""
        return self._sums_of(checksum, [self._adopt(device, *run) for run in runs])

    def cut_checksums(
        self, checksum: Checksum, device: str, cuts: Sequence[tuple[int, int, int, int]]
    ) -> NDArray[np.uint64]:
        """Return the checksums of cuts, whose runs are gathered on the device; waits for it once."""
        gathered = []
        for address, run_bytes, stride_bytes, count in cuts:
            span = self._adopt(device, address, (count - 1) * stride_bytes + run_bytes)
            gathered.append(span.as_strided((count, run_bytes), (stride_bytes, 1)).reshape(-1))
        return self._sums_of(checksum, gathered)

    def _sums_of(self, checksum: Checksum, tensors: list[torch.Tensor]) -> NDArray[np.uint64]:
        if checksum == "weighted":
            return weighted_sums_of(tensors)
        return np.array([xxhash.xxh3_64_intdigest(tensor.cpu().numpy().data) for tensor in tensors], np.uint64)

    def write(self, device: str, address: int, data: NDArray[np.uint8]) -> None:
        """Fill a run and wait for it."""
        import torch

        run = self._adopt(device, address, len(data))
        run.copy_(torch.from_numpy(data))
        _wait_for(run)

    def scatter(
        self,
        segment: NDArray[np.uint8],
        segment_shape: tuple[int, ...],
        scatter: Scatter,
        device: str,
        address: int,
        shape: tuple[int, ...],
        item_bytes: int,
    ) -> None:
        """Copy a box and wait for it; the segment goes to the device whole, and is cut there."""
        import torch

        item = getattr(torch, _INTEGERS[item_bytes])
        length = int(np.prod(shape, dtype=np.int64)) * item_bytes
        target = self._adopt(device, address, length).view(item).reshape(shape)
        source = torch.from_numpy(segment).to(target.device).view(item).reshape(segment_shape)
        rank = len(scatter.shape)
        into = _box_of(target, scatter.dst_start, scatter.shape, rank)
        into.copy_(_box_of(source, scatter.src_start, scatter.shape, rank))
        _wait_for(target)


def _box_of(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...], rank: int) -> torch.Tensor:
    lead = rank - tensor.ndim
    box = tensor.reshape((1,) * lead + tuple(tensor.shape)) if lead else tensor
    for axis, (at, size) in enumerate(zip((0,) * lead + start, shape, strict=True)):
        box = box.narrow(axis, at, size)
    return box


def _wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()


class _Run:
    """A run of device memory as torch can adopt it without a copy."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def adopt_cuda(device: str, address: int, length_bytes: int) -> torch.Tensor:
    """Return a run of CUDA memory as a u8 tensor [bytes]; whoever owns the memory keeps it alive."""
    import torch

    run: torch.Tensor = torch.as_tensor(_Run(address, length_bytes), device=device)
    return run


def device_bytes(device: str, address: int, length_bytes: int) -> memoryview:
    """Copy a run of device memory to the host and return it; waits for the copy."""
    return adopt_cuda(device, address, length_bytes).cpu().numpy().data


def fill_device(device: str, address: int, data: NDArray[np.uint8]) -> None:
    """Copy host bytes [bytes] to device memory, on the thread's current stream; returns before they have arrived."""
    import torch

    adopt_cuda(device, address, len(data)).copy_(torch.from_numpy(data))
