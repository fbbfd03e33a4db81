"""How many names the server remembers: models that nobody needs, streams that are over, workers that come back."""

from __future__ import annotations

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Failure, GetStatus, Hello, Leave, Ok, Published, StatusReply, Welcome
from tests.sim.hub import PROTOCOL, Hub, Peer


def published(hub: Hub, number: int, **about: object) -> Peer:
    peer = hub.hello("trainer", **about)
    peer.register(b"layout")
    peer.publish(number, b"sums %d" % number, Published)
    return peer


def test_models_that_nobody_needs_make_place_for_new_ones() -> None:
    hub = Hub(max_models=4)
    stays = published(hub, 7, model="in use")
    for run in range(20):
        published(hub, run, model=f"run {run}").call(Leave(), Ok)
        assert check(hub.state) == []
    assert len(hub.state.models) == 4
    assert stays.call(GetStatus("in use"), StatusReply).models[0].latest == 7
    assert sum("is forgotten" in line for line in hub.logs) == 17


def test_a_model_that_was_only_asked_about_goes_before_one_with_versions() -> None:
    hub = Hub(max_models=3)
    published(hub, 9, model="real").call(Leave(), Ok)
    for mistake in range(5):
        hub.hello("status", model=f"typing mistake {mistake}", observer=True).call(Leave(), Ok)
    hub.hello("again", model="real").register(b"layout")
    assert hub.state.models["real"].high == (1, 9)  # type: ignore[index]
    assert not any("is forgotten" in line for line in hub.logs)


def test_models_that_are_all_in_use_refuse_another_one_and_nobody_else() -> None:
    hub = Hub(max_models=2)
    peers = [published(hub, 1, model=f"model {k}") for k in range(2)]
    hub.later(1.0)
    refused = hub.peer("third").refused(Hello(PROTOCOL, "t", "third", "r"), "state_error")
    assert "2 models" in refused.message
    hub.hello("reader", model="model 0")
    peers[1].call(Leave(), Ok)
    hub.hello("reader", model="third")
    assert set(hub.state.models) == {"model 0", "third"}
    assert check(hub.state) == []


def test_a_model_is_forgotten_in_the_step_in_which_the_grace_ends() -> None:
    hub = Hub(max_models=1, grace_s=5.0)
    hub.hello("reader", model="old", high=(1, 3)).call(Leave(), Ok)
    hub.now += 6.0
    hub.hello("reader", model="new")
    assert list(hub.state.models) == ["new"]


def test_who_comes_back_is_let_in_where_nobody_else_is() -> None:
    hub = Hub(max_workers=2)
    published(hub, 1, token="trainer")
    hub.hello("reader")
    refusal = hub.peer("third").refused(Hello(PROTOCOL, "t", "policy", "third"), "state_error")
    assert "2 connections" in refusal.message
    again = hub.peer("trainer again")
    again.call(Hello(PROTOCOL, "trainer", "policy", "trainer"), Welcome)
    assert len(hub.state.workers) == 2
    assert again.call(GetStatus(), StatusReply).models[0].latest == 1


def test_streams_that_are_over_are_remembered_up_to_a_number() -> None:
    hub = Hub(max_streams=8)
    for run in range(30):
        peer = published(hub, 0, stream=f"run {run}")
        assert hub.state.models["policy"].epoch == run + 1  # type: ignore[index]
        peer.call(Leave(), Ok)
    model = next(iter(hub.state.models.values()))
    assert model.streams == [f"run {run}" for run in range(22, 30)]


def test_a_stream_that_is_over_stays_over_while_its_worker_is_there() -> None:
    hub = Hub(max_streams=4)
    old = hub.hello("old", stream="run 0")
    old.register(b"layout")
    old.publish(0, b"old sums", Published)
    for run in range(1, 20):
        published(hub, 0, stream=f"run {run}").call(Leave(), Ok)
    old.answer(old.unpublish(), Ok)
    refused = old.publish(1, b"newer sums", Failure)
    assert refused.code == "version_conflict"


def test_as_many_streams_as_are_remembered_cannot_all_be_in_use() -> None:
    hub = Hub(max_streams=3, retain=0)
    peers = [hub.hello(f"trainer {run}", stream=f"run {run}") for run in range(4)]
    for peer in peers:
        peer.register(b"layout")
    for peer in peers[:3]:
        peer.publish(0, b"sums of " + peer.session, Published)
    failure = peers[3].publish(0, b"sums of the fourth", Failure)
    assert failure.code == "state_error"
    assert "3 streams" in failure.message
    peers[0].call(Leave(), Ok)
    peers[3].publish(0, b"sums of the fourth", Published)
    assert check(hub.state) == []
