"""How a process takes what the server answers; follows the client's round machine and its account of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub_core.state.messages import (
    Committed,
    Discard,
    DropOffload,
    Failure,
    Leave,
    LeaveRound,
    NothingNewer,
    OffloadKept,
    Ok,
    Promise,
    Published,
    Reply,
    Source,
    Superseded,
    Unpublish,
    Unstage,
    Welcome,
)
from tests.walk import checks
from tests.walk.actors import GARBAGE, LETTERS, OFFLOAD, REGISTERED, SEGMENTS, STAGING, Actor, Violation

if TYPE_CHECKING:
    from tests.walk.world import World


def hear(world: World, actor: Actor, kind: str, message: Reply) -> None:
    """Take an answer."""
    if isinstance(message, Welcome):
        actor.round = actor.round if actor.in_round else message.next_round
    elif isinstance(message, Superseded):
        actor.alive, actor.phase = False, "over"
    elif kind == "publish":
        published(actor, message)
    elif kind == "unpublish":
        withdrawn(world, actor, message)
    elif kind == "handover":
        depart(world, actor, message)
    elif kind == "offload":
        offloaded(actor, message)
    elif kind == "unstage":
        if isinstance(message, Ok):
            checks.before_overwriting(world, actor, STAGING)
            actor.unstaging, actor.staged_cells = False, [GARBAGE] * SEGMENTS
    elif isinstance(message, Promise):
        promised(world, actor, message)
    elif isinstance(message, NothingNewer):
        nothing_newer(world, actor, message)
    elif isinstance(message, Discard):
        actor.phase, actor.asked_done = "reading", False
        read_from(world, actor, message.sources)
        keep_verified(world, actor, message.sources, again=True)
        actor.verified = 0
    elif isinstance(message, Committed):
        actor.committed = True
        if not checks.may_be_lost(world):
            commit(world, actor)
    elif kind == "fill" and isinstance(message, Ok):
        begin_to_fill(world, actor)
    elif isinstance(message, Failure) and kind in ("join", "fill", "relocate", "done"):
        checks.unavailable(world, actor, message)
        checks.refused(world, actor, message)
        if kind == "done":
            actor.asked_done = False
        leave(world, actor)


def published(actor: Actor, message: Reply) -> None:
    """Take the end of a publish; what cannot be published is passed over."""
    actor.last += 1
    if isinstance(message, Published):
        actor.held = 100 * message.epoch + message.number
    else:
        actor.cells = [GARBAGE] * SEGMENTS


def withdrawn(world: World, actor: Actor, message: Reply) -> None:
    """Take the end of an unpublish: whatever lies in the memory may change now; one that is refused changes nothing."""
    if not isinstance(message, Ok):
        actor.draining = False
        if actor.in_round:
            leave(world, actor)
        return
    actor.held, actor.draining = 0, False
    if not actor.in_round:
        checks.before_overwriting(world, actor, REGISTERED)
        actor.cells = [GARBAGE] * SEGMENTS


def promised(world: World, actor: Actor, message: Promise) -> None:
    """Take a promise: the first one, one with other sources, or that of another life of the server."""
    code = 100 * message.epoch + message.number
    rejoined = actor.phase == "joining" and actor.promised != 0
    checks.promise(world, actor, message, code, rejoined)
    moved = actor.promised not in (0, code)
    if moved:
        actor.verified = 0
        if actor.asked_done:
            actor.held = actor.promised
    same = {where[:2] for where in actor.sources.values()}
    actor.promised, actor.high = code, max(actor.high, code)
    read_from(world, actor, message.sources)
    keep_verified(world, actor, message.sources)
    if moved or same != {where[:2] for where in actor.sources.values()}:
        actor.running = False
        actor.verified = actor.verified if world.scene.verify else 0
    if actor.phase == "joining":
        actor.phase = "promised"
    else:
        actor.phase, actor.running = "reading", actor.touched


def keep_verified(world: World, actor: Actor, sources: tuple[Source, ...], again: bool = False) -> None:
    """Keep of what was verified by the checksums of one layout only what can be compared with those of another.

    Nothing if it has to be read `again`. What does not count is overwritten at any time.
    """
    if not world.scene.reshards or not sources:
        return
    before, derived, actor.derives = actor.verified, actor.derives, sources[0].layout[:1] == b"L"
    if (actor.derives and not derived) or again:
        actor.verified = 0
    for source in sources:
        if len(source.known) != 8 * source.prefix and source.partial:
            raise Violation(f"L12: {actor.name} may read {source.prefix} segments and knows {len(source.known)} bytes")
        if source.partial:
            actor.verified = min(actor.verified, source.prefix)
    if actor.touched and actor.verified < before:
        checks.before_overwriting(world, actor, STAGING if actor.mode == "stage" else REGISTERED, first=actor.verified)
        actor.filled[actor.verified :] = [GARBAGE] * (SEGMENTS - actor.verified)


def read_from(world: World, actor: Actor, sources: tuple[Source, ...]) -> None:
    """Read from these sources from now on; of losses only those of their leases matter."""
    actor.sources = {}
    for source in sources:
        session = next(w.session for w in world.server.workers.values() if w.id == source.worker)
        holder = world.by_session(session)
        life = -1 if holder is None else holder.life
        prefix = SEGMENTS if source.whole else source.prefix
        epoch = world.server.config.server_epoch
        actor.sources[source.lease] = (life, LETTERS.index(source.placement[:1]), prefix, epoch)
    actor.lost = {lease for lease in actor.lost if lease in actor.sources}


def begin_to_fill(world: World, actor: Actor) -> None:
    """Overwrite the memory from now on."""
    which = STAGING if actor.mode == "stage" else REGISTERED
    checks.before_overwriting(world, actor, which, first=actor.verified)
    actor.filled[actor.verified :] = [GARBAGE] * (SEGMENTS - actor.verified)
    actor.touched = actor.running = True
    actor.phase = "reading"


def nothing_newer(world: World, actor: Actor, message: NothingNewer) -> None:
    """Take the verdict that the version is there already."""
    code = 100 * message.epoch + message.number
    row = actor.filled if actor.touched else actor.cells
    if row != [code] * SEGMENTS:
        raise Violation(f"L2: {actor.name} is told that it has version {code}, and has {row}")
    actor.high = max(actor.high, code)
    if actor.mode == "install":
        unstage(world, actor)
    if actor.touched and actor.mode == "stage":
        actor.staged = code
    elif actor.touched:
        actor.held = code
    close(actor, code)


def commit(world: World, actor: Actor) -> None:
    """Hear that the round has committed."""
    code = actor.promised
    if actor.filled != [code] * SEGMENTS:
        raise Violation(f"L4, L13: {actor.name} has committed version {code} and has {actor.filled}")
    if actor.mode == "stage":
        actor.staged = code
    else:
        actor.held = code
    mode = actor.mode
    close(actor, code)
    if mode == "install":
        unstage(world, actor)


def end_round(world: World, actor: Actor) -> None:
    """Give a round up; if it touched memory, that is no version now."""
    uncertain, touched, mode = actor.asked_done, actor.touched, actor.mode
    close(actor)
    if mode == "stage" and touched:
        unstage(world, actor)
    elif touched:
        actor.held = 0
        if uncertain and not actor.draining:
            take_back(world, actor)
        elif not actor.draining:
            checks.before_overwriting(world, actor, REGISTERED)


def close(actor: Actor, code: int = 0) -> None:
    """Forget the round, but how it ended."""
    actor.ended = (actor.round, code)
    actor.greet, actor.came_back = actor.greet or (actor.came_back and code == 0), False
    actor.phase, actor.round, actor.promised, actor.verified = "idle", actor.round + 1, 0, 0
    actor.sources, actor.lost, actor.want = {}, set(), None
    actor.open = {number: kind for number, kind in actor.open.items() if kind not in ("join", "done")}
    actor.touched = actor.running = actor.unheard = actor.asked_done = actor.committed = actor.aborted = (
        actor.in_grace
    ) = False


def take_back(world: World, actor: Actor) -> None:
    """Ask for the copy back."""
    actor.draining = True
    world.ask(actor, "unpublish", Unpublish())


def unstage(world: World, actor: Actor) -> None:
    """Ask for the staged copy back."""
    actor.staged, actor.unstaging = 0, True
    world.ask(actor, "unstage", Unstage())


def leave(world: World, actor: Actor) -> None:
    """Break the round for all shards."""
    number = actor.round
    world.ask(actor, "told", LeaveRound(number, "state_error", "it cannot go on"))
    if actor.in_round and actor.round == number:
        end_round(world, actor)


def depart(world: World, actor: Actor, message: Reply) -> None:
    """Leave for good; that counts as a failure if nobody could take over."""
    world.failed = world.failed or not isinstance(message, Ok)
    world.ask(actor, "told", Leave())
    actor.alive, actor.phase = False, "over"


def offloaded(actor: Actor, message: Reply) -> None:
    """Take the answer to an offload copy: it serves, or is not needed any more."""
    if not isinstance(message, OffloadKept):
        actor.offloads.pop(actor.cells[0], None)


def drop_offload(world: World, actor: Actor, message: DropOffload) -> None:
    """Free an offload copy."""
    if message.copy == actor.offload_asked:
        actor.offload_asked = ""
    if message.placement:
        code = int(message.placement.partition(b".")[2])
        checks.before_overwriting(world, actor, OFFLOAD, code)
        actor.offloads.pop(code, None)


def reopened(actor: Actor) -> None:
    """Come back to the round after another hello; a read that runs goes on."""
    if not actor.in_round:
        return
    actor.lost.clear()
    actor.aborted = actor.committed = actor.unheard = False
    actor.phase = "rejoining"
