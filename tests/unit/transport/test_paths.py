"""Which way leads to a peer: every pair of sides there can be, against a table written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from tensorhub_core.transport.description import WAYS
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.paths import Side, Way, forecast, line, rank, serving_ways, why_none

HERE = Host("boot", 1, 2)
HOSTS = {
    "same": HERE,
    "other network namespace": Host("boot", 1, 3),
    "other container": Host("boot", 9, 2),
    "other machine": Host("another", 1, 2),
    "does not say": None,
}
NEAR = {"same", "other network namespace", "does not say"}
"""Where a process of the other side may be one that is seen from here."""
SUBSETS = [frozenset(ways) for ways in chain.from_iterable(combinations(WAYS, n) for n in range(4))]


def pairs() -> Iterator[tuple[Side, Side, str]]:
    for ours, theirs, where, rdma, their_rdma in product(SUBSETS, SUBSETS, HOSTS, (True, False), (True, False)):
        yield Side(ours, HERE, rdma), Side(theirs, HOSTS[where], their_rdma), where


def names(ways: tuple[Way, ...]) -> list[str]:
    return [way.transport for way in ways]


def best(common: frozenset[str], where: str, rdma: bool) -> str | None:
    if "cma" in common and where == "same":
        return "cma"
    if "nixl" in common and rdma:
        return "nixl"
    if "tcp" in common:
        return "tcp"
    if "nixl" in common:
        return "nixl"
    return "cma" if "cma" in common and where in NEAR else None


def test_the_best_way_of_every_pair() -> None:
    for here, there, where in pairs():
        expected = best(frozenset(here.ways & there.ways), where, here.rdma and there.rdma)
        ranked = names(rank(here, there, cpu=True))
        assert (ranked[0] if ranked else None) == expected, (here, there)


def test_every_way_that_may_work_is_ranked_once_and_no_other() -> None:
    for here, there, where in pairs():
        ranked = names(rank(here, there, cpu=True))
        possible = (here.ways & there.ways) - (set() if where in NEAR else {"cma"})
        assert sorted(ranked) == sorted(possible)
        if "cma" in ranked and where != "same":
            assert ranked[-1] == "cma"


def test_memory_of_a_device_goes_by_nixl_alone() -> None:
    for here, there, _ in pairs():
        expected = ["nixl"] if "nixl" in here.ways & there.ways else []
        assert names(rank(here, there, cpu=False)) == expected


def test_both_sides_choose_alike() -> None:
    for here, there, _ in pairs():
        if there.host is not None:
            assert names(rank(here, there, cpu=True)) == names(rank(there, here, cpu=True))


def test_what_did_not_work_comes_last_and_stays_possible() -> None:
    for here, there, _ in pairs():
        plain = names(rank(here, there, cpu=True))
        for suspects in SUBSETS:
            ranked = names(rank(here, there, cpu=True, suspects=suspects))
            assert ranked == [w for w in plain if w not in suspects] + [w for w in plain if w in suspects]


def test_sides_that_do_not_say_where_they_are_are_no_neighbours() -> None:
    unknown = Side(frozenset(WAYS))
    assert names(rank(unknown, unknown, cpu=True))[0] == "tcp"


def test_nixl_serves_only_where_it_is_needed() -> None:
    for cma, tcp, nixl, rdma, devices in product((True, False), repeat=5):
        serving = serving_ways(cma=cma, tcp=tcp, nixl=nixl, rdma=rdma, devices=devices)
        assert ("tcp" in serving, "cma" in serving) == (tcp, cma)
        assert ("nixl" in serving) == (nixl and (rdma or devices or not serving.count("cma") + serving.count("tcp")))


def test_what_is_said() -> None:
    way = Way("tcp", "not both sides have RDMA")
    assert line("agent", way) == "agent is read by tcp: not both sides have RDMA"
    assert line("agent", way, ["cma: no", "nixl: no"]).endswith(" (not by cma: no; nixl: no)")
    here, plain = Side(frozenset(WAYS), HERE), Side(frozenset({"memory"}))
    assert "serves by memory" in why_none(here, plain, cpu=True)
    far = Side(frozenset({"cma"}), HOSTS["other machine"])
    assert "set transport='auto' or 'tcp' for the peer" in why_none(here, far, cpu=True)
    assert "connect(transport='nixl')" in why_none(here, Side(frozenset({"tcp"})), cpu=False)
    assert "pip install" in why_none(Side(frozenset({"tcp"})), Side(frozenset({"nixl"})), cpu=False)


def test_the_forecast_is_what_is_chosen() -> None:
    for ways, rdma in product(SUBSETS, (True, False)):
        within, between = forecast(Side(ways, HERE, rdma))
        assert within.transport == (best(ways, "same", rdma) or "nothing")
        assert between.transport == (best(ways, "other machine", rdma) or "nothing")
