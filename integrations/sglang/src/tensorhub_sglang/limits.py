"""Which of SGLang's options do not work with weights from a hub, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICES = ("cpu", "cuda")
"""Where weights are allocated like torch's."""

_NOTHING = (None, False)


@dataclass(frozen=True, slots=True)
class Option:
    """One of SGLang's options: its name, the class of `sglang.srt.arg_groups.fields` that has it, what it may be."""

    name: str
    where: str
    fine: tuple[object, ...]
    why: str
    always: bool = True
    """It is in every release that the adapter supports."""


_REPLICA = "start one engine per replica instead"
_MOVES = "experts that move between ranks cannot be described"
_AWAY = "weights that are not where the model computes cannot be filled"
_SHARED = "its memory is shared with other engines, which a swap would overwrite"
_FRONT = "requests would come in another way than through the server that swaps"
_OLD_KV = "what was computed with old weights would outlive a swap"
_REPACKED = "it keeps a second form of the weights"
_DRAFT = "a draft is not swapped together with its model"

OPTIONS: tuple[Option, ...] = (
    Option("dp_size", "parallel.Parallel", (None, 1), _REPLICA),
    Option("attn_dp_size", "parallel.Parallel", (None, 1), _REPLICA, always=False),
    Option("enable_dp_attention", "parallel.Parallel", _NOTHING, _REPLICA),
    Option("pp_size", "parallel.Parallel", (None, 1), "pipeline stages take requests at different times"),
    Option("attn_cp_size", "parallel.Parallel", (None, 1), "not supported by this release"),
    Option("dcp_size", "parallel.Parallel", (None, 1), "not supported by this release"),
    Option("moe_dp_size", "parallel.Parallel", (None, 1), "not supported by this release"),
    Option("dwdp_size", "parallel.Parallel", (None, 1), "not supported by this release"),
    Option("quantization", "model.Model", (None, "unquant"), "not supported by this release"),
    Option("modelopt_quant", "model.Model", (None,), "not supported by this release"),
    Option("weight_cache_mode", "model.Model", (None, "off"), _SHARED),
    Option("startup_weight_load_mode", "model.Model", (None, "serial"), "it loads from files"),
    Option("checkpoint_engine_wait_weights_before_ready", "model.Model", _NOTHING, "it waits for other weights"),
    Option(
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "model.Model",
        _NOTHING,
        "others would read memory that a swap overwrites",
    ),
    Option("model_checksum", "model.Model", (None,), "there are no files to compare with it"),
    Option("enable_eplb", "exec_.ExecMoe", _NOTHING, _MOVES),
    Option("ep_num_redundant_experts", "exec_.ExecMoe", (None, 0), _MOVES),
    Option("init_expert_location", "exec_.ExecMoe", (None, "trivial"), _MOVES),
    Option("elastic_ep_backend", "exec_.ExecMoe", (None,), _MOVES),
    Option("enable_elastic_expert_backup", "exec_.ExecMoe", _NOTHING, _MOVES),
    Option("enable_paged_experts", "exec_.ExecMoe", _NOTHING, _AWAY, always=False),
    Option("kt_weight_path", "exec_.ExecMoe", (None,), _AWAY),
    Option("cpu_offload_gb", "exec_.ExecOffload", (None, 0), _AWAY),
    Option("offload_group_size", "exec_.ExecOffload", (None, -1), _AWAY),
    Option("ple_offload_embedding", "exec_.ExecOffload", _NOTHING, _AWAY),
    Option("enable_nvidia_megakernel", "exec_.ExecKernel", _NOTHING, _REPACKED, always=False),
    Option("enable_amd_monokernel", "exec_.ExecKernel", _NOTHING, _REPACKED, always=False),
    Option("speculative_algorithm", "spec.Spec", (None,), _DRAFT),
    Option("decoupled_spec_role", "disagg.Disagg", (None, "null"), _DRAFT),
    Option("enable_lora", "lora.Lora", _NOTHING, "not supported by this release"),
    Option("lora_paths", "lora.Lora", (None, [], {}), "not supported by this release"),
    Option("disaggregation_mode", "disagg.Disagg", (None, "null"), "engines of one request may have other versions"),
    Option("encoder_only", "disagg.Disagg", _NOTHING, _FRONT),
    Option("tokenizer_worker_num", "serving.Serving", (None, 1), _FRONT),
    Option("smg_grpc_mode", "serving.Serving", _NOTHING, _FRONT),
    Option("grpc_mode", "serving.Serving", _NOTHING, _FRONT),
    Option("grpc_port", "serving.Serving", (None,), _FRONT),
    Option("use_ray", "device.Device", _NOTHING, _FRONT),
    Option("hicache_storage_backend", "memory.Memory", (None,), _OLD_KV),
    Option("enable_lmcache", "memory.Memory", _NOTHING, _OLD_KV),
    Option("enable_flexkv", "memory.Memory", _NOTHING, _OLD_KV),
    Option("enable_unified_cache_external_linker", "memory.Memory", _NOTHING, _OLD_KV),
    Option("enable_streaming_session", "serving.Serving", _NOTHING, _OLD_KV),
)

LAYOUT: tuple[Option, ...] = tuple(
    Option(name, where, (), "")
    for where, names in (
        ("parallel.Parallel", ("tp_size", "ep_size", "moe_dense_tp_size", "shared_experts_tp_size")),
        ("parallel.Parallel", ("enable_dp_lm_head", "enable_shared_experts_attn_tp", "enable_dense_mlp_attn_tp")),
        ("parallel.Parallel", ("enable_layernorm_sp",)),
        ("model.Model", ("model_impl", "dtype")),
        ("exec_.ExecKernel", ("attention_backend", "decode_attention_backend", "prefill_attention_backend")),
        ("exec_.ExecKernel", ("bf16_gemm_backend",)),
        ("exec_.ExecMoe", ("moe_runner_backend", "moe_a2a_backend")),
        ("exec_.ExecMoe", ("disable_shared_experts_fusion", "enforce_shared_experts_fusion")),
        ("exec_.ExecDeterministic", ("rl_on_policy_target",)),
        ("exec_.ExecFeatures", ("enable_fp32_lm_head",)),
        ("disagg.Disagg", ("language_only", "language_model_only")),
        ("device.Device", ("device",)),
    )
    for name in names
)
"""Options that change how weights lie in memory: only engines that agree on all of them copy each other's bytes."""


def find_problems(args: Any, environment: Mapping[str, bool] = {}) -> list[str]:
    """Return one line for every option of `args`, an object with SGLang's fields, that does not work with a hub.

    `environment`: switches of SGLang that are environment variables, by name.
    """
    problems = []
    for option in OPTIONS:
        value = getattr(args, option.name, None)
        if value not in option.fine:
            problems.append(f"{_flag(option.name)} {value}: {option.why}")
    device = getattr(args, "device", None)
    if device is not None and str(device).split(":")[0] not in DEVICES:
        problems.append(f"--device {device}: only {' and '.join(DEVICES)} are supported by this release")
    problems += [f"{name}: {_FRONT}" for name, on in environment.items() if on]
    return problems


def layout_facts(args: Any) -> dict[str, str]:
    """Return the options that change how weights lie in memory, as text."""
    return {option.name: str(getattr(args, option.name, None)) for option in LAYOUT}


def refusal(problems: Sequence[str]) -> str:
    """Return the text of a refusal for these problems."""
    return "--weight-source tensorhub does not work with:\n- " + "\n- ".join(problems)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
