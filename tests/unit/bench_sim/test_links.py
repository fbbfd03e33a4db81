"""Rates are max-min fair, whatever changed before; bytes that leave one end arrive at the other."""

from __future__ import annotations

import math

from bench.sim.events import Events
from bench.sim.links import Flow, Link, Network, fair_rates
from bench.sim.reads import Read
from hypothesis import given, settings
from hypothesis import strategies as st


def nothing() -> None:
    """Do nothing."""


def water_filled(links: dict[int, float], paths: list[tuple[int, ...]]) -> list[float]:
    """Return max-min fair rates the slow way: raise all rates together, and stop those at a full link."""
    rates, moving = [0.0] * len(paths), set(range(len(paths)))
    while moving:
        room = {
            link: capacity - sum(rates[f] for f, path in enumerate(paths) if link in path)
            for link, capacity in links.items()
        }
        users = {link: sum(link in paths[f] for f in moving) for link in links}
        step, full = min((room[link] / users[link], link) for link in links if users[link])
        for flow in moving:
            rates[flow] += step
        moving = {f for f in moving if full not in paths[f]}
    return rates


networks = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 100), min_size=count, max_size=count),
        st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=3), min_size=1, max_size=12),
    )
)


def close(one: float, other: float) -> bool:
    """Tell whether two rates are the same but for rounding."""
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


@given(networks)
def test_rates_are_those_of_water_filling(world: tuple[list[int], list[set[int]]]) -> None:
    capacities, paths = world
    links = [Link(str(number), float(capacity)) for number, capacity in enumerate(capacities)]
    flows = [Flow([links[number] for number in sorted(path)]) for path in paths]
    for flow in flows:
        for link in flow.links:
            link.flows[flow] = None
    wanted = water_filled(dict(enumerate(map(float, capacities))), [tuple(sorted(path)) for path in paths])
    found = fair_rates(flows)
    assert all(close(found[flow], rate) for flow, rate in zip(flows, wanted, strict=True))


@settings(max_examples=60)
@given(networks, st.data())
def test_changes_lead_to_the_rates_of_what_is_left(
    world: tuple[list[int], list[set[int]]], data: st.DataObject
) -> None:
    capacities, paths = world
    links = [Link(str(number), float(capacity)) for number, capacity in enumerate(capacities)]
    flows = [Flow([links[number] for number in sorted(path)]) for path in paths]
    network, running = Network(), dict[int, None]()
    for _ in range(data.draw(st.integers(1, 15))):
        number = data.draw(st.integers(0, len(flows) - 1))
        if number in running:
            network.remove(flows[number])
            del running[number]
        else:
            network.add(flows[number])
            running[number] = None
        network.settle()
        wanted = water_filled(dict(enumerate(map(float, capacities))), [tuple(sorted(paths[n])) for n in running])
        assert all(close(flows[n].rate, rate) for n, rate in zip(running, wanted, strict=True))


@settings(max_examples=60)
@given(networks, st.lists(st.integers(1, 1000), min_size=12, max_size=12), st.lists(st.integers(0, 9), min_size=12))
def test_bytes_in_are_bytes_out(world: tuple[list[int], list[set[int]]], sizes: list[int], starts: list[int]) -> None:
    capacities, paths = world
    links = [Link(str(number), float(capacity)) for number, capacity in enumerate(capacities)]
    events, network, ended = Events(), Network(), list[int]()
    events.after = network.settle
    for number, path in enumerate(paths):
        read = Read(events, network, float(sizes[number]), lambda number=number: ended.append(number))
        read.add("source", tuple(links[link] for link in sorted(path)), sizes[number])
        events.at(float(starts[number]), read.begin)
    assert events.run(lambda: len(ended) == len(paths), 1e9)
    for number, link in enumerate(links):
        assert math.isclose(
            link.carried_bytes, sum(sizes[f] for f, path in enumerate(paths) if number in path), abs_tol=1
        )
        assert link.carried_bytes <= link.bytes_per_s * events.now + 1
    assert not any(link.flows for link in links)


def test_a_read_is_never_ahead_of_what_it_may_read() -> None:
    events, network, ended = Events(), Network(), list[float]()
    events.after = network.settle
    read = Read(events, network, 1000.0, lambda: ended.append(events.now))
    read.add("source", (Link("link", 100.0),), 300.0)
    events.at(0.0, read.begin)
    events.at(5.0, nothing)
    events.run(lambda: events.now >= 5.0, 10.0)
    assert read.count() == 300.0
    events.at(5.0, read.advance, "source", 1000.0)
    events.run(lambda: bool(ended), 100.0)
    assert ended == [12.0]


def test_several_sources_add_up_to_the_reader_s_own_link() -> None:
    events, network, ended = Events(), Network(), list[float]()
    events.after = network.settle
    into = Link("in", 100.0)
    read = Read(events, network, 1000.0, lambda: ended.append(events.now))
    for number in range(3):
        read.add(f"source {number}", (Link(f"out {number}", 40.0), into), 1000.0)
    events.at(0.0, read.begin)
    events.at(5.0, read.lose, "source 0")  # 500 bytes are here; the others give 80 a second
    events.run(lambda: bool(ended), 100.0)
    assert ended == [5.0 + 500 / 80]
