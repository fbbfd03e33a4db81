"""What the replicas of a simulated world do: train and publish, update, stage and install, until all is calm."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorhub_core.client.staged import Staged
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tests.sim import content
from tests.sim.cluster import Cluster, Life, Outcome, Slot
from tests.sim.judge import Violation, scribble

SKEW_S = 0.3


class Replica:
    """Shards that act together, as the ranks of a trainer or of an engine do."""

    def __init__(self, cluster: Cluster, name: str, num_shards: int, seed: int, stream: str | None = None) -> None:
        self.cluster, self.name = cluster, name
        self.chance = random.Random(f"{seed}/{name}")
        self.slots = [Slot(name, shard, num_shards, stream) for shard in range(num_shards)]
        for slot in self.slots:
            cluster.place(slot)
        self.calm = self.resting = self.playing = False
        for slot in self.slots:
            cluster.boot(slot)

    def lives(self) -> list[Life]:
        """Return the processes as they are now, in shard order; those that are of no more use are replaced first."""
        for slot in self.slots:
            life = slot.life
            if life is not None and life.alive and life.worker is not None and life.lost:
                self.cluster.kill(life)
            if slot.life is None or not slot.life.alive:
                self.replaced(slot)
                self.cluster.boot(slot)
        return [slot.life for slot in self.slots if slot.life is not None]

    def replaced(self, slot: Slot) -> None:
        """Hear that a new process takes a slot."""

    def ready(self, timeout_s: float = 30.0) -> bool:
        """Wait until every process is connected."""
        return self.cluster.await_that(lambda: all(life.worker is not None for life in self.lives()), timeout_s)

    def all(
        self, name: str, make: Callable[[Worker, Life], Any], timeout_s: float = 20.0, touches: bool = False
    ) -> list[Outcome]:
        """Let every shard make the same call at about the same time; return how they ended."""
        skew_s = SKEW_S * self.chance.random() ** 2
        ends = [
            self.cluster.ask(
                life, name, lambda w, life=life: make(w, life), timeout_s, touches, self.chance.random() * skew_s
            )
            for life in self.lives()
        ]
        return [end.result() for end in ends]

    def pause(self, least_s: float, most_s: float) -> None:
        """Let some time pass."""
        self.cluster.sleep(least_s + self.chance.random() * (most_s - least_s))


class Trainer(Replica):
    """Publishes version after version; starts a new stream when all of it starts again."""

    def __init__(self, cluster: Cluster, name: str, num_shards: int, seed: int) -> None:
        self.runs, self.number = 1, -1
        self.streams = 0
        super().__init__(cluster, name, num_shards, seed, "run-1")
        cluster.streams.append("run-1")
        self.last: int | None = None
        """The version that stays published when all is calm."""

    @property
    def stream(self) -> str:
        """Return the name of the training run."""
        return f"run-{self.runs}"

    def replaced(self, slot: Slot) -> None:
        """Restart: only this rank under the same stream, or all of them under a new one."""
        if self.calm or self.chance.random() < 0.7:
            return
        self.runs, self.number = self.runs + 1, -1
        self.cluster.streams.append(self.stream)
        for other in self.slots:
            other.stream = self.stream
            if other.life is not None and other is not slot:
                self.cluster.kill(other.life)

    def play(self) -> None:
        """Train until all is calm, then publish a last version and keep it."""
        while not self.calm:
            if self.ready() and self.publish():
                self.pause(0.1, 2.5)
            self.take_back()
        while not self.publish():
            self.take_back()
        self.last, self.resting = self.number, True

    def publish(self) -> bool:
        """Write the next version and publish it with all shards."""
        self.lives()
        self.number += 1
        number, stream = self.number, self.stream

        def write_and_publish(worker: Worker, life: Life) -> Version:
            right = content.shard_of(stream, number, life.slot.shard, life.slot.num_shards)
            for name, part in right.items():
                np.copyto(life.memory[name], part)
            return worker.publish(number, fresh=True)

        return all(outcome.good for outcome in self.all("publish", write_and_publish, 20.0, True))

    def take_back(self) -> None:
        """Unpublish with all shards, as long as it takes, and go on with the memory."""
        for _ in range(40):
            timeout_s = self.chance.choice((1.0, 5.0, 20.0))
            outcomes = self.all("unpublish", functools.partial(self.unpublish, timeout_s=timeout_s), timeout_s)
            if all(outcome.good for outcome in outcomes):
                return
            self.pause(0.05, 0.3)
        raise Violation(f"{self.name} cannot take its copy back: {[str(o.error) for o in outcomes]}")

    def unpublish(self, worker: Worker, life: Life, timeout_s: float) -> None:
        """Take the copy back; then the memory is changed at once."""
        worker.unpublish(timeout_s)
        scribble(life.memory)


class Reader(Replica):
    """Follows the trainer in every way that there is."""

    def play(self) -> None:
        """Follow until all is calm, then go on until the last version is there."""
        self.playing = True
        while not self.calm:
            if self.ready():
                draw = self.chance.random()
                if draw < 0.5:
                    self.update()
                elif draw < 0.7:
                    self.stage_and_install()
                elif draw < 0.8:
                    self.replicate()
                elif draw < 0.9:
                    self.process_in_place()
                else:
                    self.wait()
            self.pause(0.0, 1.0)
        self.playing = False

    def settle(self, number: int, until_s: float) -> None:
        """Go on until every shard holds the last version."""
        # An update between a stage() and its install() would make that one a mistake of this world's own.
        self.cluster.await_that(lambda: not self.playing, until_s - self.cluster.now)
        tries = 0
        while not self.holds(number):
            if self.cluster.now >= until_s:
                raise Violation(f"{self.name} does not get version {number}, {tries} tries after all is calm")
            tries += 1
            if self.ready():
                self.update()
                self.all("publish", self.offer)
            self.pause(0.0, 0.2)
        self.resting = True

    def holds(self, number: int) -> bool:
        """Tell whether every shard publishes a version."""
        workers = [life.worker for life in self.lives()]
        return all(w is not None and w.version == number and w._holding.published for w in workers)

    def agree(self, outcomes: list[Outcome]) -> None:
        """Check that all shards got the same version (L2, L13)."""
        got = {outcome.value.key for outcome in outcomes if outcome.good}
        if len(got) > 1 and all(outcome.good for outcome in outcomes):
            raise Violation(f"L2: the shards of {self.name} got different versions: {sorted(got)}")

    def update(self) -> None:
        """Replace what is held."""
        timeout_s = self.chance.choice((2.0, 8.0, 20.0))
        self.agree(self.all("update", lambda w, _: w.update(timeout_s=timeout_s), timeout_s, True))

    def replicate(self) -> None:
        """Take the copy back, change the memory, fill it again."""

        def make(worker: Worker, life: Life) -> Version:
            worker.unpublish(5.0)
            scribble(life.memory)
            return worker.replicate(timeout_s=10.0)

        self.agree(self.all("update", make, 15.0, True))

    def process_in_place(self) -> None:
        """Get a version that is not offered, and offer it later."""
        outcomes = self.all("update", lambda w, _: w.update(timeout_s=8.0, publish=False), 8.0, True)
        self.agree(outcomes)
        if all(outcome.good for outcome in outcomes):
            self.pause(0.0, 0.5)
            self.all("publish", self.offer)

    def offer(self, worker: Worker, life: Life) -> Version | None:
        """Offer what is held, if anything is."""
        return None if worker.version is None or worker._holding.draining else worker.publish(worker.version)

    def stage_and_install(self) -> None:
        """Stage while the old version serves, then install; throw it away if a shard could not stage."""
        staged: dict[Life, Staged] = {}

        def stage(worker: Worker, life: Life) -> Staged:
            staged[life] = worker.stage(timeout_s=8.0)
            return staged[life]

        def install(worker: Worker, life: Life) -> Version:
            return staged[life].install(8.0)

        def discard(worker: Worker, life: Life) -> None:
            if life in staged:
                staged[life]._ends.leave(staged[life]._what, False)

        self.all("stage", stage, 8.0)
        self.pause(0.0, 0.5)
        if all(life in staged for life in self.lives()) and self.chance.random() < 0.9:
            self.agree(self.all("install", install, 8.0, True))
        self.all("discard", discard, 10.0)

    def wait(self) -> None:
        """Wait for something newer than is held."""
        self.all("wait", lambda w, _: w.wait(w.version, 3.0), 3.0)
