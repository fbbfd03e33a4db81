"""A random world whose readers are in a zone, some of them as its seed agents; what they are told never gets older."""

from __future__ import annotations

import dataclasses

import msgspec

from tensorhub_core.state.messages import Hello, NothingNewer, Promise, Reply
from tests.sim.lives import Life
from tests.sim.world import World

ZONE = "east"


class ZonedWorld(World):
    """A world with `agents` seed agents among its readers; `held` counts answers that were older than the newest."""

    def __init__(self, seed: int, *shape: int, agents: int = 1, **more: bool) -> None:
        self.agents = {f"reader{r}" for r in range(agents)}
        self.told: dict[bytes, int] = {}
        self.held = self.seen = 0
        super().__init__(seed, *shape, **more)  # type: ignore[arg-type]
        self.state.config = dataclasses.replace(self.state.config, agent_within_s=0.5)  # the world is short

    def birth(self, replica: str, shard: int, is_trainer: bool) -> None:
        """Start a process, in the zone if it is a reader."""
        super().birth(replica, shard, is_trainer)
        life = self.lives[-1]
        number, hello = life.outbox[0]
        assert isinstance(hello, Hello)
        zone = "" if is_trainer else ZONE
        life.outbox[0] = (number, msgspec.structs.replace(hello, zone=zone, seeds=replica in self.agents))

    def hear(self, life: Life, request: int, message: Reply) -> None:
        """Check that nobody is told an older version than before; an install gets what was staged."""
        if isinstance(message, Promise | NothingNewer) and not life.is_trainer and life.mode != "install":
            before = self.told.get(life.session, 0)
            assert message.number >= before, f"{life.replica} was told of {before}, and now of {message.number}"
            self.told[life.session] = message.number
            high = self.state.models[next(iter(self.state.models))].high
            if life.replica not in self.agents:
                self.held += high is not None and message.number < high[1]
                self.seen += high is not None and message.number == high[1]
        super().hear(life, request, message)
