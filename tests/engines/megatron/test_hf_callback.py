"""`Trainer`, and TRL's GRPOTrainer, with one callback more: a reader has the model of every step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tensorhub_core import ConfigError, connect, serve
from tensorhub_megatron import TensorHubTrainerCallback, attach_fsdp

from .hf_models import Lines, tiny_model, tokenizer, train_on_ranks
from .ranks import Ranks
from .readers import Engine, whole_layout
from .shares import array_of

SETTINGS = {"handover_s": 0.5}


@pytest.fixture
def address() -> Iterator[str]:
    with serve() as server:
        yield server.address


class Follow(TrainerCallback):
    """An engine that takes what is published at the end of each step, and compares it with the model."""

    def __init__(self, publishing: TensorHubTrainerCallback, reader: Engine, dtype: torch.dtype) -> None:
        self.publishing, self.reader, self.dtype = publishing, reader, dtype
        self.seen: list[tuple[int, int]] = []
        self.micro_steps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.micro_steps += 1
        assert self.publishing.version == state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        version = self.reader.update()
        self.seen.append((state.global_step, version))
        self.compare(model)

    def compare(self, model: Any) -> None:
        parameters = model.named_parameters(remove_duplicate=False)
        self.reader.require({name: array_of(parameter.detach().to(self.dtype)) for name, parameter in parameters})


def reader_of(address: str, model: Any, dtype: str = "float32") -> Engine:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    return Engine(address, [whole_layout(shapes, dtype)])


def arguments(folder: Path, **how: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **how,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cast", [None, "bf16"])
def test_a_reader_has_the_model_of_each_step(address: str, tmp_path: Path, cast: str | None) -> None:
    model = tiny_model()
    dtype = torch.bfloat16 if cast else torch.float32
    publishing = TensorHubTrainerCallback(address, model="m", stream="run", cast=cast, settings=SETTINGS)
    assert publishing.version is None
    with reader_of(address, model, "bfloat16" if cast else "float32") as reader:
        follow = Follow(publishing, reader, dtype)
        how = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_steps": 2}
        trainer = Trainer(
            model=model, args=arguments(tmp_path, **how), train_dataset=Lines(), callbacks=[publishing, follow]
        )
        trainer.train()
        assert follow.seen == [(1, 1), (2, 2), (3, 3)]
        assert follow.micro_steps == 3
        follow.compare(model)
        assert publishing.version is None

        # A resumed training counts on; the hub still knows the run.
        again = TensorHubTrainerCallback(address, model="m", stream="run", cast=cast, settings=SETTINGS)
        follow = Follow(again, reader, dtype)
        trainer = Trainer(
            model=model, args=arguments(tmp_path, **{**how, "max_steps": 4}), train_dataset=Lines(), callbacks=[again]
        )
        trainer.add_callback(follow)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert follow.seen == [(4, 4)]


@pytest.mark.timeout(120)
def test_data_parallel_ranks_publish_together(ranks: Callable[[int], Ranks], address: str, tmp_path: Path) -> None:
    with reader_of(address, tiny_model()) as reader, ThreadPoolExecutor(1) as pool:
        following = pool.submit(reader.follow, 3)
        trained = ranks(2).run(train_on_ranks, address, str(tmp_path), 3)
        taken = following.result(60)
        assert sorted(trained[0]) == [1, 2, 3]
        assert 3 in taken
        for version in taken.keys() & trained[0].keys():
            reader.put(taken[version])
            for rank in trained:
                reader.require(rank[version])


@pytest.mark.timeout(120)
def test_what_loads_the_best_model_at_the_end_is_refused(address: str, tmp_path: Path) -> None:
    how = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 1}
    trainer = Trainer(
        model=tiny_model(),
        args=arguments(tmp_path, **how),
        train_dataset=Lines(),
        eval_dataset=Lines(),
        callbacks=[TensorHubTrainerCallback(address, model="m")],
    )
    with pytest.raises(ConfigError, match="load_best_model_at_end overwrites"):
        trainer.train()
    with connect(address, model="m", replica="watcher") as watcher:
        assert watcher.versions() == []


@pytest.mark.timeout(60)
def test_a_step_that_a_loss_scaler_skipped_makes_no_version(address: str) -> None:
    model = torch.nn.Linear(4, 2)
    publishing = TensorHubTrainerCallback(address, model="m", start_version=7, settings=SETTINGS)
    args, state, control = SimpleNamespace(load_best_model_at_end=False), SimpleNamespace(global_step=3), object()
    optimizer = SimpleNamespace(step_was_skipped=False, step=lambda: None)

    def step(skipped: bool) -> None:
        optimizer.step_was_skipped = skipped
        publishing.on_pre_optimizer_step(args, state, control, model=model, optimizer=optimizer)
        if not skipped:
            with torch.no_grad():
                model.weight.add_(1)
        publishing.on_step_end(args, state, control, model=model, optimizer=optimizer)

    publishing.on_train_begin(args, state, control, model=model, optimizer=optimizer)
    with reader_of(address, model) as reader:
        for skipped, version in ((False, 8), (True, 8), (False, 9)):
            step(skipped)
            assert publishing.version == version
            assert reader.update() == version
            reader.require({name: array_of(parameter) for name, parameter in model.named_parameters()})
        publishing.on_train_end(args, state, control, model=model, optimizer=optimizer)
    publishing.close()


@pytest.mark.timeout(60)
def test_a_step_that_a_fused_optimizer_skipped_inside_makes_no_version(address: str) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    publishing = TensorHubTrainerCallback(address, model="m", settings={"handover_s": 0})
    args, state, control = SimpleNamespace(load_best_model_at_end=False), SimpleNamespace(global_step=0), object()
    how = {"model": model, "optimizer": optimizer}
    wrong = SimpleNamespace(load_best_model_at_end=True)
    with pytest.raises(ConfigError):
        publishing.on_train_begin(wrong, state, control, **how)
    assert not optimizer._optimizer_step_post_hooks
    publishing.on_train_begin(args, state, control, **how)
    for factor, version in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() * factor).backward()
        publishing.on_pre_optimizer_step(args, state, control, **how)
        scaler.step(optimizer)
        scaler.update()
        publishing.on_step_end(args, state, control, **how)
        assert publishing.version == version
    publishing.on_train_end(args, state, control, **how)
    assert not optimizer._optimizer_step_post_hooks


def test_it_takes_what_attaching_takes() -> None:
    found, sibling = (inspect.signature(kind).parameters for kind in (TensorHubTrainerCallback, attach_fsdp))
    assert found.keys() == sibling.keys() - {"module", "optimizer", "group"}  # all ranks of a `Trainer` train
    assert {name for name in found if found[name] != sibling[name]} == {"server", "start_version"}
    assert found["server"].annotation == sibling["server"].annotation
    assert found["start_version"].default is None


@pytest.mark.timeout(120)
def test_a_reader_has_the_policy_of_each_grpo_step(address: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="TRL is not installed in this environment")
    trl = pytest.importorskip("trl", reason="TRL is not installed in this environment")
    model = tiny_model()
    publishing = TensorHubTrainerCallback(address, model="m", settings=SETTINGS)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    prompts = datasets.Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w6", "w7 w8"]})
    with reader_of(address, model) as reader:
        follow = Follow(publishing, reader, torch.float32)
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            train_dataset=prompts,
            args=config,
            callbacks=[publishing, follow],
        )
        trainer.train()
        assert follow.seen == [(1, 1), (2, 2), (3, 3)]
        follow.compare(model)
