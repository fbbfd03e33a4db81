"""Where workers run, and which leases share a link: those that leave one NIC, arrive by one, or cross into one zone.

What a lease counts for is noted with it, so that it is taken back in the same place whatever workers say later.
"""

from __future__ import annotations

from tensorhub_core.ids import LeaseId, VersionKey
from tensorhub_core.schedule.sources import Place
from tensorhub_core.state.context import Step
from tensorhub_core.state.records import Copy, Lease, ModelState, Worker


def place_of(s: Step, worker: Worker) -> Place:
    """Return where a worker runs."""
    return Place(s.group(worker).zone, worker.host, worker.rail)


def nic_of(place: Place, worker: Worker) -> str:
    """Name the NIC that a worker reads and is read by; one of its own where its machine is not known."""
    return f"{place.zone}/{place.host}/{place.rail}" if place.host else worker.id


def machine_of(place: Place) -> str:
    """Name the machine of a worker; empty if it is not known."""
    return f"{place.zone}/{place.host}" if place.host else ""


def crosses(source: Place, reader: Place) -> bool:
    """Tell whether bytes go from one zone into another; what is not known is no other zone."""
    return bool(source.zone and reader.zone) and source.zone != reader.zone


def ingress_of(s: Step, worker: Worker) -> int:
    """Return how many others read by a worker's NIC."""
    own = any(s.state.leases[lease].ingress for lease in worker.leases)
    return s.state.flows.ingress.get(nic_of(place_of(s, worker), worker), 0) - own


def note_lease(s: Step, lease: Lease, copy: Copy) -> None:
    """Count a new lease where it goes by; a reader of several sources arrives once."""
    holder, reader = s.holder(copy), s.state.workers[lease.reader]
    here, there = place_of(s, reader), place_of(s, holder)
    if not (here.host and here.host == there.host and here.zone == there.zone):
        lease.egress = nic_of(there, holder)
        if not any(s.state.leases[other].ingress for other in reader.leases):
            lease.ingress = nic_of(here, reader)
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
        s.state.models[name].index.stale[key, replica] = None


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
