"""Simulated processes that run the real client: `connect()`, `Worker` and all its threads, over fibers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from tensorhub_core.client.connect import connect
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ClientConfig, ServerConfig
from tensorhub_core.errors import TensorHubError
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.settings import Settings
from tensorhub_core.state.machine import MachineConfig
from tests.sim import content
from tests.sim.dataplane import DataPlane
from tests.sim.fibers import Fiber, Process, Timeline, dispose, kill
from tests.sim.judge import Judge
from tests.sim.network import Network, SimLink
from tests.sim.shims import Promise, Queue, Waiters, clock_of

MODEL = "policy"
CALL_S = 20.0
CLIENT = ClientConfig(
    connect_timeout_s=5.0,
    call_timeout_s=CALL_S,
    close_timeout_s=5.0,
    segment_bytes=128,
    window=3,
    min_run_bytes=8,
    stall_s=1.5,
    transport="memory",
)
SERVER = {"lease_s": 3.0, "heartbeat_s": 0.75, "grace_s": 3.0, "dead_after_s": 9.0, "join_timeout_s": 10.0}


@dataclass(eq=False)
class Slot:
    """One shard of a replica, whatever process holds it now."""

    replica: str
    shard: int
    num_shards: int
    stream: str | None = None
    spot: bool = False
    zone: str = ""
    host: str = ""
    lives: int = 0
    life: Life | None = None
    boots: Callable[[Slot], Life] | None = None
    """How its process is started, if it is none that runs one worker."""

    @property
    def name(self) -> str:
        """Return replica/shard."""
        return f"{self.replica}/{self.shard}"


@dataclass
class Outcome:
    """How one call of a worker ended."""

    value: Any = None
    error: BaseException | None = None

    @property
    def good(self) -> bool:
        """Tell whether it returned."""
        return self.error is None


@dataclass(eq=False)
class Call:
    """One call of a worker, made by the thread that owns it. `touches`: it may write to the registered memory."""

    name: str
    make: Callable[[Worker], Any]
    timeout_s: float
    touches: bool
    end: Promise
    delay_s: float = 0.0
    began_s: float = 0.0
    paused_s: float = 0.0


@dataclass(eq=False)
class Life(Process):
    """One process of the cluster: its memory, its worker, and the call it is in."""

    slot: Slot
    name: str = ""
    alive: bool = True
    paused_until: float = 0.0
    ahead_s: float = 0.0
    fibers: list[Fiber] = field(default_factory=list)
    memory: dict[str, content.Bytes] = field(default_factory=dict)
    worker: Worker | None = None
    call: Call | None = None
    calls: Queue | None = None
    newest: tuple[int, int] = (0, -1)
    """The highest `latest` it was told."""

    @property
    def lost(self) -> bool:
        """Tell whether the worker is of no more use: superseded, or a read could not be stopped."""
        worker = self.worker
        return worker is None or worker._mailbox.over is not None or worker._runner.lost

    def workers(self) -> list[Worker]:
        """Return its workers."""
        return [] if self.worker is None else [self.worker]

    def memory_of(self, worker: Worker) -> dict[str, content.Bytes] | None:
        """Return the memory that a worker of this process has registered."""
        return self.memory

    def held(self) -> Iterator[tuple[Worker, Version, dict[str, content.Bytes]]]:
        """Yield what its workers say that they hold, and where."""
        if self.worker is not None and (version := self.worker.version) is not None:
            yield self.worker, version, self.memory

    def awaits(self, address: int) -> bool:
        """Tell whether a call waits for bytes that land at an address, if it is in registered memory."""
        ours = any(a.ctypes.data <= address < a.ctypes.data + a.nbytes for a in self.memory.values())
        return not ours or (self.call is not None and self.call.touches)


class Cluster:
    """Processes, networks and the hub of one world."""

    def __init__(
        self, seed: int, machine: Mapping[str, object], zones: tuple[str, ...] = ("",), hosts: int = 0
    ) -> None:
        chance = partial(random.Random)
        self.seed, self.zones, self.hosts = seed, zones, hosts
        self.timeline = Timeline(chance(f"{seed}/threads"))
        self.judge = Judge(self)
        config = MachineConfig(server_epoch=0, **{**SERVER, **machine})  # type: ignore[arg-type]
        self.network = Network(self.timeline, chance(f"{seed}/network"), config, self.judge.stepped)
        self.plane = DataPlane(self.timeline, chance(f"{seed}/plane"), self.network.weather, self.judge.lands)
        self.lives: list[Life] = []
        self.streams: list[str] = []
        self.script = Process("script")
        self._drawn = 0

    @property
    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.timeline.now

    def stand_ins(self) -> dict[tuple[str, str], object]:
        """Return what the client finds in place of the world."""
        client = "tensorhub_core.client."
        flow = partial(FlowSettings, chunk_bytes=200, most_chunk_bytes=800, min_bytes_per_s=16)
        return {
            (client + "session", "Link"): self._link,
            (client + "exactness", "ExactPolicy"): partial(ExactPolicy, min_segment_bytes=1),
            (client + "connect", "_transport_maker"): lambda transport, config: self._transport,
            (client + "connect", "secrets"): SimpleNamespace(token_hex=self._token),
            (client + "executor", "FlowSettings"): flow,
            (client + "offload", "available_bytes"): lambda: 1 << 30,
            **{(client + module, "available_bytes"): lambda: 1 << 30 for module in ("connect", "seeding", "mirror")},
            (client + "observer", "secrets"): SimpleNamespace(token_hex=self._token),
        }

    def _process(self) -> Process:
        assert self.timeline.current is not None
        return self.timeline.current.process

    def _link(self, addresses: tuple[str, ...], *_: object) -> SimLink:
        return SimLink(self.network, self._process(), addresses[0])

    def _transport(self) -> object:
        return self.plane.of(self._process())

    def _token(self, size: int) -> str:
        self._drawn += 1
        return f"token-{self._drawn}"

    # --- scripts: fibers that nobody kills --------------------------------------------------------------------------

    def play(self, name: str, script: Callable[[], None]) -> Fiber:
        """Run a script beside everything else."""
        fiber = Fiber(self.timeline, self.script, name, script)
        fiber.start()
        return fiber

    def sleep(self, seconds: float) -> None:
        """Let time pass for a script."""
        Waiters(self.timeline).wait(seconds)

    def await_that(self, ready: Callable[[], bool], timeout_s: float, every_s: float = 0.1) -> bool:
        """Wait until something is so."""
        end = self.now + timeout_s
        while not ready():
            if self.now >= end:
                return False
            self.sleep(every_s)
        return True

    # --- processes --------------------------------------------------------------------------------------------------

    def place(self, slot: Slot) -> None:
        """Say where a replica runs: the trainer in the first zone, the others where the scenario's seed draws them."""
        chance = random.Random(f"{self.seed}/place of {slot.replica}")
        slot.zone = self.zones[0] if slot.replica == "trainer" else chance.choice(self.zones)
        slot.host = f"host{chance.randrange(self.hosts)}" if self.hosts else slot.replica

    def boot(self, slot: Slot) -> Life:
        """Start a process in a slot; an older one, if it still lives, is superseded by its hello."""
        if slot.boots is not None:
            return slot.boots(slot)
        slot.lives += 1
        life = Life(slot, f"{slot.name}#{slot.lives}")
        life.memory = content.empty(slot.shard, slot.num_shards)
        life.calls = Queue(self.timeline)
        slot.life = life
        self.lives.append(life)
        self.judge.note(f"start {life.name}")
        Fiber(self.timeline, life, f"{life.name} main", lambda: self._main(life)).start()
        return life

    def _main(self, life: Life) -> None:
        slot, settings = life.slot, Settings(client=CLIENT, server=ServerConfig(), origins={})
        more = {"replica": slot.replica, "shard": slot.shard, "num_shards": slot.num_shards, "stream": slot.stream}
        while life.worker is None:
            try:
                worker = connect(
                    "sim://hub",
                    model=MODEL,
                    zone=slot.zone,
                    host=slot.host or slot.replica,
                    spot=slot.spot,
                    settings=settings,
                    **more,
                )
                worker.register(life.memory, content.boxes(slot.shard, slot.num_shards))
                life.worker = worker
            except TensorHubError as error:
                self.judge.ended(life, Call("connect", lambda worker: None, 0.0, False, Promise(self.timeline)), error)
                Waiters(self.timeline).wait(0.5)
        assert life.calls is not None
        while True:
            self._perform(life, life.calls.get())

    def _perform(self, life: Life, call: Call) -> None:
        worker = life.worker
        assert worker is not None
        life.call = call
        Waiters(self.timeline).wait(call.delay_s)
        self.judge.began(life, call)
        try:
            outcome = Outcome(call.make(worker))
        except Exception as error:
            outcome = Outcome(error=error)
        if life.alive:
            self.judge.ended(life, call, outcome.error, outcome.value)
            call.end.set_result(outcome)

    def kill(self, life: Life) -> None:
        """End a process at once."""
        if not life.alive:
            return
        self.judge.note(f"kill {life.name}")
        kill(life)
        for worker in life.workers():
            worker._finalizer.detach()
        self.network.cut(life.name)
        calls = [] if life.calls is None else list(life.calls._items)
        for call in (*calls, *([] if life.call is None else [life.call])):
            call.end.set_result(Outcome(error=Killed(life.name)))
        life.call = None

    def pause(self, life: Life, seconds: float) -> None:
        """Stop a process, as SIGSTOP does."""
        self.judge.note(f"pause {life.name} for {seconds:.1f} s")
        before = max(life.paused_until, self.now)
        life.paused_until = max(life.paused_until, self.now + seconds)
        if life.call is not None:
            life.call.paused_s += life.paused_until - before

    # --- calls ------------------------------------------------------------------------------------------------------

    def ask(
        self,
        life: Life,
        name: str,
        make: Callable[[Worker], Any],
        timeout_s: float = CALL_S,
        touches: bool = False,
        delay_s: float = 0.0,
    ) -> Promise:
        """Let a process's main thread make a call; its end is an `Outcome`."""
        call = Call(name, make, timeout_s, touches, Promise(self.timeline), delay_s)
        if life.alive and life.calls is not None:
            life.calls.put(call)
        else:
            call.end.set_result(Outcome(error=Killed(life.name)))
        return call.end

    def end(self) -> None:
        """Let go of everything."""
        self.timeline.clear()
        dispose([self.script, *self.lives])
        self.lives.clear()


class Killed(Exception):
    """The process was killed during the call."""


__all__ = ["CALL_S", "Call", "Cluster", "Killed", "Life", "Outcome", "Slot", "clock_of"]
