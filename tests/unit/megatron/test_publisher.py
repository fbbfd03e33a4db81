"""A wrapped optimizer takes weights back before a step and publishes what came out, whatever happens in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_core.errors import ConfigError, DeadlineExceeded, RegistrationError, ServerUnreachable, StateError
from tensorhub_megatron import attach_fsdp, attach_optimizer, parameters_of

from .recording import MegatronLikeOptimizer, RecordingWorker, backward, follow


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


@pytest.fixture
def worker(model: torch.nn.Module) -> RecordingWorker:
    return RecordingWorker(parameters_of(model))


def train_alone(model: torch.nn.Module, make: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each step of the same training without a publisher."""
    optimizer = make(model.parameters())
    after = []
    for _ in range(steps):
        backward(model)
        optimizer.step()
        after.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return after


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        MegatronLikeOptimizer,
    ],
)
def test_readers_see_exactly_the_weights_after_each_step(
    model: torch.nn.Module, worker: RecordingWorker, make: Any
) -> None:
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = [start, *train_alone(model, make, 3)]
    model.load_state_dict(start)
    optimizer = make(model.parameters())
    with follow(worker, optimizer, start_version=10) as publisher:
        for _ in range(3):
            backward(model)
            optimizer.step()
        assert publisher.version == 13
    steps = [event for version in (11, 12, 13) for event in ("unpublish", f"publish {version}")]
    assert worker.events == ["publish 10", *steps, "close"]
    for version, weights in zip((10, 11, 12, 13), expected, strict=True):
        assert worker.seen[version].keys() == weights.keys()
        assert all(torch.equal(worker.seen[version][name], weights[name]) for name in weights)


def test_with_every_3_weights_stay_unpublished_while_they_change(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer, every=3)
    for _ in range(7):
        backward(model)
        optimizer.step()
    assert worker.events == ["publish 0", "unpublish", "publish 1", "unpublish", "publish 2", "unpublish"]
    assert publisher.version == 2


