"""Coalesce the memory of many tensors into few regions, because each registered region costs; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorhub_core.transport.base import Region

PAGE_BYTES = 4096
MAX_GAP_BYTES = 2 << 20
"""Widest gap inside one allocation that is registered along: bounds the memory pinned beyond the tensors."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of owned bytes `low..high` on a device; `allocation` is the live allocation around it, if known."""

    low: int
    high: int
    device: str = "cpu"
    allocation: tuple[int, int] | None = None


def coalesce(spans: Iterable[Span], page_bytes: int = PAGE_BYTES, max_gap_bytes: int = MAX_GAP_BYTES) -> list[Region]:
    """Return regions that cover every span and never a page without an owned byte outside the spans' allocations.

    Spans are joined when they touch, when they lie in one allocation close to each other, and on a CPU also over a gap
    that contains no whole page: such a gap lies in pages that the neighbours own. On other devices only spans of one
    allocation are joined, because a registration must not cross two.
    """
    regions: list[Region] = []
    current: Span | None = None
    for span in sorted(spans, key=lambda s: (s.device, s.low, s.high)):
        if span.high <= span.low:
            continue
        if current is not None and _joins(current, span, page_bytes, max_gap_bytes):
            wider = span.allocation if span.high > current.high else current.allocation
            current = Span(current.low, max(current.high, span.high), span.device, wider)
            continue
        if current is not None:
            regions.append(Region(current.low, current.high - current.low, current.device))
        current = span
    if current is not None:
        regions.append(Region(current.low, current.high - current.low, current.device))
    return regions


def _joins(a: Span, b: Span, page_bytes: int, max_gap_bytes: int) -> bool:
    """Tell whether `b`, which begins no earlier than `a`, may be registered in one region with it."""
    if a.device != b.device:
        return False
    if b.low < a.high:
        return True
    if a.allocation is not None and a.allocation == b.allocation and b.low - a.high <= max_gap_bytes:
        return True
    if a.device != "cpu":
        return False
    next_page = -(-a.high // page_bytes) * page_bytes
    return next_page + page_bytes > b.low
