"""What must be true in every simulated world, checked after every step of the server and at both ends of every call."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensorhub_core.client import worker as client
from tensorhub_core.client.staged import Staged
from tensorhub_core.client.versions import Version
from tensorhub_core.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    ServerUnreachable,
    StateError,
    TransportError,
    VersionUnavailable,
)
from tensorhub_core.state.events import Effect, Event, Log, Received
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import GetBlob, Heartbeat, PutBlob
from tensorhub_core.state.records import Copy, CopyState, Worker
from tensorhub_core.wire.codec import decode_reply, decode_request, split
from tests.sim import content
from tests.sim.zone_watch import ZoneWatch

if TYPE_CHECKING:
    from tests.sim.cluster import Call, Cluster, Life
    from tests.sim.dataplane import SimTransport
    from tests.sim.fibers import Process

EXPECTED = (DeadlineExceeded, ServerUnreachable, VersionUnavailable, CorruptTransfer, StateError, TransportError)
"""What a caller may hear in bad weather."""
_LIGHT = (GetBlob, Heartbeat, PutBlob)
"""What hardly changes anything: all is checked after every eighth of these, and after every other step."""
SLACK_S = 4.0
"""How much later than its deadline a call may end: the server's last word (2 s), a read that stops, system threads."""


class Violation(AssertionError):
    """Something that must never happen happened."""