def test_a_skipped_step_makes_no_version(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = MegatronLikeOptimizer(model.parameters())
    publisher = follow(worker, optimizer)
    optimizer.overflow = True
    backward(model)
    assert optimizer.step() == (False, float("inf"), 0)
    assert publisher.version == 0
    assert worker.published
    optimizer.overflow = False
    optimizer.step()
    assert publisher.version == 1


def test_an_overflow_seen_by_a_loss_scaler_publishes_nothing(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    publisher = follow(worker, optimizer)
    for factor, version in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert publisher.version == version
    assert worker.events == ["publish 0", "unpublish", "publish 1"]


def test_a_step_that_raises_publishes_nothing_until_one_succeeds(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(worker, optimizer)

    def failing_closure() -> float:
        raise ArithmeticError("loss is not finite")

    with pytest.raises(ArithmeticError):
        optimizer.step(failing_closure)
    assert not worker.published
    backward(model)
    optimizer.step()
    assert worker.events == ["publish 0", "unpublish", "publish 1"]


def test_weights_do_not_change_while_a_reader_stays(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer, timeout_s=0.5)
    before = {name: tensor.detach().clone() for name, tensor in worker.tensors.items()}
    backward(model)
    worker.readers = 1
    with pytest.raises(DeadlineExceeded, match=r"1 readers after 0\.5 s"):
        optimizer.step()
    assert all(torch.equal(worker.tensors[name], before[name]) for name in before)
    worker.readers = 0
    optimizer.step()
    assert publisher.version == 1


def test_a_step_that_waits_says_for_what(
    model: torch.nn.Module, worker: RecordingWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorhub_megatron.publication.time", worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer, timeout_s=100)
    worker.readers = 1
    with caplog.at_level("WARNING"), pytest.raises(DeadlineExceeded, match="1 readers after 10"):
        optimizer.step()
    assert worker.waits == [30, 30, 30, 10]
    assert publisher.last_wait_s == 100
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == [
        f"version 0 is not taken back yet, and the step waits, for 100 s at most, {passed} s have passed"
        for passed in (30, 60, 90)
    ]
    assert all("1 readers after 30" in text for text in said)


def test_an_error_that_comes_at_once_is_not_waited_for(
    model: torch.nn.Module, worker: RecordingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float | None] = []

    def refuse(timeout_s: float | None = None) -> None:
        calls.append(timeout_s)
        raise ServerUnreachable("the session is over")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(worker, optimizer, timeout_s=100)
    monkeypatch.setattr(worker, "unpublish", refuse)
    with pytest.raises(ServerUnreachable):
        optimizer.step()
    assert calls == [30]


@pytest.mark.parametrize("attach", [attach_optimizer, attach_fsdp])
def test_without_a_limit_of_its_own_a_step_waits_as_long_as_every_call(
    model: torch.nn.Module, worker: RecordingWorker, monkeypatch: pytest.MonkeyPatch, attach: Any
) -> None:
    for module in ("publisher", "attaching"):
        monkeypatch.setattr(f"tensorhub_megatron.{module}.connect", lambda *_, **__: worker)
    monkeypatch.setattr("tensorhub_megatron.publication.time", worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, settings={"call_timeout_s": 70})
    worker.readers = 1
    with pytest.raises(DeadlineExceeded):
        optimizer.step()
    assert worker.waits == [30, 30, 10]


@pytest.mark.parametrize("first", ["scheduler", "publisher"])
def test_a_learning_rate_scheduler_works_with_it(
    model: torch.nn.Module, worker: RecordingWorker, first: str, recwarn: pytest.WarningsRecorder
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first == "scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        publisher = follow(worker, optimizer)
    else:
        publisher = follow(worker, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert publisher.version == 1
    assert scheduler.get_last_lr() == [0.05]
    publisher.close()
    optimizer.step()
    assert worker.events == ["publish 0", "unpublish", "publish 1", "close"]
    assert [str(warning.message) for warning in recwarn] == []


def test_close_gives_the_optimizer_its_own_step_back(model: torch.nn.Module, worker: RecordingWorker) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = follow(worker, optimizer)
    with pytest.raises(StateError, match="attached already"):
        follow(RecordingWorker(worker.tensors), optimizer)
    publisher.close()
    publisher.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert worker.events == ["publish 0", "close"]
    follow(RecordingWorker(worker.tensors), optimizer)


@pytest.mark.parametrize("changed", [False, True])
def test_a_closed_publisher_says_so(model: torch.nn.Module, worker: RecordingWorker, changed: bool) -> None:
    publisher = follow(worker, torch.optim.SGD(model.parameters(), lr=0.1))
    publisher.close()
    with pytest.raises(StateError, match="closed: attach again"):
        publisher.publish(changed=changed)
    assert publisher.version == 0
    assert worker.events == ["publish 0", "close"]


def test_close_gives_an_optimizer_without_hooks_its_own_step_back(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    optimizer = MegatronLikeOptimizer(model.parameters())
    publisher = follow(worker, optimizer)
    with pytest.raises(StateError, match="attached already"):
        follow(RecordingWorker(worker.tensors), optimizer)
    publisher.close()
    assert set(vars(optimizer)) == {"inner", "overflow"}
    optimizer.overflow = True
    assert optimizer.step() == (False, float("inf"), 0)
    assert worker.events == ["publish 0", "close"]


def test_weights_can_be_taken_back_between_steps_and_given_again(
    model: torch.nn.Module, worker: RecordingWorker
) -> None:
    publisher = follow(worker, torch.optim.SGD(model.parameters(), lr=0.1), start_version=4)
    publisher.unpublish()
    publisher.publish()
    publisher.unpublish()
    with torch.no_grad():
        model[0].weight.zero_()
    publisher.publish(changed=True)
    assert publisher.version == 5
    assert worker.events == ["publish 4", "unpublish", "publish 4", "unpublish", "publish 5"]
    assert not worker.seen[5]["0.weight"].any()
    # What is registered anew may be other memory at the same addresses.
    assert worker.registrations == 3


def test_several_optimizers_are_refused(model: torch.nn.Module) -> None:
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"a list has no step\(\) to follow: give one optimizer"):
        attach_optimizer(model, optimizers)


class LayerWiseDummyOptimizer(torch.optim.SGD):
    """Named as the one of transformers, whose weights change in hooks of the backward pass."""


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(model: torch.nn.Module) -> None:
    optimizer = LayerWiseDummyOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="LayerWiseDummyOptimizer weights change during the backward pass"):
        attach_optimizer(model, optimizer)


def test_what_accelerate_wraps_is_followed_where_it_steps(model: torch.nn.Module, worker: RecordingWorker) -> None:
    class AcceleratedOptimizer:
        """Calls the inner optimizer only when gradients are whole, and exchanges its `step`, as accelerate's does."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.is_last = optimizer, False
            inner = optimizer.step
            optimizer.step = lambda *args: inner(*args)

        def step(self) -> None:
            if self.is_last:
                self.optimizer.step()

    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    publisher = follow(worker, optimizer)
    for micro in range(4):
        optimizer.is_last = micro % 2 == 1
        backward(model)
        optimizer.step()
    assert publisher.version == 2
    assert worker.events == ["publish 0", "unpublish", "publish 1", "unpublish", "publish 2"]


def test_tied_parameters_have_all_their_names_and_share_memory() -> None:
    embedding = torch.nn.Embedding(6, 4)
    head = torch.nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    found = parameters_of(torch.nn.ModuleDict({"embedding": embedding, "head": head}))
    assert set(found) == {"embedding.weight", "head.weight"}
    assert {tensor.data_ptr() for tensor in found.values()} == {embedding.weight.data_ptr()}


def test_a_distributed_parameter_is_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.tensor import distribute_module, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharded = distribute_module(torch.nn.Linear(4, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(RegistrationError, match="'weight' is a shard of a distributed tensor"):
            parameters_of(sharded)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("start_version", "every"), [(-1, 1), (0, 0), (0, -2)])
def test_impossible_numbers_are_refused(
    model: torch.nn.Module, worker: RecordingWorker, start_version: int, every: int
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        follow(worker, optimizer, start_version=start_version, every=every)
    assert worker.events == []
