"""Which round a shard is welcomed to, so that the calls of all shards go on to meet (L2)."""

from __future__ import annotations

from tensorhub_core.state.messages import Ended, Hello, NothingNewer, Published, Welcome
from tests.sim.hub import Hub, Peer


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
