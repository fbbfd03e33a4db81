"""A stand-in for SGLang's kernels, for tests without a GPU: one function, in torch.

It registers no operators of torch: so SGLang finds no AMX kernels, and its layers take their paths in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int | None = None,
) -> None:
    """Write into the rows of `requests`, from start to end, where the KV of their next tokens lies."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = places[taken : taken + end - start].to(table.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    """Return a function that says what is missing when it is called: many are imported and few are used."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in in tests/engines/sglang/shim")

    missing.__name__ = name
    return missing
