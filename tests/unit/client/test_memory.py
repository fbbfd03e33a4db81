"""Registered memory: storages point at the right bytes, strided tensors have shadows, moved ones are noticed."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.types import Box, Placement


def read_back(memory: RegisteredMemory, name: str) -> bytes:
    """Read what a peer would read of a tensor: through the storage's address alone."""
    for index, storage in enumerate(memory.storages):
        if name in storage.names:
            return ctypes.string_at(int(memory.addresses[index]), storage.length_bytes) if storage.length_bytes else b""
    raise AssertionError(name)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype)
    data = torch.randint(0, 256, (size.numel() * size.element_size(),), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the canonical (C order) bytes of a tensor, by torch alone."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


STRIDED: dict[str, Any] = {
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 1:4],
    "rows": lambda t: t[::2],
    "permuted": lambda t: t.reshape(2, 4, 3, 2).permute(3, 1, 0, 2),
    "diagonal": lambda t: t.diagonal(),
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("kind", STRIDED)
def test_a_strided_tensor_is_read_and_filled_through_its_shadow(kind: str, dtype: torch.dtype) -> None:
    base = random_tensor((8, 6), dtype)
    if kind == "permuted" and base.element_size() == 1:
        base = base.clone()
    tensor = STRIDED[kind](base)
    outside = base.clone()
    memory = RegisteredMemory({"w": tensor, "plain": torch.ones(3)})
    memory.collect()
    assert read_back(memory, "w") == bytes_of(tensor)

    replacement = random_tensor(tuple(tensor.shape), dtype)
    index = next(i for i, s in enumerate(memory.storages) if s.names == ("w",))
    buffer = memory.buffers[index]
    assert buffer is not None
    buffer[:] = np.frombuffer(bytes_of(replacement), np.uint8)
    assert bytes_of(tensor) == bytes_of(STRIDED[kind](outside)), "the tensor changes only when it is spread"
    memory.spread()
    assert bytes_of(tensor) == bytes_of(replacement)
    mask = torch.ones(8, 6, dtype=torch.bool)
    STRIDED[kind](mask).fill_(False)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        base.element_size()
    ]
    rest, before = base.view(integers)[mask], outside.view(integers)[mask]
    assert bytes_of(rest) == bytes_of(before), "bytes around the view stay"


def test_numpy_arrays_with_negative_strides_work() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    memory = RegisteredMemory({"r": array[::-1, ::-2]})
    memory.collect()
    assert read_back(memory, "r") == np.ascontiguousarray(array[::-1, ::-2]).tobytes()


def test_nan_payloads_and_negative_zero_survive_the_shadow() -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800001], np.uint32)
    base = torch.from_numpy(np.stack([bits, bits]).view(np.float32).T)
    memory = RegisteredMemory({"w": base})
    memory.collect()
    assert read_back(memory, "w") == np.ascontiguousarray(np.stack([bits, bits]).T).tobytes()


def test_tied_tensors_are_one_storage_and_count_once() -> None:
    tied, other = random_tensor((16, 4)), random_tensor((5,))
    memory = RegisteredMemory({"lm_head": tied, "embed": tied.view(16, 4), "b": other})
    assert sorted(s.names for s in memory.storages) == [("b",), ("embed", "lm_head")]
    assert memory.total_bytes == tied.nbytes + other.nbytes


def test_empty_and_scalar_tensors_are_described() -> None:
    scalar = torch.tensor(7, dtype=torch.int64)
    memory = RegisteredMemory({"none": torch.empty(0, 16), "scalar": scalar, "one": torch.ones(1)})
    assert read_back(memory, "none") == b""
    assert read_back(memory, "scalar") == bytes_of(scalar)
    assert {t.name: t.shape for t in memory.layout.tensors} == {"none": (0, 16), "scalar": (), "one": (1,)}
    assert all(region.length_bytes for region in memory.regions())


def test_sums_are_the_hashes_of_each_segments_bytes() -> None:
    tensors = {f"t{i}": random_tensor((i * 700, 3)) for i in range(4)} | {"view": random_tensor((4, 4)).t()}
    memory = RegisteredMemory(tensors, segment_bytes=4096)
    memory.collect()
    expected = []
    for storage, offset, length in zip(
        memory.table.storage, memory.table.offset_bytes.tolist(), memory.table.length_bytes.tolist(), strict=True
    ):
        data = bytes_of(tensors[memory.storages[storage].names[0]])
        expected.append(xxhash.xxh3_64_intdigest(data[offset : offset + length]))
    assert memory.sums().tolist() == expected
    assert memory.num_segments == len(expected) > 4


