"""Two real servers that start at the same moment: one swaps when told, one of two ranks follows by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tensorhub_core import Server, connect, serve

from ..mirror import mirroring
from ..models import Checkpoints, Trainer, training
from .server import Served, Stream, ending, launch, leave_room, stream, wait_ready

pytestmark = pytest.mark.timeout(400)
KIND = "dense-tied"
PROMPT = [(i * 7) % 300 + 3 for i in range(150)]
LONG = 1500
QUEUED = [(i * 11) % 300 + 3 for i in range(1, 120)]
"""What is asked during a swap. Not PROMPT: blocks of it that were computed in one batch with a running request, so with
other roundings, would lie in the prefix cache for the next test."""


@dataclass
class World:
    """A hub, a trainer, a server that is told, and one that follows."""

    hub: Server
    trainer: Trainer
    told: Served
    follower: Served
    checkpoints: Checkpoints
    newest: int = 1
    seed: int = 1
    """Whose weights the told server serves."""

    def publish(self, seed: int) -> int:
        """Publish the checkpoint of a seed as the next version."""
        self.newest += 1
        self.trainer.publish(self.checkpoints(KIND, seed), self.newest)
        return self.newest

    def told_to(self, seed: int) -> None:
        """Have the told server serve the weights of a seed."""
        reply = self.told.update(version=self.publish(seed), mode="wait")
        assert reply.status_code == 200, reply.text
        self.seed = seed


@pytest.fixture(scope="module")
def world(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start everything at once."""
    logs, bare = tmp_path_factory.mktemp("logs"), checkpoints.bare(KIND)
    with (
        serve("tcp://127.0.0.1:0", lease_s=60.0, heartbeat_s=1.0) as hub,
        training(hub.address, checkpoints(KIND, 1)) as trainer,
    ):
        config: dict[str, Any] = {"server": hub.address, "timeout_s": 30}
        told = launch(bare, {**config, "follow": False}, logs / "told.log", ranks=1, cores="0")
        follower = launch(bare, config, logs / "follower.log", ranks=2, cores="0|1")
        with ending(told, follower):
            wait_ready(told)
            wait_ready(follower)
            leave_room(told, 0)
            yield World(hub, trainer, told, follower, checkpoints)


def test_two_engines_started_at_once_are_two_replicas(world: World) -> None:
    one, other = world.told.version(), world.follower.version()
    assert one["replica"] != other["replica"]
    for body, shards in ((one, 1), (other, 2)):
        assert (body["state"], body["version"], body["error"], body["model"]) == ("serving", 1, None, "policy")
        assert [shard["shard"] for shard in body["shards"]] == list(range(shards))
        assert all(shard["digest"] and shard["version"] == 1 for shard in body["shards"])
        assert body["last_swap"] is None
    holders = {row for info in world.trainer.worker.versions() for row in info.replicas}
    assert holders == {"trainer", one["replica"], other["replica"]}


def test_the_follower_swaps_by_itself_and_says_so(world: World) -> None:
    before = world.follower.generate(PROMPT, 8)
    version = world.publish(2)
    body = world.follower.wait(version)
    assert [shard["source"] for shard in body["shards"]] == ["trainer", "trainer"]
    assert len({shard["digest"] for shard in body["shards"]}) == 2
    assert set(body["last_swap"]) == {"mode", "drain_s", "transfer_s", "process_s", "total_s"}
    after = world.follower.generate(PROMPT, 8)
    assert after["token_ids"] != before["token_ids"], "the long prompt was cached under the old weights"
    assert [span["version"] for span in after["weight_versions"]] == [str(version)]
    assert world.told.version()["version"] == 1, "the other one was not told"


def test_an_update_answers_with_proof_and_a_second_one_changes_nothing(world: World) -> None:
    before = world.told.generate(PROMPT, 8)["token_ids"]
    reply = world.told.update(version="latest", mode="wait")
    body = reply.json()
    assert (reply.status_code, body["version"], body["state"]) == (200, world.newest, "serving")
    assert len(body["shards"][0]["digest"]) == 32
    assert world.told.generate(PROMPT, 8)["token_ids"] != before
    again = world.told.update(version=world.newest, mode="abort")
    assert (again.status_code, again.json()["last_swap"]) == (200, body["last_swap"]), "nothing was stopped for it"


@dataclass
class References:
    """The told server's own long answers by seed, without a swap in between."""

    tokens: dict[int, list[int]]
    queued: dict[int, list[int]]
    """The first tokens that answer QUEUED."""


@pytest.fixture(scope="module")
def references(world: World) -> References:
    """Ask the told server with both sets of weights."""
    tokens, queued = {}, {}
    for seed in (1, 2):
        world.told_to(seed)
        tokens[seed] = world.told.generate(PROMPT, LONG)["token_ids"]
        queued[seed] = world.told.generate(QUEUED, 16)["token_ids"]
    assert common(tokens[1], tokens[2]) < 20
    assert queued[1] != queued[2]
    return References(tokens, queued)


