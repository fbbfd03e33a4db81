"""What must hold after every step of the server machine; each check names its law.

Used by tests after every step, and for debugging. Returns texts instead of raising, so that all broken ones are seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tensorhub_core.ids import CopyId, VersionKey
from tensorhub_core.schedule.sources import MOST_RAW_SOURCES
from tensorhub_core.state.calling import waits_for_others
from tensorhub_core.state.candidates import is_broken
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import disagreements
from tensorhub_core.state.invariants_retention import RETENTION_LAWS
from tensorhub_core.state.links import seat_of
from tensorhub_core.state.manifests import SUM_BYTES
from tensorhub_core.state.reachability import MOST_PAIRS
from tensorhub_core.state.records import UNFINISHED, CopyState, Group, ModelState, ServerState


def check(state: ServerState) -> list[str]:
    """Return every invariant that does not hold, with its witness; empty when all is well."""
    return [f"{law.__name__}: {witness}" for law in LAWS for witness in law(state)]


def references_agree(state: ServerState) -> Iterator[str]:
    """Leases, copies, workers, sessions and blobs refer to each other both ways."""
    for lease in state.leases.values():
        if lease.reader not in state.workers or lease.id not in state.workers[lease.reader].leases:
            yield f"lease {lease.id} has no reader"
        if lease.copy not in state.copies or lease.id not in state.copies[lease.copy].leases:
            yield f"lease {lease.id} has no copy"
    for copy in state.copies.values():
        if copy.worker not in state.workers or all(c is not copy for c in state.workers[copy.worker].copies()):
            yield f"copy {copy.id} has no holder"
        if not copy.leases <= state.leases.keys():
            yield f"copy {copy.id} has a dead lease"
        if (copy.state is CopyState.DRAINING) != (copy.id in state.draining):
            yield f"copy {copy.id} is {copy.state} but draining={copy.id in state.draining}"
    for worker in state.workers.values():
        if (
            worker.session and state.sessions.get(worker.session) != worker.id
        ) or not worker.leases <= state.leases.keys():
            yield f"worker {worker.id} has a dead session or lease"
    if state.blob_bytes != sum(len(entry.data) for entry in state.blobs.values()):
        yield f"{state.blob_bytes} blob bytes are not the sum of the blobs"


def l2_one_promise_per_round(state: ServerState) -> Iterator[str]:
    """All leases of a round are on copies of its one promised version; later rounds wait for who is in this one."""
    for group in _groups(state):
        rounds = group.open_rounds()
        for current in rounds[1:]:
            ends = [state.workers[group.members[shard]].ended for shard in current.joined]
            if current.key is not None or any(end is None or end.round < rounds[0].number for end in ends):
                yield f"{group.replica} is in round {current.number} before {rounds[0].number} has ended"
        for current in group.rounds.values():
            for lease in (state.leases.get(i) for leases in current.leases.values() for i in leases):
                if lease is not None and state.copies[lease.copy].key != current.key:
                    yield f"{group.replica} round {current.number} reads {state.copies[lease.copy].key}"


def l3_leases_belong_to_open_rounds(state: ServerState) -> Iterator[str]:
    """A lease lives only as long as the round it was granted for."""
    for lease in state.leases.values():
        reader = state.workers[lease.reader]
        group = state.models[reader.model].groups[reader.replica]
        current = group.rounds.get(lease.round)
        if current is None or current.verdict is not None or lease.id not in current.leases.get(reader.shard, []):
            yield f"lease {lease.id} of {group.replica}/{reader.shard} has no open round"


def l4_suspected_workers_read_nothing(state: ServerState) -> Iterator[str]:
    """A silent worker holds no lease."""
    for worker in state.workers.values():
        if worker.suspected and worker.leases:
            yield f"{worker.id} is suspected and holds leases"


def l8_one_worker_per_place(state: ServerState) -> Iterator[str]:
    """Every place is held by one living worker of the right model, replica and shard."""
    for group in _groups(state):
        if list(group.members) != sorted(group.members):
            yield f"{group.replica} has its shards in the order {list(group.members)}"
        for shard, worker_id in group.members.items():
            worker = state.workers.get(worker_id)
            if worker is not None and worker.seat != seat_of(group, worker):
                yield f"{group.replica}/{shard} runs elsewhere than {worker.seat}"
            if worker is None or (worker.replica, worker.shard) != (group.replica, shard):
                yield f"{group.replica}/{shard} is held by {worker_id}"


def l10_high_is_the_highest_whole_version(state: ServerState) -> Iterator[str]:
    """Nothing that was ever whole is above `high`."""
    for model in state.models.values():
        for key, record in model.versions.items():
            if record.was_whole and (model.high is None or key > model.high):
                yield f"{model.name}: {key} was whole, high is {model.high}"


def l2_rounds_that_wait_are_known(state: ServerState) -> Iterator[str]:
    """Every replica whose round waits for what others do is looked at when they do it."""
    for group in _groups(state):
        if waits_for_others(group) and group.replica not in state.models[group.model].calling:
            yield f"{group.replica} waits in a round, and would not be looked at"


def l10_zones_know_what_they_have(state: ServerState) -> Iterator[str]:
    """A zone with seed agents knows its agents, and every version that is whole at one of its replicas."""
    for model in state.models.values():
        for zone, lead in model.leads.items():
            groups = [group for group in model.groups.values() if group.zone == zone]
            if set(lead.agents) != {group.replica for group in groups if group.seeds}:
                yield f"{model.name}: agents of {zone!r} are {sorted(lead.agents)}"
            for key in (key for key, record in model.versions.items() if record.was_whole):
                if lead.newest is None or key > lead.newest:
                    whole = [group.replica for group in groups if _publishes(state, group, key)]
                    if whole:
                        yield f"{model.name}: {key} is whole at {whole}, {zone!r} knows of {lead.newest}"


def _publishes(state: ServerState, group: Group, key: VersionKey) -> bool:
    copies = [state.workers[member].kept_copy(key) for member in group.members.values()]
    published = all(copy is not None and copy.state is CopyState.PUBLISHED for copy in copies)
    return published and len(copies) == group.num_shards


def l12_first_manifest_binds(state: ServerState) -> Iterator[str]:
    """Every offered copy has the sums its version's first manifest has for the layout."""
    for copy in state.copies.values():
        if copy.state not in (CopyState.PUBLISHED, CopyState.DRAINING):
            continue
        record = _model_of(state, copy.worker).versions.get(copy.key)
        if record is None or record.manifests.get(copy.memory.layout) != copy.sums:
            yield f"copy {copy.id} of {copy.key} differs from its manifest"


