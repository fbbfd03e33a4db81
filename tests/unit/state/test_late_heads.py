"""Who queues behind a reader that does not begin is sent elsewhere, one at a time, and the queue stays a chain."""

from __future__ import annotations

from collections import Counter

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Done,
    Filling,
    LeaseFailure,
    Ok,
    Promise,
    Relocate,
    SourceSlow,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_awaited import LARGE, source, world
from tests.unit.state.test_rounds import trainer


def sources(hub: Hub) -> dict[str, str]:
    """Return whom each replica reads from now."""
    found = {}
    for lease in hub.state.leases.values():
        holder = hub.state.workers[hub.state.copies[lease.copy].worker]
        found[hub.state.workers[lease.reader].replica] = holder.replica
    return found


def obey(hub: Hub, readers: list[Peer], heard: dict[str, int]) -> None:
    """Let readers that were told of a source leave it, as the client does."""
    for reader in readers:
        for told in reader.pushed(SourceSlow)[heard.get(reader.name, 0) :]:
            heard[reader.name] = heard.get(reader.name, 0) + 1
            reader.call(Relocate(0, (LeaseFailure(told.lease, "slow"),)), Promise)


def run(hub: Hub, readers: list[Peer], seconds: float) -> dict[str, int]:
    """Let time pass; return how often each reader was told to go elsewhere so far."""
    heard = {reader.name: n for reader in readers if (n := len(reader.pushed(SourceSlow)))}
    for _ in range(int(seconds * 2)):
        hub.later(0.5)
        obey(hub, readers, heard)
        assert check(hub.state) == []
    return heard


def test_only_the_head_of_the_queue_goes_to_the_holder_and_the_others_follow_it() -> None:
    hub, _, readers = world(8, **LARGE)
    for reader in readers:
        reader.join(0)
    for reader in readers[1:]:
        reader.call(Filling(0), Ok)
    heard = run(hub, readers, hub.config.begin_within_s - 1)
    assert heard == {}
    heard = run(hub, readers, 10)
    assert heard == {"r1/0": 1}
    assert sources(hub) == {"r0": "trainer", "r1": "trainer", **{f"r{n}": f"r{n - 1}" for n in range(2, 8)}}


def test_the_head_that_begins_after_all_is_followed_by_nobody_and_commits() -> None:
    hub, t, readers = world(3, **LARGE)
    for reader in readers:
        reader.join(0)
    for reader in readers[1:]:
        reader.call(Filling(0), Ok)
    run(hub, readers, 8)
    readers[0].call(Filling(0), Ok)
    assert run(hub, readers, 8) == {"r1/0": 1}, "nobody goes back and forth"
    for reader in reversed(readers):
        reader.call(Done(0, reader.put(b"sums 1 0")), Committed)
    t.answer(t.unpublish(), Ok)
    assert check(hub.state) == []


def test_a_queue_in_which_nobody_begins_waits_for_its_first_to_be_ready() -> None:
    hub, _, readers = world(5, **LARGE)
    for reader in readers:
        reader.join(0)
    assert run(hub, readers, 10) == {}, "who is not ready to read gains nothing elsewhere"
    readers[3].call(Filling(0), Ok)
    assert run(hub, readers, 3) == {"r3/0": 1}
    assert (sources(hub)["r3"], sources(hub)["r4"]) == ("trainer", "r3")


def test_many_who_begin_behind_many_who_do_not_form_a_chain_again() -> None:
    hub, _, readers = world(12, **LARGE)
    for reader in readers:
        reader.join(0)
    ready = readers[1::2]
    for reader in ready:
        reader.call(Filling(0), Ok)
    heard = run(hub, readers, 20)
    assert set(heard.values()) == {1}
    now = sources(hub)
    loads = Counter(now[reader.name.split("/")[0]] for reader in ready)
    assert max(loads.values()) == 1, now
    assert loads["trainer"] == 1, now


def test_newcomers_do_not_queue_behind_who_is_late() -> None:
    hub, _, readers = world(3, **LARGE)
    for reader in readers:
        reader.join(0)
    hub.later(hub.config.begin_within_s + 1)
    (late,), (later,) = trainer(hub, "late"), trainer(hub, "later")
    assert source(late, late.join(0)) == "trainer"
    assert source(later, later.join(0)) == "late"


def test_who_has_begun_is_better_than_a_busy_holder() -> None:
    hub, _, (a, b, c, d) = world(4, **LARGE)
    a.join(0)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 2), Ok)
    assert source(b, b.join(0)) == "r0"
    hub.later(1.0)
    assert source(c, c.join(0)) == "r1"
    c.call(Filling(0), Ok)
    run(hub, [a, b, c, d], 8)
    assert sources(hub)["r2"] in ("trainer", "r0")


def test_without_another_source_the_queue_stays() -> None:
    hub, t, (a, b) = world(2, **LARGE)
    a.join(0)
    b.join(0)
    b.call(Filling(0), Ok)
    hub.later(hub.config.lease_s + 1.5, silent=(t,))
    assert b.pushed(SourceSlow) == []
    assert sources(hub)["r1"] == "r0"
