"""What a process may do next, and how it does it."""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub_core.ids import Digest
from tensorhub_core.state.messages import (
    Announce,
    Done,
    Filling,
    HandOver,
    JoinRound,
    LeaseFailure,
    Offloaded,
    OffloadFailed,
    Publish,
    Relocate,
    Unpublish,
    Unstage,
)
from tests.walk import checks, hearing
from tests.walk.actors import REGISTERED, SEGMENTS, STAGING, Action, Actor, Reading, Violation
from tests.walk.world import NOW, World, code_of, key_of, packed_sums, sums_of

BEFORE_S = 0.1
"""A moment; far less than a heartbeat."""
_MEMORIES = ("", " staging", " offload")


def of_process(world: World, actor: Actor) -> Iterator[Action]:
    """Yield what a process may do next."""
    if not actor.alive:
        return
    worker = world.worker(actor)
    if worker is None or actor.greet:
        yield ("hello", actor.place, "")
        if not actor.is_source:
            yield from reads(world, actor)
        return
    if worker.suspected or worker.last_seen_s < NOW:
        yield ("wake", actor.place, "")
    yield from (("again", actor.place, kind) for kind in sorted(actor.resend))
    if actor.offload_asked:
        yield ("offload", actor.place, "")
        if world.scene.refusals:
            yield ("offload fails", actor.place, "")
    if "handover" in actor.open.values():
        return
    if world.scene.departures and actor.phase == "idle" and not actor.draining:
        yield ("hand over", actor.place, "")
    if actor.is_source:
        if actor.held and not actor.draining:
            yield ("unpublish", actor.place, "")
        elif not actor.held and not actor.draining and actor.last < world.scene.versions:
            yield ("publish", actor.place, str(actor.last + 1))
    else:
        yield from of_reader(world, actor)


def of_reader(world: World, actor: Actor) -> Iterator[Action]:
    """Yield what a reader may do next."""
    place, phase = actor.place, actor.phase
    if actor.committed or actor.aborted:
        yield ("hear", place, "committed" if actor.committed else "aborted")
    if phase == "idle" and not actor.draining and not actor.unstaging and in_step(world, actor):
        if actor.staged:
            yield ("join", place, "install")
            yield ("unstage", place, "")
            yield ("join", place, "update")
        else:
            yield ("join", place, "update" if actor.held else "replicate")
            if world.scene.stages:
                yield ("join", place, "stage")
            if world.scene.explicit:
                yield from (("join", place, f"update {v + 1}") for v in range(world.scene.versions))
    elif phase == "rejoining":
        yield ("rejoin", place, "")
    elif phase == "promised":
        if actor.held and actor.mode != "stage":
            if not actor.draining:
                yield ("withdraw", place, "")
        else:
            clear = actor.mode in ("replicate", "update") and not actor.came_back
            yield ("begin" if world.scene.hasty and clear else "fill", place, "")
    elif actor.unheard:
        yield ("fill", place, "")  # what it says next comes after that
    elif phase == "reading":
        if actor.verified == SEGMENTS:
            yield ("done", place, "")
        if actor.lost or any(world.by_life(where[0]) is None for where in actor.sources.values()):
            yield ("relocate", place, "lost")
        if world.scene.doubts and actor.sources:
            yield from (("doubt", place, kind) for kind in ("stalled", "slow"))
    yield from reads(world, actor)
    if actor.unheard:
        return
    if world.scene.leaves and phase in ("joining", "promised", "reading", "relocating", "done") and not actor.committed:
        yield ("leave", place, "")


def in_step(world: World, actor: Actor) -> bool:
    """Tell whether a shard may join its next round: it is not too far ahead of the others."""
    return all(actor.round <= other.round + world.scene.ahead for other in world.group(actor) if other.alive)


