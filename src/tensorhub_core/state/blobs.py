"""Content-addressed blobs: layouts, placements and checksums, stored once however many workers refer to them."""

from __future__ import annotations

import xxhash

from tensorhub_core.errors import RegistrationError, StateError
from tensorhub_core.ids import Digest
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import Blob, GetBlob, Ok, PutBlob
from tensorhub_core.state.records import BlobEntry, Worker

KEEP_UNREFERENCED_S = 60.0


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
    s.reply(worker, request, Blob(m.digest, entry.data))


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
