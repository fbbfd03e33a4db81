"""A seed agent and its zone: nobody there reads across zones while it lives, and nobody waits for one that is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorhub_core import serve
from tensorhub_core.server.serving import Server
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import QUICK, Hub
from tests.processes.client.samples import Tensors, make, same
from tests.processes.client.test_chains import Traffic
from tests.processes.client.test_faults import MIB, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
LEASE_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Run a server whose workers may be slow for a while."""
    with serve(lease_s=LEASE_S, heartbeat_s=0.5, retain=0) as running:
        yield running


class Fleet:
    """A trainer in the west, which publishes version 1, and what is connected in the east."""

    def __init__(self, here: Hub, other: Actor) -> None:
        self.here, self.other = here, other
        self.trainer = self.connect(other, "trainer", zone="west")
        self.publish(1)

    def connect(self, actor: Actor, replica: str, **more: object) -> str:
        handle = f"{self.here.model} {replica}"
        address = self.here.server.address
        actor.do("connect", handle, server=address, model=self.here.model, replica=replica, settings=QUICK, **more)
        self.here._remote.append((actor, handle))
        return handle

    def publish(self, version: int) -> None:
        if version > 1:
            self.other.do("call", self.trainer, method="unpublish")
        self.other.do("register", self.trainer, sample="plain", seed=version, mib=MIB)
        self.other.do("call", self.trainer, method="publish", version=version)

    def agent(self, actor: Actor, name: str = "agent") -> str:
        handle = self.connect(actor, name, zone="east", seeds=True)
        actor.do("register", handle, sample="plain", blank=True, mib=MIB)
        return handle

    def holds_half(self, actor: Actor, handle: str, version: int) -> None:
        """Let an agent read half of a version, and no more."""
        actor.begin("call", handle, method="update", version=version, hold=True, timeout_s=60)
        while True:
            _, done, total, _ = actor.events.get(timeout=60)
            if done >= total // 2:
                return


def right(tensors: Tensors, version: int) -> bool:
    return same(tensors, make("plain", version, mib=MIB))


def test_an_agent_brings_each_version_once_and_the_zone_reads_from_it(here: Hub, other: Actor) -> None:
    fleet = Fleet(here, other)
    with Actor() as actor:
        agent = fleet.agent(actor)
        actor.do("call", agent, method="replicate", version=1)
        engines = [here.reader("plain", f"engine {k}", mib=MIB, zone="east") for k in range(2)]
        traffic = [Traffic() for _ in engines]
        for version in (1, 2):
            if version > 1:
                waits = [in_background(lambda w=w: w.wait(1, timeout_s=60)) for w, _ in engines]  # type: ignore[misc]
                fleet.publish(version)
                assert [w.update() for w, _ in engines] == [1, 1], "the agent has not brought it yet"
                assert not any(wait.done() for wait in waits)
                actor.do("call", agent, method="update", version=version)
                assert [wait.result(60) for wait in waits] == [2, 2]
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(w.update, progress=t) for (w, _), t in zip(engines, traffic, strict=True)]
                assert [call.result(60) for call in calls] == [version] * 2
            assert all(right(tensors, version) for _, tensors in engines)
        size = sum(tensor.nbytes for tensor in engines[0][1].values())
        assert actor.do("counters", agent)["bytes_read"] == 2 * size, "once a version"
        assert not sum(t.bytes["trainer"] for t in traffic), "nobody else reads from the trainer"


def test_a_second_agent_reads_from_the_first_one(here: Hub, other: Actor) -> None:
    fleet, traffic = Fleet(here, other), Traffic()
    with Actor() as actor:
        fleet.holds_half(actor, fleet.agent(actor), 1)
        second, tensors = here.reader("plain", "second agent", mib=MIB, zone="east", seeds=True)
        call = in_background(lambda: second.replicate(1, progress=traffic, timeout_s=60))
        actor.do("go")
        assert call.result(60) == 1
    assert right(tensors, 1)
    assert set(traffic.bytes) == {"agent"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_gone_in_the_middle_is_not_waited_for(here: Hub, other: Actor, how: signal.Signals) -> None:
    fleet = Fleet(here, other)
    with Actor() as actor:
        agent = fleet.agent(actor)
        actor.do("call", agent, method="replicate", version=1)
        engine, tensors = here.reader("plain", "engine", mib=MIB, zone="east")
        assert engine.replicate() == 1
        fleet.publish(2)
        fleet.holds_half(actor, agent, 2)
        assert engine.update() == 1
        new, blank = here.reader("plain", "new", mib=MIB, zone="east")
        assert new.replicate() == 1, "what is in the zone"
        assert right(blank, 1)
        wait = in_background(lambda: engine.wait(1, timeout_s=60))
        assert not wait.done()
        actor.signal(how)
        assert wait.result(60) == 2
        assert [engine.update(), new.update()] == [2, 2]
        assert right(tensors, 2)
        assert right(blank, 2)
        actor.kill()
