"""A hub, a trainer, a server that swaps when told, and one that follows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorhub_core import Server, serve

from ..models import Checkpoints, Trainer, training
from .server import FLOAT32, LONG, Answers, Served, Servers, ending

KIND = "tied-float32"
MANY = 400
"""Tokens of a request that is in flight during a swap."""
QUEUED = [(i * 11) % 300 + 3 for i in range(1, 120)]
"""What is asked during a swap."""


@dataclass
class World:
    """Both servers have the same weights if they are told to; `seed`: whose weights the told one serves."""

    hub: Server
    trainer: Trainer
    told: Served
    follower: Served
    checkpoints: Checkpoints
    servers: Servers
    newest: int = 1
    seed: int = 1
    seeds: dict[int, int] = field(default_factory=lambda: {1: 1})
    """Whose weights a version is."""

    def publish(self, seed: int) -> int:
        """Publish the checkpoint of a seed as the next version."""
        self.newest += 1
        self.seeds[self.newest] = seed
        self.trainer.publish(self.checkpoints(KIND, seed), self.newest)
        return self.newest

    def tell(self, seed: int) -> int:
        """Have the told server serve the weights of a seed; returns the version."""
        version = self.publish(seed)
        reply = self.told.update(version=version, mode="wait")
        assert reply.status_code == 200, reply.text
        self.seed = seed
        return version

    def fresh(self, seed: int) -> Answers:
        """Return what a fresh engine on the checkpoint of a seed answers to PROMPTS."""
        return self.servers.fresh(self.checkpoints(KIND, seed), *FLOAT32).answers


@contextlib.contextmanager
def world(
    servers: Servers, checkpoints: Checkpoints, *, ranks: tuple[int, int], timeout_s: float = 30.0, **following: Any
) -> Iterator[World]:
    """Start everything at once; `ranks`: of the told server and of the follower, `following`: the latter's config.

    The hub's lease is long: who leaves without saying so stays in its lists.
    """
    bare = checkpoints.bare(KIND)
    with (
        serve("tcp://127.0.0.1:0", lease_s=60.0, heartbeat_s=1.0) as hub,
        training(hub.address, checkpoints(KIND, 1)) as trainer,
    ):
        config: dict[str, Any] = {"server": hub.address, "timeout_s": timeout_s}
        told = servers.start(bare, *FLOAT32, ranks=ranks[0], config={**config, "follow": False})
        follower = servers.start(bare, *FLOAT32, ranks=ranks[1], config={**config, **following})
        with ending(told, follower):
            told.ready()
            follower.ready()
            yield World(hub, trainer, told, follower, checkpoints, servers)


@dataclass
class References:
    """The told server's long answers by seed, without a swap in between."""

    tokens: dict[int, list[int]]
    queued: dict[int, list[int]]
    """The first tokens that answer QUEUED."""


def references(world: World) -> References:
    """Ask the told server with both sets of weights."""
    tokens, queued = {}, {}
    for seed in (1, 2):
        world.tell(seed)
        tokens[seed] = list(world.told.generate(LONG, MANY)["output_ids"])
        queued[seed] = list(world.told.generate(QUEUED, 16)["output_ids"])
    assert common(tokens[1], tokens[2]) < 20
    assert queued[1] != queued[2]
    return References(tokens, queued)


def common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two answers share from the start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def spans(meta: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return (version, start, end) for the parts of a completion."""
    return [(int(span["version"]), span["start"], span["end"]) for span in meta]


def until(condition: Any, timeout_s: float = 60.0) -> Any:
    """Wait until a condition holds; returns its value."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
    return found
