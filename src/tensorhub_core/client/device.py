"""Bring bytes of CUDA memory to the host, by address; torch is loaded only when there are any."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


class _Run:
    """A run of device memory as torch can adopt it without a copy."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_bytes(device: str, address: int, length_bytes: int) -> memoryview:
    """Copy a run of device memory to the host and return it; waits for the copy."""
    import torch

    run = torch.as_tensor(_Run(address, length_bytes), device=device)
    return run.cpu().numpy().data


def fill_device(device: str, address: int, data: NDArray[np.uint8]) -> None:
    """Copy host bytes [bytes] to device memory, on the thread's current stream; returns before they have arrived."""
    import torch

    run = torch.as_tensor(_Run(address, len(data)), device=device)
    run.copy_(torch.from_numpy(data))


def checksum_device(device: str, address: int, length_bytes: int) -> int:
    """Return the xxh3_64 of a run of device memory."""
    return xxhash.xxh3_64_intdigest(device_bytes(device, address, length_bytes))
