"""Make safetensors files by hand and by the safetensors library, which is the truth in these tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

TORCH_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name without prefix."""
    return str(dtype).removeprefix("torch.")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits (NaN payloads included; bools are 0 or 1)."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    bits = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the C-ordered bytes."""
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def one_of_each() -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype and of every odd shape."""
    tensors = {name_of(dtype): random_tensor(dtype, (3, 4), seed) for seed, dtype in enumerate(TORCH_DTYPES)}
    tensors["empty"] = torch.zeros((0, 16))
    tensors["scalar"] = torch.tensor(7, dtype=torch.int64)
    tensors["one"] = torch.ones(1, dtype=torch.bfloat16)
    return tensors


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file with the library."""
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def save_sharded(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Write files and their index."""
    places = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save(folder / file, tensors)
        places.update(dict.fromkeys(tensors, file))
    write_index(folder, places)


def write_index(folder: Path, places: object) -> None:
    """Write an index with this weight_map."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def raw_file(header: object, body: bytes = b"") -> bytes:
    """Return a file with any header, text or JSON, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def as_bytes(buffer: NDArray[np.uint8]) -> bytes:
    """Return a buffer's bytes."""
    return buffer.tobytes()