def test_placement_names_address_and_device_of_every_storage() -> None:
    tensors = {"a": random_tensor((3,)), "b": torch.empty(0), "c": random_tensor((2, 2))}
    memory = RegisteredMemory(tensors)
    placement = msgspec.msgpack.decode(memory.placement("nixl", b"agent"), type=Placement)
    addresses = np.frombuffer(placement.addresses, "<u8").tolist()
    by_name = dict(zip((s.names[0] for s in memory.storages), addresses, strict=True))
    assert by_name == {"a": tensors["a"].data_ptr(), "b": 0, "c": tensors["c"].data_ptr()}
    assert placement.device_names == ("cpu",)
    assert placement.devices == bytes(3)
    assert placement.agent == b"agent"


def test_regions_cover_every_storage() -> None:
    tensors = {f"t{i}": random_tensor((i % 7, 5)) for i in range(300)}
    memory = RegisteredMemory(tensors)
    regions = memory.regions()
    for storage in memory.storages:
        if storage.length_bytes:
            assert any(
                r.address <= storage.address and storage.address + storage.length_bytes <= r.address + r.length_bytes
                for r in regions
            )


def test_tensors_of_one_buffer_are_one_region() -> None:
    flat = torch.zeros(10_000 * 17)
    assert len(RegisteredMemory({f"t{i}": flat[17 * i : 17 * i + 11] for i in range(10_000)}).regions()) == 1


def _move_data(p: torch.nn.Parameter) -> None:
    p.data = p.data.clone()


def _resize(p: torch.nn.Parameter) -> None:
    p.data.resize_(100)
    p.data = p.data


def _free(p: torch.nn.Parameter) -> None:
    p.data.untyped_storage().resize_(0)


def _cast(p: torch.nn.Parameter) -> None:
    p.data = p.data.view(torch.int32).view(torch.float32).to(torch.float64)


def _transpose(p: torch.nn.Parameter) -> None:
    p.data = p.data.t()


@pytest.mark.parametrize("move", [_move_data, _resize, _free, _cast, _transpose])
def test_a_moved_tensor_is_noticed_by_name(move: Any) -> None:
    layer = torch.nn.Linear(6, 6)
    memory = RegisteredMemory(dict(layer.named_parameters()))
    memory.check_unmoved()
    with torch.no_grad():
        layer.weight.add_(1)
    memory.check_unmoved()
    move(layer.weight)
    with pytest.raises(RegistrationError, match="'weight'"):
        memory.check_unmoved()


def test_read_only_arrays_can_be_published_but_not_filled() -> None:
    array = np.ones(5, np.float32)
    array.flags.writeable = False
    memory = RegisteredMemory({"frozen": array, "free": np.ones(5, np.float32)})
    assert len(memory.sums()) == 2
    with pytest.raises(RegistrationError, match="'frozen'"):
        memory.check_writable()


def test_boxes_reach_the_layout_and_unknown_ones_are_refused() -> None:
    box = Box("qkv", (0, 0), (2, 3), (0, 0))
    memory = RegisteredMemory({"q": torch.ones(2, 3)}, {"q": [box]}, shard=1, num_shards=2, tag="raw")
    assert memory.layout.tensors[0].boxes == (box,)
    assert (memory.layout.shard, memory.layout.num_shards, memory.layout.tag) == (1, 2, "raw")
    assert not memory.portable
    with pytest.raises(RegistrationError, match="'k'"):
        RegisteredMemory({"q": torch.ones(2, 3)}, {"k": [box]})


def test_the_fingerprint_depends_on_the_tensors_and_not_on_their_order_or_place() -> None:
    def make(names: str, rows: int = 3) -> bytes:
        return RegisteredMemory([(name, torch.ones(rows, 2)) for name in names]).fingerprint

    assert make("abc") == make("cab")
    assert make("abc") != make("abd")
    assert make("abc") != make("abc", rows=4)
