"""A tiny language model, its tokenizer and its data, for Hugging Face's trainers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .reference import Array
from .shares import array_of

WORDS = 60


def tiny_model() -> Any:
    """Return a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS + 3,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )


def tokenizer() -> Any:
    """Return a tokenizer of the words w0 to w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random token sequences to be learnt by heart."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, WORDS, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def train_on_ranks(rank: int, address: str, folder: str, steps: int) -> dict[int, dict[str, Array]]:
    """Train with `Trainer` on all ranks, data-parallel; return the weights at each version."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tensorhub_megatron import TensorHubTrainerCallback

    world = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    publishing = TensorHubTrainerCallback(address, model="m", settings={"handover_s": 20})
    found: dict[int, dict[str, Array]] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            version = publishing.version
            assert version is not None
            found[version] = {name: array_of(p) for name, p in model.named_parameters(remove_duplicate=False)}

    arguments = TrainingArguments(
        output_dir=str(Path(folder) / str(rank)),
        per_device_train_batch_size=2,
        max_steps=steps,
        learning_rate=1e-2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=Lines(), callbacks=[publishing, Keep()])
    trainer.train()
    assert trainer.accelerator.num_processes == int(world)
    return found
