"""Seed agents of zones: processes that run what `tensorhub seed --zone Z` runs, with all its workers and threads."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorhub_core.client.connect import connect
from tensorhub_core.client.observer import observe
from tensorhub_core.client.seeding import Connect, Layouts, Seeder
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import TensorHubError
from tensorhub_core.settings import Settings
from tests.sim import content
from tests.sim.cluster import CLIENT, MODEL, Call, Cluster, Life, Slot
from tests.sim.fibers import Fiber
from tests.sim.judge import Violation
from tests.sim.roles import Replica
from tests.sim.scenario import AgentPlan
from tests.sim.shims import Promise, Waiters

TAKE_S = 20.0
"""What one call of a worker may take; to make a buffer anew takes several."""
CLOSE_S = CLIENT.close_timeout_s + CLIENT.handover_s + 1.0


@dataclass(eq=False)
class AgentLife(Life):
    """The process of an agent: many workers, each with memory of its own, and an observer."""

    made: list[Worker] = field(default_factory=list)
    seeder: Seeder | None = None
    stopping: bool = False
    """It was sent SIGTERM."""

    @property
    def lost(self) -> bool:
        """Tell whether it is of no more use: it looks after that itself."""
        return False

    def workers(self) -> list[Worker]:
        """Return all workers that it has made."""
        return self.made

    def memory_of(self, worker: Worker) -> dict[str, content.Bytes] | None:
        """Return a worker's registered memory."""
        memory = worker._resources.memory
        if memory is None:
            return None
        names = [storage.names[0] for storage in memory.storages]
        return {name: part for name, part in zip(names, memory.buffers, strict=True) if part is not None}

    def held(self) -> Iterator[tuple[Worker, Version, dict[str, content.Bytes]]]:
        """Yield what its workers say that they hold, and where; but for those in the middle of a call."""
        buffers = [] if self.seeder is None else [b for b in self.seeder.buffers if b.version is not None]
        for worker in [worker for buffer in buffers for worker in buffer.workers]:
            version, memory = worker.version, self.memory_of(worker)
            if version is not None and memory is not None:
                yield worker, version, memory

    def awaits(self, address: int) -> bool:
        """Tell whether bytes may land at an address: not where a version is that is offered."""
        for worker in self.made:
            if worker._holding.published and not worker._holding.draining:
                buffers = (self.memory_of(worker) or {}).values()
                if any(a.ctypes.data <= address < a.ctypes.data + a.nbytes for a in buffers):
                    return False
        return True


class Watched(Seeder):
    """A seeder whose every take is judged as a call."""

    cluster: Cluster
    life: AgentLife

    def take(self, version: Version, layouts: Layouts) -> bool:
        """Take a version, and check what lies in the buffers then."""
        cluster, life = self.cluster, self.life
        timeout_s = TAKE_S if any(b.layouts == layouts for b in self.buffers) else 4 * TAKE_S
        call = Call("take", lambda worker: None, timeout_s, True, Promise(cluster.timeline))
        cluster.judge.began(life, call)
        try:
            taken = super().take(version, layouts)
        except TensorHubError as error:
            if life.alive:
                cluster.judge.ended(life, call, error)
            raise
        if life.alive:
            cluster.judge.ended(life, call, None, version if taken else None)
        return taken


def boot(cluster: Cluster, plan: AgentPlan, stuck: bool, slot: Slot) -> AgentLife:
    """Start an agent; `stuck`: it says hello and does nothing more."""
    slot.lives += 1
    life = AgentLife(slot, f"{slot.name}#{slot.lives}")
    slot.life = life
    cluster.lives.append(life)
    cluster.judge.note(f"start {life.name}")
    Fiber(cluster.timeline, life, f"{life.name} main", lambda: _main(cluster, plan, stuck, life)).start()
    return life


