"""Offload copies, leaving and spot replicas in a random world; a second opinion on what may be released (law L11)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.messages import (
    DropOffload,
    Failure,
    HandOver,
    Leave,
    Offload,
    Offloaded,
    OffloadFailed,
    OffloadKept,
    PutBlob,
    Reply,
    Request,
    Unpublish,
)
from tensorhub_core.state.records import Group, ModelState, ServerState, VersionRecord
from tests.sim.hub import digest
from tests.sim.lives import SEGMENTS, Life
from tests.sim.parts import Parts


class Keeper:
    """Lets the lives of a world do what retention asks of them; every decision is drawn from `chance`."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.parts = Parts(chance)
        self.groups: list[Group] = []
        self.made = self.kept = self.freed = self.refused = self.handed_over = 0

    def era(self, state: ServerState, life: Life) -> str:
        """Return a name for the replica that it does not share with one that everybody has left before it came."""
        group = next((g for m in state.models.values() for name, g in m.groups.items() if name == life.replica), None)
        if group is not None and all(group is not other for other in self.groups):
            self.groups.append(group)
        number = next((k for k, other in enumerate(self.groups) if other is group), -1)
        return f"{life.replica} ({number})"

    def act(self, life: Life) -> bool:
        """Go on with an offload copy; tell whether that was what the worker did now."""
        self.parts.ask(life)
        if life.making is None or self.chance.random() < 0.5:
            return False
        (copy, number), life.making = life.making, None
        if self.chance.random() < 0.15:
            life.ask(OffloadFailed(copy, "config_error", "no memory"))
            return True
        assert life.cells == [(number, life.shard)] * SEGMENTS, "asked to offload what it does not hold any more"
        self.made += 1
        blob = b"offload %d of %s" % (self.made, life.session)
        life.offloads[digest(blob)] = list(life.cells)
        life.ask(PutBlob(digest(blob), blob))
        life.ask(Offloaded(copy, digest(blob)))
        return True

    def hear(self, life: Life, asked: Request | None, message: Reply) -> bool:
        """Take a message in that concerns retention, or parts of segments; tell whether it did."""
        if self.parts.hear(life, asked, message):
            return True
        if isinstance(message, Offload):
            life.making = (message.copy, message.number)
        elif isinstance(message, DropOffload):
            if message.placement:
                self.freed += 1
                del life.offloads[message.placement]
            else:
                life.making = None
        elif isinstance(asked, Offloaded):
            self.kept += isinstance(message, OffloadKept)
            if isinstance(message, Failure):
                del life.offloads[asked.placement]
        elif isinstance(asked, HandOver):
            self.handed_over += not isinstance(message, Failure)
            life.ask(Leave())
        elif isinstance(asked, Unpublish) and isinstance(message, Failure) and message.code == "config_error":
            self.refused += 1
            life.published = life.withdrawing
            return False
        else:
            return False
        return True

    def leave(self, group: list[Life]) -> None:
        """Let the shards of a replica leave: when they were told that nothing depends on them, or at once."""
        for life in group:
            life.phase = "leaving"
            life.outbox.clear()
            life.ask(HandOver() if self.chance.random() < 0.8 else Leave())


class SecondOpinion:
    """Checks every release from outside: enough newer versions have to be at least as safe."""

    def __init__(self) -> None:
        self.secured: set[VersionKey] = set()
        self.released: set[VersionKey] = set()
        self.held: dict[VersionKey, set[str]] = {}

    def look(self, state: ServerState) -> None:
        """Look at the state after a step; the index of holders has been checked by the invariants."""
        for model in state.models.values():
            for key, record in model.versions.items():
                if any(self.is_reliable(state, model, r) for r in record.keeping.whole if r != record.creator):
                    self.secured.add(key)
            for key, record in model.versions.items():
                if record.keeping.released and key not in self.released:
                    self.released.add(key)
                    replaced = sum(self.replaces(model, newer, record) for newer in model.versions.values())
                    assert replaced >= model.retain, f"{key} was released too early"
            self.held = {key: set(record.keeping.held) for key, record in model.versions.items()}

    def is_reliable(self, state: ServerState, model: ModelState, replica: str) -> bool:
        group = next(g for name, g in model.groups.items() if name == replica)
        workers = [state.workers[w] for w in group.members.values()]
        return not group.spot and not any(w.suspected or w.leaving for w in workers)

    def replaces(self, model: ModelState, newer: VersionRecord, old: VersionRecord) -> bool:
        if newer.key <= old.key or not newer.was_whole:
            return False
        return newer.key in self.secured or any(
            holders <= newer.keeping.whole for holders in self.holders(model, old) if newer.keeping.whole
        )

    def holders(self, model: ModelState, old: VersionRecord) -> Iterator[set[str]]:
        """Yield who held the old version after this step and before it: the release was somewhere between."""
        for names in (set(map(str, old.keeping.held)), self.held.get(old.key, set())):
            lasting = {name for name, group in model.groups.items() if name in names and not group.spot}
            yield set(lasting) or names
