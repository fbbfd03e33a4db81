"""Whoever steps, and however a step ends: readers have the weights of whole steps alone."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_core.errors import ConfigError, StateError
from tensorhub_megatron import Publisher, parameters_of
from tensorhub_megatron.stepping import stepping, warn_of_others

from .recording import MegatronLikeOptimizer, RecordingWorker, backward, follow

NAN = float("nan")
STEP = ["unpublish", "publish 1"]


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


@pytest.fixture
def worker(model: torch.nn.Module) -> RecordingWorker:
    return RecordingWorker(parameters_of(model))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def require_seen(worker: RecordingWorker, version: int) -> None:
    """Fail unless readers of a version see what the tensors hold now."""
    assert worker.published
    assert worker.events[-1] == f"publish {version}"
    assert all(torch.equal(worker.seen[version][name], tensor) for name, tensor in worker.tensors.items())


def test_an_overflow_that_the_optimizer_skips_inside_publishes_nothing(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    """Fused optimizers are stepped at an overflow, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    publisher = follow(worker, optimizer)
    for factor, version in ((float("inf"), 0), (1.0, 1), (float("nan"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert publisher.version == version
        require_seen(worker, version)


class Clamped(torch.optim.SGD):
    """Goes on to change weights after the step of its base class."""

    fails_inside = False

    def step(self, closure: Any = None) -> Any:
        try:
            loss = super().step(self._fail if self.fails_inside else closure)
        except ArithmeticError:
            loss = None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.01, 0.01)
        return loss

    def _fail(self) -> float:
        raise ArithmeticError


@pytest.mark.parametrize("fails_inside", [False, True])
def test_a_step_that_calls_another_one_is_one_step(
    model: torch.nn.Module, worker: RecordingWorker, fails_inside: bool
) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on that class has hooks of its own, too
    optimizer = Clamped(model.parameters(), lr=0.1)
    optimizer.fails_inside = fails_inside
    publisher = follow(worker, optimizer)
    for version in (1, 2):
        backward(model)
        optimizer.step()
        assert publisher.version == version
        require_seen(worker, version)
    assert worker.events == ["publish 0", "unpublish", "publish 1", "unpublish", "publish 2"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"])
def test_torchs_wrappers_of_optimizers_are_followed(model: torch.nn.Module, worker: RecordingWorker, kind: str) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    optimizer: Any
    if kind == "PostLocalSGDOptimizer":  # does not make itself an optimizer of torch's, as which it has no hooks
        averager = PeriodicModelAverager(period=1, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    publisher = follow(worker, optimizer)
    backward(model)
    optimizer.step()
    assert worker.events == ["publish 0", *STEP]
    require_seen(worker, 1)
    publisher.close()
    assert "step" not in vars(optimizer)


def test_torchs_ways_to_step_in_the_backward_pass_are_refused(model: torch.nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    overlapping: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    overlapping._overlap_with_ddp = True
    with pytest.raises(ConfigError, match="SGD weights change during the backward pass"):
        stepping(overlapping)
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match="AdamW weights change during the backward pass"):
        stepping(torch.optim.AdamW(model.parameters(), lr=0.1))


@pytest.mark.parametrize("make", [torch.optim.SGD, MegatronLikeOptimizer])
def test_after_a_step_that_raised_nothing_is_published_until_one_succeeds(
    model: torch.nn.Module, worker: RecordingWorker, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make(model.parameters())
    publisher = follow(worker, optimizer)
    inner = getattr(optimizer, "inner", optimizer)
    inner.param_groups[0]["lr"] = None  # some of the parameters may have changed when this raises
    backward(model)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(TypeError):
            optimizer.step()
        with pytest.raises(StateError, match=r"last optimizer step did not end.*publish\(changed=True\)"):
            publisher.publish()
        if inner is not optimizer:
            optimizer.overflow = True  # a step that is skipped does not heal the weights
            optimizer.step()
            with pytest.raises(StateError, match="did not end"):
                publisher.publish()
            optimizer.overflow = False
        assert worker.events == ["publish 0", "unpublish"]
        inner.param_groups[0]["lr"] = 0.1
        optimizer.step()
    assert worker.events == ["publish 0", *STEP]
    require_seen(worker, 1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "version 0 was the newest, and nothing is published until a step succeeds" in said
    publisher.unpublish()
    publisher.publish()
    require_seen(worker, 1)


def test_after_a_step_that_raised_the_user_can_say_that_weights_are_whole(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = MegatronLikeOptimizer(model.parameters())
    publisher = follow(worker, optimizer)
    optimizer.inner.param_groups[0]["lr"] = None
    backward(model)
    with pytest.raises(TypeError):
        optimizer.step()
    publisher.publish(changed=True)  # a checkpoint was loaded
    require_seen(worker, 1)


def test_what_lies_between_two_versions_is_not_published_as_the_older_one(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer, every=2)
    for _ in range(2):
        backward(model)
        optimizer.step()
        publisher.unpublish()  # as offloading asks for between any two steps
        publisher.publish()
    assert worker.events == ["publish 0", *STEP, "unpublish", "publish 1"]
    require_seen(worker, 1)
    backward(model)
    optimizer.step()
    publisher.publish(changed=True)
    require_seen(worker, 2)
    for _ in range(2):
        backward(model)
        optimizer.step()
    require_seen(worker, 3)


def test_steps_of_any_thread_are_followed(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(worker, optimizer)
    for version in (1, 2):
        backward(model)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        require_seen(worker, version)


def test_a_closure_may_be_evaluated_many_times_in_a_step(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    follow(worker, optimizer)
    calls = []

    def closure() -> torch.Tensor:
        assert not worker.published
        calls.append(1)
        model.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    require_seen(worker, 1)


def test_a_schedule_that_wraps_the_step_is_followed_through(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    for version in (1, 2, 3):
        backward(model)
        optimizer.step()
        schedule.step()
        require_seen(worker, version)
    publisher.close()
    optimizer.step()
    assert worker.events[-1] == "close"


@pytest.mark.parametrize("make", [torch.optim.AdamW, MegatronLikeOptimizer])
def test_a_copy_of_a_followed_optimizer_is_nobodys(model: torch.nn.Module, worker: RecordingWorker, make: Any) -> None:
    optimizer = make(model.parameters())
    publisher = follow(worker, optimizer)
    assert publisher.__reduce__() == (type(None), ())
    publisher._publication._worker.lock = threading.Lock()  # as a real one has, which nobody can copy
    other = copy.deepcopy(optimizer)
    before = {name: tensor.detach().clone() for name, tensor in worker.tensors.items()}
    groups = getattr(other, "inner", other).param_groups
    for parameter in groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    own = groups[0]["params"][0].detach().clone()
    other.step()
    assert worker.events == ["publish 0"]
    assert all(torch.equal(worker.tensors[name], before[name]) for name in before)
    assert not torch.equal(groups[0]["params"][0], own)
    assert isinstance(follow(RecordingWorker(worker.tensors), other), Publisher)


def test_a_compiled_step_is_followed(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(worker, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for version in (1, 2):
        backward(model)
        step()
        require_seen(worker, version)


@pytest.mark.parametrize(
    "wrong",
    [{"start_version": 1.5}, {"every": None}, {"start_version": "3"}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}],
)
def test_what_is_no_number_is_refused_before_anything_is_published(
    model: torch.nn.Module, worker: RecordingWorker, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        follow(worker, torch.optim.SGD(model.parameters(), lr=0.1), **wrong)
    assert worker.events == []


def test_whole_numbers_of_any_type_are_taken(model: torch.nn.Module, worker: RecordingWorker) -> None:
    start: Any = torch.tensor(7)
    publisher = follow(worker, torch.optim.SGD(model.parameters(), lr=0.1), start_version=start)
    assert type(publisher.version) is int
    assert worker.events == ["publish 7"]


def test_weights_that_another_hook_changes_are_published_after_that(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer)
    for version in (1, 2):  # registered when ours was there already
        optimizer.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-0.1, 0.1))
        backward(model)
        optimizer.step()
        assert publisher.version == version
        require_seen(worker, version)


def test_what_is_published_cannot_be_published_as_something_else(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    publisher = follow(worker, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateError, match=r"version 0 is published: call unpublish\(\) before the weights change"):
        publisher.publish(changed=True)
    assert publisher.version == 0
    assert worker.events == ["publish 0"]


def test_parameters_of_another_optimizer_are_named(model: torch.nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """As of a trainer that has one for matrices, and another one for the rest."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    model[2].weight.requires_grad_(False)
    warn_of_others(model, torch.optim.SGD(model.parameters(), lr=0.1))
    warn_of_others(model, torch.optim.SGD([torch.ones(1)], lr=0.1))  # a copy of them all, as of other precision
    warn_of_others(model, MegatronLikeOptimizer(model.parameters()))
    warn_of_others(None, torch.optim.SGD(matrices, lr=0.1))
    assert caplog.records == []
    warn_of_others(model, torch.optim.SGD(matrices, lr=0.1))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "2 parameters that require gradients are not the optimizer's (0.bias, 2.bias): if another" in said