def common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two answers share from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Flight:
    """A swap under a running request and one that came during it."""

    running: Stream
    queued: Stream
    body: dict[str, Any]
    old: tuple[str, list[int]]
    new: tuple[str, list[int]]
    """The new version and how it answers QUEUED."""

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Return which version made which tokens of the running request."""
        return [(span["version"], span["start"], span["end"]) for span in self.running.versions]


def swap_in_flight(world: World, references: References, mode: str) -> Flight:
    """Swap to the other weights while a request runs; tries again if the request ended too early for that."""
    for _ in range(8):
        seed = world.seed
        old = (str(world.told.version()["version"]), references.tokens[seed])
        version = world.publish(3 - seed)
        running = stream(world.told, PROMPT, LONG)
        running.started(8)
        reply = world.told.update(version=version, mode=mode)
        queued = stream(world.told, QUEUED, 16)
        world.seed = 3 - seed
        assert reply.status_code == 200, reply.text
        running.join()
        queued.join()
        flight = Flight(running, queued, reply.json(), old, (str(version), references.queued[3 - seed]))
        whole = running.finish == "length" and [span[0] for span in flight.spans] == [old[0]]
        if not whole or (mode == "wait" and flight.body["last_swap"]["drain_s"] > 0.1):
            return flight
    raise AssertionError("the request was never in flight during the swap")


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_in_flight(world: World, references: References, mode: str) -> None:
    flight = swap_in_flight(world, references, mode)
    running, (old_version, old), (new_version, new) = flight.running, flight.old, flight.new
    assert flight.body["version"] == int(new_version)
    assert flight.body["last_swap"]["mode"] == mode
    if mode == "wait":
        assert (running.tokens, running.finish) == (old, "length"), "it ran to its end on the old weights"
        assert flight.spans == [(old_version, 0, LONG)]
    elif mode == "keep":
        assert (len(running.tokens), running.finish) == (LONG, "length"), "it went on after the swap"
        assert [version for version, _, _ in flight.spans] == [old_version, new_version]
        cut = flight.spans[1][1]
        assert 0 < cut < LONG
        assert common(running.tokens, old) >= cut, "up to the swap it is the old weights' answer"
        assert running.tokens != old
    else:
        assert running.finish == "abort"
        assert len(running.tokens) < LONG
        assert running.tokens == old[: len(running.tokens)]
    assert flight.queued.tokens == new, "what comes after the swap is answered by the new weights"
    assert [span["version"] for span in flight.queued.versions] == [new_version]


def test_what_cannot_be_had_or_does_not_fit_is_refused_and_nothing_stops(world: World) -> None:
    served = world.told.version()["version"]
    expected = world.told.generate(PROMPT, 8)["token_ids"]
    assert world.told.update(version=9999).status_code == 404
    assert world.told.update(version="newest").status_code == 400
    assert world.told.update(mode="drain").status_code == 400
    assert world.told.update(versio=1).status_code == 400
    with connect(world.hub.address, model="policy", replica="other") as worker:
        world.newest += 1
        Trainer(worker, world.checkpoints("dense-untied", 1), world.newest)
        reply = world.told.update(version=world.newest)
        assert reply.status_code == 409
        assert "self_attn.q_norm" in reply.json()["error"]
    body = world.told.version()
    assert (body["state"], body["version"]) == ("serving", served)
    assert world.told.generate(PROMPT, 8)["token_ids"] == expected


def test_a_swap_that_breaks_serves_nothing_until_it_is_healed(world: World, references: References) -> None:
    world.told_to(1)
    with mirroring(world.hub.address, world.told.version()["replica"]) as mirror:
        world.newest += 1
        mirror.publish(world.newest, broken=0)
        reply = world.told.update(version=world.newest)
        assert reply.status_code in (404, 502), reply.text
        body = world.told.version()
        assert (body["state"], body["version"]) == ("paused", None)
        assert body["error"]
        waiting = stream(world.told, PROMPT, 16)
        time.sleep(1.0)
        assert waiting.tokens == [], "a paused engine answers nothing"
    version = world.publish(2)
    reply = world.told.update(version="latest")
    assert (reply.status_code, reply.json()["version"], reply.json()["state"]) == (200, version, "serving")
    waiting.join()
    assert waiting.tokens == references.tokens[2][:16] != references.tokens[1][:16], "it was not lost, nor mixed"


def test_the_follower_heals_by_itself_when_a_source_appears(world: World) -> None:
    replica = world.follower.wait(world.newest)["replica"]
    with mirroring(world.hub.address, replica) as mirror:
        world.newest += 1
        mirror.publish(world.newest, broken=1)
        until = time.monotonic() + 60
        while (body := world.follower.version())["state"] != "paused":
            assert time.monotonic() < until, body
            time.sleep(0.05)
        assert body["version"] is None
        assert body["shards"][1]["version"] is None
        assert body["shards"][0]["version"] != world.newest, "rank 0 could read it, and must not have gone on alone"
    version = world.publish(2)
    body = world.follower.wait(version)
    assert body["error"] is None
    assert world.follower.generate(PROMPT, 8)["weight_versions"][0]["version"] == str(version)


def test_an_engine_that_ends_leaves_the_hub_before(world: World) -> None:
    """Last: it ends the server. The hub's lease is far longer than what is waited here."""
    replica = world.told.version()["replica"]
    world.told.process.terminate()
    assert world.told.process.wait(30) == 0
    assert replica not in {row for info in world.trainer.worker.versions() for row in info.replicas}


def test_the_log_is_readable(world: World) -> None:
    text = world.follower.text()
    assert "swapped to version" in text
    assert "serves version 1 from trainer" in text
    assert "Traceback" not in text
