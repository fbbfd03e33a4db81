"""Tiny GPT models of megatron-core, one rank's part of each, with weights that differ everywhere.

Functions here run on the ranks (`ranks.py`).
"""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN, HEADS, HEAD_DIM, FFN, EXPERT_FFN, LENGTH = 64, 8, 8, 96, 48, 16
VOCAB = 101


@dataclass(frozen=True)
class Recipe:
    """A model and how it is divided; one that a world of `tp * pp * dp` ranks builds together."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of experts; None is `tp`."""
    vpp: int | None = None
    layers: int = 2
    groups: int = 4
    tied: bool = False
    qkv_bias: bool = False
    biases: bool = False
    qk_norm: bool = False
    experts: int = 0
    shared_expert: int = 0
    experts_as: str = "sequential"
    """`sequential`, `grouped` (one transposed parameter) or `te_grouped` (one parameter each, as with TE)."""
    fused_norms: bool = False
    bf16: bool = True
    dist_opt: bool = False
    overlap: bool = False
    moe_layers: tuple[int, ...] | None = None
    mixtral: bool = False
    vocab: int = VOCAB
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where it has another number of them than the others."""

    @property
    def world(self) -> int:
        """Return how many ranks build it."""
        return self.tp * self.pp * self.dp

    @property
    def padded_vocab(self) -> int:
        """Return the rows of the embedding: a multiple of 8 for every rank, as Megatron pads it."""
        multiple = 8 * self.tp
        return -(-self.vocab // multiple) * multiple

    @property
    def model_type(self) -> str:
        """Return the family that has such parts: Mixtral, Qwen or Llama."""
        if self.mixtral:
            return "mixtral"
        family = "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else ""
        return f"{family or 'qwen3'}_moe" if self.experts else family or "llama"

    def hf_config(self) -> dict[str, Any]:
        """Return the Hugging Face configuration of the same model."""
        moe = {"num_experts": self.experts, "moe_intermediate_size": EXPERT_FFN} if self.experts else {}
        if self.mixtral:
            moe = {"num_local_experts": self.experts, "intermediate_size": EXPERT_FFN}
        if self.shared_expert:
            moe["shared_expert_intermediate_size"] = self.shared_expert
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": HIDDEN,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.groups,
            "head_dim": HEAD_DIM,
            "intermediate_size": FFN,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.qkv_bias or self.biases,
            "mlp_bias": self.biases,
            **moe,
        }


@dataclass
class Built:
    """One rank's part: the wrapped chunks and the optimizer, as a trainer has them."""

    recipe: Recipe
    config: Any
    chunks: list[Any]
    optimizer: Any


def end_groups() -> None:
    """Destroy all process groups but the world's: Megatron forgets its own, and each keeps its threads until then."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    gc.collect()


def build(recipe: Recipe, *, fill: bool = True) -> Built:
    """Set the parallel groups up anew and build this rank's part, wrapped, with its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    end_groups()
    parallel_state.initialize_model_parallel(
        recipe.tp, recipe.pp, recipe.vpp, expert_model_parallel_size=recipe.ep, expert_tensor_parallel_size=recipe.etp
    )
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(recipe)
    models = [_model(recipe, config, number) for number in range(recipe.vpp or 1)]
    if fill:
        for model in models:
            fill_weights(model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=recipe.dist_opt,
        overlap_grad_reduce=recipe.overlap,
        overlap_param_gather=recipe.overlap,
        grad_reduce_in_fp32=True,
        bucket_size=20_000 if recipe.overlap else None,
    )
    chunks = [DistributedDataParallel(config, ddp, model) for model in models]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            bf16=recipe.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=recipe.dist_opt,
            clip_grad=1.0,
            overlap_param_gather=recipe.overlap,
        ),
        chunks,
    )
    return Built(recipe, config, chunks, optimizer)


def transformer_config(recipe: Recipe) -> Any:
    """Return Megatron's configuration of the model."""
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    moe = {}
    if recipe.experts:
        moe = {
            "num_moe_experts": recipe.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": EXPERT_FFN,
            "moe_grouped_gemm": recipe.experts_as != "sequential",
            "moe_token_dispatcher_type": "allgather" if recipe.ep == 1 else "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": recipe.shared_expert or None,
            "moe_shared_expert_gate": bool(recipe.shared_expert),
        }
        if recipe.moe_layers is not None:
            moe["moe_layer_freq"] = list(recipe.moe_layers)
    return TransformerConfig(
        num_layers=recipe.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=recipe.groups,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=recipe.tp,
        pipeline_model_parallel_size=recipe.pp,
        virtual_pipeline_model_parallel_size=recipe.vpp,
        num_layers_in_first_pipeline_stage=recipe.first_stage_layers,
        expert_model_parallel_size=recipe.ep,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=recipe.biases,
        add_qkv_bias=recipe.qkv_bias or recipe.biases,
        qk_layernorm=recipe.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=recipe.bf16,
        batch_p2p_comm=False,
        **moe,
    )