def reads(world: World, actor: Actor) -> Iterator[Action]:
    """Yield the reads that can land next; also one that goes on while a new server does not know of it yet."""
    if not actor.running or actor.phase not in ("reading", "rejoining", "joining") or actor.verified == SEGMENTS:
        return
    if actor.mode == "install":
        yield ("read", actor.place, "staging")
    for life, which, prefix, _ in sorted(set(actor.sources.values())):
        if prefix > actor.verified and (holder := world.by_life(life)) is not None:
            yield ("read", actor.place, holder.name + _MEMORIES[which])
    if any(shown(world, actor, where) > where[2] for where in actor.sources.values()):
        yield ("look", actor.place, "")


def shown(world: World, actor: Actor, where: Reading) -> int:
    """Return how far the holder of a copy that fills shows that it is, by a manifest that its follower knows too."""
    holder = world.by_life(where[0])
    fills = holder is not None and holder.in_round and holder.touched and holder.mode != "install"
    if holder is None or not fills or not world.scene.verify or world.scene.reshards:
        return 0
    same = holder.promised == actor.promised and where[1] == (STAGING if holder.mode == "stage" else REGISTERED)
    return holder.verified if same else 0


def do_look(world: World, actor: Actor, _: str) -> None:
    """See how far the sources are, whatever the server has heard of them."""
    for lease, where in actor.sources.items():
        life, which, prefix, epoch = where
        actor.sources[lease] = (life, which, max(prefix, shown(world, actor, where)), epoch)


def do_read(world: World, actor: Actor, which: str) -> None:
    """Read the next segment as it is in that memory now, and announce it if it was verified."""
    if which == "staging":
        actor.filled[actor.verified] = actor.staged_cells[actor.verified]
        actor.verified += 1
        return
    name, _, kind = which.partition(" ")
    memory = _MEMORIES.index(" " + kind if kind else "")
    holder = next(a for a in world.actors if a.name == name and a.alive)
    value = holder.memory(memory, actor.promised)[actor.verified]
    if world.scene.verify and value != actor.promised:
        found = [lease for lease, where in actor.sources.items() if where[:2] == (holder.life, memory)]
        if any(checks.rightful(world, lease, actor.sources[lease][3]) for lease in found):
            raise Violation(f"L3: {actor.name} reads {value} for version {actor.promised} from {name} under a lease")
        if actor.phase == "reading" and world.worker(actor) is not None:
            hear_of_it(world, actor)
            do_relocate(world, actor, "corrupt", set(found))
        return
    actor.filled[actor.verified] = value
    actor.verified += 1
    if not actor.unheard:
        announce(world, actor)


def announce(world: World, actor: Actor) -> None:
    """Announce what is verified."""
    if world.scene.verify and actor.verified and actor.phase == "reading" and world.worker(actor) is not None:
        sums = packed_sums(actor.promised, actor.shard)[: 8 * actor.verified] if actor.derives else b""
        world.ask(actor, "told", Announce(actor.round, actor.verified, 100 * actor.verified, sums))


def do_fill(world: World, actor: Actor, _: str) -> None:
    """Say that the memory is overwritten from now on, or let the server hear that it is already."""
    if actor.unheard:
        return hear_of_it(world, actor)
    world.ask(actor, "fill", Filling(actor.round))


def hear_of_it(world: World, actor: Actor) -> None:
    """Let the server hear that the memory is overwritten."""
    if actor.unheard:
        actor.unheard = False
        world.ask(actor, "told", Filling(actor.round))
        announce(world, actor)


def do_begin(world: World, actor: Actor, _: str) -> None:
    """Overwrite memory of which the server has no copy; it hears of that later."""
    actor.unheard = True
    hearing.begin_to_fill(world, actor)


def do_relocate(world: World, actor: Actor, kind: str, leases: set[str] | None = None) -> None:
    """Ask for other sources instead of those that are lost."""
    if leases is None:
        dead = {lease for lease, where in actor.sources.items() if world.by_life(where[0]) is None}
        leases = actor.lost | dead
    actor.lost.clear()
    actor.phase = "relocating"
    failures = tuple(LeaseFailure(lease, kind) for lease in sorted(leases))  # type: ignore[arg-type]
    world.ask(actor, "relocate", Relocate(actor.round, failures))


