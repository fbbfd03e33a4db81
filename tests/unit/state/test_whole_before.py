"""A version that was whole before the server restarted, and is being taken back when its shards come again."""

from __future__ import annotations

import pytest

from tensorhub_core.state.messages import Held, Hello, Offload, Welcome
from tests.sim.hub import Hub, Peer, digest


def comes_back(hub: Hub, shard: int) -> Peer:
    """Say hello again as one shard of a trainer that held version 7."""
    peer = hub.peer(f"trainer/{shard}")
    held = Held(1, 7, digest(b"layout %d" % shard), digest(b"placement"), digest(b"sums %d" % shard), 400, 4)
    hello = Hello(1, f"token {shard}", "policy", "trainer", shard, 2, held=held, high=(1, 7))
    peer.call(hello, Welcome)
    return peer


@pytest.mark.parametrize("first_asks", [False, True])
def test_a_version_that_was_whole_is_still_retained(first_asks: bool) -> None:
    """Whether a shard asks for its memory before or after the other one has come back."""
    hub = Hub(server_epoch=2, retain=1)
    first = comes_back(hub, 0)
    taken = first.unpublish() if first_asks else 0
    second = comes_back(hub, 1)
    taken = taken or first.unpublish()
    assert hub.state.models["policy"].high == (1, 7)  # type: ignore[index]
    hub.later(hub.config.grace_s + 0.5)
    assert [push.number for push in first.pushed(Offload)] == [7], "nothing else keeps it"
    assert taken not in first.answers
    assert second.answers


def test_what_only_one_shard_has_was_not_whole() -> None:
    hub = Hub(server_epoch=2, retain=1)
    first = comes_back(hub, 0)
    taken = first.unpublish()
    hub.later(hub.config.grace_s + 0.5)
    assert hub.state.models["policy"].high is None  # type: ignore[index]
    assert taken in first.answers
