"""Where workers run, and which leases share a link: those that leave one NIC, arrive by one, or cross into one zone.

What a lease counts for is noted with it, so that it is taken back in the same place whatever workers say later.
"""

from __future__ import annotations

from tensorhub_core.ids import LeaseId, VersionKey
from tensorhub_core.schedule.sources import Place
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import note_readers
from tensorhub_core.state.records import Copy, Group, Lease, ModelState, Seat, Worker


def seat_of(group: Group, worker: Worker) -> Seat:
    """Return where a worker runs, by what it and the last of its replica have said; noted at a hello."""
    zone, host, rail = group.zone, worker.host, worker.rail
    nic, machine = (f"{zone}/{host}/{rail}", f"{zone}/{host}") if host else (worker.id, "")
    return Seat(Place(zone, host, rail), nic, machine)


def crosses(source: Place, reader: Place) -> bool:
    """Tell whether bytes go from one zone into another; what is not known is no other zone."""
    return bool(source.zone and reader.zone) and source.zone != reader.zone


def ingress_of(s: Step, worker: Worker) -> int:
    """Return how many others read by a worker's NIC."""
    others = s.state.flows.ingress.get(worker.seat.nic, 0)
    return others - arrives(s, worker) if others else 0


def arrives(s: Step, worker: Worker) -> bool:
    """Tell whether a worker reads by its NIC already."""
    return bool(worker.leases) and any(s.state.leases[lease].ingress for lease in worker.leases)


def note_lease(s: Step, lease: Lease, copy: Copy) -> None:
    """Count a new lease where it goes by; a reader of several sources arrives once."""
    holder, reader = s.holder(copy), s.state.workers[lease.reader]
    here, there = reader.seat.place, holder.seat.place
    if not (here.host and here.host == there.host and here.zone == there.zone):
        lease.egress = holder.seat.nic
        if not arrives(s, reader):
            lease.ingress = reader.seat.nic
    if crosses(there, here):
        lease.crosses = (copy.key, here.zone)
        s.model(reader).index.crossing.setdefault(lease.crosses, set()).add(lease.id)
    count(s, lease, 1)


def forget_lease(s: Step, lease: Lease) -> None:
    """Take a lease back where it was counted; others of a zone may have waited for what crossed under it."""
    count(s, lease, -1)
    reader = s.state.workers.get(lease.reader)
    if lease.crosses is None or reader is None:
        return
    model = s.model(reader)
    model.index.crossing[lease.crosses].discard(lease.id)
    if not model.index.crossing[lease.crosses]:
        del model.index.crossing[lease.crosses]
    group = model.groups.get(reader.replica)
    current = None if group is None else group.rounds.get(lease.round)
    if current is None or current.join_by_s is not None:  # else it was never promised
        s.touched.add(model.name)


def count(s: Step, lease: Lease, number: int) -> None:
    """Count a lease on its links, or not any more; what can be read by the same NIC costs something else then."""
    add(s.state.flows.egress, lease.egress, number)
    add(s.state.flows.ingress, lease.ingress, number)
    for name, key, replica in s.state.flows.stands.get(lease.egress, ()):
        note_readers(s.state.models[name].index, key, replica)


def add(counts: dict[str, int], link: str, number: int) -> None:
    """Change how many go by a link."""
    if not link:
        return
    counts[link] = counts.get(link, 0) + number
    if not counts[link]:
        del counts[link]


def crossing_into(model: ModelState, key: VersionKey, zone: str) -> list[LeaseId]:
    """Return the leases under which a version is read from other zones into this one."""
    return sorted(model.index.crossing.get((key, zone), ()))
