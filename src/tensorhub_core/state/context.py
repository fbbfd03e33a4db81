"""One step of the machine: the state, the time, and the effects collected so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub_core.errors import TensorHubError
from tensorhub_core.ids import ModelName, ReplicaName, SessionId, VersionKey, WorkerId
from tensorhub_core.state.events import Drop, Effect, Log, Send
from tensorhub_core.state.messages import Failure, Reply
from tensorhub_core.state.ordered import OrderedSet
from tensorhub_core.state.records import Copy, Group, ModelState, ServerState, Worker

NO_SESSION = SessionId(b"")
"""Session of a worker whose replies could not be delivered."""


@dataclass(slots=True)
class Step:
    """Carry a step's inputs and outputs through the machine's functions.

    `touched` names the models of which something new became available, `touched_groups` the replicas of which only
    their own round has to be looked at again when the step ends.
    """

    state: ServerState
    now: float
    effects: list[Effect] = field(default_factory=list)
    touched: OrderedSet[ModelName] = field(default_factory=OrderedSet)
    touched_groups: OrderedSet[tuple[ModelName, ReplicaName]] = field(default_factory=OrderedSet)
    changed: set[tuple[ModelName, ReplicaName, VersionKey]] = field(default_factory=set)
    """Replicas whose copies of a version have changed, or whether they can be relied on (law L11)."""
    kept: set[ModelName] = field(default_factory=set)
    """Models of which it has to be decided again who keeps what."""

    def reply(self, worker: Worker, request: int, message: Reply) -> None:
        """Answer a request of a worker, if it can be reached."""
        if worker.session != NO_SESSION:
            self.effects.append(Send(worker.session, request, message))

    def fail(self, worker: Worker, request: int, error: TensorHubError) -> None:
        """Refuse a request of a worker."""
        self.reply(worker, request, failure(error))

    def push(self, worker: Worker, message: Reply) -> None:
        """Tell a worker something it did not ask for, if it can be reached."""
        if worker.session != NO_SESSION:
            self.effects.append(Send(worker.session, 0, message))

    def log(self, level: str, text: str) -> None:
        """Log a line."""
        self.effects.append(Log(level, text))

    def drop(self, worker: Worker) -> None:
        """Forget a worker's session."""
        if worker.session != NO_SESSION:
            self.effects.append(Drop(worker.session))

    def new_id(self, kind: str) -> str:
        """Return an id that was never used, in this server life or an earlier one (law L8)."""
        self.state.counter += 1
        return f"{kind}{self.state.config.server_epoch}.{self.state.counter}"

    def touch(self, worker: Worker) -> None:
        """Look at the round of the worker's group again when the step ends."""
        self.touched_groups.add((worker.model, worker.replica))

    def note(self, worker: Worker, key: VersionKey) -> None:
        """Look again when the step ends at how the worker's replica keeps a version."""
        self.changed.add((worker.model, worker.replica, key))

    def forget(self, name: ModelName) -> None:
        """Not look at a model any more when the step ends."""
        self.touched.discard(name)
        self.kept.discard(name)
        self.changed = {triple for triple in self.changed if triple[0] != name}

    def model(self, worker: Worker) -> ModelState:
        """Return the worker's model."""
        return self.state.models[worker.model]

    def group(self, worker: Worker) -> Group:
        """Return the worker's group; observers have none."""
        return self.state.models[worker.model].groups[worker.replica]

    def members(self, group: Group) -> list[Worker]:
        """Return the group's workers in shard order."""
        workers = self.state.workers
        return [workers[member] for member in group.members.values()]

    def holder(self, copy: Copy) -> Worker:
        """Return the worker in whose memory the copy lies."""
        return self.state.workers[copy.worker]

    def worker_at(self, group: Group, shard: int) -> Worker | None:
        """Return the worker of a shard, if it is there."""
        worker: WorkerId | None = group.members.get(shard)
        return None if worker is None else self.state.workers[worker]


def failure(error: TensorHubError) -> Failure:
    """Put an error on the wire."""
    return Failure(error.code, str(error), getattr(error, "differences", ()))
