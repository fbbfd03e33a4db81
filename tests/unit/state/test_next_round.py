"""Which round a shard is welcomed to, so that the calls of all shards go on to meet (L2)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Ended,
    Hello,
    NothingNewer,
    Ok,
    Promise,
    Published,
    RegisterStaging,
    Welcome,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_resuming import KEY, back, grace, restarted, told
from tests.unit.state.test_rounds import publish


def group(hub: Hub, replica: str) -> list[Peer]:
    peers = [hub.hello(replica, shard, 2, token=f"{replica} {shard}") for shard in range(2)]
    for peer in peers:
        peer.register(b"layout %d" % peer.shard)
    return peers


def again(hub: Hub, ended: int) -> int:
    """Let shard 0 come back over another connection, after a last round; return the round it is welcomed to."""
    hello = Hello(1, "reader 0", "policy", "reader", 0, 2, high=(1, 3), ended=Ended(ended, (1, 3)))
    return hub.peer("reader/0").call(hello, Welcome).next_round


def test_who_comes_back_between_two_calls_hears_that_there_was_nothing_newer() -> None:
    """Or it would be a round ahead of the others, and they would hear an old answer when there is something newer."""
    hub = Hub()
    trainers, readers = group(hub, "trainer"), group(hub, "reader")
    for peer in (*trainers, *readers):
        peer.publish(3, b"three %d" % peer.shard, Published)
    for number in range(2):
        for reader in readers:
            reader.answer(reader.join(number, mode="update", have=(1, 3)), NothingNewer)
    readers[1].answer(readers[1].join(2, mode="update", have=(1, 3)), NothingNewer)
    assert again(hub, 1) == 2, "it has not heard the answer"
    assert again(hub, 2) == 3, "it has"


@pytest.mark.parametrize("when", ["later", "first"])
@pytest.mark.parametrize("mode", ["update", "stage"])
def test_who_had_not_called_when_the_server_restarted_hears_what_the_others_heard(mode: str, when: str) -> None:
    """Shard 0 had heard in round 7 that there is nothing newer. Or the calls of shard 1 would be one behind."""
    hub, t = restarted()
    heard = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    late = back(hub, "reader", 1, number=1, ended=Ended(6, KEY))
    for p in (heard, late):
        p.call(RegisterStaging(p.put(b"staging of " + p.session)), Ok)
    assert (told(heard), told(late)) == (8, 7)
    if when == "first":
        waits = heard.join(8, mode=mode, have=KEY)
        asked = late.join(7, mode=mode, have=KEY)
        assert asked not in late.answers, "the server listens"
    withdrawn = [p.unpublish() for p in t]
    grace(hub)
    for p, n in zip(t, withdrawn, strict=True):
        p.answer(n, Ok)
    publish(t, 2)
    if when == "later":
        waits = heard.join(8, mode=mode, have=KEY)
        asked = late.join(7, mode=mode, have=KEY)
    assert late.answer(asked, NothingNewer).number == 1
    if when == "first":
        assert heard.answer(waits, NothingNewer).number == 1, "it was asked when there was nothing newer"
        waits = heard.join(9, mode=mode, have=KEY)
        assert late.answer(late.join(8, mode=mode, have=KEY), NothingNewer).number == 1
        assert {heard.answer(waits, Promise).number, late.answer(late.join(9, mode=mode), Promise).number} == {2}
        return
    both = {heard.answer(waits, Promise).number, late.answer(late.join(8, mode=mode, have=KEY), Promise).number}
    assert both == {2}
    assert check(hub.state) == []


def test_who_called_before_the_others_came_back_hears_what_they_had_heard() -> None:
    hub, t = restarted()
    late = back(hub, "reader", 1, number=1, ended=Ended(6, KEY))
    assert told(late) == 7
    asked = late.join(7, mode="update", have=KEY)
    heard = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    assert told(heard) == 8
    grace(hub)
    assert late.answer(asked, NothingNewer).number == 1
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    both = [p.join(8, mode="update", have=KEY) for p in (heard, late)]
    assert {p.answer(n, Promise).number for p, n in zip((heard, late), both, strict=True)} == {2}
    assert check(hub.state) == []


def test_a_round_that_this_server_has_seen_is_heard_from_it_alone() -> None:
    """What another shard says of its last round decides nothing that this life of the server has decided otherwise."""
    hub, _ = restarted()
    heard = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    late = back(hub, "reader", 1, number=1, ended=Ended(6))
    assert told(late) == 8, "its last round was broken off: it does not hold what they heard"
    grace(hub)
    asked = [p.join(8, mode="replicate") for p in (heard, late)]
    assert {p.answer(n, Promise).number for p, n in zip((heard, late), asked, strict=True)} == {1}
    assert check(hub.state) == []
