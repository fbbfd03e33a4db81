"""Engines that start from a folder without weights: from a published checkpoint, from a peer, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tensorhub_core import Server, serve
from tests.processes.cli.commands import Running

from ..models import Checkpoints, Trainer, training
from .server import FLOAT32, PROMPTS, Served, Servers, ending

pytestmark = pytest.mark.timeout(400)
KIND = "tied-float32"


@dataclass
class World:
    """A hub, a published checkpoint, and engines of one and of two ranks that started from it."""

    hub: Server
    publisher: Running
    one: Served
    two: Served

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the config of an engine that swaps when it is told."""
        return {"server": self.hub.address, "follow": False, "timeout_s": 60, **more}

    def engines(self) -> list[Served]:
        """Return both engines."""
        return [self.one, self.two]


@pytest.fixture(scope="module")
def world(servers: Servers, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start everything at once."""
    log, bare = tmp_path_factory.mktemp("publisher") / "log", checkpoints.bare(KIND)
    with serve("tcp://127.0.0.1:0", lease_s=10.0, heartbeat_s=1.0) as hub:
        config = {"server": hub.address, "follow": False, "timeout_s": 60}
        one = servers.start(bare, *FLOAT32, config=config)
        two = servers.start(bare, *FLOAT32, config=config, ranks=2)
        with ending(one, two):
            publish = ("publish", checkpoints(KIND, 1), "--model", "policy")
            publisher = Running(*publish, "--version", 1, "--server", hub.address, log=log)
            try:
                yield World(hub, publisher, one.ready(), two.ready())
            finally:
                publisher.kill()


def test_an_engine_without_weight_files_answers_like_one_that_loaded_the_checkpoint(
    world: World, servers: Servers, checkpoints: Checkpoints
) -> None:
    fresh = servers.fresh(checkpoints(KIND, 1), *FLOAT32)
    assert world.publisher.first_line == "published policy 1"
    for engine, ranks in ((world.one, 1), (world.two, 2)):
        body = engine.version()
        assert (body["state"], body["version"], body["error"], body["model"]) == ("serving", 1, None, "policy")
        assert [(shard["shard"], shard["version"]) for shard in body["shards"]] == [(n, 1) for n in range(ranks)]
        assert all(len(shard["digest"]) == 32 and shard["source"] for shard in body["shards"])
        assert engine.answers() == fresh.answers
        completion = engine.generate(PROMPTS[0])["meta_info"]
        assert completion["weight_version"] == "1"
        assert [span["version"] for span in completion["weight_versions"]] == ["1"]
    assert world.one.memory() == fresh.memory[0]


def test_engines_fill_from_engines(world: World, servers: Servers, checkpoints: Checkpoints) -> None:
    """The publisher has ended: only engines are left, and new ones take their bytes as these hold them."""
    assert world.publisher.end().code == 0
    bare = checkpoints.bare(KIND)
    third = servers.start(bare, *FLOAT32, config=world.config())
    fourth = servers.start(bare, *FLOAT32, config=world.config(), ranks=2)
    with ending(third, fourth):
        for engine, peer in ((fourth, world.two), (third, world.one)):
            body, held = engine.ready().version(), peer.version()
            assert {shard["source"] for shard in body["shards"]} == {held["replica"]}
            assert body["replica"] != held["replica"]
            assert [shard["digest"] for shard in body["shards"]] == [shard["digest"] for shard in held["shards"]]
            assert engine.answers() == servers.fresh(checkpoints(KIND, 1), *FLOAT32).answers
        assert [fourth.memory(rank) for rank in (0, 1)] == [world.two.memory(rank) for rank in (0, 1)]


def test_an_update_leaves_what_a_fresh_engine_holds(world: World, servers: Servers, checkpoints: Checkpoints) -> None:
    before = [engine.answers() for engine in world.engines()]
    with training(world.hub.address, checkpoints(KIND, 2), version=2) as trainer:
        assert isinstance(trainer, Trainer)
        for engine, ranks in ((world.one, 1), (world.two, 2)):
            reply = engine.update(version=2, mode="wait")
            assert reply.status_code == 200, reply.text
            assert (reply.json()["version"], reply.json()["state"]) == (2, "serving")
            fresh = servers.fresh(checkpoints(KIND, 2), *FLOAT32, ranks=ranks)
            assert [engine.memory(rank) for rank in range(ranks)] == fresh.memory
            assert engine.answers() == fresh.answers != before[ranks - 1]
            assert engine.generate(PROMPTS[0])["meta_info"]["weight_version"] == "2"
