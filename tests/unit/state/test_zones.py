"""What `latest` means in a zone that has a seed agent, and when the zone goes on without one (law L10)."""

from __future__ import annotations

import pytest

from tensorhub_core.ids import ModelName
from tensorhub_core.state.lead import Lead
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Cancel,
    DescribeVersion,
    Failure,
    HandOver,
    Heartbeat,
    Hello,
    Leave,
    NothingNewer,
    Ok,
    Promise,
    VersionLayouts,
    Welcome,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.fleet import begin, commit, join, lawful, promised, publish, replica, replicate, source_of

PATIENCE_S = 10.0


class Fleet:
    """A trainer in the west with version 1, an agent and two engines in the east which hold it, all of two shards."""

    def __init__(self, shards: int = 2, **config: float) -> None:
        self.hub = Hub(**config)
        self.trainer = replica(self.hub, "trainer", shards, zone="west")
        self.agent = replica(self.hub, "agent-a", shards, zone="east", seeds=True)
        self.engine, self.other = (replica(self.hub, name, shards, zone="east") for name in ("engine", "other"))
        publish(self.trainer, 1)
        self.bring(0, 1)
        for peers in (self.engine, self.other):
            assert replicate(peers) == 1

    def next_version(self, number: int) -> None:
        for peer in self.trainer:
            peer.unpublish()
        publish(self.trainer, number)

    def bring(self, round_: int, number: int, part: int = 4) -> None:
        """Let the agent take a version, or only a part of it."""
        for peer in self.agent:
            peer.unpublish()
        assert promised(self.agent, join(self.agent, round_, number)) == number
        begin(self.agent, round_)
        for peer in self.agent:
            peer.call(Announce(round_, part, 100 * part), Ok)
        if part == 4:
            commit(self.agent, round_, number)

    def later(self, seconds: float, silent: tuple[Peer, ...] = ()) -> None:
        self.hub.later(seconds, silent)
        lawful(self.hub)

    def lead(self) -> Lead:
        return self.hub.state.models[ModelName("policy")].leads["east"]


def update(peers: list[Peer], round_: int, have: int = 1) -> list[int]:
    return join(peers, round_, mode="update", have=(1, have))


def nothing_newer(peers: list[Peer], asked: list[int], number: int) -> bool:
    return {p.answer(n, NothingNewer).number for p, n in zip(peers, asked, strict=True)} == {number}


def test_the_zone_goes_on_with_what_it_has_until_the_agent_has_brought_the_next_version() -> None:
    fleet = Fleet()
    waits = [p.wait((1, 1)) for p in fleet.engine]
    fleet.next_version(2)
    assert not any(n in p.answers for p, n in zip(fleet.engine, waits, strict=True))
    assert nothing_newer(fleet.engine, update(fleet.engine, 1), 1)
    staged = join(fleet.other, 1, mode="stage", have=(1, 1))
    assert nothing_newer(fleet.other, staged, 1)
    fleet.bring(1, 2)
    assert [p.answer(n, Available).number for p, n in zip(fleet.engine, waits, strict=True)] == [2, 2]
    asked = update(fleet.engine, 2)
    assert promised(fleet.engine, asked) == 2
    assert {source_of(p, n) for p, n in zip(fleet.engine, asked, strict=True)} == {"agent-a"}
    lawful(fleet.hub)


def test_who_has_nothing_gets_what_is_in_the_zone() -> None:
    fleet = Fleet(shards=1)
    fleet.next_version(2)
    new = replica(fleet.hub, "new", zone="east")
    (asked,) = join(new, 0)
    promise = new[0].answer(asked, Promise)
    assert promise.number == 1
    assert {source.replica for source in promise.sources} <= {"agent-a", "engine", "other"}


def test_a_zone_in_which_there_is_nothing_yet_waits() -> None:
    hub = Hub()
    trainer = replica(hub, "trainer")
    replica(hub, "agent-a", zone="east", seeds=True)
    publish(trainer, 1)
    (engine,) = replica(hub, "engine", zone="east")
    asked, wait = engine.join(0), engine.wait()
    refused = engine.refused(DescribeVersion(), "version_unavailable")
    assert "zone 'east'" in refused.message
    assert "seed agents bring version 1" in refused.message
    hub.later(PATIENCE_S - 1)
    assert not {asked, wait} & engine.answers.keys()
    hub.later(1.5)
    assert engine.answer(asked, Promise).number == engine.answer(wait, Available).number == 1
    assert any("zone 'east' goes on by itself" in text for text in hub.logs)


def test_other_zones_and_those_without_one_and_the_agent_itself_see_everything() -> None:
    fleet = Fleet(shards=1)
    fleet.next_version(2)
    for name, more in (("south", {"zone": "south"}), ("nowhere", {}), ("agent-b", {"zone": "east", "seeds": True})):
        peers = replica(fleet.hub, name, **more)
        assert promised(peers, join(peers, 0)) == 2, name


