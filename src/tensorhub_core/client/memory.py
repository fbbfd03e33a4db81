"""Hold the registered tensors of one worker: their layout, where each storage lies, and shadows of strided tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.client.regions import Span, coalesce
from tensorhub_core.client.sums import host_sums, segment_sums
from tensorhub_core.client.tensors import Tensors, View, check_geometry, marks_of, named_tensors, view_of
from tensorhub_core.errors import RegistrationError
from tensorhub_core.ids import Digest
from tensorhub_core.layout.canonical import build_layout, digest_of, encode_layout
from tensorhub_core.layout.segments import SegmentTable, segment_table
from tensorhub_core.layout.types import Box, Checksum, Layout, Placement, TensorSpec
from tensorhub_core.transport.base import Region

if TYPE_CHECKING:
    import torch

_MAX_DEVICES = 256


class Shadow(Protocol):
    """A contiguous stand-in for a strided tensor: peers read and fill it, the tensor itself they cannot."""

    address: int
    keep: object

    def collect(self) -> None:
        """Copy the tensor into the shadow."""

    def spread(self) -> None:
        """Copy the shadow into the tensor."""


@dataclass(frozen=True, slots=True)
class StorageMemory:
    """Where one storage of the layout lies. `names` share it; the first one's tensor stands for all."""

    names: tuple[str, ...]
    view: View
    address: int
    length_bytes: int
    shadow: Shadow | None
    buffer: NDArray[np.uint8] | None
    """Flat bytes [length_bytes] of CPU memory; None on other devices."""


class FilledMemory(Protocol):
    """Memory that a round fills: registered, or staging; see `RegisteredMemory`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def table(self) -> SegmentTable: ...
    @property
    def addresses(self) -> NDArray[np.uint64]: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def buffers(self) -> tuple[NDArray[np.uint8] | None, ...]: ...
    @property
    def page(self) -> PrefixPage: ...

    def collect(self) -> None:
        """Bring in what a read may leave as it is, before the first one."""

    def spread(self) -> None:
        """Put what was read where the user sees it."""

    def sums(self) -> NDArray[np.uint64]:
        """Return the checksum of every segment, u64 [segments]."""


class RegisteredMemory:
    """The tensors of one `register()`; keeps them alive. Calls come from one thread at a time."""

    def __init__(
        self,
        tensors: Tensors,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        *,
        shard: int = 0,
        num_shards: int = 1,
        tag: str = "",
        segment_bytes: int = 4 << 20,
        checksum: Checksum | None = None,
    ) -> None:
        """Describe the tensors; raises RegistrationError naming the one that cannot be registered.

        `checksum` None: one that is computed where the tensors lie.
        """
        self._tensors = named_tensors(tensors)
        self._views = {name: view_of(name, tensor) for name, tensor in self._tensors.items()}
        self._marks = list(marks_of(list(self._tensors.values())))
        groups = check_geometry(self._views)
        self.layout: Layout = build_layout(
            _specs(self._views, boxes),
            [names for names in groups.values() if len(names) > 1],
            shard=shard,
            num_shards=num_shards,
            tag=tag,
            segment_bytes=segment_bytes,
            checksum=checksum or ("xxh3" if all(v.device == "cpu" for v in self._views.values()) else "weighted"),
        )
        self.layout_blob: bytes = encode_layout(self.layout)
        self.fingerprint: Digest = digest_of(self.layout_blob)
        self.table: SegmentTable = segment_table(self.layout)
        self.storages: tuple[StorageMemory, ...] = tuple(self._storage(names) for names in self._storage_names())
        self.addresses: NDArray[np.uint64] = np.array([s.address for s in self.storages], np.uint64)
        self.devices: tuple[str, ...] = tuple(s.view.device for s in self.storages)
        self.buffers: tuple[NDArray[np.uint8] | None, ...] = tuple(s.buffer for s in self.storages)
        self.total_bytes: int = self.table.total_bytes
        self.page = PrefixPage()

    def _storage_names(self) -> list[tuple[str, ...]]:
        return [tuple(self.layout.tensors[index].name for index in indices) for indices in self.layout.storages]

    def _storage(self, names: tuple[str, ...]) -> StorageMemory:
        view, tensor = self._views[names[0]], self._tensors[names[0]]
        length = view.extent.length_bytes
        if not length:
            return StorageMemory(names, view, 0, 0, None, np.empty(0, np.uint8))
        shadow = None if view.extent.contiguous else make_shadow(view, tensor)
        address = view.extent.address if shadow is None else shadow.address
        buffer = flat_bytes(address, length) if view.device == "cpu" else None
        return StorageMemory(names, view, address, length, shadow, buffer)

    @property
    def num_segments(self) -> int:
        """Return the number of segments."""
        return len(self.table)

    @property
    def portable(self) -> bool:
        """Tell whether readers of another layout may read this one through boxes."""
        return not self.layout.tag

    def regions(self) -> list[Region]:
        """Return the few regions of memory to register with a transport, beside the page."""
        return coalesce(self._span(storage) for storage in self.storages)

    def _span(self, storage: StorageMemory) -> Span:
        allocation = None if storage.shadow is not None else storage.view.allocation
        return Span(storage.address, storage.address + storage.length_bytes, storage.view.device, allocation)

    def placement(self, transport: str, agent: bytes) -> bytes:
        """Return the placement blob: where peers find the storages through the transport's agent."""
        names = tuple(sorted(set(self.devices)))
        if len(names) > _MAX_DEVICES:
            raise RegistrationError(f"the tensors lie on {len(names)} devices; a worker can have {_MAX_DEVICES}")
        index = {name: number for number, name in enumerate(names)}
        devices = bytes(index[device] for device in self.devices)
        addresses = self.addresses.astype("<u8").tobytes()
        word = self.page.address if agent else 0
        return msgspec.msgpack.encode(Placement(transport, agent, addresses, names, devices, word))

    def gone(self) -> str | None:
        """Return the name of a tensor whose registered bytes are not there any more, even if nobody holds it.

        A tensor that was given other memory leaves the registered one as it is; one that is resized in place does not.
        """
        return next((s.names[0] for s in self.storages if s.shadow is None and not s.view.is_there()), None)

    def check_unmoved(self) -> None:
        """Raise RegistrationError naming the first tensor that no longer lies where it was registered."""
        now = marks_of(list(self._tensors.values()))
        if all(mark is not None and mark == before for mark, before in zip(now, self._marks, strict=True)):
            return
        for name, tensor in self._tensors.items():
            if view_of(name, tensor).place != self._views[name].place:
                raise RegistrationError(
                    f"{name!r} was moved, resized or cast since register(): its memory is not the one that peers "
                    "see; call register() again, after unpublish() if a version is published"
                )

    def check_writable(self) -> None:
        """Raise RegistrationError naming the first tensor that cannot be filled."""
        for name, view in self._views.items():
            if not view.writable:
                raise RegistrationError(
                    f"{name!r} is a read-only array: it can be published, not filled by replicate()"
                )

    def collect(self) -> None:
        """Copy strided tensors into their shadows and wait for work queued on their devices, before a publish."""
        for storage in self.storages:
            if storage.shadow is not None:
                storage.shadow.collect()
        self.synchronize()

    def spread(self) -> None:
        """Copy the shadows into their strided tensors, after a read."""
        for storage in self.storages:
            if storage.shadow is not None:
                storage.shadow.spread()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the devices have finished what was queued on them."""
        devices = sorted({device for device in self.devices if device != "cpu"})
        if devices:
            import torch

            for device in devices:
                torch.cuda.synchronize(device)

    def sums(self) -> NDArray[np.uint64]:
        """Return the checksum of every segment, u64 [segments], of what the memory holds now."""
        checksum, table = self.layout.checksum, self.table
        if all(buffer is not None for buffer in self.buffers):
            return segment_sums(table, self.addresses, checksum)
        sums, compute, devices = np.zeros(len(table), np.uint64), host_sums(checksum), TorchMemory()
        for number, storage in enumerate(self.storages):
            mine = slice(int(table.first[number]), int(table.first[number + 1]))
            lengths = table.length_bytes[mine].tolist()
            addresses = (np.uint64(storage.address) + table.offset_bytes[mine]).tolist()
            if storage.buffer is not None:
                sums[mine] = compute(addresses, lengths)
            else:
                runs = list(zip(addresses, lengths, strict=True))
                sums[mine] = devices.checksums(checksum, storage.view.device, runs)
        return sums


def _specs(views: Mapping[str, View], boxes: Mapping[str, Sequence[Box]] | None) -> list[TensorSpec]:
    boxes = boxes or {}
    unknown = sorted(set(boxes) - set(views))
    if unknown:
        raise RegistrationError(f"boxes are given for {unknown[0]!r}, which is not among the tensors")
    for name, given in boxes.items():
        if not isinstance(given, Sequence) or not all(isinstance(box, Box) for box in given):
            raise RegistrationError(f"the boxes of {name!r} must be a sequence of Box, not {given!r}")
    return [
        TensorSpec(name, view.dtype, view.extent.shape, tuple(boxes[name]) if name in boxes else None)
        for name, view in views.items()
    ]


def flat_bytes(address: int, length_bytes: int) -> NDArray[np.uint8]:
    """Return CPU memory as u8 [length_bytes], without owning it: the caller keeps it alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length_bytes).from_address(address)), np.uint8)


