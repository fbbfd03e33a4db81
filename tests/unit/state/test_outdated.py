"""A server that hears of a later life of itself decides nothing more, and does not answer."""

from __future__ import annotations

import copy

import pytest

from tensorhub_core.ids import SessionId
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH
from tensorhub_core.state.events import Outdated, Received, Send
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.state.messages import PROTOCOL, Failure, Hello, Welcome

EPOCH = 1_000


def hello(server_epoch: int, observer: bool = False) -> Received:
    message = Hello(PROTOCOL, "token", "policy", "replica", observer=observer, server_epoch=server_epoch)
    return Received(SessionId(b"s"), 1, message)


def fresh() -> ServerState:
    return ServerState.new(MachineConfig(server_epoch=EPOCH), 0.0)


@pytest.mark.parametrize("epoch", [EPOCH + 1, EPOCH + 10**9, MOST_SERVER_EPOCH])
@pytest.mark.parametrize("observer", [False, True])
def test_a_higher_epoch_is_the_end_and_changes_nothing(epoch: int, observer: bool) -> None:
    state = fresh()
    before = copy.deepcopy(state)
    state, effects = step(state, hello(epoch, observer), 0.0)
    assert effects == [Outdated(epoch)]
    assert state == before


@pytest.mark.parametrize("epoch", [0, 1, EPOCH - 1, EPOCH])
def test_whoever_heard_of_this_life_or_earlier_ones_is_welcome(epoch: int) -> None:
    _, effects = step(fresh(), hello(epoch), 0.0)
    assert [type(effect.message) for effect in effects if isinstance(effect, Send)] == [Welcome]


@pytest.mark.parametrize("epoch", [-1, -(2**60), MOST_SERVER_EPOCH + 1, 2**64 - 1])
def test_what_is_no_epoch_is_refused(epoch: int) -> None:
    state, effects = step(fresh(), hello(epoch), 0.0)
    (answer,) = effects
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "config_error"
    assert not state.workers