class Judge:
    """The knowing observer of one world."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.lines: list[str] | None = None
        self.errors: dict[str, int] = {}
        self.good: dict[str, int] = {}
        self.steps = self.silences = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._known: dict[bytes, int] = {}
        self.traced = False
        self.zones = ZoneWatch()

    # --- the trace --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.traced:
            line = f"{self._cluster.now:11.4f}  {text}"
            self._hash.update(line.encode())
            if self.lines is not None:
                self.lines.append(line)

    def sent(self, name: str, frames: list[bytes], to_hub: bool) -> None:
        """Trace a message."""
        header = split(frames)
        message = decode_request(header) if to_hub else decode_reply(header)
        arrow = f"{name} -> hub" if to_hub else f"hub -> {name}"
        self.note(f"{arrow}  #{header.request} {type(message).__name__}{self._brief(message)}")

    def _brief(self, value: object) -> str:
        if isinstance(value, bytes):
            return f"b{self._known.setdefault(value, len(self._known))}"  # addresses differ from run to run
        if isinstance(value, msgspec.Struct):
            return "(" + ", ".join(f"{f}={self._brief(getattr(value, f))}" for f in value.__struct_fields__) + ")"
        if isinstance(value, tuple):
            return "[" + ", ".join(map(self._brief, value)) + "]"
        return str(value)

    @property
    def hash(self) -> str:
        """Return the hash of the trace so far."""
        return self._hash.hexdigest()

    # --- the server -------------------------------------------------------------------------------------------------

    def stepped(self, event: Event, effects: list[Effect]) -> None:
        """Check everything after a step of the server."""
        self.steps += 1
        state = self._cluster.network.hub.state
        for effect in effects:
            if isinstance(effect, Log):
                self.note(f"hub: {effect.text}")
                self.silences += "is silent" in effect.text
        if isinstance(event, Received) and isinstance(event.message, _LIGHT) and len(effects) == 1 and self.steps % 8:
            return
        broken = check(state)
        if broken:
            raise Violation(f"invariants: {broken}")
        wrong = self.zones.look(self._cluster.now, state, event, effects)
        if wrong:
            raise Violation(f"L10: {wrong}")
        for lease in state.leases.values():
            copy = state.copies[lease.copy]
            if copy.state in (CopyState.PUBLISHED, CopyState.DRAINING):
                self._check_leased(copy, state.workers[copy.worker])

    def _check_leased(self, copy: Copy, worker: Worker) -> None:
        """Check the truth: what a lease lets a reader read is in the memory of its holder (L3)."""
        life = self._life_of(worker)
        holder = None if life is None or not life.alive else self._holder_of(life, worker)
        if life is None or holder is None:
            return
        memory = self._memory_of(life, holder, copy, worker)
        num_shards = holder._identity.num_shards
        if memory is not None and self.stream_of(memory, copy.key[1], worker.shard, num_shards) is None:
            raise Violation(f"L3: {life.name} holds other bytes than version {copy.key}, which somebody may read")

    def _holder_of(self, life: Life, worker: Worker) -> client.Worker | None:
        """Return the worker of a process that has a session."""
        link: object = self._cluster.network.hub.peers[worker.session].link
        return next((w for w in life.workers() if w._session._link is link), None)

    def _memory_of(
        self, life: Life, holder: client.Worker, copy: Copy, worker: Worker
    ) -> dict[str, content.Bytes] | None:
        """Return the memory in which a copy lies, as far as it can be told."""
        resources: Any = holder._resources
        if copy is worker.copy:
            return life.memory_of(holder)
        if copy is worker.staged:
            buffers = None if resources.room.memory is None else resources.room.memory.buffers
        else:
            kept = [entry.memory for entry in resources.offloads._entries if entry.id == copy.id]
            buffers = kept[0]._arena.buffers if kept and kept[0] is not None else None
        layout = None if resources.memory is None else resources.memory.layout
        if buffers is None or layout is None:
            return None
        names = [layout.tensors[group[0]].name for group in layout.storages]
        return dict(zip(names, buffers, strict=True))

    def _life_of(self, worker: Worker) -> Life | None:
        connection = self._cluster.network.hub.peers.get(worker.session)
        if connection is None:
            return None
        process: Any = connection.link.process
        return process

    def stream_of(self, memory: dict[str, content.Bytes], number: int, shard: int, num_shards: int) -> str | None:
        """Return the training run whose version `number` is in a memory, byte by byte; None: no version is."""
        for stream in reversed(self._cluster.streams):
            if content.holds(memory, stream, number, shard, num_shards):
                return stream
        return None

    # --- the data plane ---------------------------------------------------------------------------------------------

    def lands(self, reader: SimTransport, source: Process, address: int, length_bytes: int) -> None:
        """Check that bytes land only where a call waits for them (L9), and count those that come from elsewhere."""
        life: Any = reader.process
        there: Any = source
        if life.slot.zone != there.slot.zone:
            self.zones.crossed_bytes[life.slot.zone] += length_bytes
        end = address + length_bytes
        if not any(r.address <= address and end <= r.address + r.length_bytes for r in reader.writable):
            raise Violation(f"L9: bytes land at {life.name} in memory that was given back")
        if not life.awaits(address):
            raise Violation(f"L9: a late write at {life.name}: {None if life.call is None else life.call.name}")

    # --- calls ------------------------------------------------------------------------------------------------------

    def began(self, life: Life, call: Call) -> None:
        """Note a call, check what the worker holds before it, and watch that it ends."""
        call.began_s = self._cluster.now
        call.paused_s = max(0.0, life.paused_until - self._cluster.now)
        life.call = call
        self.note(f"{life.name}: {call.name}()")
        self.check_holding(life)
        self._watch(life, call)

    def _watch(self, life: Life, call: Call) -> None:
        due_s = call.began_s + call.timeout_s + call.paused_s + SLACK_S

        def look() -> None:
            if life.call is call and life.alive:
                if call.began_s + call.timeout_s + call.paused_s + SLACK_S > due_s:
                    return self._watch(life, call)
                raise Violation(f"{call.name}() of {life.name} hangs: {self._cluster.now - call.began_s:.1f} s")

        self._cluster.timeline.at(due_s, look)

    def ended(self, life: Life, call: Call, error: BaseException | None, value: object = None) -> None:
        """Check how a call ended."""
        life.call = None
        if error is not None:
            self.errors[type(error).__name__] = self.errors.get(type(error).__name__, 0) + 1
            self.note(f"{life.name}: {call.name}() raised {type(error).__name__}: {error}")
            if not isinstance(error, EXPECTED):
                raise error
            return
        self.good[call.name] = self.good.get(call.name, 0) + 1
        self.note(
            f"{life.name}: {call.name}() = {value if isinstance(value, Version | None) else type(value).__name__}"
        )
        if call.name in ("update", "stage", "wait") and isinstance(value, Version | Staged):
            key = value.version.key if isinstance(value, Staged) else value.key
            if key < life.newest:
                raise Violation(f"L10: {life.name} was told {key} after {life.newest}")
            life.newest = key
        self.check_holding(life)

    def check_holding(self, life: Life) -> None:
        """Check that the memory is the version that the worker says it holds, in every byte (L1, L3, L12)."""
        for worker, version, memory in life.held():
            who = worker._identity
            if self.stream_of(memory, int(version), who.shard, who.num_shards) is None:
                raise Violation(f"{life.name} holds version {version!r}, but its memory is something else")


def scribble(memory: dict[str, content.Bytes]) -> None:
    """Change memory that was given back: whoever still reads it gets what it deserves."""
    for array in memory.values():
        np.bitwise_xor(array, 0x5A, out=array)
