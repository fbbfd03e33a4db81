"""Processes that are stopped for longer than a lease and go on: paused, not dead. Every byte is checked (law L4)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tensorhub_core import DeadlineExceeded, VersionUnavailable, serve
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import digest, make, same
from tests.processes.client.test_faults import BY, MIB, Brake, each_way, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
LEASE_S = 2.0
PAUSES_S = [0.6 * LEASE_S, 1.6 * LEASE_S]
"""Within a lease, and past it but before the worker is buried (at three leases)."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A server whose lease is so long that a pause of one and a half is no burial on a busy machine."""
    with serve(lease_s=LEASE_S, heartbeat_s=0.2, retain=0) as running:
        hub = Hub(running, "policy")
        try:
            yield hub
        finally:
            hub.close()


def pause(actor: Actor, seconds: float) -> None:
    actor.signal(signal.SIGSTOP)
    time.sleep(seconds)
    actor.signal(signal.SIGCONT)


@each_way
@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_the_only_source_is_paused_and_goes_on(hub: Hub, way: str, pause_s: float) -> None:
    """The read waits for it, or does not need it on the same machine, and ends right; nobody says that it is gone."""
    settings = BY[way]
    with Actor() as only:
        hub.publisher(only, "plain", mib=MIB, settings=settings)
        reader, tensors = hub.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        reading = in_background(lambda: reader.replicate(timeout_s=60, progress=brake))
        assert brake.half.wait(60)
        brake.go.set()
        pause(only, pause_s)
        assert reading.result(60) == 1
        assert same(tensors, make("plain", 1, mib=MIB))


def test_who_asks_while_the_only_holder_is_paused_gets_the_version(hub: Hub) -> None:
    with Actor() as only:
        hub.publisher(only, "plain")
        reader, tensors = hub.reader("plain")
        only.signal(signal.SIGSTOP)
        time.sleep(1.4 * LEASE_S)
        with pytest.raises(DeadlineExceeded, match="silent at the moment: trainer"):
            reader.replicate(timeout_s=0.3)
        reading = in_background(lambda: reader.replicate(timeout_s=60))
        time.sleep(0.2 * LEASE_S)
        assert not reading.done()
        only.signal(signal.SIGCONT)
        assert reading.result(60) == 1
        assert same(tensors, make("plain", 1))


def test_who_asks_while_the_only_holder_is_paused_is_told_when_it_is_buried(hub: Hub) -> None:
    with Actor() as only:
        hub.publisher(only, "plain")
        reader, _ = hub.reader("plain")
        only.signal(signal.SIGSTOP)
        time.sleep(1.4 * LEASE_S)
        with pytest.raises(VersionUnavailable, match="version 1"):
            reader.replicate(timeout_s=60)
        only.signal(signal.SIGCONT)


@each_way
@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_a_reader_is_paused_and_goes_on(hub: Hub, other: Actor, way: str, pause_s: float) -> None:
    """Its leases ended meanwhile: it asks, reads again what it must, and holds the right bytes."""
    settings = BY[way]
    trainer, tensors = hub.worker("trainer", settings=settings), make("plain", 1, mib=MIB)
    trainer.register(tensors)
    trainer.publish(1)
    rollout = hub.remote(other, "rollout", settings=settings)
    other.do("register", rollout, sample="plain", seed=1, mib=MIB, blank=True)
    reading = other.begin("call", rollout, method="replicate", timeout_s=60, report=True)
    assert other.events.get(timeout=30)
    pause(other, pause_s)
    assert reading.result(60) == 1
    assert other.do("digest", rollout) == digest(tensors)
    trainer.unpublish(timeout_s=30)
    assert all(set(info.replicas) == {"rollout"} for info in trainer.versions())
