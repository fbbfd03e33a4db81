"""Questions for checksums of cuts, on their way from readers to sources and back; soft state, bounded (law L12)."""

from __future__ import annotations

from tensorhub_core.errors import StateError
from tensorhub_core.ids import TicketId
from tensorhub_core.state.bounds import MOST_DETAIL, PACKED_CUT_BYTES
from tensorhub_core.state.context import NO_SESSION, Step, failure
from tensorhub_core.state.messages import AskSums, GiveSums, Ok, Reply, SumsGiven, SumsWanted
from tensorhub_core.state.records import UNFINISHED, Lease, Ticket, Worker

_SUM_BYTES = 8


def pass_on(s: Step, reader: Worker, request: int, lease: Lease, m: AskSums) -> None:
    """Put a reader's question to its source, if that can answer now and has not too many open."""
    copy = s.state.copies[lease.copy]
    source, config = s.holder(copy), s.state.config
    cuts, odd = divmod(len(m.cuts), PACKED_CUT_BYTES)
    if odd or not cuts:
        return s.fail(reader, request, StateError("AskSums needs one cut at least, in 40 bytes each"))
    if copy.state in UNFINISHED:
        why = "it is still filling"
    elif source.session == NO_SESSION:
        why = "it is not connected at the moment"
    elif (
        len(lease.tickets) >= config.max_tickets_of_lease
        or len(source.tickets) >= config.max_tickets_of_worker
        or len(s.state.tickets) >= config.max_tickets
    ):
        why = "too much is asked at the moment"
    else:
        ticket = Ticket(TicketId(s.new_id("t")), lease.id, source.id, request, cuts)
        s.state.tickets[ticket.id] = ticket
        lease.tickets.add(ticket.id)
        source.tickets.add(ticket.id)
        return s.push(source, SumsWanted(ticket.id, copy.memory.placement, copy.sums, m.cuts))
    s.reply(reader, request, SumsGiven(refusal="wait", detail=why))


def give(s: Step, worker: Worker, request: int, m: GiveSums) -> None:
    """Pass a source's answer on to who asked; what nobody asked this worker, or not like this, is dropped."""
    s.reply(worker, request, Ok())
    ticket = s.state.tickets.get(TicketId(m.ticket))
    if ticket is None or ticket.source != worker.id:
        return
    if len(m.sums) != (0 if m.refusal else _SUM_BYTES * ticket.cuts):
        return
    end(s, ticket.id, SumsGiven(m.sums, m.refusal, m.detail[:MOST_DETAIL]))


def end(s: Step, ticket_id: TicketId, answer: Reply | None) -> None:
    """End a question; its reader hears the answer, if there is one."""
    ticket = s.state.tickets.pop(ticket_id)
    lease = s.state.leases[ticket.lease]
    lease.tickets.discard(ticket_id)
    s.state.workers[ticket.source].tickets.discard(ticket_id)
    if answer is not None:
        s.reply(s.state.workers[lease.reader], ticket.request, answer)


def end_with_lease(s: Step, lease: Lease) -> None:
    """End what was asked under a lease that is about to end."""
    for ticket_id in sorted(lease.tickets):
        end(s, ticket_id, failure(StateError("the lease has ended")))


def end_with_connection(s: Step, worker: Worker) -> None:
    """End what a worker asked or was asked over a connection that is gone: who asked may ask again."""
    for lease_id in sorted(worker.leases):
        for ticket_id in sorted(s.state.leases[lease_id].tickets):
            end(s, ticket_id, None)
    for ticket_id in sorted(worker.tickets):
        end(s, ticket_id, SumsGiven(refusal="wait", detail="its connection was lost"))