def _model(recipe: Recipe, config: Any, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    virtual = {"vp_stage": stage} if recipe.vpp else {}
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=not recipe.vpp, **virtual)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=not recipe.vpp, **virtual)
    model = GPTModel(
        config,
        layer_spec(recipe, config),
        vocab_size=recipe.padded_vocab,
        max_sequence_length=LENGTH,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=recipe.tied,
        **virtual,
    )
    return model.bfloat16() if recipe.bf16 else model


def layer_spec(recipe: Recipe, config: Any) -> Any:
    """Return the spec of a layer, or of a block whose layers differ."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if recipe.moe_layers is not None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec = get_gpt_layer_local_spec(
        num_experts=recipe.experts or None,
        normalization="RMSNorm",
        qk_layernorm=recipe.qk_norm,
        moe_grouped_gemm=recipe.experts_as == "grouped",
    )
    if recipe.experts_as == "te_grouped":
        spec.submodules.mlp.submodules.experts = _te_grouped_experts()
    return _with_fused_norms(spec) if recipe.fused_norms else spec


def _te_grouped_experts() -> Any:
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = MLPSubmodules(linear_fc1=_grouped_linear(0), linear_fc2=_grouped_linear(1))
    return ModuleSpec(module=TEGroupedMLP, submodules=submodules)


def _grouped_linear(tp_axis: int) -> type[torch.nn.Module]:
    """Return a class with the parameters of Megatron's TEGroupedLinear, and its description of where they lie.

    Transformer Engine needs a GPU, and Megatron defines that class only beside it.
    """

    class GroupedLinear(torch.nn.Module):
        def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, pg_collection: Any, **_: Any):
            super().__init__()
            self._experts, self._groups = experts, pg_collection
            shape = [outputs, inputs]
            shape[tp_axis] //= pg_collection.expt_tp.size()
            for number in range(experts):
                parameter: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
                parameter.allreduce = config.expert_model_parallel_size == 1
                parameter.tensor_model_parallel = True
                parameter.partition_dim = tp_axis
                self.register_parameter(f"weight{number}", parameter)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

            ranks = self._groups.ep
            offset, total = ranks.rank() * self._experts, ranks.size() * self._experts
            found = {
                f"{prefix}weight{number}": make_tp_sharded_tensor_for_checkpoint(
                    getattr(self, f"weight{number}"),
                    f"{prefix}weight",
                    tp_axis,
                    prepend_offsets=(*sharded_offsets, (len(sharded_offsets), offset + number, total)),
                    tp_group=self._groups.expt_tp,
                    dp_cp_group=metadata["dp_cp_group"],
                )
                for number in range(self._experts)
            }
            for sharded in found.values():  # experts have copies on other ranks than the rest
                sharded.replica_id = (*sharded.replica_id[:2], self._groups.expt_dp.rank())
            return found

    return GroupedLinear


def _with_fused_norms(spec: Any) -> Any:
    """Move the norms into the linear layers after them, as Transformer Engine's layers have them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class NormLinear(ColumnParallelLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.weight.shape[1], dtype=self.weight.dtype))

    layer = spec.submodules
    layer.input_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormLinear
    layer.sharded_state_dict_keys_map = {}
    if not hasattr(layer.mlp.submodules, "experts"):
        layer.pre_mlp_layernorm = IdentityOp
        layer.mlp.submodules.linear_fc1 = NormLinear
    return spec


def global_names(model: Any) -> dict[str, tuple[str, torch.nn.Parameter, int | None, tuple[int, int]]]:
    """Return by local name: the name in the whole model, the parameter, its divided axis, (part, parts) of that axis.

    Independent of the product: layer numbers, ranks and axes come from the modules themselves.
    """
    from megatron.core import parallel_state

    tp = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
    etp = (parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size())
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            layer = model.decoder.layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if "experts" in parts and "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(int(parts[at]) + expert_rank * layer.mlp.num_local_experts)
            elif parts[-1].removeprefix("weight").isdigit() and "linear_fc" in parts[-2]:
                number = int(parts[-1].removeprefix("weight")) + expert_rank * layer.mlp.num_local_experts
                parts[-3:] = ["experts", "local_experts", str(number), parts[-2], "weight"]
            elif parts[-1] in ("weight1", "weight2"):
                parts.append(str(expert_rank))
        whole = ".".join(parts)
        if model.share_embeddings_and_output_weights and name == "output_layer.weight":
            whole = "embedding.word_embeddings.weight"
        divided = bool(getattr(parameter, "tensor_model_parallel", False))
        axis = int(parameter.partition_dim) if divided else None
        is_expert = ".experts." in whole
        if parts[-2] in ("weight1", "weight2"):
            axis = 1 if parts[-2] == "weight1" else 0
        found[name] = (whole, parameter, axis, (etp if is_expert else tp) if axis is not None else (0, 1))
    return found


@torch.no_grad()
def fill_weights(model: Any) -> None:
    """Give every element of the whole model its own random bits; copies on several ranks get the same."""
    for whole, parameter, _, part in global_names(model).values():
        seed = int.from_bytes(hashlib.sha256(f"{whole} {part[0]}".encode()).digest()[:6], "little")
        generator = torch.Generator().manual_seed(seed)
        parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