def l12_sources_have_one_content(state: ServerState) -> Iterator[str]:
    """Several sources of a shard are either the shards of one replica, or few and the same bytes in one layout."""
    for worker in state.workers.values():
        copies = [state.copies[state.leases[lease].copy] for lease in worker.leases]
        contents = {(copy.memory.layout, copy.sums) for copy in copies}
        replicas = {state.workers[copy.worker].replica for copy in copies}
        if min(len(contents), len(replicas)) > 1 or (len(contents) == 1 and len(copies) > MOST_RAW_SOURCES):
            yield f"{worker.id} reads {len(copies)} copies of {len(replicas)} replicas"


def l12_sums_are_asked_of_sources(state: ServerState) -> Iterator[str]:
    """A question for checksums of cuts lives under its reader's lease, with the worker that holds the copy; bounded."""
    config = state.config
    for ticket in state.tickets.values():
        lease = state.leases.get(ticket.lease)
        if lease is None or ticket.id not in lease.tickets or state.copies[lease.copy].worker != ticket.source:
            yield f"ticket {ticket.id} is not under a lease on its source's copy"
        elif ticket.id not in state.workers[ticket.source].tickets:
            yield f"ticket {ticket.id} is not known at its source"
    under = sum(len(lease.tickets) for lease in state.leases.values())
    at = sum(len(worker.tickets) for worker in state.workers.values())
    if not len(state.tickets) == under == at <= config.max_tickets:
        yield f"{len(state.tickets)} tickets, {under} under leases, {at} at sources"
    if any(len(lease.tickets) > config.max_tickets_of_lease for lease in state.leases.values()):
        yield "a lease has too many tickets"


