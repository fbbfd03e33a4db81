"""The processes of a workload, and one update of everybody by each of the ways that are compared.

Every way starts from the same moment: the trainer has new weights, and `train_s` later its optimizer wants to change
them: what it must wait then is its stall. A rollout pauses at its offset from that moment. All are checked to hold the
trainer's bytes in the end.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.clusters.cluster import Cluster, Topology
from bench.common import hub
from bench.netns import sent_and_received_bytes
from bench.remote import Remote

TRAINER = "trainer"
COUNT = 300
TIMEOUT_S = 100.0
_LEAD_S = 0.1
"""Until all processes have their orders."""
_PORT = 29400


@dataclass(frozen=True)
class Plan:
    """How large the model is, and in which pieces it is moved, by us and by a star alike."""

    total_bytes: int
    piece_bytes: int
    train_s: float = 0.2
    """From new weights until the trainer's optimizer wants to change them again."""


@dataclass(frozen=True)
class Outcome:
    """One update: how long each rollout stalled, what the trainer waited, what crossed which link."""

    stalls_s: Mapping[str, float]
    trainer_s: float
    seconds: float
    """From the new weights at the trainer until the last rollout has them."""
    sent_bytes: int
    entered_bytes: Mapping[str, int]
    busy: float
    """The share of time in which the CPUs did anything, others' work too."""

    @property
    def stall_s(self) -> float:
        """Return what all GPUs lost together, the trainer's too."""
        return self.rollouts_s + self.trainer_s

    @property
    def rollouts_s(self) -> float:
        """Return what the rollouts lost together."""
        return sum(self.stalls_s.values())