def do_doubt(world: World, actor: Actor, kind: str) -> None:
    """Leave sources that live; those that have stalled are not heard until they speak."""
    world.spend("doubts")
    holders = [world.by_life(where[0]) for where in actor.sources.values()]
    for worker in (world.known(a) for a in holders if a is not None and kind == "stalled"):
        if worker is not None:
            worker.last_seen_s = NOW - 2 * BEFORE_S
    do_relocate(world, actor, kind, set(actor.sources))
    for current in world.model.groups[actor.replica].rounds.values():  # type: ignore[index]
        for copies, times in current.stalls.items():
            current.stalls[copies] = [min(time, NOW - BEFORE_S) for time in times]


def do_hand_over(world: World, actor: Actor, _: str) -> None:
    """Ask whether what it holds is kept without it, in order to leave."""
    world.spend("departures")
    world.ask(actor, "handover", HandOver())


def do_join(world: World, actor: Actor, how: str) -> None:
    """Join the next round."""
    mode, _, want = how.partition(" ")
    actor.phase, actor.mode, actor.want = "joining", mode, int(want) if want else None
    join(world, actor, mode, actor.staged if mode == "install" else actor.held, again=False)


def do_rejoin(world: World, actor: Actor, _: str) -> None:
    """Ask for the promise again, with what was read so far."""
    actor.phase, mode, have = "joining", actor.mode, actor.staged if actor.mode == "install" else actor.held
    actor.came_back = True
    if actor.touched and mode not in ("stage", "install"):
        mode, have = "update" if actor.asked_done else "replicate", 0
    join(world, actor, mode, have, again=True)


def join(world: World, actor: Actor, mode: str, have: int, *, again: bool) -> None:
    """Send the request."""
    actor.in_grace = not world.listened
    promised = key_of(actor.promised) if actor.promised else None
    held = key_of(have) if have else None
    request = JoinRound(actor.round, actor.want, mode, held, True, world.scene.verify, promised, again=again)  # type: ignore[arg-type]
    world.ask(actor, "join", request)


def do_publish(world: World, actor: Actor, number: str) -> None:
    """Write a version and publish it."""
    checks.before_overwriting(world, actor, REGISTERED)
    code = code_of(1, int(number))
    actor.cells = [code] * SEGMENTS
    world.ask(actor, "publish", Publish(int(number), sums_of(world.scene, actor, code)))


def do_done(world: World, actor: Actor, _: str) -> None:
    """Ask whether what was read counts."""
    actor.phase, actor.asked_done = "done", True
    world.ask(actor, "done", Done(actor.round, Digest(sums_of(world.scene, actor, actor.promised))))


def do_hear(world: World, actor: Actor, what: str) -> None:
    """Hear how the round has ended."""
    hear_of_it(world, actor)
    hearing.commit(world, actor) if what == "committed" else hearing.end_round(world, actor)


def do_leave(world: World, actor: Actor, _: str) -> None:
    """Give the round up."""
    world.spend("leaves")
    hearing.leave(world, actor)


def do_again(world: World, actor: Actor, kind: str) -> None:
    """Ask again under the same number."""
    world.ask(actor, kind, Unpublish() if kind == "unpublish" else Unstage())


def do_offload(world: World, actor: Actor, _: str) -> None:
    """Copy what is being taken back into host memory."""
    copy, actor.offload_asked = actor.offload_asked, ""
    code = actor.held
    actor.offloads[code] = actor.cells.copy()
    world.ask(actor, "offload", Offloaded(copy, b"O%d.%d" % (actor.life, code)))


def do_offload_fails(world: World, actor: Actor, _: str) -> None:
    """Have no room for it."""
    world.spend("refusals")
    copy, actor.offload_asked = actor.offload_asked, ""
    world.ask(actor, "told", OffloadFailed(copy, "config_error", "no room"))
