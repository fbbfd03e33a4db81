"""Tensors that both sides of a process boundary can make from a name and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.complex64, torch.complex128),
)


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of random bits: NaN payloads and negative zeros included; bools stay bools."""
    empty = torch.empty(shape, dtype=dtype)
    size = empty.numel() * empty.element_size()
    bits = rng.integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def plain(seed: int, mib: int = 4) -> Tensors:
    """A few matrices and vectors, about `mib` MiB in all."""
    rng = np.random.default_rng(seed)
    rows = mib * 128
    return {
        "layers.0.weight": noise(rng, (rows, 1024), torch.bfloat16),
        "layers.1.weight": noise(rng, (rows, 1023), torch.float32),
        "norm": noise(rng, (1024,), torch.float32),
    }


def dtypes(seed: int) -> Tensors:
    """Every dtype, as a matrix; `packed` is int4 pairs in uint8."""
    rng = np.random.default_rng(seed)
    made = {f"t.{dtype}": noise(rng, (33, 7), dtype) for dtype in DTYPES}
    return made | {"packed": noise(rng, (64, 32), torch.uint8), "scales": noise(rng, (64,), torch.float32)}


def shapes(seed: int) -> Tensors:
    """Empty, scalar and single-element tensors."""
    rng = np.random.default_rng(seed)
    return {
        "empty": torch.empty(0, 16),
        "scalar": noise(rng, (), torch.int64),
        "one": noise(rng, (1,), torch.bfloat16),
        "ones": noise(rng, (1, 1, 1), torch.float32),
        "empty too": torch.empty(3, 0, 2, dtype=torch.int8),
    }


def only_empty(seed: int) -> Tensors:
    """Nothing to move at all."""
    return {"a": torch.empty(0, 16), "b": torch.empty(4, 0, dtype=torch.int64)}


def names(seed: int) -> Tensors:
    """Odd names."""
    rng = np.random.default_rng(seed)
    odd = ["x" * 4096, "層.0/重み", "a b\nc", "/", "..", "λ" * 500, "🙂", "tab\t", "nul\0", " ", "'", '"']
    return {name: noise(rng, (5,), torch.float32) for name in odd}


def tied(seed: int) -> Tensors:
    """Two names of one storage."""
    rng = np.random.default_rng(seed)
    embed = noise(rng, (3000, 64), torch.bfloat16)
    return {"embed.weight": embed, "lm_head.weight": embed, "norm": noise(rng, (64,), torch.float32)}


def untied(seed: int) -> Tensors:
    """The same two names with storages of their own and equal bytes."""
    made = tied(seed)
    return made | {"lm_head.weight": made["embed.weight"].clone()}


def untied_different(seed: int) -> Tensors:
    """The same two names with different bytes."""
    return untied(seed) | {"lm_head.weight": tied(seed + 1)["lm_head.weight"].clone()}


def tiny(seed: int, count: int = 60_000) -> Tensors:
    """Very many tensors of 1 to 64 bytes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 65, count).tolist()
    return {f"t{i}": torch.from_numpy(rng.integers(0, 256, size, np.uint8)) for i, size in enumerate(sizes)}


def strided(seed: int) -> Tensors:
    """Transposed, interleaved and stepped views."""
    rng = np.random.default_rng(seed)
    fused = noise(rng, (64, 96), torch.bfloat16)
    other = noise(rng, (40, 50), torch.float32)
    return {"q": fused[:, :32], "k": fused[:, 32:64], "v": fused[:, 64:], "t": other.t()[::2], "plain": other.clone()}


SAMPLES: dict[str, Callable[..., Tensors]] = {
    make.__name__: make
    for make in (plain, dtypes, shapes, only_empty, names, tied, untied, untied_different, tiny, strided)
}


def make(sample: str, seed: int, **more: Any) -> Tensors:
    """Make a sample by name."""
    return SAMPLES[sample](seed, **more)


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def blank(like: Mapping[str, torch.Tensor], fill: int = 0xA5) -> Tensors:
    """Make tensors of the same names, shapes, strides and ties, every byte `fill`."""
    storages: dict[int, torch.UntypedStorage] = {}
    made = {}
    for name, tensor in like.items():
        old = tensor.untyped_storage()
        if old.data_ptr() not in storages:
            new = torch.full((old.nbytes(),), fill, dtype=torch.uint8)
            storages[old.data_ptr()] = new.untyped_storage()
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(storages[old.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
        made[name] = twin
    return made


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one hash of all names and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(repr((name, str(tensors[name].dtype), tuple(tensors[name].shape))).encode())
        found.update(raw(tensors[name]))
    return found.hexdigest()


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether all tensors are equal bit by bit."""
    return a.keys() == b.keys() and all(raw(a[name]) == raw(b[name]) for name in a)


def is_filled(tensors: Mapping[str, torch.Tensor], fill: int = 0xA5) -> bool:
    """Tell whether every byte still is `fill`."""
    return all(set(raw(tensor)) <= {fill} for tensor in tensors.values())