def test_an_observer_sees_what_its_zone_sees() -> None:
    fleet = Fleet(shards=1)
    observers = {}
    for zone in ("", "east"):
        peer = observers[zone] = fleet.hub.peer(f"observer {zone}")
        peer.call(Hello(1, f"token {zone}", "policy", "observer", zone=zone, observer=True), Welcome)
    fleet.next_version(2)
    waits = {zone: peer.wait((1, 1)) for zone, peer in observers.items()}
    assert observers[""].answer(waits[""], Available).number == 2
    assert waits["east"] not in observers["east"].answers
    assert observers[""].call(DescribeVersion(), VersionLayouts).number == 2
    assert observers["east"].call(DescribeVersion(), VersionLayouts).number == 1
    fleet.bring(1, 2)
    assert observers["east"].answer(waits["east"], Available).number == 2


def test_a_version_asked_by_its_number_is_not_held_back_and_then_is_there_for_all() -> None:
    fleet = Fleet(shards=1)
    fleet.next_version(2)
    for peer in fleet.engine:
        peer.unpublish()
    assert replicate(fleet.engine, 1, want=2) == 2
    assert promised(fleet.other, update(fleet.other, 1)) == 2


def test_nobody_is_told_an_older_version_than_before() -> None:
    """The engine hears of version 2 while no agent lives; then one comes, and holds 2 back from the others."""
    fleet = Fleet(shards=2)
    for peer in fleet.agent:
        peer.call(Leave(), Ok)
    fleet.next_version(2)
    told = fleet.engine[0].wait((1, 1))
    assert fleet.engine[0].answer(told, Available).number == 2
    fleet.agent = replica(fleet.hub, "agent-b", 2, zone="east", seeds=True)
    assert nothing_newer(fleet.other, update(fleet.other, 1), 1)
    wait = fleet.engine[1].wait((1, 1))
    assert fleet.engine[1].answer(wait, Available).number == 2, "as the other shard of its replica"
    assert promised(fleet.engine, update(fleet.engine, 1)) == 2


def test_what_was_heard_before_the_server_restarted_counts() -> None:
    fleet = Fleet(shards=1)
    fleet.later(6)  # or the server would listen first
    fleet.next_version(2)
    (back,) = replica(fleet.hub, "back", zone="east", high=(1, 2))
    assert promised([back], [back.join(0)]) == 2


def end(fleet: Fleet, how: str) -> None:
    """End the agent."""
    agents = tuple(fleet.agent)
    if how == "leaves":
        agents[0].call(Leave(), Ok)
    elif how == "is about to leave":
        agents[0].ask(HandOver())
    elif how == "is silent":
        fleet.later(fleet.hub.config.lease_s + 0.5, silent=agents)
    elif how == "is another replica's now":
        replica(fleet.hub, "agent-a", 2, zone="south", seeds=True)
    else:
        replica(fleet.hub, "agent-a", 2, zone="east")


ENDS = ["leaves", "is about to leave", "is silent", "is another replica's now", "is no agent any more"]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("begun", [False, True])
def test_the_zone_goes_on_as_soon_as_no_agent_lives(how: str, begun: bool) -> None:
    fleet = Fleet()
    waits = [p.wait((1, 1)) for p in fleet.engine]
    new = replica(fleet.hub, "new", 2, zone="east")
    fleet.next_version(2)
    if begun:
        fleet.bring(1, 2, part=2)
    end(fleet, how)
    assert [p.answer(n, Available).number for p, n in zip(fleet.engine, waits, strict=True)] == [2, 2]
    assert promised(new, join(new, 0)) == 2
    lawful(fleet.hub)


def test_one_of_two_agents_is_enough() -> None:
    fleet = Fleet()
    replica(fleet.hub, "agent-b", 1, zone="east", seeds=True)
    fleet.next_version(2)
    wait = fleet.engine[0].wait((1, 1))
    end(fleet, "leaves")
    assert wait not in fleet.engine[0].answers


def test_an_agent_that_is_heard_again_counts_again() -> None:
    fleet = Fleet(shards=1)
    fleet.later(6, silent=tuple(fleet.agent))
    fleet.agent[0].call(Heartbeat(), Ok)
    fleet.next_version(2)
    assert nothing_newer(fleet.engine, update(fleet.engine, 1), 1)


def test_an_agent_that_does_not_begin_is_not_waited_for() -> None:
    fleet = Fleet(shards=1)
    wait = fleet.engine[0].wait((1, 1))
    fleet.next_version(2)
    fleet.later(PATIENCE_S - 1)
    assert wait not in fleet.engine[0].answers
    fleet.later(1.5)
    assert fleet.engine[0].answer(wait, Available).number == 2