def make_shadow(view: View, tensor: Any) -> Shadow:
    """Make the stand-in of a strided tensor on the tensor's device."""
    return _CpuShadow(view) if view.device == "cpu" else _TorchShadow(tensor)


class _CpuShadow:
    """Shadow of CPU memory, torch's or numpy's: elements are copied as opaque items of their size."""

    def __init__(self, view: View) -> None:
        extent = view.extent
        low, high = extent.hull()
        item = np.dtype(f"u{extent.item_bytes}") if extent.item_bytes <= 8 else np.dtype(f"V{extent.item_bytes}")
        memory = memoryview((ctypes.c_uint8 * (high - low)).from_address(low))
        self._tensor: NDArray[Any] = np.ndarray(extent.shape, item, memory, extent.address - low, extent.strides)
        self._dense: NDArray[Any] = np.empty(extent.shape, item)
        self.keep: object = self._dense
        self.address: int = self._dense.__array_interface__["data"][0]

    def collect(self) -> None:
        """Copy the tensor into the shadow."""
        self._dense[...] = self._tensor

    def spread(self) -> None:
        """Copy the shadow into the tensor."""
        self._tensor[...] = self._dense


class _TorchShadow:
    """Shadow of device memory; bytes are moved as integers of the element's size, so that no value changes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        self._tensor = tensor.detach().view(integers[tensor.element_size()])
        self._dense = torch.empty(tensor.shape, dtype=self._tensor.dtype, device=tensor.device)
        self.keep: object = self._dense
        self.address: int = self._dense.data_ptr()

    def collect(self) -> None:
        """Copy the tensor into the shadow."""
        self._dense.copy_(self._tensor)

    def spread(self) -> None:
        """Copy the shadow into the tensor."""
        self._tensor.copy_(self._dense)