def l12_sums_are_announced_in_order(state: ServerState) -> Iterator[str]:
    """What is offered without a manifest has announced checksums, those of its source, and all of them were told."""
    for copy in state.copies.values():
        unfinished, segments = copy.state in UNFINISHED, len(copy.known) // SUM_BYTES
        if copy.known and not (unfinished and copy.partial and not copy.sums):
            yield f"copy {copy.id} has a manifest, and announced checksums"
        if unfinished and copy.partial and (copy.sums or segments != copy.prefix or len(copy.known) % SUM_BYTES):
            yield f"copy {copy.id} offers {copy.prefix} segments with {len(copy.known)} bytes of checksums"
        for lease in (state.leases[i] for i in copy.leases):
            follower = state.workers[lease.reader].unfinished()
            if unfinished and not copy.sums and not copy.partial:
                yield f"copy {copy.id} is followed by lease {lease.id} without checksums"
            if unfinished and copy.partial and lease.told > segments:
                yield f"lease {lease.id} was told checksums of copy {copy.id} that nobody has announced"
            if follower is None or not follower.partial or follower.content or not copy.partial:
                continue
            if not copy.known.startswith(follower.known):
                yield f"copy {follower.id} offers what its source {copy.id} has not announced"
    if state.known_bytes != sum(len(copy.known) for copy in state.copies.values()):
        yield f"{state.known_bytes} bytes are not the sum of the announced checksums"


def l13_filling_needs_a_round(state: ServerState) -> Iterator[str]:
    """Memory counts as filling, or is awaited, only while its round is open."""
    for copy in state.copies.values():
        if copy.state not in UNFINISHED:
            continue
        worker = state.workers[copy.worker]
        current = _model_of(state, copy.worker).groups[worker.replica].open_round()
        if current is None or current.key != copy.key or worker.shard not in current.joined:
            yield f"copy {copy.id} fills without a round"
        elif (copy.state is CopyState.AWAITED) != (copy is worker.awaited) or (copy.prefix and copy is worker.awaited):
            yield f"copy {copy.id} is {copy.state} with {copy.prefix} segments"
        elif copy is not worker.awaited and (current.mode == "stage") != (copy is worker.staged):
            yield f"copy {copy.id} fills the wrong memory in a round of mode {current.mode}"


def l13_nothing_is_overwritten_before_all_have_staged(state: ServerState) -> Iterator[str]:
    """An install has a promise only when every shard has joined with the promised version."""
    for group in _groups(state):
        for current in group.rounds.values():
            if current.kind != "install" or current.key is None or current.verdict is not None:
                continue
            staged = {shard for shard, joined in current.joined.items() if joined.have == current.key}
            for shard, worker_id in group.members.items():  # who has installed it before the server restarted
                end = state.workers[worker_id].ended
                if current.resumed and end is not None and (end.round, end.key) == (current.number, current.key):
                    staged.add(shard)
            if staged != set(range(group.num_shards)):
                yield f"{group.replica} installs {current.key} that only shards {sorted(staged)} have staged"


def l1_what_is_staged_was_whole_before(state: ServerState) -> Iterator[str]:
    """A finished staged copy is of a version that became whole in registered memory."""
    for worker in state.workers.values():
        copy = worker.staged
        if copy is None or copy.state is CopyState.FILLING:
            continue
        record = state.models[worker.model].versions.get(copy.key)
        if copy.state is not CopyState.HELD and (record is None or not record.was_whole):
            yield f"copy {copy.id} of {copy.key} is staged, but the version never was whole"


