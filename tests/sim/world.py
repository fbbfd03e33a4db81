"""A random world around the real machine: trainers, readers, byte-accurate memory, slow networks, pauses, deaths.

Every worker holds `SEGMENTS` cells; a cell is what was last written there: (version, shard) or garbage. A read copies
cells from the source's memory as it is at that moment. The world knows the truth, the machine does not: whatever a
group believes to have committed has to be in its cells. With `stages`, readers have a second row of cells in which they
stage versions, to install them later. The newest versions are retained, 0 to 2 by seed; some replicas are spot, some
leave as they should.
"""

from __future__ import annotations

import random
from collections import Counter

from tensorhub_core.ids import SessionId
from tensorhub_core.state.events import Received, Send, Tick
from tensorhub_core.state.invariants import check
from tensorhub_core.state.machine import ServerState, step
from tensorhub_core.state.messages import (
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    Heartbeat,
    Hello,
    JoinRound,
    LeaseFailure,
    LeaseLost,
    Leave,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Publish,
    PutBlob,
    Register,
    RegisterStaging,
    Relocate,
    Reply,
    RoundAborted,
    Source,
    SourceProgress,
    SourceSlow,
    Superseded,
    UnknownSession,
    Unpublish,
    Unstage,
    Welcome,
)
from tests.sim.geography import Geography
from tests.sim.hub import digest
from tests.sim.keeping import Keeper, SecondOpinion
from tests.sim.lives import SEGMENTS, Life, cells_of, sums
from tests.sim.resharding import Resharding


