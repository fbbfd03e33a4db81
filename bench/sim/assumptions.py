"""Everything the simulator assumes, in one place: a value, its unit, and where it comes from or why it was chosen.

`python -m bench.sim --assumptions` prints the table as markdown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tensorhub_core.client.announcing import ANNOUNCE_S, SEEN_S
from tensorhub_core.config import ClientConfig
from tensorhub_core.state.records import MachineConfig

T = TypeVar("T", int, float, str, bool)

PAPER = "the paper (arXiv 2604.09107)"
UNSAID = f"assumption: no figure in what could be read of {PAPER}"
_MACHINE, _CLIENT = MachineConfig(1), ClientConfig()


@dataclass(frozen=True)
class Assumption(Generic[T]):
    """One assumption."""

    value: T
    unit: str
    why: str


@dataclass(frozen=True)
class Size:
    """A model: its parameters, in bfloat16, and on how many GPUs one replica of it runs."""

    name: str
    parameters: float
    gpus: int
    why: str

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all weights."""
        return int(2 * self.parameters)

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of one GPU's shard."""
        return self.total_bytes // self.gpus


_FITS = "sizes of the paper's models; GPUs per replica: assumption, weights take at most half of 80 GB on each"
SIZES = {
    size.name: size
    for size in (
        Size("9B", 9e9, 1, _FITS),
        Size("36B", 36e9, 4, _FITS),
        Size("260B", 260e9, 16, _FITS),
        Size("1T", 1e12, 64, _FITS),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """All of them; `replace` one to ask what if."""

    nic_bytes_per_s: Assumption[float] = Assumption(
        25e9, "B/s", f"200 Gbit/s of RDMA for each GPU and direction: 22 GB/s are 88 % of it in {PAPER}"
    )
    nic_share: Assumption[float] = Assumption(
        0.88,
        "of the line",
        f"what a read gets of it: 22 GB/s for 50 GB, by a summary of {PAPER}. The same for all",
    )
    fabric: Assumption[str] = Assumption(
        "does not block", "", "within a zone only network cards limit: assumption, as in rail-optimised GPU clusters"
    )
    bus_bytes_per_s: Assumption[float] = Assumption(
        200e9, "B/s", "what a GPU gives to its host's neighbours: NVLink of an H800. Each takes no more than by a card"
    )
    gpus_per_host: Assumption[int] = Assumption(8, "GPUs", "each with a network card of its own; usual")
    wan_bytes_per_s: Assumption[float] = Assumption(
        12.5e9, "B/s", f"100 Gbit/s between two datacentres and direction, for all flows together; {UNSAID}"
    )
    wan_share: Assumption[float] = Assumption(0.9, "of the line", "TCP with many streams; assumption")
    latency_s: Assumption[float] = Assumption(
        100e-6, "s", "a message between a worker and the hub, one way, in one zone: assumption, TCP in a datacentre"
    )
    wan_latency_s: Assumption[float] = Assumption(
        0.015, "s", "the same between zones: 30 ms round trip; assumption. The hub is in the trainer's zone"
    )
    hub_message_s: Assumption[float] = Assumption(
        20e-6,
        "s",
        "the hub's time for one request and its answer: 54,000-71,000 requests/s measured on one core"
        " (bench/results/control_plane.json). Constant: the time of the machine in this process is not virtual time",
    )
    hub_push_s: Assumption[float] = Assumption(
        12e-6, "s", "each message more that a request brings about: 10-16 ms for 1,000 waiters (the same file)"
    )
    hub_join_s: Assumption[float] = Assumption(
        50e-6,
        "s",
        "choosing sources for a reader: 61-72 ms for 1,000 joins in all, with their messages (the same file)",
    )
    hub_tick_worker_s: Assumption[float] = Assumption(
        1e-6, "s", "the hub's look at each worker, four times a lease: assumption from the machine's own time"
    )
    hub_bytes_per_s: Assumption[float] = Assumption(
        2e9, "B/s", "blobs (checksums, layouts) through ZeroMQ: 2.1-2.8 GB/s measured (FACTS.md, section 5)"
    )
    heartbeats: Assumption[str] = Assumption(
        "in 20 batches a period",
        "",
        "every worker's heartbeat is a real message that costs the hub its time; they arrive in 20 batches a period",
    )
    announce_s: Assumption[float] = Assumption(
        ANNOUNCE_S,
        "s",
        "least time between two announcements of a worker that followers cannot look at; else"
        f" {1e3 * SEEN_S:g} ms: client/announcing.py, the real pacing",
    )
    announces_one: Assumption[bool] = Assumption(
        True, "", "the next announcement waits for the answer to the last one (what if not: 0)"
    )
    looks: Assumption[bool] = Assumption(
        True,
        "",
        "followers look at their source's progress themselves, 1 ms after news, then later and later up to 8 ms, each"
        " time at the cost of a message there and back: client/looking.py, the real rule (what if they heard of it"
        " through the hub: no)",
    )
    poll_s: Assumption[float] = Assumption(0.005, "s", "how often a worker looks: client/driver.py, _POLL_S")
    segment_bytes: Assumption[int] = Assumption(_CLIENT.segment_bytes, "B", "default setting: the unit of a prefix")
    most_flight_bytes: Assumption[int] = Assumption(
        48 << 20,
        "B",
        "at most: so much has come and is not verified, so that no follower may read it: three batches of 16 MiB."
        " Measured at 7 GB/s with both CPUs busy: 28 to 44 MiB (bench/hops.py). What is asked for behind that has not"
        " come yet: the reads of one source end one after the other",
    )
    flight_s: Assumption[float] = Assumption(
        0.0375,
        "s",
        "where that is less: what a source gives in this time is in flight, and taken for not verified: client/flow.py,"
        " 1.5 x _EASY_S. Behind a link of 200 Mbit/s it is half a millisecond in truth (bench/hops.py)",
    )
    plan_s: Assumption[float] = Assumption(0.002, "s", "planning a raw read: bench/results/planning.json; assumption")
    settle_s: Assumption[float] = Assumption(0.001, "s", "from the last verified byte to Done; assumption")
    verify: Assumption[str] = Assumption(
        "keeps up", "", "checksums are computed as fast as bytes arrive: on GPUs an assumption, on CPUs measured"
    )
    lost_peer_s: Assumption[float] = Assumption(
        0.053, "s", "until a reader notices that its source was killed: 1-53 ms measured (FACTS.md, section 5)"
    )
    hello_within: Assumption[float] = Assumption(
        0.25, "of a lease", "a worker tries a lost server at least four times a lease (client/search.py)"
    )
    restart_s: Assumption[float] = Assumption(2.0, "s", "until a killed hub listens again; assumption: a supervisor")
    lease_s: Assumption[float] = Assumption(_MACHINE.lease_s, "s", "default setting")
    heartbeat_s: Assumption[float] = Assumption(_MACHINE.heartbeat_s, "s", "default setting")
    grace_s: Assumption[float] = Assumption(_MACHINE.grace_s, "s", "default setting: after a restart the hub listens")
    agents: Assumption[str] = Assumption(
        "like a replica",
        "",
        "a seed agent has a replica's shards and network cards, and host memory; assumption",
    )
    layouts: Assumption[str] = Assumption(
        "alike", "", "the trainer publishes in the rollouts' layout, for all contenders: none of them reshards here"
    )
    earlier: Assumption[int] = Assumption(
        2,
        "versions",
        "have passed before the one that is measured, for all contenders: all hold the one before it, and withdraw it,"
        " which costs ours a round trip to the hub for each worker; the trainer's time to withdraw and publish counts",
    )
    skew_s: Assumption[float] = Assumption(
        10.0,
        "s",
        "standalone: rollouts are ready for new weights evenly within this time, when their running requests end"
        f" (long answers); {UNSAID}. The figure shows the ratio over this value, from 0",
    )
    nccl_share: Assumption[float] = Assumption(
        0.88, "of the line", "what a collective broadcast gets: as much as a read; generous"
    )
    nccl_chunk_bytes: Assumption[int] = Assumption(4 << 20, "B", "what one rank passes on to the next; usual")
    nccl_hop_s: Assumption[float] = Assumption(20e-6, "s", "time of a hop beside the bytes; usual")
    nccl_setup_s: Assumption[float] = Assumption(
        1.0, "s", "a new communicator when members come or go, whatever their number: assumption, generous"
    )
    nccl_setup_rank_s: Assumption[float] = Assumption(
        2e-3, "s", "the same, for each rank: bootstrap of a communicator of 1,000 ranks takes seconds; assumption"
    )
    ucx_setup_s: Assumption[float] = Assumption(0.005, "s", "a reader of the star: connection and addresses; generous")
    elastic_joiners: Assumption[int] = Assumption(
        8, "replicas", f"spot rollouts that come at the same moment; {UNSAID}. The figure shows other numbers"
    )
    remote_replicas: Assumption[int] = Assumption(
        16, "replicas", f"rollouts in the other datacentre; {UNSAID}. The figure shows other numbers"
    )

    @property
    def link_bytes_per_s(self) -> float:
        """Return what one direction of a network card gives to reads."""
        return self.nic_bytes_per_s.value * self.nic_share.value

    @property
    def between_bytes_per_s(self) -> float:
        """Return what one direction between two zones gives to reads."""
        return self.wan_bytes_per_s.value * self.wan_share.value

    def flight_bytes(self, rate: float) -> float:
        """Return how much of a read is in flight at a rate: on its way, but not verified."""
        return min(float(self.most_flight_bytes.value), max(rate * self.flight_s.value, 256 << 10))


def through_the_hub(assumptions: Assumptions) -> Assumptions:
    """Return what would be if followers did not look themselves."""
    return replace(assumptions, looks=Assumption(False, "", "what if"))


def table(assumptions: Assumptions) -> str:
    """Write all assumptions as a markdown table."""
    rows = ["| what | value | where from, or why |", "| --- | --- | --- |"]
    for name in Assumptions.__dataclass_fields__:
        each: Assumption[str] = getattr(assumptions, name)
        rows.append(f"| `{name}` | {_shown(each.value, each.unit)} | {each.why} |")
    for size in SIZES.values():
        gpus = "1 GPU" if size.gpus == 1 else f"{size.gpus} GPUs: {size.shard_bytes / 1e9:,.1f} GB each"
        rows.append(f"| `{size.name}` | {size.total_bytes / 1e9:,.0f} GB on {gpus} | {size.why} |")
    return "\n".join(rows)


def _shown(value: float | str | bool, unit: str) -> str:
    """Write a value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in ("B", "B/s"):
        return f"{value / 1e9:g} G{unit}" if value >= 1e9 else f"{value / (1 << 20):g} Mi{unit}"
    if unit == "s" and 0 < value < 0.1:
        return f"{value * 1e3:g} ms"
    return f"{value:,g} {unit}"
