"""A shard that waits for something newer hears of a round that the others of its replica are in already (law L2)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.messages import Available, Promise
from tests.sim.hub import Hub, Peer
from tests.unit.state.fleet import answered, begin, commit, lawful, publish, replica, replicate, unpublish
from tests.unit.state.test_resuming import back, restarted


def both_at(hub: Hub, number: int) -> tuple[list[Peer], list[Peer]]:
    """A trainer that has published `number`, and an engine of two shards that holds it."""
    trainer, engine = replica(hub, "trainer"), replica(hub, "engine", 2)
    publish(trainer, number)
    assert replicate(engine) == number
    return trainer, engine


def finish(trainer: list[Peer], withdrawn: list[int], engine: list[Peer], number: int) -> None:
    """The shard that waited joins; the round ends, and with that the trainer's wait."""
    late = engine[1].join(1, mode="update", have=(1, 1))
    assert engine[1].answer(late, Promise).number == number
    assert answered(trainer, withdrawn) == [False]
    answered(engine, unpublish(engine))
    begin(engine, 1)
    commit(engine, 1, number)
    assert answered(trainer, withdrawn) == [True]


def test_a_version_that_is_taken_back_is_told_to_shards_whose_replica_was_promised_it() -> None:
    """Else the shard waits for a newer one, the trainer for the round, and the round for the shard."""
    hub = Hub(retain=0)
    trainer, engine = both_at(hub, 1)
    unpublish(trainer)
    publish(trainer, 2)
    early = engine[0].join(1, mode="update", have=(1, 1))
    assert engine[0].answer(early, Promise).number == 2
    withdrawn = unpublish(trainer)
    waits = engine[1].wait((1, 1))
    assert engine[1].answer(waits, Available) == Available(1, 2)
    finish(trainer, withdrawn, engine, 2)
    lawful(hub)


def test_a_shard_that_waits_already_is_told_when_the_promise_is_made() -> None:
    hub = Hub(retain=0)
    trainer, engine = both_at(hub, 1)
    unpublish(trainer)
    waits = engine[1].wait((1, 2))
    publish(trainer, 2)
    assert waits not in engine[1].answers, "2 is not newer than 2"
    older = engine[1].wait((1, 1))
    assert engine[1].answer(older, Available) == Available(1, 2)
    early = engine[0].join(1, mode="update", have=(1, 1))
    assert engine[0].answer(early, Promise).number == 2
    withdrawn = unpublish(trainer)
    assert waits not in engine[1].answers
    finish(trainer, withdrawn, engine, 2)
    lawful(hub)


def test_a_shard_that_waits_is_told_when_the_others_come_back_with_their_promise() -> None:
    """After a restart of the server, which promises nothing before it has listened."""
    hub, trainer = restarted()
    engine = [back(hub, "reader", k) for k in (0, 1)]
    early = engine[0].join(0, promised=(1, 1))
    waits = engine[1].wait()
    withdrawn = unpublish(trainer)
    assert waits not in engine[1].answers
    hub.later(2 * hub.config.grace_s)
    assert engine[0].answer(early, Promise).number == 1
    assert engine[1].answer(waits, Available) == Available(1, 1)
    assert answered(trainer, withdrawn) == [False, False]
    lawful(hub)


@pytest.mark.parametrize("mode", ["replicate", "update", "stage"])
def test_it_hears_of_nothing_that_it_has_or_has_joined(mode: str) -> None:
    hub = Hub(retain=0)
    trainer, engine = both_at(hub, 1)
    unpublish(trainer)
    publish(trainer, 2)
    for peer in engine:
        peer.join(1, mode=mode, have=(1, 1))
    unpublish(trainer)
    assert engine[1].wait((1, 1)) not in engine[1].answers, "it is in that round itself"
    other = replica(hub, "other", 2)
    assert other[0].wait(None) not in other[0].answers, "no replica but this one was promised it"
    lawful(hub)
