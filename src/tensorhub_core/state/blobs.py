"""Content-addressed blobs: layouts, placements and checksums, stored once however many workers refer to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from tensorhub_core.errors import RegistrationError, StateError
from tensorhub_core.ids import Digest
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import Blob, GetBlob, Ok, PutBlob, Source
from tensorhub_core.state.records import BlobEntry, Worker

KEEP_UNREFERENCED_S = 60.0
MOST_ENCLOSED_BYTES = 128 << 10
"""Blobs that come with a promise: so much is copied for everybody who asks at the same moment."""
_MOST_REMEMBERED = 64
"""Blobs that a worker is remembered to have been given: those of a few versions."""


def put(s: Step, worker: Worker, request: int, m: PutBlob) -> None:
    """Store a blob; refused when its digest is wrong or the server's blob memory is full."""
    digest = Digest(m.digest)
    known = s.state.blobs.get(digest)
    if known is not None:
        known.touched_s = s.now
        return s.reply(worker, request, Ok())
    if xxhash.xxh3_128_digest(m.data) != m.digest:
        return s.fail(worker, request, StateError("the blob does not have the digest it was sent under"))
    if s.state.blob_bytes + len(m.data) > s.state.config.max_blob_bytes:
        sweep(s, keep_s=0.0)
    if s.state.blob_bytes + len(m.data) > s.state.config.max_blob_bytes:
        limit = s.state.config.max_blob_bytes
        return s.fail(worker, request, RegistrationError(f"the server's metadata memory ({limit:,} bytes) is full"))
    s.state.blobs[digest] = BlobEntry(m.data, s.now)
    s.state.blob_bytes += len(m.data)
    s.reply(worker, request, Ok())


def get(s: Step, worker: Worker, request: int, m: GetBlob) -> None:
    """Return a blob."""
    entry = s.state.blobs.get(Digest(m.digest))
    if entry is None:
        return s.fail(worker, request, StateError("the server does not have this blob (any more)"))
    entry.touched_s = s.now
    note_has(worker, Digest(m.digest))
    s.reply(worker, request, Blob(m.digest, entry.data))


def note_has(worker: Worker, digest: Digest) -> None:
    """Remember that a worker was given a blob. It may forget it, and asks for it then."""
    worker.has.pop(digest, None)
    worker.has[digest] = None
    if len(worker.has) > _MOST_REMEMBERED:
        del worker.has[next(iter(worker.has))]


def enclose(s: Step, worker: Worker, sources: Sequence[Source]) -> tuple[bytes, ...]:
    """Return what a reader may lack of the blobs that its sources name, as far as it is small.

    A reader need not ask for them then: that is a message to the server for each, and the way there and back.
    """
    found: list[bytes] = []
    room_bytes = MOST_ENCLOSED_BYTES
    own = None if worker.memory is None else worker.memory.layout
    for digest in _named(sources):
        entry = s.state.blobs.get(digest)
        if digest == own or digest in worker.has or entry is None or len(entry.data) > room_bytes:
            continue
        entry.touched_s = s.now
        note_has(worker, digest)
        found.append(entry.data)
        room_bytes -= len(entry.data)
    return tuple(found)


def _named(sources: Iterable[Source]) -> dict[Digest, None]:
    """Return the digests that sources name, each once."""
    names = ((source.placement, source.sums, source.layout) for source in sources)
    return dict.fromkeys(Digest(digest) for each in names for digest in each if digest)


def sweep(s: Step, keep_s: float = KEEP_UNREFERENCED_S) -> None:
    """Forget blobs that nothing refers to and that were not touched for `keep_s`."""
    referenced: set[Digest] = set()
    for worker in s.state.workers.values():
        if worker.memory is not None:
            referenced.update((worker.memory.layout, worker.memory.placement))
        if worker.staging is not None:
            referenced.add(worker.staging.placement)
        for copy in worker.copies():
            referenced.update((copy.memory.layout, copy.memory.placement, copy.sums))
    for group in (g for model in s.state.models.values() for g in model.groups.values()):
        for joined in (j for r in group.rounds.values() for j in r.joined.values()):
            if joined.done_sums is not None:
                referenced.add(joined.done_sums)
    for digest in [d for d, e in s.state.blobs.items() if d not in referenced and s.now - e.touched_s >= keep_s]:
        s.state.blob_bytes -= len(s.state.blobs.pop(digest).data)
    s.state.swept_s = s.now