def l14_no_circles(state: ServerState) -> Iterator[str]:
    """Following sources never leads back."""
    for copy in state.copies.values():
        seen: set[CopyId] = set()
        ahead = [copy.id]
        while ahead:
            here = state.copies[ahead.pop()]
            if here.id in seen:
                continue
            seen.add(here.id)
            if here.state in UNFINISHED:
                follows = [state.leases[i].copy for i in state.workers[here.worker].leases]
                if copy.id in follows:
                    yield f"copy {copy.id} follows itself"
                ahead += follows


def index_is_a_full_scan(state: ServerState) -> Iterator[str]:
    """What can be read is filed as it is, and leases are counted on their links."""
    s = Step(state, state.now_s)
    for model in state.models.values():
        yield from disagreements(s, model)
        copies = [c for group in model.groups.values() for worker in s.members(group) for c in worker.copies()]
        for holders, found in (
            (model.holders, copies),
            (model.finished, [c for c in copies if c.state not in UNFINISHED]),
        ):
            if {(key, name) for key in holders for name in holders[key]} != {
                (c.key, s.holder(c).replica) for c in found
            }:
                yield f"the holders of {model.name} are not {holders}"
        crossing = {(lease.crosses, lease.id) for lease in state.leases.values() if lease.crosses is not None}
        mine = {pair for pair in crossing if s.state.workers[state.leases[pair[1]].reader].model == model.name}
        if mine != {(place, lease) for place, leases in model.index.crossing.items() for lease in leases}:
            yield f"leases of {model.name} that cross zones are not noted"
    for copy in state.copies.values():
        if is_broken(s, copy.id) and copy.id not in s.model(s.holder(copy)).index.broken:
            yield f"copy {copy.id} is followed and has no source, which is not noted"
    for counts, links in (
        (state.flows.egress, Counter(lease.egress for lease in state.leases.values() if lease.egress)),
        (state.flows.ingress, Counter(lease.ingress for lease in state.leases.values() if lease.ingress)),
    ):
        if counts != links:
            yield f"{counts} are not the leases by their links: {dict(links)}"


def reachability_has_living_witnesses(state: ServerState) -> Iterator[str]:
    """What is remembered of machines that cannot reach each other was shown by workers that are there, and counted."""
    known = state.reachability
    for (reader, source), shown in known.pairs.items():
        if not state.workers.keys() >= set(shown[:2]):
            yield f"{reader} cannot reach {source}, said a worker that is gone"
    if known.readers != Counter(reader for reader, _ in known.pairs) or len(known.pairs) > MOST_PAIRS:
        yield f"{len(known.pairs)} pairs are counted as {known.readers}"


def _groups(state: ServerState) -> Iterator[Group]:
    for model in state.models.values():
        yield from model.groups.values()


def _model_of(state: ServerState, worker: str) -> ModelState:
    return state.models[next(w.model for w in state.workers.values() if w.id == worker)]


LAWS: tuple[Callable[[ServerState], Iterator[str]], ...] = (
    references_agree,
    l2_one_promise_per_round,
    l3_leases_belong_to_open_rounds,
    l4_suspected_workers_read_nothing,
    l8_one_worker_per_place,
    l10_high_is_the_highest_whole_version,
    l2_rounds_that_wait_are_known,
    l10_zones_know_what_they_have,
    l12_first_manifest_binds,
    l12_sources_have_one_content,
    l12_sums_are_asked_of_sources,
    l12_sums_are_announced_in_order,
    l13_filling_needs_a_round,
    l13_nothing_is_overwritten_before_all_have_staged,
    l1_what_is_staged_was_whole_before,
    l14_no_circles,
    index_is_a_full_scan,
    reachability_has_living_witnesses,
    *RETENTION_LAWS,
)
