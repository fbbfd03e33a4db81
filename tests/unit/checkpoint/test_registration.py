"""A checkpoint's tensors can be registered as they are: dtypes, sums and places of the mapped bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from tensorhub_core.checkpoint.reader import open_checkpoint
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.tensors import RawTensor, view_of
from tensorhub_core.errors import RegistrationError
from tests.unit.checkpoint.samples import bytes_of, name_of, one_of_each, save, save_sharded


def test_a_checkpoint_has_the_layout_of_the_tensors_in_it(tmp_path: Path) -> None:
    tensors = one_of_each()
    names = sorted(tensors)
    save_sharded(tmp_path, [{name: tensors[name] for name in names[part::2]} for part in range(2)])
    checkpoint = open_checkpoint(tmp_path)
    memory = RegisteredMemory((tensor.name, tensor) for tensor in checkpoint.tensors)
    assert memory.fingerprint == RegisteredMemory(tensors).fingerprint
    assert memory.sums().tolist() == [
        xxhash.xxh3_64_intdigest(bytes_of(tensors[name])) for name in names if tensors[name].numel()
    ]
    with pytest.raises(RegistrationError, match=r"read-only"):
        memory.check_writable()


def test_a_file_takes_one_region(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {f"layer.{i}": torch.zeros(100 + i, dtype=torch.bfloat16) for i in range(500)})
    memory = RegisteredMemory((tensor.name, tensor) for tensor in open_checkpoint(tmp_path).tensors)
    (region,) = memory.regions()
    assert region.length_bytes == memory.total_bytes == 2 * sum(100 + i for i in range(500))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (RawTensor("w", "bfloat16", (2, 2), np.zeros(7, np.uint8)), "'w' of bfloat16 .* takes 8 bytes, .* has 7"),
        (RawTensor("w", "bfloat17", (2,), np.zeros(4, np.uint8)), "'w' cannot be registered"),
        (RawTensor("w", "bfloat16", (2,), np.zeros(2, np.uint16)), "'w' has a buffer that is not"),  # type: ignore[arg-type]
        (RawTensor("w", "bfloat16", (2,), np.zeros(8, np.uint8)[::2]), "'w' has a buffer that is not"),
    ],
)
def test_a_raw_tensor_must_hold_what_it_says(tensor: RawTensor, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        view_of("w", tensor)


def test_a_raw_tensor_lies_where_its_buffer_lies() -> None:
    buffer = np.zeros(24, np.uint8)
    view = view_of("w", RawTensor("w", name_of(torch.bfloat16), (3, 4), buffer))
    assert (view.extent.address, view.extent.length_bytes) == (buffer.ctypes.data, 24)
    assert view.extent.contiguous
    assert view.writable