def test_what_is_published_meanwhile_gives_an_agent_no_more_time() -> None:
    fleet = Fleet(shards=1)
    wait = fleet.engine[0].wait((1, 1))
    for number in range(2, 7):
        assert wait not in fleet.engine[0].answers
        fleet.next_version(number)
        fleet.later(2.1)
    assert fleet.engine[0].answer(wait, Available).number == 6


def test_an_agent_that_comes_on_is_waited_for() -> None:
    fleet = Fleet(shards=1)
    wait = fleet.engine[0].wait((1, 1))
    fleet.next_version(2)
    fleet.later(6)
    fleet.bring(1, 2, part=1)
    for part in (2, 3):
        fleet.later(6)
        fleet.agent[0].call(Announce(1, part, 100 * part), Ok)
    assert wait not in fleet.engine[0].answers
    commit(fleet.agent, 1, 2)
    assert fleet.engine[0].answer(wait, Available).number == 2


def test_an_agent_that_is_busy_with_an_older_version_than_the_newest_comes_on() -> None:
    fleet = Fleet(shards=1)
    fleet.next_version(2)
    fleet.bring(1, 2, part=1)
    publish(replica(fleet.hub, "second", zone="west"), 3)
    wait = fleet.engine[0].wait((1, 1))
    for part in (2, 3):
        fleet.later(8)
        fleet.agent[0].call(Announce(1, part, 100 * part), Ok)
    assert wait not in fleet.engine[0].answers
    commit(fleet.agent, 1, 2)
    assert fleet.engine[0].answer(wait, Available).number == 2
    assert promised(fleet.engine, update(fleet.engine, 1)) == 2


def test_agents_that_start_again_and_again_hold_nothing_up_for_ever() -> None:
    fleet = Fleet(shards=1)
    wait = fleet.engine[0].wait((1, 1))
    fleet.next_version(2)
    fleet.bring(1, 2, part=2)
    for life in range(4):
        assert wait not in fleet.engine[0].answers
        before, fleet.agent = fleet.agent, replica(fleet.hub, f"agent {life}", zone="east", seeds=True)
        before[0].call(Leave(), Ok)
        fleet.bring(0, 2, part=2)
        fleet.later(2.6)
    assert fleet.engine[0].answer(wait, Available).number == 2
    assert fleet.lead().late


def test_an_agent_that_offers_again_what_it_had_gets_no_more_time() -> None:
    fleet = Fleet()
    fleet.next_version(2)
    for _ in range(2):
        fleet.later(PATIENCE_S / 2)
        for peer in fleet.agent:
            peer.unpublish()
        publish(fleet.agent, 1)
    fleet.later(1.0)
    assert fleet.lead().late
    assert promised(fleet.engine, update(fleet.engine, 1)) == 2


def test_an_agent_that_was_late_has_to_come_on_before_the_zone_waits_for_it_again() -> None:
    fleet = Fleet(shards=1)
    fleet.next_version(2)
    fleet.later(PATIENCE_S + 1)
    assert promised(fleet.engine, update(fleet.engine, 1)) == 2
    fleet.engine[0].unpublish()
    begin(fleet.engine, 1)
    commit(fleet.engine, 1, 2)
    fleet.next_version(3)
    assert promised(fleet.other, update(fleet.other, 1)) == 3, "it has not brought 2 either"
    fleet.bring(1, 3)
    fleet.other[0].call(Leave(), Ok)
    fleet.next_version(4)
    assert promised(fleet.engine, update(fleet.engine, 2, have=2)) == 3, "not 4"


def test_a_version_that_is_gone_from_the_zone_is_not_seen_there() -> None:
    """Version 1 was in the zone, but is not any more: a newcomer waits for what the agent brings."""
    fleet = Fleet(shards=1)
    for peers in (fleet.engine, fleet.other):
        peers[0].call(Leave(), Ok)
    fleet.next_version(2)
    fleet.bring(1, 2, part=2)
    (new,) = replica(fleet.hub, "new", zone="east")
    asked = new.join(0)
    assert asked not in new.answers
    commit(fleet.agent, 1, 2)
    assert new.answer(asked, Promise).number == 2


def test_a_zone_is_forgotten_when_nobody_is_there_any_more() -> None:
    hub = Hub()
    for k in range(5):
        (agent,) = replica(hub, f"agent-{k}", zone=f"zone {k}", seeds=True)
        agent.call(Leave(), Ok)
    replica(hub, "agent-a", zone="east", seeds=True)
    model = hub.state.models[ModelName("policy")]
    assert list(model.leads) == ["east"]


def test_a_wait_that_is_held_back_can_be_withdrawn() -> None:
    fleet = Fleet(shards=1)
    wait = fleet.engine[0].wait((1, 1))
    fleet.next_version(2)
    fleet.engine[0].call(Cancel(wait), Ok)
    assert fleet.engine[0].answer(wait, Failure).code == "deadline_exceeded"
