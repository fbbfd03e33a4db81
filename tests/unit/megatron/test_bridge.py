"""The Megatron-Bridge callback against a stand-in of its documented interface: events by name, a context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_megatron import TensorHubCallback, bridge

EVENTS = {
    "on_data_init_start",
    "on_train_start",
    "on_train_step_start",
    "on_train_step_end",
    "on_train_end",
    "on_eval_start",
    "on_eval_end",
    "on_checkpoint_save",
    "on_checkpoint_load",
}
"""Of `megatron.bridge.training.callbacks`, which calls what a callback has of them."""


class Recorder:
    """Stands for `attach()` and for the publisher that it returns."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []
        self.version = -1
        self.last_wait_s = 0.25
        self.closed = 0

    def __call__(self, model: Any, optimizer: Any, *, start_version: int, **keywords: Any) -> Recorder:
        self.calls.append((model, optimizer, keywords))
        self.version = start_version
        return self

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(bridge, "attach", recorder)
    return recorder


def fire(callback: Any, event: str, context: Any) -> None:
    assert event in EVENTS
    method = getattr(callback, event, None)
    if method is not None:
        method(context)


def train(callback: Any, recorder: Recorder, steps: int, done: int = 0) -> Any:
    """Fire events as the training loop does."""
    state = SimpleNamespace(train_state=SimpleNamespace(step=done))
    context = SimpleNamespace(state=state, model=["chunk"], optimizer="optimizer", user_state={}, skipped_iter=None)
    fire(callback, "on_data_init_start", context)
    fire(callback, "on_train_start", context)
    for _ in range(steps):
        fire(callback, "on_train_step_start", context)
        recorder.version += 1
        state.train_state.step += 1
        context.skipped_iter = False
        fire(callback, "on_train_step_end", context)
    saved = SimpleNamespace(state=state, checkpoint_name="/checkpoints/iter_3", checkpoint_type=object(), user_state={})
    fire(callback, "on_checkpoint_save", saved)
    return context


def test_a_training_is_attached_once_and_left_at_its_end(attached: Recorder) -> None:
    callback = TensorHubCallback("tcp://hub:7077", stream="run", every=1, hf_config={"model_type": "qwen3"})
    assert callback.version is None
    context = train(callback, attached, 3)
    keywords = {"server": "tcp://hub:7077", "stream": "run", "every": 1, "hf_config": {"model_type": "qwen3"}}
    assert attached.calls == [(["chunk"], "optimizer", keywords)]
    assert callback.version == 3
    assert callback.last_wait_s == 0.25
    assert callback.checkpoints == {"/checkpoints/iter_3": 3}
    fire(callback, "on_train_end", context)
    callback.close()
    assert attached.closed == 1


@pytest.mark.parametrize(("start_version", "first"), [(None, 40), (7, 7)])
def test_a_resumed_training_counts_on_from_its_step(attached: Recorder, start_version: int | None, first: int) -> None:
    callback = TensorHubCallback(start_version=start_version)
    train(callback, attached, 2, done=40)
    assert callback.version == first + 2


def test_it_has_every_event_of_the_training_loop_that_it_needs() -> None:
    own = {name for name in vars(TensorHubCallback) if name.startswith("on_")}
    assert own == {"on_train_start", "on_train_step_start", "on_train_step_end", "on_checkpoint_save", "on_train_end"}
    assert own <= EVENTS


def test_a_keyword_that_attach_does_not_have_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="streem"):
        TensorHubCallback("tcp://hub:7077", streem="run")