def _main(cluster: Cluster, plan: AgentPlan, stuck: bool, life: AgentLife) -> None:
    """Do what the command does: an error ends the process."""
    settings = Settings(client=CLIENT, server=ServerConfig(), origins={})
    name = plan.name if plan.same_name else f"{plan.name}-{life.slot.lives}"

    def connect_shard(replica: str, shard: int, num_shards: int) -> Worker:
        who = {"replica": replica, "shard": shard, "num_shards": num_shards, "zone": plan.zone, "host": plan.name}
        worker = connect("sim://hub", model=MODEL, seeds=True, settings=settings, **who)  # type: ignore[arg-type]
        life.made.append(worker)
        return worker

    try:
        with observe("sim://hub", model=MODEL, zone="", settings=settings) as observer:
            seeder = Watched(connect_shard, name, plan.versions, lambda: life.stopping)
            seeder.cluster, seeder.life, life.seeder = cluster, life, seeder
            try:
                if stuck:
                    _be_stuck(cluster, life, seeder, connect_shard)
                else:
                    seeder.follow(observer, lambda version: cluster.judge.note(f"{life.name} holds {version!r}"))
            finally:
                if life.alive:
                    _close(cluster, life, seeder)
    except TensorHubError as error:
        if life.alive:
            cluster.judge.ended(life, Call("seed", lambda w: None, 0.0, False, Promise(cluster.timeline)), error)
    if life.alive:
        cluster.kill(life)


def _be_stuck(cluster: Cluster, life: AgentLife, seeder: Seeder, connect_shard: Connect) -> None:
    for buffer in seeder.buffers:
        buffer.workers.append(connect_shard(buffer.replica, 0, 1))
    while not life.stopping:
        Waiters(cluster.timeline).wait(0.2)


def _close(cluster: Cluster, life: AgentLife, seeder: Seeder) -> None:
    call = Call("close", lambda worker: None, CLOSE_S, True, Promise(cluster.timeline))
    cluster.judge.began(life, call)
    seeder.close()
    if life.alive:
        cluster.judge.ended(life, call, None)


class Agent(Replica):
    """Keeps an agent running, as a supervisor does, until all is calm; then it stays, is gone, or does nothing."""

    def __init__(self, cluster: Cluster, plan: AgentPlan, seed: int) -> None:
        self.cluster, self.name, self.plan = cluster, plan.name, plan
        self.chance = random.Random(f"{seed}/{plan.name}")
        self.slots = [Slot(plan.name, 0, 1, zone=plan.zone, host=plan.name)]
        self.slots[0].boots = functools.partial(boot, cluster, plan, False)
        self.calm = self.resting = self.playing = False

    @property
    def slot(self) -> Slot:
        """Return its only slot."""
        return self.slots[0]

    def play(self) -> None:
        """Start when the plan says so, and start again a while after an end."""
        self.cluster.sleep(self.plan.at_s)
        while not self.calm:
            if self.slot.life is None or not self.slot.life.alive:
                self.cluster.boot(self.slot)
            self.pause(0.1, 0.3)
            if self.slot.life is not None and not self.slot.life.alive:
                self.pause(0.0, 5.0)

    def rest(self) -> None:
        """Become what the plan says that it is when all is calm."""
        life = self.slot.life
        if self.plan.at_rest != "holds" and life is not None:
            self.cluster.kill(life)
        if self.plan.at_rest == "stuck":
            self.slot.boots = functools.partial(boot, self.cluster, self.plan, True)
            self.cluster.boot(self.slot)

    def settle(self, number: int, until_s: float) -> None:
        """Go on until it holds the last version, if it is one that comes on."""
        while self.plan.at_rest == "holds" and not self.holds(number):
            if self.cluster.now >= until_s:
                raise Violation(f"the agent {self.name} does not bring version {number} after all is calm")
            if self.slot.life is None or not self.slot.life.alive:
                self.cluster.boot(self.slot)
            self.cluster.sleep(0.1)
        self.resting = True

    def holds(self, number: int) -> bool:
        """Tell whether it has a version in one of its buffers."""
        life = self.slot.life
        seeder = life.seeder if isinstance(life, AgentLife) and life.alive else None
        return seeder is not None and any(buffer.version == number for buffer in seeder.buffers)

    def stop(self) -> None:
        """End it as SIGTERM does."""
        life = self.slot.life
        if isinstance(life, AgentLife) and life.alive:
            life.stopping = True
            if not self.cluster.await_that(lambda: not life.alive, CLOSE_S + 10.0):
                raise Violation(f"the agent {life.name} does not end when it should")
