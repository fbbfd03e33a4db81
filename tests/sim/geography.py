"""Where the processes of a random world run, drawn from its seed: in up to three zones, some on one machine."""

from __future__ import annotations

import random
from dataclasses import replace

from tensorhub_core.schedule.policy import AUTO
from tensorhub_core.state.machine import MachineConfig


class Geography:
    """Places by replica and shard, and what a hop costs. Half of the worlds have no zones; without `places` all."""

    def __init__(self, seed: int, trainers: int, readers: int, places: bool = True) -> None:
        chance = random.Random(f"{seed}/geography")
        self.policy = replace(AUTO, lag_bytes=chance.choice([1, 60, 1 << 20] if places else [1]))
        zones = chance.choice([("",), ("",), ("east", "west"), ("east", "west", "north", "")] if places else [("",)])
        hosts = chance.choice([0, 1, 3] if places else [0])
        names = [f"trainer{t}" for t in range(trainers)] + [f"reader{r}" for r in range(readers)]
        self.zones = {name: chance.choice(zones) for name in names}
        self.hosts = {name: chance.randrange(hosts) if hosts else None for name in names}
        self.rails = chance.choice([1, 2])

    def config(self, **more: int) -> MachineConfig:
        """Return the constants of the world's server."""
        return MachineConfig(server_epoch=1, join_timeout_s=8.0, policy=self.policy, **more)

    def of(self, replica: str, shard: int) -> dict[str, str]:
        """Return what a process says of its place."""
        host = self.hosts[replica]
        names = {} if host is None else {"host": f"host{host}", "rail": f"rail{shard % self.rails}"}
        return {"zone": self.zones[replica], **names}
