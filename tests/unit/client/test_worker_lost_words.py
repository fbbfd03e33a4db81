"""Words of a worker that went with a lost connection: the other shards, and a restarted server, come to know."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import DeadlineExceeded, StateError, TensorHubError, VersionConflict
from tensorhub_core.server.serving import serve
from tensorhub_core.state.messages import LeaveRound
from tests.unit.client.fake_executor import FakeExecutor, Job
from tests.unit.client.hubs import Hub, blank, hub, in_background, publisher, reader, weights

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with hub(**getattr(request, "param", {})) as made:
        yield made
        made.server.close()


class Slow:
    """An executor whose reads stop for nobody until they are let go."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self.executor = FakeExecutor(self._before)

    def _before(self, job: Job, read: int) -> None:
        self.reached.set()
        assert self.go.wait(60)


def lose_the_word(worker: Worker) -> None:
    """Let the next `LeaveRound` go with its connection, and the worker say hello again over another one."""
    session: Any = worker._session
    tell = session.tell

    def losing(message: object, life: int) -> None:
        if not isinstance(message, LeaveRound):
            return tell(message, life)
        session.say_hello_again()

    session.tell = losing


def test_a_shard_that_left_a_round_unheard_does_not_hold_up_the_others(here: Hub) -> None:
    for shard in range(2):
        trainer = here.connect("trainer", shard=shard, num_shards=2)
        trainer.register(weights(shard))
        trainer.publish(1)
    slow = Slow()
    executors = [slow.executor, FakeExecutor()]
    readers = [here.connect("reader", shard=k, num_shards=2, executor=executors[k]) for k in range(2)]
    for each in readers:
        each.register(blank())
    lose_the_word(readers[0])
    first = in_background(lambda: readers[0].update(timeout_s=2.0))
    begun_s = time.monotonic()
    second = in_background(lambda: readers[1].update(timeout_s=60.0))
    assert slow.reached.wait(10)
    time.sleep(max(0.0, 3.0 - (time.monotonic() - begun_s)))  # its deadline passes while the read goes on
    slow.go.set()
    with pytest.raises(DeadlineExceeded):
        first.result(20)
    with pytest.raises(TensorHubError, match="left the round"):
        second.result(20)
    del readers[0]._session.tell  # type: ignore[method-assign]
    futures = [in_background(lambda w=worker: w.update(timeout_s=20.0)) for worker in readers]
    assert [future.result(30) for future in futures] == [1, 1], "their next calls meet"


@pytest.mark.parametrize("here", [{"retain": 0}], indirect=True)
@pytest.mark.parametrize("stream", [None, "run 1"])
def test_a_trainer_between_two_versions_stays_in_its_epoch_when_the_server_restarts(
    here: Hub, stream: str | None
) -> None:
    trainer = publisher(here, 10, stream=stream)
    trainer.unpublish()
    address = here.server.address
    here.server.close()
    here.server = serve(address, lease_s=1.0, heartbeat_s=0.1, retain=0)
    trainer.register(weights(3))
    with pytest.raises(VersionConflict, match="is not newer"):
        trainer.publish(2)
    version = trainer.publish(11)
    assert (version, version.epoch) == (11, 1)
    rollout, _ = reader(here)
    assert rollout.replicate(timeout_s=15) == 11


def test_a_reader_that_republishes_creates_nothing(here: Hub) -> None:
    publisher(here, 3, stream="run 1")
    rollout, _ = reader(here)
    rollout.replicate(timeout_s=15, publish=False)
    rollout.publish(3)
    assert rollout._session.created is None
    rollout.unpublish()
    with pytest.raises((VersionConflict, StateError)):
        rollout.publish(2, fresh=True)
