"""Options that would serve wrong weights are refused, all at once and with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_sglang.limits import OPTIONS, find_problems, layout_facts, refusal

DEFAULTS: dict[str, Any] = {option.name: option.fine[-1] for option in OPTIONS}


def problems(**given: Any) -> list[str]:
    """Return what is refused of an engine on a CPU with these options and defaults for the rest."""
    return find_problems(SimpleNamespace(**{**DEFAULTS, "device": "cpu", **given}), {})


def test_a_plain_engine_is_fine() -> None:
    assert problems() == []
    assert problems(device="cuda", tp_size=8, ep_size=8, enable_memory_saver=True) == []
    assert find_problems(SimpleNamespace(), {"SGLANG_RUST_SERVER": False}) == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quantization": "fp8"}, "--quantization fp8: not supported by this release"),
        ({"dp_size": 2}, "--dp-size 2: start one engine per replica instead"),
        ({"pp_size": 2}, "--pp-size 2: pipeline stages take requests at different times"),
        ({"enable_eplb": True}, "--enable-eplb True: experts that move between ranks cannot be described"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE: a draft is not swapped"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb 4: weights that are not where the model computes"),
        ({"lora_paths": ["a"]}, "--lora-paths ['a']: not supported by this release"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file: what was computed with old weights"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client: its memory is shared"),
        ({"device": "npu"}, "--device npu: only cpu and cuda are supported"),
    ],
)
def test_what_does_not_work_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    (problem,) = problems(**given)
    assert problem.startswith(reason)


def test_every_refusal_is_told_at_once() -> None:
    found = problems(quantization="fp8", pp_size=2)
    found += find_problems(SimpleNamespace(), {"SGLANG_RUST_SERVER": True})
    text = refusal(found)
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- --pp-size 2: pipeline stages take requests at different times",
        "- --quantization fp8: not supported by this release",
        "- SGLANG_RUST_SERVER: requests would come in another way than through the server that swaps",
    ]


def test_the_order_of_options_is_no_matter_for_what_lies_in_memory() -> None:
    one = layout_facts(SimpleNamespace(tp_size=2, moe_runner_backend="triton", port=1))
    other = layout_facts(SimpleNamespace(port=2, moe_runner_backend="triton", tp_size=2))
    assert one == other
    assert one != layout_facts(SimpleNamespace(tp_size=2, moe_runner_backend="flashinfer_cutlass"))
