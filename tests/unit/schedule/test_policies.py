"""The shape that readers of one version take under each policy, whoever asks when: how deep, how wide, across zones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ConfigError
from tensorhub_core.schedule.policy import AUTO, POLICIES, Policy, policy_of
from tensorhub_core.server.options import machine_config
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Announce, Filling, Ok, Promise, Published
from tests.sim.hub import Hub, Peer

SIZE = 400
CHAINS = replace(AUTO, lag_bytes=1)
TREES = replace(AUTO, lag_bytes=SIZE // 4)
ZONES = st.sampled_from(["home", "east", "west"])


@dataclass(frozen=True)
class Arrival:
    """A reader: where it runs, and whether it begins at once."""

    zone: str
    host: str
    begins: bool


ARRIVALS = st.lists(
    st.builds(Arrival, ZONES, st.sampled_from(["", "a", "b", "c"]), st.booleans()), min_size=1, max_size=24
)
AT_HOME = st.lists(st.builds(Arrival, st.just("home"), st.just(""), st.booleans()), min_size=1, max_size=40)


class Fleet:
    """One publisher, and readers that come one after the other and are never done."""

    def __init__(self, policy: Policy, arrivals: list[Arrival]) -> None:
        self.hub = Hub(policy=policy, worth_waiting_bytes=0)
        self.places = {"trainer": ("home", "trainer's")}
        trainer = self.hub.hello("trainer", zone="home", host="trainer's")
        trainer.register(b"layout")
        trainer.publish(1, b"sums", Published)
        self.above: dict[str, str] = {}
        for number, arrival in enumerate(arrivals):
            self.come(f"r{number:02}", arrival)

    def come(self, name: str, arrival: Arrival) -> Peer:
        peer = self.hub.hello(name, zone=arrival.zone, host=arrival.host)
        peer.register(b"layout")
        (source,) = peer.answer(peer.join(0), Promise).sources
        self.above[name] = source.replica
        self.places[name] = (arrival.zone, arrival.host)
        if arrival.begins:
            peer.call(Filling(0), Ok)
            peer.call(Announce(0, 1, SIZE // 4), Ok)
        assert check(self.hub.state) == []
        return peer

    def depth(self, name: str) -> int:
        return 0 if name == "trainer" else 1 + self.depth(self.above[name])

    def egress(self, name: str) -> int:
        """Return how many read from a replica over the network."""
        place = self.places[name]
        below = [self.places[other] for other, source in self.above.items() if source == name]
        return sum(not (place[1] and place == other) for other in below)

    def crossings(self, zone: str) -> list[str]:
        """Return who of a zone reads from another one."""
        return [n for n, source in self.above.items() if self.places[n][0] == zone != self.places[source][0]]


@settings(max_examples=40, deadline=None)
@given(AT_HOME)
def test_readers_of_large_copies_form_one_chain(arrivals: list[Arrival]) -> None:
    fleet = Fleet(CHAINS, arrivals)
    assert all(fleet.egress(name) <= 1 for name in fleet.places)
    assert max(map(fleet.depth, fleet.places)) == len(arrivals)


@settings(max_examples=40, deadline=None)
@given(AT_HOME, st.sampled_from([SIZE, SIZE // 2, SIZE // 4, SIZE // 10]))
def test_the_lag_of_a_chain_costs_no_more_than_another_reader_of_the_first_holder(
    arrivals: list[Arrival], lag_bytes: int
) -> None:
    fleet = Fleet(replace(AUTO, lag_bytes=lag_bytes), arrivals)
    deepest = max(map(fleet.depth, fleet.places))
    assert (deepest - 1) * lag_bytes / SIZE <= fleet.egress("trainer")


@settings(max_examples=20, deadline=None)
@given(AT_HOME)
def test_readers_of_small_copies_form_a_shallow_tree(arrivals: list[Arrival]) -> None:
    fleet = Fleet(replace(AUTO, lag_bytes=SIZE), arrivals)
    assert max(map(fleet.depth, fleet.places)) <= 8
    assert max(map(fleet.egress, fleet.places)) <= 8


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([CHAINS, TREES]))
def test_one_reader_of_each_zone_reads_from_another_one(arrivals: list[Arrival], policy: Policy) -> None:
    fleet = Fleet(policy, arrivals)
    for zone in ("east", "west"):
        assert len(fleet.crossings(zone)) == any(arrival.zone == zone for arrival in arrivals)
    assert not fleet.crossings("home")


@settings(max_examples=40, deadline=None)
@given(ARRIVALS)
def test_one_reader_of_a_machine_pulls_and_its_neighbours_read_from_it(arrivals: list[Arrival]) -> None:
    fleet = Fleet(CHAINS, arrivals)
    for place in {place for place in fleet.places.values() if place[1]} - {fleet.places["trainer"]}:
        pulled = [n for n, source in fleet.above.items() if fleet.places[n] == place != fleet.places[source]]
        assert len(pulled) == 1


@settings(max_examples=30, deadline=None)
@given(ARRIVALS)
def test_a_star_has_one_middle(arrivals: list[Arrival]) -> None:
    fleet = Fleet(POLICIES["star"], arrivals)
    assert set(fleet.above.values()) == {"trainer"}


@settings(max_examples=30, deadline=None)
@given(AT_HOME)
def test_in_a_chain_everybody_follows_the_last_one_however_small_the_copy(arrivals: list[Arrival]) -> None:
    fleet = Fleet(POLICIES["chain"], arrivals)
    assert max(map(fleet.depth, fleet.places)) == len(arrivals)


def test_a_setting_names_the_policy() -> None:
    assert machine_config(ServerConfig(), 1).policy is AUTO
    assert {name: machine_config(ServerConfig(policy=name), 1).policy.name for name in POLICIES} == {
        n: n for n in POLICIES
    }
    with pytest.raises(ConfigError, match="auto, chain, star, tree"):
        policy_of("best")


@pytest.mark.parametrize(("total", "lag"), [(0, 1.0), (16 << 20, 1.0), (64 << 20, 0.25), (1 << 40, 16 / (1 << 20))])
def test_a_hop_costs_a_share_of_the_time_of_a_copy_and_at_most_all_of_it(total: int, lag: float) -> None:
    assert POLICIES["tree"].lag(total) == pytest.approx(lag)
    assert AUTO.lag(total) == 0
