"""A second opinion on zones with seed agents: what is promised there, how long anybody waits, and who reads across.

It knows only what the server heard and what came of it, and keeps its own account of how agents come on.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tensorhub_core.ids import ReplicaName, VersionKey, WorkerId
from tensorhub_core.state.events import Effect, Event, Received, Send, Tick
from tensorhub_core.state.messages import Announce, NothingNewer
from tensorhub_core.state.records import CopyState, Group, ModelState, ServerState

_NEVER = float("-inf")
TICK_S = 1.0


class ZoneWatch:
    """What is known of the zones of one world; `look()` is called after every step of the server."""

    def __init__(self) -> None:
        self.crossed: dict[tuple[str, VersionKey], set[ReplicaName]] = defaultdict(set)
        """Who was leased a version of another zone while an agent of the zone lived and came on."""
        self.crossed_bytes: Counter[str] = Counter()
        self.agents: set[ReplicaName] = set()
        self.held = self.lates = self.brought = 0
        self._epoch = -1
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[str, VersionKey] = {}
        """The newest version that has been whole in a zone; in this life of the server, as all of these."""
        self._brought: dict[str, VersionKey | None] = {}
        self._marks: dict[str, tuple[VersionKey, dict[int, int]]] = {}
        self._came_on: dict[str, float] = {}
        """When agents of a zone came on for certain."""
        self._excused: dict[str, float] = {}
        """When they came on, or had a reason to begin only then."""
        self._told: dict[WorkerId, VersionKey] = {}
        self._rounds: set[tuple[ReplicaName, int, int]] = set()
        self._high: VersionKey | None = None
        self._late: set[str] = set()
        self._answered: set[tuple[ReplicaName, int, int]] = set()
        self._since: dict[str, VersionKey | None] = {}
        """The newest version when agents began to live and come on: others may have been told of it before."""
        self._idle: dict[str, float] = {}
        """Since when a zone should not wait any more."""

    def look(self, now: float, state: ServerState, event: Event, effects: list[Effect]) -> list[str]:
        """Return what must not be."""
        if state.config.server_epoch != self._epoch:
            self._epoch = state.config.server_epoch
            self._forget()
        broken: list[str] = []
        for model in state.models.values():
            zones = {group.zone for group in model.groups.values() if group.seeds and group.zone}
            self._note_high(now, model)
            for zone in sorted(zones):
                broken += self._look_at(now, state, model, zone, event, effects)
            self._told = {name: worker.told for name, worker in state.workers.items() if worker.told is not None}
            self._high = model.high
        return broken

    def _note_high(self, now: float, model: ModelState) -> None:
        for zone, brought in self._brought.items():
            if model.high != self._high and brought == self._high:
                self._excused[zone] = now

    def _look_at(
        self, now: float, state: ServerState, model: ModelState, zone: str, event: Event, effects: list[Effect]
    ) -> list[str]:
        agents = [group for group in model.groups.values() if group.seeds and group.zone == zone]
        lives = any(_lives(state, group) for group in agents)
        self.agents |= {group.replica for group in agents}
        before = self._seen.get(zone)
        self._note_progress(now, state, zone, event)
        self._note_whole(now, state, model, zone)
        lead = model.leads[zone]
        self.lates += lead.late and zone not in self._late
        self._late = self._late | {zone} if lead.late else self._late - {zone}
        within_s, broken = state.config.agent_within_s, []
        if lead.late and now < self._came_on.get(zone, _NEVER) + within_s:
            broken.append(f"zone {zone!r} does not wait for agents that have just come on")
        seen = self._seen.get(zone)
        behind = model.high is not None and (seen is None or seen < model.high)
        idle = behind and lives and not lead.late and now > self._excused[zone] + within_s
        idle_since = self._idle.setdefault(zone, now) if idle else self._idle.pop(zone, now)
        if idle and now > idle_since + TICK_S and isinstance(event, Tick):
            broken.append(f"zone {zone!r} waits for agents that have not come on since {self._excused[zone]:.2f}")
        broken += self._look_at_answers(state, model, zone, effects, lives)
        comes_on = lives and not lead.late
        first = self._since.setdefault(zone, model.high) if comes_on else self._since.pop(zone, None)
        if lives and not lead.late:
            broken += self._look_at_promises(state, model, zone, before if before == seen else seen)
            self._note_crossing(state, zone, first)
        return broken

    def _note_progress(self, now: float, state: ServerState, zone: str, event: Event) -> None:
        if zone not in self._brought:
            self._brought[zone], self._excused[zone] = None, now
        name = state.sessions.get(event.session) if isinstance(event, Received) else None
        worker = state.workers.get(name) if name is not None else None
        copy = None if worker is None else worker.filling()
        announced = isinstance(event, Received) and isinstance(event.message, Announce)
        if worker is None or copy is None or not announced:
            return
        group, seen = state.models[worker.model].groups[worker.replica], self._seen.get(zone)
        if not group.seeds or group.zone != zone or (seen is not None and copy.key <= seen):
            return
        bringing, marks = self._marks.get(zone, (copy.key, {}))
        if copy.key > bringing:
            bringing, marks = copy.key, {}
        if copy.key == bringing and copy.done_bytes > marks.get(worker.shard, 0):
            marks[worker.shard] = copy.done_bytes
            self._came_on[zone] = self._excused[zone] = now
        self._marks[zone] = (bringing, marks)

    def _note_whole(self, now: float, state: ServerState, model: ModelState, zone: str) -> None:
        seen, brought = self._seen.get(zone), self._brought[zone]
        for key in model.finished:
            new = seen is None or key > seen
            newly = brought is None or key > brought
            for replica in model.finished[key] if new or newly else ():
                group = model.groups[replica]
                if group.zone == zone and _offers(state, group, key):
                    self._seen[zone] = max(key, self._seen.get(zone, key))
                    if group.seeds and newly:
                        self._brought[zone] = max(key, self._brought[zone] or key)
                        self.brought += 1
                        self._excused[zone] = now

    def _look_at_promises(self, state: ServerState, model: ModelState, zone: str, seen: VersionKey | None) -> list[str]:
        broken = []
        for group in model.groups.values():
            current = group.open_round()
            if current is None or group.zone != zone or group.seeds:
                continue
            waits = current.key is None and current.want is None and current.kind != "install"
            self.held += waits and model.high is not None and (seen is None or seen < model.high)
            name = (group.replica, group.generation, current.number)
            if current.key is None or name in self._rounds:
                continue
            self._rounds.add(name)
            told = [self._told[name] for name in group.members.values() if name in self._told]
            known = current.resumed or current.want is not None or current.kind == "install"
            if not known and (seen is None or seen < current.key) and all(key < current.key for key in told):
                broken.append(
                    f"{group.replica} was promised {current.key}, which its agents have yet to bring ({seen})"
                )
        return broken

    def _look_at_answers(
        self, state: ServerState, model: ModelState, zone: str, effects: list[Effect], lives: bool
    ) -> list[str]:
        """Where no agent lives, no round ends with nothing newer than what is older than the newest."""
        key, broken = model.high, []
        answers = [
            (e.session, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, NothingNewer)
        ]
        for session, message in answers:
            who, told = state.sessions.get(session), (message.epoch, message.number)
            group = None if who is None else model.groups[state.workers[who].replica]
            if group is None or group.zone != zone or group.seeds:
                continue
            name = (group.replica, group.generation, message.round)
            if name in self._answered:
                continue  # all shards of a round hear the same, whatever has come to pass since
            self._answered.add(name)
            known = self._epoch > 1 and group.first_round is not None and message.round < group.first_round
            if lives or known or key is None or told >= key:
                continue
            if any(_lives(state, g) and _offers(state, g, key) for g in model.groups.values()):
                broken.append(f"{group.replica} is told of {told} and not of {key}, though no agent lives")
        return broken

    def _note_crossing(self, state: ServerState, zone: str, first: VersionKey | None) -> None:
        for lease in state.leases.values():
            if lease.crosses is not None and lease.crosses[1] == zone and (first is None or lease.crosses[0] > first):
                self.crossed[zone, lease.crosses[0]].add(state.workers[lease.reader].replica)


def _lives(state: ServerState, group: Group) -> bool:
    workers = [state.workers[name] for name in group.members.values()]
    return len(workers) == group.num_shards and not any(w.suspected or w.leaving for w in workers)


def _offers(state: ServerState, group: Group, key: VersionKey) -> bool:
    workers = [state.workers[name] for name in group.members.values()]
    return len(workers) == group.num_shards and all(w.copy_of(key, (CopyState.PUBLISHED,)) for w in workers)
