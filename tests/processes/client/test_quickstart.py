"""The loop of DESIGN: a trainer and a late rollout in two processes."""

from __future__ import annotations

import pytest

from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import raw

pytestmark = pytest.mark.timeout(90)


def test_a_rollout_follows_a_trainer_step_by_step(here: Hub, other: Actor) -> None:
    trainer = here.publisher(other, "plain", version=0)
    rollout, tensors = here.reader("plain")
    version = rollout.replicate("latest")
    assert version == 0
    for step in range(1, 6):
        waiting = other.begin("call", trainer, method="unpublish")
        waiting.result(20)
        other.do("fill", trainer, value=step)
        other.do("call", trainer, method="publish", version=step)
        version = rollout.wait(newer_than=version)
        assert version == step
        assert rollout.update() == step
        assert rollout.version == step
        assert all(set(raw(tensor)) == {step} for tensor in tensors.values())
    (latest, *older) = reversed(rollout.versions())
    assert latest.version == 5
    assert set(latest.replicas) == {"trainer", "reader"}
    assert not any(info.whole for info in older)
