"""One rank of the trainer: ordinary training with Megatron-Core, and one call more, `attach()`.

Runs in Megatron's environment, see trainer.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorhub_megatron import attach

TENSOR, PIPELINE = 2, 2
WORLD = TENSOR * PIPELINE
_MICROBATCH = 2
_PADDED_TO = 128
"""Megatron's own default: rows of the embedding, a multiple of this on every rank."""


@dataclass(frozen=True)
class Spec:
    """What a trainer is told: the model's Hugging Face configuration, the hub, and what to learn.

    `documents` are token ids i64 [document, token], all of one length; what follows a document's `lengths[document]`
    tokens is padding and not learnt.
    """

    hf_config: Mapping[str, Any]
    server: str
    model: str
    stream: str
    documents: Sequence[Sequence[int]]
    lengths: Sequence[int]
    learning_rate: float
    seed: int


class Training:
    """One rank's part of the model, its optimizer, and what it learns from."""

    def __init__(self, spec: Spec) -> None:
        """Build the rank's part, as any training script does, and publish it as version 0; called by all ranks."""
        self._spec = spec
        self._documents = torch.tensor(spec.documents)  # i64 [document, token]
        self._config = _config(spec.hf_config)
        self._chunks, self._optimizer = _build(spec, self._config)
        self._publisher = attach(
            self._chunks,
            self._optimizer,
            server=spec.server,
            model=spec.model,
            stream=spec.stream,
            hf_config=spec.hf_config,
        )
        self._addresses = [parameter.data_ptr() for parameter in self._parameters().values()]

    def step(self) -> float:
        """Train one step, which publishes the next version; returns the seconds it took."""
        began_s = time.monotonic()
        self._chunks[0].zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(forward_only=False)
        self._optimizer.step()
        return time.monotonic() - began_s

    def report(self) -> dict[str, Any]:
        """Say what this rank knows: the version, the wait for readers, and on the last stage what the model thinks.

        `logprobs` are log-probabilities of the documents' tokens after their first, per document, by the published
        weights.
        """
        rows = [row.tolist() for batch in self._run(forward_only=True) for row in batch["logprobs"]]
        logprobs = [row[: length - 1] for row, length in zip(rows, self._spec.lengths, strict=False)]
        here = [parameter.data_ptr() for parameter in self._parameters().values()]
        return {
            "version": self._publisher.version,
            "waited_s": self._publisher.last_wait_s,
            "logprobs": logprobs,
            "tensors": len(here),
            "moved": sum(a != b for a, b in zip(here, self._addresses, strict=True)),
            "bytes": sum(p.nbytes for p in self._parameters().values()),
        }

    def save(self, file: Path) -> None:
        """Write this rank's parameters, each under its name in the whole model and the axis that ranks divide."""
        from megatron.core import parallel_state
        from safetensors.torch import save_file

        rank, tensors = parallel_state.get_tensor_model_parallel_rank(), {}
        for name, parameter in self._parameters().items():
            divided = getattr(parameter, "tensor_model_parallel", False)
            part, axis = (rank, int(parameter.partition_dim)) if divided else (0, -1)
            tensors[f"{self._whole(name)} {axis} {part}"] = parameter.detach().clone()
        save_file(tensors, file)

    def close(self) -> None:
        """Leave the hub."""
        self._publisher.close()

    def _parameters(self) -> dict[str, Any]:
        return dict(self._chunks[0].module.named_parameters())

    def _whole(self, name: str) -> str:
        """Return a parameter's name in the whole model: layers of later stages count on."""
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(self._chunks[0].module.decoder.layers[int(parts[2])].layer_number - 1)
        whole = ".".join(parts)
        tied = self._chunks[0].module.share_embeddings_and_output_weights
        return "embedding.word_embeddings.weight" if tied and whole == "output_layer.weight" else whole

    def _run(self, *, forward_only: bool) -> list[dict[str, Any]]:
        """Go through all documents, forward and maybe backward; returns what the last stage found, none elsewhere."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._config.finalize_model_grads_func = finalize_model_grads
        length = self._documents.shape[1] - 1
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        positions = torch.arange(length)[None].expand(_MICROBATCH, length)

        def forward(batches: Iterator[tuple[Any, Any]], model: Any) -> Any:
            tokens, learnt = next(batches)
            labels = tokens[:, 1:].contiguous()
            if forward_only:
                return model(tokens[:, :-1], positions, mask), lambda logits: self._judge(logits, labels)
            losses = model(tokens[:, :-1], positions, mask, labels=labels)
            return losses, lambda losses: ((losses.float() * learnt).sum() / learnt.sum(), {})

        found: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self._batches(),
            model=self._chunks[0],
            num_microbatches=len(self._documents) // _MICROBATCH,
            seq_length=length,
            micro_batch_size=_MICROBATCH,
            forward_only=forward_only,
        )
        return found

    def _judge(self, logits: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
        """Return log-probabilities of `labels` [document, token] among the words there are.

        Megatron's loss counts the padding of the vocabulary as words; no engine does.
        """
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        words = gather_from_tensor_model_parallel_region(logits)[..., : self._spec.hf_config["vocab_size"]]
        logprobs = words.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return -logprobs.mean(), {"logprobs": logprobs.detach()}

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the documents two by two, and for each predicted token whether it is learnt."""
        places = torch.arange(1, self._documents.shape[1])[None]
        learnt = (places < torch.tensor(self._spec.lengths)[:, None]).float()
        starts = range(0, len(self._documents), _MICROBATCH)
        return ((self._documents[at : at + _MICROBATCH], learnt[at : at + _MICROBATCH]) for at in starts)


def _build(spec: Spec, config: Any) -> tuple[list[Any], Any]:
    """Return the wrapped model chunk of this rank, in a list, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(spec.seed)
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
    model_parallel_cuda_manual_seed(spec.seed)
    rows = _PADDED_TO * TENSOR
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
        vocab_size=-(-spec.hf_config["vocab_size"] // rows) * rows,
        max_sequence_length=len(spec.documents[0]),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(spec.hf_config["rope_parameters"]["rope_theta"]),
        share_embeddings_and_output_weights=spec.hf_config["tie_word_embeddings"],
    )
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)]
    options = OptimizerConfig(
        optimizer="adam",
        lr=spec.learning_rate,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=False,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    return chunks, get_megatron_optimizer(options, chunks)


def _config(hf_config: Mapping[str, Any]) -> Any:
    """Return Megatron's configuration of the Hugging Face model; fusions are off, their kernels need a GPU."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        ffn_hidden_size=hf_config["intermediate_size"],
        layernorm_epsilon=hf_config["rms_norm_eps"],
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_comm=False,
    )