class Crew:
    """A trainer and rollouts on the hosts of a cluster; a context manager."""

    def __init__(self, cluster: Cluster, server: str, plan: Plan, rollouts: Sequence[str]) -> None:
        self.cluster, self.server, self.plan = cluster, server, plan
        self.rollouts = list(rollouts)
        self.version = 0
        self._ports = 0
        self.nodes: dict[str, Remote] = {}
        self.transport = ""
        self.model = ""
        self._right = ""
        for name in (TRAINER, *rollouts):
            self.nodes[name] = self._start(name)
        size = {"total_bytes": plan.total_bytes, "count": COUNT, "seed": 0}
        self.all([TRAINER, *rollouts], "make", **size)

    def _start(self, name: str) -> Remote:
        # Or UCX would read the other process's memory: it is on the same machine, whatever its network.
        return Remote("clusters/member.py", prefix=self.cluster.hosts[name].command, environment={"UCX_TLS": "tcp"})

    def all(self, names: Sequence[str], command: str, **arguments: Any) -> dict[str, Any]:
        """Let several do the same at once; return what each answers."""
        return self.gather({name: self.nodes[name].begin(command, **arguments) for name in names})

    def gather(self, futures: Mapping[str, Future[Any]]) -> dict[str, Any]:
        """Wait for answers."""
        return {name: future.result(TIMEOUT_S) for name, future in futures.items()}

    def connect(self, transport: str, names: Sequence[str]) -> None:
        """Make everybody a worker of a new model, and let them hold its first version."""
        self.transport, self.model = transport, f"policy {secrets.token_hex(3)}"
        for name in (TRAINER, *names):
            self.nodes[name].do("raw_end")
        futures = {name: self.nodes[name].begin("connect", **self.identity(name)) for name in (TRAINER, *names)}
        self.gather(futures)
        self.all([TRAINER, *names], "register")
        self.ours(names)

    def identity(self, name: str, spot: bool = False) -> dict[str, Any]:
        """Return the arguments of `connect` for a host's worker."""
        settings = {"segment_bytes": self.plan.piece_bytes, "interface": "eth0", "close_timeout_s": 5.0}
        where = {"zone": self.cluster.hosts[name].zone, "host": name}
        who = {"server": self.server, "model": self.model, "replica": name, "transport": self.transport, "spot": spot}
        return {**who, **where, "settings": settings}

    def ours(
        self,
        names: Sequence[str],
        how: str = "update_at",
        offsets: Mapping[str, float] | None = None,
        also: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Publish the next version and let rollouts `update_at`, `stage_at` or `follow`; `also` runs meanwhile."""
        self.version += 1
        self.renew()
        meter = Meter(self)
        at_s = time.monotonic() + _LEAD_S
        trainer = self.nodes[TRAINER].begin("publish_at", at_s=at_s, version=self.version)
        arguments = {"timeout_s": TIMEOUT_S}
        futures = {}
        for name in names:
            if how == "follow":
                futures[name] = self.nodes[name].begin(how, newer_than=self.version - 1, **arguments)
            else:
                when = at_s + (offsets or {}).get(name, 0.0)
                futures[name] = self.nodes[name].begin(how, at_s=when, version=self.version, **arguments)
        published = trainer.result(TIMEOUT_S)
        release = self.nodes[TRAINER].begin(
            "release_at", at_s=published["ended_s"] + self.plan.train_s, timeout_s=TIMEOUT_S
        )
        also()
        got = self.gather(futures)
        released = release.result(TIMEOUT_S)
        waited_s = released["ended_s"] - released["began_s"] + published["ended_s"] - published["began_s"]
        outcome = meter.outcome(got, at_s, waited_s)
        self.check(names)
        return outcome

    def star(self, names: Sequence[str], transport: str, offsets: Mapping[str, float] | None = None) -> Outcome:
        """Let rollouts read from the trainer, all on their own; it keeps its memory until the last has read."""
        self.renew()
        self.all([TRAINER, *names], "raw_end")
        self.all(names, "raw_prepare", transport=transport)
        offer = self.nodes[TRAINER].do("raw_serve", transport=transport, interface="eth0")
        how = {"transport": transport, "interface": "eth0", "chunk_bytes": self.plan.piece_bytes, **offer}
        meter = Meter(self)
        at_s = time.monotonic() + _LEAD_S
        when = {name: at_s + (offsets or {}).get(name, 0.0) for name in names}
        got = self.gather({name: self.nodes[name].begin("star", at_s=when[name], **how) for name in names})
        last_s = max(each["ended_s"] for each in got.values())
        outcome = meter.outcome(got, at_s, max(0.0, last_s - at_s - self.plan.train_s))
        self.check(names)
        return outcome

    def join(self, names: Sequence[str]) -> float:
        """Make trainer and rollouts the ranks of a collective, in this order; return the seconds that it took."""
        self._ports += 1
        url = f"tcp://{self.cluster.hosts[TRAINER].address}:{_PORT + self._ports}"
        ranks = [TRAINER, *names]
        began = time.monotonic()
        self.gather(
            {
                name: self.nodes[name].begin("join", rank=rank, size=len(ranks), url=url)
                for rank, name in enumerate(ranks)
            }
        )
        return time.monotonic() - began

    def collective(
        self, names: Sequence[str], way: str, piece_bytes: int, offsets: Mapping[str, float] | None = None
    ) -> Outcome:
        """Let the group that has joined broadcast the trainer's weights; the trainer trains meanwhile, if it can."""
        self.renew()
        everybody = [TRAINER, *names]
        self.all(everybody, "pack")
        meter = Meter(self)
        at_s = time.monotonic() + _LEAD_S
        when = {name: at_s + (offsets or {}).get(name, 0.0) for name in everybody}
        how = {"way": way, "piece_bytes": piece_bytes}
        got = self.gather({name: self.nodes[name].begin("collective", at_s=when[name], **how) for name in everybody})
        trainer = got.pop(TRAINER)
        outcome = meter.outcome(got, at_s, max(0.0, trainer["ended_s"] - at_s - self.plan.train_s))
        self.check(names, "packed_digest")
        return outcome

    def renew(self) -> None:
        """Give the trainer other weights."""
        seed = secrets.randbits(32)
        self._right = self.nodes[TRAINER].do("make", total_bytes=self.plan.total_bytes, count=COUNT, seed=seed)

    def check(self, names: Sequence[str], command: str = "digest") -> None:
        """End everything unless these hold the weights that the trainer had last."""
        wrong = [name for name, found in self.all(names, command).items() if found != self._right]
        if wrong:
            raise SystemExit(f"other bytes than the trainer's at {', '.join(wrong)}")
        for node in self.nodes.values():
            while not node.events.empty():
                node.events.get()

    def close(self) -> None:
        """End the processes, all at once: nobody waits for what another still reads."""
        for node in self.nodes.values():
            node.kill()
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def crew_on(topology: Topology, plan: Plan, rollouts: Sequence[str]) -> Iterator[Crew]:
    """Make a cluster with a hub on its host `hub`, and the crew."""
    with Cluster(topology) as cluster:
        host = cluster.hosts["hub"]
        # As it comes: the newest version is retained, so a trainer that wants its memory back leaves a copy if need be.
        serving = hub("--log-level", "error", prefix=host.command, bind=f"tcp://{host.address}:7077")
        with serving as (server, _), Crew(cluster, server, plan, rollouts) as crew:
            yield crew


class Meter:
    """What links and CPUs had done when it was made."""

    def __init__(self, crew: Crew) -> None:
        self._cluster, self._publisher = crew.cluster, crew.nodes[TRAINER].pid
        self._sent, self._entered, self._cpus = self._read()

    def _read(self) -> tuple[int, dict[str, int], tuple[float, float]]:
        zones = self._cluster.topology.zones
        entered = {zone: self._cluster.entered_bytes(zone) for zone in zones} if len(zones) > 1 else {}
        return sent_and_received_bytes(self._publisher)[0], entered, busy_and_all()

    def outcome(self, got: Mapping[str, Mapping[str, Any]], at_s: float, trainer_s: float) -> Outcome:
        """Return what has come out since, from the rollouts' answers."""
        sent, entered, cpus = self._read()
        busy, spent = (after - before for after, before in zip(cpus, self._cpus, strict=True))
        stalls_s = {name: each["ended_s"] - each["paused_s"] for name, each in got.items()}
        shown = (f"{name} {stall_s:.2f} s{_sources(got[name])}" for name, stall_s in stalls_s.items())
        print(f"stalls: {', '.join(shown)}; trainer {trainer_s:.2f} s", file=sys.stderr, flush=True)
        return Outcome(
            stalls_s=stalls_s,
            trainer_s=trainer_s,
            seconds=max(each["ended_s"] for each in got.values()) - at_s,
            sent_bytes=sent - self._sent,
            entered_bytes={zone: after - self._entered[zone] for zone, after in entered.items()},
            busy=busy / spent if spent else 0.0,
        )


def _sources(got: Mapping[str, Any]) -> str:
    """Say whom a rollout has read from, if that is known."""
    return f" <- {' + '.join(got['first_s'])}" if got.get("first_s") else ""


def busy_and_all() -> tuple[float, float]:
    """Return the seconds that the CPUs were busy and there in all, since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return float(sum(fields) - fields[3] - fields[4]), float(sum(fields))
