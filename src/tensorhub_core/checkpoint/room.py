"""Make room for a version that is to be written as a checkpoint: memory now, and enough of the disk later."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from tensorhub_core.checkpoint.inventory import Inventory
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.canonical import dtype_bytes

_ALIGNMENT_BYTES = 64


def allocate(inventory: Inventory, target: Path) -> tuple[tuple[RawTensor, ...], int]:
    """Return zeroed tensors for the inventory, names of the same bytes sharing a buffer, and the bytes of all buffers.

    Raises ConfigError if the memory or the disk of `target` has no room for them.
    """
    owner = {name: group[0] for group in inventory.aliases for name in group}
    sizes = {t.name: dtype_bytes(t.dtype) * math.prod(t.shape) for t in inventory.tensors}
    places: dict[str, int] = {}
    end = 0
    for tensor in inventory.tensors:
        if owner.get(tensor.name, tensor.name) == tensor.name:
            places[tensor.name] = end
            end += -(-sizes[tensor.name] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    check_room(end, sum(sizes.values()), target)
    try:
        arena = np.zeros(end, np.uint8)
    except MemoryError:
        raise ConfigError(f"the version needs {decimal(end)} of memory, which this machine refuses") from None
    tensors = []
    for tensor in inventory.tensors:
        start = places[owner.get(tensor.name, tensor.name)]
        tensors.append(RawTensor(tensor.name, tensor.dtype, tensor.shape, arena[start : start + sizes[tensor.name]]))
    return tuple(tensors), end


def check_room(memory_bytes: int, disk_bytes: int, target: Path) -> None:
    """Raise ConfigError if the machine's memory or the disk of `target` has no room."""
    available = available_memory_bytes()
    if available is not None and memory_bytes > available:
        raise ConfigError(f"the version needs {decimal(memory_bytes)} of memory, {decimal(available)} are available")
    parent = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if disk_bytes > free:
        raise ConfigError(f"the version needs {decimal(disk_bytes)} of disk, {parent} has {decimal(free)} free")


def available_memory_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return how many bytes programs can still take, or None if the kernel does not say."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None
