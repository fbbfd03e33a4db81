"""The server goes and comes back while workers are in the middle of something."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, TensorHubError, VersionUnavailable
from tensorhub_core.server.serving import serve
from tests.unit.client.fake_executor import FakeExecutor, Job
from tests.unit.client.hubs import Gate, Hub, blank, equal, hub, in_background, publisher, reader, untouched, weights

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with hub(**getattr(request, "param", {})) as made:
        yield made
        made.server.close()


def restart(here: Hub, down_s: float = 0.0, **more: Any) -> None:
    """End the server, and start one that knows nothing at its address."""
    address = here.server.address
    here.server.close()
    time.sleep(down_s)
    here.server = serve(address, lease_s=1.0, heartbeat_s=0.1, **more)


def test_a_copy_is_offered_again_by_itself(here: Hub) -> None:
    trainer = publisher(here, 4)
    restart(here, 0.3)
    rollout, tensors = reader(here)
    assert rollout.replicate(timeout_s=15) == 4
    assert equal(tensors, weights())
    assert trainer.counters.reconnects >= 1
    trainer.unpublish()
    assert trainer.version is None


def test_a_read_in_flight_goes_on_and_is_committed_by_the_new_server(here: Hub) -> None:
    publisher(here, 4)
    gate = Gate(3)
    rollout, tensors = reader(here, executor=gate.executor)
    reading = in_background(lambda: rollout.replicate(timeout_s=20))
    assert gate.reached.wait(10)
    restart(here)
    time.sleep(0.5)
    gate.open.set()
    assert reading.result(25) == 4
    assert equal(tensors, weights())
    read = [index for job in gate.executor.jobs for index in job.read]
    assert len(read) == len(set(read)), "nothing is read twice"
    other, copied = reader(here, "other")
    assert other.replicate(timeout_s=15) == 4
    assert equal(copied, weights())


def test_a_read_that_ends_while_the_server_is_away_is_committed_later(here: Hub) -> None:
    publisher(here, 4)
    gate = Gate(3)
    rollout, tensors = reader(here, executor=gate.executor)
    reading = in_background(lambda: rollout.replicate(timeout_s=30))
    assert gate.reached.wait(10)
    address = here.server.address
    here.server.close()
    gate.open.set()
    gate.executor.jobs[0].thread.join(10)
    time.sleep(0.5)
    here.server = serve(address, lease_s=1.0, heartbeat_s=0.1)
    assert reading.result(30) == 4
    assert equal(tensors, weights())
    assert len(gate.executor.jobs[0].read) == len(gate.executor.jobs[0].plan)


def test_a_waiting_replicate_and_a_wait_are_answered_by_the_new_server(here: Hub) -> None:
    rollout, tensors = reader(here)
    joined = in_background(lambda: rollout.replicate(7, timeout_s=20))
    watcher = here.connect("watcher")
    waited = in_background(lambda: watcher.wait(timeout_s=20))
    time.sleep(0.3)
    restart(here, 0.2)
    publisher(here, 7)
    assert joined.result(25) == 7
    assert waited.result(25) == 7
    assert equal(tensors, weights())


def test_an_unpublish_in_flight_ends_after_the_restart(here: Hub) -> None:
    trainer = publisher(here, 4)
    gate = Gate(3)
    rollout, _ = reader(here, executor=gate.executor)
    reading = in_background(lambda: rollout.replicate(timeout_s=20))
    assert gate.reached.wait(10)
    unpublishing = in_background(lambda: trainer.unpublish(timeout_s=25))
    time.sleep(0.2)
    restart(here)
    time.sleep(0.3)
    assert not unpublishing.done()
    gate.open.set()
    try:
        reading.result(25)
    except (VersionUnavailable, DeadlineExceeded):
        assert rollout.version is None
    unpublishing.result(25)


@pytest.mark.parametrize(("here", "retain"), [({"retain": n}, n) for n in (0, 1)], indirect=["here"])
def test_memory_that_is_being_overwritten_is_never_offered_as_the_old_version(here: Hub, retain: int) -> None:
    """The old copy is withdrawn, the new one half read, when the server forgets everything."""
    trainer = publisher(here, 1)
    slow = Gate(99)
    rollout, tensors = reader(here, executor=slow.executor)
    rollout.replicate()
    trainer.unpublish()
    trainer.register(weights(5))
    trainer.publish(2)
    slow.at = 3
    updating = in_background(lambda: rollout.update(timeout_s=20))
    assert slow.reached.wait(10)
    restart(here, retain=retain)
    time.sleep(1.5)
    late = here.connect("late")
    late_tensors = blank()
    late.register(late_tensors)
    if retain:
        assert late.replicate(1, timeout_s=10) == 1
        assert equal(late_tensors, weights()), "from the copy in host memory"
    else:
        with pytest.raises((VersionUnavailable, DeadlineExceeded)):
            late.replicate(1, timeout_s=1.5)
        assert untouched(late_tensors)
    slow.open.set()
    assert updating.result(25) == 2
    assert equal(tensors, weights(5))


def test_without_a_server_calls_end_at_their_deadline_and_close_at_once(here: Hub) -> None:
    trainer = publisher(here, 1)
    rollout, tensors = reader(here)
    here.server.close()
    time.sleep(0.5)
    for call in (
        lambda: rollout.replicate(timeout_s=1.2),
        lambda: rollout.wait(timeout_s=1.2),
        lambda: trainer.unpublish(timeout_s=1.2),
    ):
        with pytest.raises(TensorHubError) as error:
            call()
        assert isinstance(error.value, ServerUnreachable | DeadlineExceeded)
    assert untouched(tensors)
    begun = time.monotonic()
    trainer.close()
    rollout.close()
    assert time.monotonic() - begun < 3


def test_the_server_may_go_twice_during_one_call(here: Hub) -> None:
    publisher(here, 4)

    def slow(job: Job, read: int) -> None:
        job.until(lambda: time.monotonic() > ready[0])

    ready = [float("inf")]
    rollout, tensors = reader(here, executor=FakeExecutor(slow))
    reading = in_background(lambda: rollout.replicate(timeout_s=40))
    time.sleep(0.3)
    restart(here)
    time.sleep(0.7)
    restart(here)
    time.sleep(0.3)
    ready[0] = 0.0
    assert reading.result(40) == 4
    assert equal(tensors, weights())


def test_a_call_after_one_that_was_ending_when_the_server_went_joins_the_new_servers_rounds(here: Hub) -> None:
    publisher(here, 4)
    reached, stuck = threading.Event(), threading.Event()

    def hold(job: Job, read: int) -> None:
        reached.set()
        assert stuck.wait(30)

    rollout, tensors = reader(here, executor=FakeExecutor(hold))
    reading = in_background(lambda: rollout.replicate(timeout_s=0.5))
    assert reached.wait(10)
    time.sleep(0.7)  # the deadline has passed: the read is being stopped
    restart(here)
    end = time.monotonic() + 30
    while not rollout.counters.reconnects:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)  # the round has heard of it
    stuck.set()
    with pytest.raises((DeadlineExceeded, ServerUnreachable)):  # the latter if no heartbeat came for a second
        reading.result(25)
    assert rollout.replicate(timeout_s=15) == 4
    assert equal(tensors, weights())
