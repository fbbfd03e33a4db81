"""Walk every order of events the client's round machine can meet, and check what must always hold.

The budgets are cut to one, so that the walk is finite; the environment answers in every way a server, an executor and a
caller can. Rules checked in every state: no read while the old copy may have readers, no read before the server
knows, or was told while it had no copy, one read at a time, no end while bytes may land, nothing after the end, dirty
exactly if touched, success only by the server's word, and an end that is always near once the deadline has passed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from tensorhub_core.client.machine import step
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import (
    Answered,
    Ask,
    Begin,
    Broken,
    Effect,
    End,
    Event,
    Mode,
    Plan,
    PlanFailed,
    Planned,
    Pushed,
    Read,
    ReadEnded,
    Reopened,
    RoundState,
    Settle,
    Settled,
    Stop,
    Tell,
    Tick,
    Unvouched,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.errors import LayoutMismatch, StateError
from tensorhub_core.state.messages import (
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    JoinRound,
    LeaseLost,
    NothingNewer,
    Ok,
    Promise,
    Relocate,
    Reply,
    Request,
    RoundAborted,
    Source,
    SourceProgress,
    Welcome,
)

DEADLINE_S = 10.0
STAGED = (1, 7)
NO_READS = np.zeros(0, np.bool_)


@dataclass
class World:
    """One state of the machine and of what surrounds it."""

    state: RoundState
    had_copy: bool = False
    now: float = 0.0
    pending: dict[int, Request] = field(default_factory=dict)
    planning: bool = False
    withdrawing: bool = False
    withdrawn: bool = False
    reading: bool = False
    stopped: bool = False
    settling: bool = False
    entered: bool = False
    told: bool = False
    """It was said over this connection that memory is filled of which the server has no copy."""
    committed: bool = False
    done: bool = False
    promised: tuple[int, int] | None = None
    ever_read: bool = False
    end: End | None = None

    def clone(self) -> World:
        """Return an independent copy; faster than `deepcopy`, which takes most of the walk's time."""
        world, state = copy.copy(self), copy.copy(self.state)
        state.lost, state.prefixes, state.aliases = dict(state.lost), dict(state.prefixes), dict(state.aliases)
        state.whole, state.inexact = set(state.whole), set(state.inexact)
        world.state, world.pending = state, dict(self.pending)
        return world

    def key(self) -> tuple[object, ...]:
        """Return what makes two worlds the same: the numbers of requests do not matter, only which one is newest."""
        state, newest = self.state, self.pending.get(self.state.asked)
        of_state = tuple(
            _hashable(getattr(state, name)) for name in _STATE_FIELDS if name not in ("asked", "done_asked", "ending")
        )
        done = -1 if state.done_asked == state.asked else min(1, state.done_asked)
        return of_state, done, type(state.ending), newest, tuple(getattr(self, name) for name in _WORLD_FIELDS)


def _hashable(value: object) -> object:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return frozenset(value) if isinstance(value, set) else value


_STATE_FIELDS = tuple(f.name for f in fields(RoundState))
_WORLD_FIELDS = tuple(f.name for f in fields(World) if f.name not in ("state", "pending", "end"))


def sources(lease: str, place: bytes) -> tuple[Source, ...]:
    return (Source(lease, "w", "r", 0, 1, b"l", place, b"s"),)


def replies(world: World, request: Request) -> Iterator[Reply]:
    """Yield every answer the server may give to a request."""
    number = world.state.number
    if isinstance(request, JoinRound) and request.mode == "install":
        yield Promise(number, *STAGED, ())
        yield Promise(number, 1, 8, ())
        yield NothingNewer(number, *STAGED)
    elif isinstance(request, JoinRound):
        yield Promise(number, 1, 7, sources("l1", b"a"))
        yield Promise(number, 1, 7, sources("l2", b"b"))
        yield Promise(number, 1, 8, sources("l4", b"d"))
        if request.mode in ("update", "stage"):
            yield NothingNewer(number, 1, 7)
    elif isinstance(request, Relocate):
        yield Promise(number, 1, 7, sources("l2", b"b"))
        yield Promise(number, 1, 8, sources("l3", b"c"))
    elif isinstance(request, Done):
        yield Committed(number, True)
        yield Discard(number, sources("l2", b"b"))
    else:
        yield Ok()
    yield Failure("version_unavailable", "gone")


