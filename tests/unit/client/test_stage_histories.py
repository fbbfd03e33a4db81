"""Random histories of replicas that stage, install, discard, update, leave and die while a trainer publishes on.

Every shard of version v holds only the value 10 v + shard, so that any wrong, torn or late byte shows. What each call
raises is not judged here, as long as it is a typed error within its deadline; what the memory holds afterwards is.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.identity import Identity
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.session import Session
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import TensorHubError
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.hubs import Hub, hub

RUN_S = 5.0
OPS = ("update", "install", "install", "discard")


@dataclass
class History:
    """What the threads of one run share."""

    here: Hub
    network: MemoryNetwork
    over: threading.Event = field(default_factory=threading.Event)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    names: int = 0

    def connect(self, replica: str, shard: int) -> Worker:
        """Connect one shard of two with the real executor."""
        self.names += 1
        identity = Identity(f"{replica} {shard} {self.names}", "policy", replica, shard=shard, num_shards=2)
        config = ClientConfig(call_timeout_s=4.0, close_timeout_s=1.0, handover_s=0.1, segment_bytes=4096)
        mailbox = Mailbox(WorkerCounters())
        session = Session(self.here.server.address, identity, mailbox)
        mailbox.welcomed(session.open(10.0))
        resources = Resources(session, lambda: MemoryTransport(self.network), lambda t: ReadExecutor(t, config))
        return Worker(identity, config, resources, mailbox)


def train(history: History, chance: random.Random) -> None:
    workers = [history.connect("trainer", shard) for shard in (0, 1)]
    memories = [np.zeros(6000) for _ in workers]
    for worker, memory in zip(workers, memories, strict=True):
        worker.register({"w": memory})
    version = 0
    while not history.over.wait(0.15 * chance.random()):
        version += 1
        for shard, worker in enumerate(workers):
            worker.unpublish()
            memories[shard][:] = 10 * version + shard
        for worker in workers:
            worker.publish(version)
    for worker in workers:
        worker.close()


class Shard:
    """One shard that does one thing after the other; dead ones are born again."""

    def __init__(self, history: History, replica: str, number: int, plan: list[str]) -> None:
        self.history, self.replica, self.number, self.plan = history, replica, number, plan
        self.chance = random.Random(f"{replica} {number}")
        self.worker: Worker | None = None
        self.memory = np.zeros(6000)

    def run(self) -> None:
        turn = 0
        while not self.history.over.is_set():
            try:
                if self.worker is None:
                    self.memory = np.zeros(6000)
                    self.worker = self.history.connect(self.replica, self.number)
                    self.worker.register({"w": self.memory})
                turn += 1
                self.act(self.worker, self.plan[turn % len(self.plan)])
            except TensorHubError as error:
                self.history.done[type(error).__name__] += 1
            except BaseException as error:
                self.history.wrong.append(f"{type(error).__name__}: {error}")
                return
        if self.worker is not None:
            self.worker.close()

    def act(self, worker: Worker, what: str) -> None:
        if what == "update":
            self.check(worker, worker.update(), what)
        else:
            held, before = worker.version, self.memory.copy()
            with worker.stage() as staged:
                if worker.version != held or not np.array_equal(before, self.memory):
                    self.history.wrong.append("a stage touched the registered memory")
                if what == "install":
                    self.check(worker, staged.install(), what)
        self.history.done[what] += 1
        draw = self.chance.random()
        if draw < 0.03:
            worker.close()
        elif draw < 0.06:
            worker._resources.close()  # as if the process had died: nobody is told
            worker._closed = True
        if draw < 0.06:
            self.worker = None

    def check(self, worker: Worker, version: Any, what: str) -> None:
        if worker.version != version or not (self.memory == 10 * int(version) + self.number).all():
            self.history.wrong.append(f"{what} of {version}: {worker.version} holds {set(self.memory)}")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("step_bytes", [None, 600], ids=["fast", "slow"])
def test_no_history_leaves_a_wrong_byte(step_bytes: int | None) -> None:
    chance = random.Random(7)
    with hub() as here:
        history = History(here, MemoryNetwork(step_bytes))
        shards = [
            Shard(history, replica, number, plan)
            for replica in ("a", "b", "c")
            for plan in [[chance.choice(OPS) for _ in range(17)]]
            for number in (0, 1)
        ]
        threads = [threading.Thread(target=shard.run) for shard in shards]
        threads.append(threading.Thread(target=train, args=(history, chance)))
        for thread in threads:
            thread.start()
        time.sleep(RUN_S)
        history.over.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "every call ends"
    assert history.wrong == []
    assert min(history.done[what] for what in ("update", "install", "discard")) > 5, history.done