class World:
    """One run: `advance()` takes one random step and checks everything."""

    def __init__(
        self,
        seed: int,
        readers: int = 2,
        shards: int = 2,
        trainers: int = 1,
        checksums: bool = True,
        stages: bool = False,
        retain: int | None = None,
        reshards: bool = False,
        places: bool = True,
    ) -> None:
        self.checksums, self.stages = checksums, stages
        self.installing: dict[tuple[str, int], set[int]] = {}
        self.commits_by_mode: Counter[str] = Counter()
        self.outcomes: dict[tuple[str, int], set[str]] = {}
        self.now, self.chance = 0.0, random.Random(seed)
        self.resharding = Resharding(reshards, self.chance)
        queues = 0 if self.chance.random() < 0.5 else 1 << 30  # of readers behind one that has yet to begin
        retain = self.chance.randrange(3) if retain is None else retain
        self.geography = Geography(seed, trainers, readers, places)
        self.keeper, self.opinion = Keeper(self.chance), SecondOpinion()
        spot_share = self.chance.choice([0.0, 0.3, 0.8]) if retain else 0.0
        self.spots = {f"reader{r}": self.chance.random() < spot_share for r in range(readers)}
        self.state = ServerState.new(self.geography.config(worth_waiting_bytes=queues, retain=retain), 0.0)
        self.lives: list[Life] = []
        self.by_session: dict[SessionId, Life] = {}
        self.commits = self.most_sources = self.born = 0
        self.shards = shards
        for t in range(trainers):
            for k in range(shards):
                self.birth(f"trainer{t}", k, True)
        for r in range(readers):
            for k in range(shards):
                self.birth(f"reader{r}", k, False)

    def birth(self, replica: str, shard: int, is_trainer: bool) -> None:
        """Start a process."""
        self.born += 1
        life = Life(SessionId(b"s%d" % self.born), replica, shard, self.shards, is_trainer)
        self.lives.append(life)
        self.by_session[life.session] = life
        who = (f"t{self.born}", "policy", replica, shard, self.shards)
        about = {"spot": self.spots.get(replica, False), **self.geography.of(replica, shard)}
        life.ask(Hello(1, *who, announces_sums=self.resharding.enabled, **about))
        life.staging = digest(b"staging %d" % self.born)
        layout, placement = self.resharding.layout(life), b"placement %d" % self.born
        life.placement = digest(placement)
        life.ask(PutBlob(digest(layout), layout))
        life.ask(PutBlob(digest(placement), placement))
        life.ask(Register(digest(layout), digest(placement), 200, SEGMENTS))
        if self.stages:
            life.ask(PutBlob(life.staging, b"staging %d" % self.born))
            life.ask(RegisterStaging(life.staging))

    def feed(self, event: Received | Tick) -> None:
        """Step the machine and check its invariants."""
        self.state, effects = step(self.state, event, self.now)
        broken = check(self.state)
        assert not broken, broken
        self.opinion.look(self.state)
        for effect in effects:
            if isinstance(effect, Send) and (life := self.by_session.get(effect.session)) is not None and life.alive:
                life.inbox.append((effect.request, effect.message))

    def advance(self) -> None:
        """Take one random step."""
        draw = self.chance.random()
        if draw < 0.02:
            self.now += self.chance.choice([0.05, 0.2, 0.5])
            for life in self.lives:
                if not life.outbox and self.now >= life.paused_until:
                    life.ask(Heartbeat())
            self.feed(Tick())
        elif draw < 0.022:
            self.disturb()
        else:
            life = self.chance.choice(self.lives)
            if self.now < life.paused_until:
                return
            if life.outbox and (not life.inbox or self.chance.random() < 0.5):
                request, message = life.outbox.popleft()
                if isinstance(message, JoinRound) and message.mode == "install":
                    self.installing.setdefault((life.era, message.round), set()).add(life.shard)
                self.feed(Received(life.session, request, message))
                if isinstance(message, Leave):
                    self.replace(life)
            elif life.inbox:
                self.hear(life, *life.inbox.popleft())
            elif life.alive:
                self.act(life)
        self.check_leases()

    def disturb(self) -> None:
        """Kill, replace or pause somebody."""
        life = self.chance.choice([x for x in self.lives if x.alive])
        if self.chance.random() < 0.5:
            life.paused_until = self.now + self.chance.choice([1.0, 6.0, 20.0])
            return
        if self.state.config.retain and self.chance.random() < 0.4:
            return self.keeper.leave([x for x in self.lives if x.replica == life.replica and x.alive])
        self.replace(life)

    def replace(self, life: Life) -> None:
        """End a process, and start another one in its place."""
        life.alive = False
        life.outbox.clear()
        self.lives.remove(life)
        self.birth(life.replica, life.shard, life.is_trainer)

    def act(self, life: Life) -> None:
        """Let a worker do the next thing on its own account."""
        if self.keeper.act(life):
            return
        if life.phase == "leaving":
            if self.chance.random() < 0.01:
                life.ask(Leave())
        elif life.phase == "idle" and life.is_trainer:
            group = [x for x in self.lives if x.replica == life.replica]
            number = self.next_number(group)
            life.cells = [(number, life.shard)] * SEGMENTS
            life.ask(PutBlob(digest(found := sums(number, life.shard)), found))
            life.ask(Publish(number, digest(found)))
            life.phase, life.promised = "publishing", (1, number)
        elif life.phase == "published" and self.chance.random() < 0.1:
            if life.is_trainer:
                life.unpublish()
                life.phase = "draining"
            else:
                self.join(life)
        elif life.phase == "idle":
            self.join(life)
        elif life.phase == "reading":
            self.read(life)
        elif life.phase in ("joining", "done") and self.chance.random() < 0.01:
            life.ask(LeaveRound(life.round, "deadline_exceeded", "out of patience"))

    def join(self, life: Life) -> None:
        """Join the next round; all shards of a replica mostly want the same of it."""
        have = None if life.published is None else (1, life.published)
        if life.staged is not None:
            if self.chance.random() < 0.05:
                return life.unstage()
            life.mode, have = "install", (1, life.staged)
        elif self.stages and life.round % 3:
            if life.unstaging:
                return
            life.mode = "stage"
        else:
            life.mode = "replicate" if have is None else "update"
        life.ask(JoinRound(life.round, None, life.mode, have))  # type: ignore[arg-type]
        life.phase = "joining"

    def next_number(self, group: list[Life]) -> int:
        """Return the number a trainer's group publishes next; all its shards agree on it."""
        numbers = sorted((x.promised or (0, 0))[1] for x in group)
        if numbers[0] < numbers[-1]:
            return numbers[-1]
        return max([numbers[-1], *(x.promised[1] for x in self.lives if x.promised)]) + 1

    def read(self, life: Life) -> None:
        """Read one more segment, as it is in the memory of one of the sources now."""
        assert life.sources or life.mode == "install"
        assert life.promised is not None
        if life.verified == SEGMENTS:
            self.resharding.done(life)
            life.phase = "done"
            return
        if not life.sources:
            life.cells[life.verified] = life.staged_cells[life.verified]
            life.verified += 1
            return
        able = self.resharding.able(life)
        if not able:
            return
        source = able[0] if len(able) == 1 else self.chance.choice(able)
        self.most_sources = max(self.most_sources, len(able))
        holder = self.holder(source)
        cell = None if holder is None else cells_of(holder, source.placement)[life.verified]
        wrong = self.checksums and cell != (life.promised[1], life.shard)
        if holder is None or not holder.alive or wrong:
            kind = "lost" if holder is None or not holder.alive else "corrupt"
            life.ask(Relocate(life.round, (LeaseFailure(source.lease, kind),)))
            life.phase = "relocating"
            return
        life.filled[life.verified] = cell
        life.verified += 1
        life.ask(self.resharding.announce(life))

    def holder(self, source: Source) -> Life | None:
        """Return whose memory a source is."""
        worker = next((w for w in self.state.workers.values() if w.id == source.worker), None)
        return None if worker is None else self.by_session[worker.session]

    def hear(self, life: Life, request: int, message: Reply) -> None:
        """Let a worker take a message in."""
        asked = life.requests.pop(request, None)
        if self.keeper.hear(life, asked, message) or (life.phase == "leaving" and not isinstance(message, Superseded)):
            return
        if isinstance(message, Welcome):
            life.era = self.keeper.era(self.state, life)
            life.round, life.phase = message.next_round, "idle"
        elif isinstance(message, (Superseded, UnknownSession)):
            if life in self.lives and life.alive:
                life.alive = False
                life.outbox.clear()
                self.lives.remove(life)
                if isinstance(message, UnknownSession):
                    self.birth(life.replica, life.shard, life.is_trainer)
        elif isinstance(message, Promise) and life.phase in ("joining", "relocating"):
            self.begin(life, message)
        elif isinstance(message, Discard) and life.phase == "done":
            life.verified, life.phase = 0, "reading"
            self.resharding.promised(life, message.sources)
            life.read_from(message.sources)
        elif isinstance(message, NothingNewer) and life.phase == "joining":
            right = [(message.number, life.shard)] * SEGMENTS
            assert right in (life.cells, life.filled), "told to hold what it does not"
            life.round, life.phase = life.round + 1, "idle" if life.published is None else "published"
        elif isinstance(message, Committed) and life.phase == "done":
            self.committed(life)
        elif isinstance(message, SourceProgress) and message.lease in life.readable:
            life.readable[message.lease] = max(life.readable[message.lease], self.resharding.heard(life, message))
        elif isinstance(message, (LeaseLost, SourceSlow)):
            if message.lease in life.readable and life.phase == "reading":
                kind = "lost" if isinstance(message, LeaseLost) else "slow"
                life.ask(Relocate(life.round, (LeaseFailure(message.lease, kind),)))
                life.phase = "relocating"
        elif isinstance(message, RoundAborted) and message.round == life.round:
            self.end_round(life)
        elif isinstance(asked, Publish):
            published = not isinstance(message, Failure)
            life.phase = "published" if published else "idle"
            assert life.promised is not None
            life.published = life.promised[1] if published else None
        elif isinstance(asked, Filling) and isinstance(message, Ok) and life.phase == "opening":
            life.filled[:], life.phase = [None] * SEGMENTS, "reading"
        elif isinstance(asked, Unpublish) and isinstance(message, Ok):
            self.withdrawn(life)
        elif isinstance(asked, Unpublish) and life.published is not None and life.published == life.withdrawing:
            self.held_back(life)
        elif isinstance(asked, Unstage) and isinstance(message, Ok):
            life.unstaging, life.staged_cells = False, [(-self.born, 0)] * SEGMENTS
        elif (
            isinstance(message, Failure)
            and isinstance(asked, JoinRound | Done | Relocate | Filling)
            and asked.round == life.round
        ):
            if isinstance(asked, Filling):  # the round may go on for the others, and waits for this one
                life.ask(LeaveRound(life.round, "state_error", "the old copy still drains"))
            self.end_round(life)

    def committed(self, life: Life) -> None:
        """Check that a committed version is where it belongs."""
        assert life.promised is not None
        assert life.filled == [(life.promised[1], life.shard)] * SEGMENTS, "committed what it does not hold"
        self.note_outcome(life, "committed")
        life.round += 1
        self.commits += 1
        self.commits_by_mode[life.mode] += 1
        if life.mode == "stage":
            life.staged = life.promised[1]
            life.phase = "idle" if life.published is None else "published"
            return
        life.published, life.phase = life.promised[1], "published"
        if life.mode == "install":
            life.unstage()

    def begin(self, life: Life, promise: Promise) -> None:
        """Begin or go on to read what was promised, after the old copy is withdrawn."""
        if life.phase == "joining" or not self.checksums:
            life.verified = 0
        if life.phase == "joining":
            life.promised = (promise.epoch, promise.number)
        assert life.promised == (promise.epoch, promise.number), "a round's promise has changed"
        if life.mode == "install":
            assert promise.number == life.staged, "installs something else"
            assert self.installing[life.era, life.round] == set(range(life.num_shards)), "not all have staged"
            life.read_from(())
        else:
            self.resharding.promised(life, promise.sources)
            life.read_from(promise.sources)
        if life.phase == "joining" and life.published is not None and life.mode != "stage":
            life.unpublish()
            life.phase = "withdrawing"
            return
        if life.phase == "joining":
            life.ask(Filling(life.round))
            life.phase = "opening"
            return
        life.phase = "reading"

    def withdrawn(self, life: Life) -> None:
        """Overwrite memory: nobody may be reading it any more."""
        life.published = None
        if life.is_trainer:
            life.cells, life.phase = [(-self.born, 0)] * SEGMENTS, "idle"
        elif life.phase == "withdrawing":
            life.phase = "opening"
            life.ask(Filling(life.round))

    def held_back(self, life: Life) -> None:
        """Go on publishing what could not be offloaded."""
        if life.phase == "withdrawing":
            life.ask(LeaveRound(life.round, "config_error", "no memory"))
            self.note_outcome(life, "aborted")
            life.round += 1
            life.read_from(())
        if life.phase in ("withdrawing", "draining", "idle"):
            life.phase = "published"

    def end_round(self, life: Life) -> None:
        """Give a round up; the memory is what it is."""
        if life.phase in ("joining", "withdrawing", "opening", "reading", "relocating", "done"):
            keep = life.published is not None and (life.phase == "joining" or life.mode == "stage")
            if life.mode == "stage" and life.phase != "joining":
                life.unstage()
            life.phase = "published" if keep else "idle"
            self.note_outcome(life, "aborted")
            if not keep and life.published is not None:
                life.unpublish()
                life.published = None
            life.round += 1
            life.read_from(())

    def note_outcome(self, life: Life, outcome: str) -> None:
        """Check that a round ends in the same way for every shard that hears of it."""
        heard = self.outcomes.setdefault((life.era, life.round), set())
        heard.add(outcome)
        assert len(heard) == 1, f"round {life.round} of {life.replica} was committed for some and aborted for others"

    def check_leases(self) -> None:
        """Check the truth: what a living lease lets its reader read is in the source's memory."""
        for lease in self.state.leases.values():
            copy = self.state.copies[lease.copy]
            worker = self.state.workers[copy.worker]
            life = self.by_session[worker.session]
            right = [(copy.key[1], life.shard)] * copy.prefix
            cells = cells_of(life, copy.memory.placement)
            assert not life.alive or cells[: copy.prefix] == right, "a leased copy was overwritten"
