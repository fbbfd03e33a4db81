"""Checksums of copies that fill without a manifest: announced segment by segment, in order (law L12).

A reader of another layout derives the checksums of its own segments from bytes that it has verified, one after the
other. It announces them with its prefix, and who follows it verifies by them; what the follower offers then has those
same checksums, so it announces a prefix only. The whole of it becomes the manifest when such a reader is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub_core.ids import Digest, LeaseId
from tensorhub_core.state.context import Step
from tensorhub_core.state.records import UNFINISHED, Copy, Registration, Worker

SUM_BYTES = 8
MOST_KNOWN_BYTES = 32 << 20
"""Announced checksums of one copy: they have a place in a `Promise`. One with more segments is followed when done."""

Content = tuple[tuple[Digest, Digest], ...]


def is_raw(sources: Sequence[Copy], memory: Registration) -> bool:
    """Tell whether all sources have the layout of the memory that is filled from them."""
    return bool(sources) and all([copy.memory.layout == memory.layout for copy in sources])


def content_of(sources: Sequence[Copy], memory: Registration) -> Content:
    """Return the layouts and manifests of the sources in other layouts that a copy is derived from, else nothing."""
    return () if is_raw(sources, memory) else tuple((copy.memory.layout, copy.sums) for copy in sources)


def sources_of(s: Step, worker: Worker) -> list[Copy]:
    """Return the copies that a worker reads from, in the order in which they were leased."""
    current = s.group(worker).open_round()
    return [] if current is None else copies_of(s, current.leases.get(worker.shard, ()))


def copies_of(s: Step, leases: Sequence[LeaseId]) -> list[Copy]:
    """Return the copies that are read under those of some leases that live."""
    alive, copies = s.state.leases, s.state.copies
    return [copies[lease.copy] for name in leases if (lease := alive.get(name)) is not None]


def known_sums(s: Step, copy: Copy) -> bytes:
    """Return the packed checksums of a copy's first segments that are known; nothing if its manifest has gone."""
    if not copy.sums:
        return copy.known
    entry = s.state.blobs.get(copy.sums)
    whole = SUM_BYTES * copy.memory.num_segments
    return entry.data if entry is not None and len(entry.data) == whole else b""


def set_known(s: Step, copy: Copy, known: bytes) -> None:
    """Note the announced checksums of a copy; all of them together are bounded (`may_grow`)."""
    s.state.known_bytes += len(known) - len(copy.known)
    copy.known = known


def may_grow(s: Step, more_bytes: int) -> bool:
    """Tell whether there is room for more announced checksums."""
    return more_bytes <= s.state.config.max_blob_bytes - s.state.known_bytes


def forget_prefix(s: Step, copy: Copy) -> None:
    """Offer nothing of a copy any more."""
    copy.prefix = 0
    set_known(s, copy, b"")


def announced(s: Step, worker: Worker, copy: Copy, prefix: int, sums: bytes) -> int | None:
    """Take in the checksums that a prefix brings; return how far it counts, None if they contradict earlier ones.

    `sums` are those of the last segments of the prefix. Some that are known already are compared; with some missing
    before them they say nothing, and come again. The last segment does not count before its reader is done and has said
    what the whole memory sums to (`agrees`): so nobody commits before that what it has derived.
    """
    if copy.sums:
        return prefix
    if not copy.partial:
        return 0
    if not copy.content:
        return _follow(s, worker, copy, prefix)
    count, odd = divmod(len(sums), SUM_BYTES)
    first = SUM_BYTES * (prefix - count)
    sums = sums[: max(0, SUM_BYTES * (copy.memory.num_segments - 1) - first)]
    if odd or first < 0 or first > len(copy.known):
        return copy.prefix
    both = min(len(sums), len(copy.known) - first)
    if sums[:both] != copy.known[first : first + both]:
        return None
    if both < len(sums) and may_grow(s, len(sums) - both):
        set_known(s, copy, copy.known + sums[both:])
    return len(copy.known) // SUM_BYTES


def _follow(s: Step, worker: Worker, copy: Copy, prefix: int) -> int:
    """Return how much of a prefix has checksums at its source, and take those over."""
    sources = sources_of(s, worker)
    known = known_sums(s, sources[0])[: SUM_BYTES * prefix] if sources else b""
    if len(known) > len(copy.known) and may_grow(s, len(known) - len(copy.known)):
        set_known(s, copy, known)
    return len(copy.known) // SUM_BYTES


def agrees(s: Step, copy: Copy, sums: Digest) -> bool:
    """Tell whether the manifest of a copy that is done has the checksums that it announced."""
    if copy.sums or not (copy.known or copy.leases):
        return True
    data = s.state.blobs[sums].data
    return len(data) == SUM_BYTES * copy.memory.num_segments and data.startswith(copy.known)


def complete(s: Step, copy: Copy, sums: Digest) -> bool:
    """Take the manifest of a copy that is done for its announced checksums; False if nobody can follow it any more."""
    if copy.sums or not copy.partial:
        return True
    data = s.state.blobs[sums].data
    copy.partial = len(data) == SUM_BYTES * copy.memory.num_segments and may_grow(s, len(data) - len(copy.known))
    set_known(s, copy, data if copy.partial else b"")
    return copy.partial


def still_stands(s: Step, copy: Copy, sources: Sequence[Copy], sums: Digest, content: Content) -> bool:
    """Tell whether what a copy has verified counts with its new sources as well.

    It does with the same manifest, of its own layout or of those that it is derived from; and what was announced
    without one does if a source of its own layout has the same checksums.
    """
    if copy.sums or content:
        return (sums, content) == (copy.sums, copy.content)
    return bool(sources) and known_sums(s, sources[0]).startswith(copy.known)


def may_be_followed(copy: Copy) -> bool:
    """Tell whether others may read what an unfinished copy has verified."""
    return copy.state in UNFINISHED and copy.offered and (bool(copy.sums) or copy.partial)


def may_be_partial(worker: Worker, memory: Registration, content: Content) -> bool:
    """Tell whether a copy without a manifest may be followed: its holder announces checksums, and converts nothing.

    Whether it converts is known of what it derives only when it begins to fill.
    """
    fits = SUM_BYTES * memory.num_segments <= MOST_KNOWN_BYTES
    return worker.announces_sums and fits and not (content and worker.casts)