def events(world: World) -> Iterator[Event]:
    """Yield everything that can happen next."""
    state = world.state
    newest = world.pending.get(state.asked)
    if newest is not None:
        yield from (Answered(state.asked, reply) for reply in replies(world, newest))
    if world.planning:
        yield Planned()
        yield PlanFailed(LayoutMismatch("differs"))
        if state.sources:
            yield PlanFailed(StateError("no blob"), state.sources[0].lease)
    if world.withdrawing:
        yield Withdrawn()
        yield Withdrawn(StateError("refused"))
    if world.reading:
        yield ReadEnded(ReadOutcome(ReadEnd.VERIFIED, NO_READS, 10))
        if state.sources:
            yield ReadEnded(ReadOutcome(ReadEnd.SOURCE_FAILED, NO_READS, 5, "l1", "corrupt"))
        if world.stopped:
            yield ReadEnded(ReadOutcome(ReadEnd.CANCELLED, NO_READS, 5))
    # Once, and not after everything else: or there would be too many states.
    if world.reading and state.sources and not state.inexact and not state.rejoins and not state.relocations:
        yield Unvouched(state.sources[0].lease, "unable", "no sums")
    if world.settling:
        yield Settled(b"digest")
    yield Pushed(RoundAborted(state.number, "state_error", "other shard"))
    for source in state.sources:
        yield Pushed(LeaseLost(state.number, source.lease, "gone"))
        yield Pushed(SourceProgress(source.lease, 2, False))
    yield Reopened(Welcome("w", 2, 1, 0, 1, 1.0, 1.0))
    yield Broken(KeyboardInterrupt())
    if world.now < DEADLINE_S or state.give_up_s is not None:
        yield Tick()


def take(world: World, event: Event) -> World:
    """Return the world after an event, with the rules checked."""
    world = world.clone()
    before = copy.copy(world.state)
    if isinstance(event, Answered):
        request = world.pending.pop(event.asked)
        world.entered |= isinstance(request, Filling) and isinstance(event.reply, Ok)
        world.committed = isinstance(event.reply, Committed | NothingNewer)
        if isinstance(event.reply, Promise) and isinstance(request, JoinRound):
            world.promised = (event.reply.epoch, event.reply.number)
    elif isinstance(event, Planned | PlanFailed):
        world.planning = False
    elif isinstance(event, Withdrawn):
        world.withdrawing, world.withdrawn = False, world.withdrawn or event.error is None
    elif isinstance(event, ReadEnded):
        world.reading = world.stopped = False
    elif isinstance(event, Settled):
        world.settling = False
    elif isinstance(event, Reopened):
        world.pending.clear()
        world.told = False
    elif isinstance(event, Tick):
        world.now = DEADLINE_S if before.give_up_s is None else world.now + 100.0
    _, effects = step(world.state, event, world.now)
    for effect in effects:
        assert world.end is None, "nothing may follow the end"
        carry_out(world, effect)
    if isinstance(event, Tick) and before.give_up_s is None:
        assert world.end is not None or world.state.give_up_s is not None, "a passed deadline begins the end"
    if isinstance(event, Tick) and before.give_up_s is not None:
        assert world.end is not None, "the end is bounded"
    return world


def carry_out(world: World, effect: Effect) -> None:
    """Note an effect and check what must hold when it is carried out."""
    state = world.state
    if isinstance(effect, Ask):
        world.pending[effect.asked] = effect.message
        if isinstance(effect.message, Filling | Done):
            assert world.withdrawn or not world.had_copy, "the old copy is withdrawn first"
        if isinstance(effect.message, JoinRound) and state.mode in ("stage", "install"):
            assert (effect.message.mode, effect.message.have) == (state.mode, state.have), "what is staged is named"
        if isinstance(effect.message, Done):
            assert not world.reading
            world.done = True
    elif isinstance(effect, Tell) and isinstance(effect.message, Filling):
        free = world.withdrawn or state.have is None
        world.told = free and not world.withdrawing and state.mode in ("replicate", "update")
    elif isinstance(effect, Plan):
        assert not world.reading
        world.planning = True
    elif isinstance(effect, Withdraw):
        assert not world.withdrawing
        if world.withdrawn or not world.had_copy:
            assert world.done, "only what may have been committed is withdrawn again"
        world.had_copy, world.withdrawing, world.withdrawn = True, True, False
    elif isinstance(effect, Read):
        assert not world.reading, "one read at a time"
        assert world.entered or world.told, "the server knows first, unless it had no copy"
        assert world.withdrawn or not world.had_copy, "no read while the old copy may have readers"
        world.reading = world.ever_read = True
    elif isinstance(effect, Stop):
        assert world.reading
        world.stopped = True
    elif isinstance(effect, Settle):
        assert not world.reading
        world.settling = True
    elif isinstance(effect, End):
        world.end = effect
        assert not world.reading or effect.unquiet, "no end while bytes may land"
        if effect.error is None:
            assert world.committed, "success only by the server's word"
            assert effect.held or effect.key == world.promised
            assert state.mode != "install" or effect.key == STAGED, "what was staged is installed, nothing else"
        else:
            assert effect.dirty == world.ever_read
            assert effect.dirty == state.touched
            assert not effect.published


def walk(mode: Mode, had_copy: bool, fresh: bool = False) -> tuple[int, set[tuple[str, bool, bool, bool]]]:
    """Visit every state; return how many there are and how rounds end (error, dirty, held, uncertain).

    `fresh`: the memory holds nothing yet.
    """
    have = None if fresh else STAGED if mode == "install" else (1, 6)
    state = RoundState(3, None, mode, have, True, DEADLINE_S, had_copy)
    start = take(World(state, had_copy), Begin())
    seen, todo, ends = {start.key()}, deque([start]), set()
    while todo:
        world = todo.popleft()
        for event in events(world):
            after = take(world, event)
            if after.end is not None:
                ends.add((type(after.end.error).__name__, after.end.dirty, after.end.held, after.end.uncertain))
                continue
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return len(seen), ends
