"""Coalescing covers every owned byte and registers no page that is not owned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.regions import MAX_GAP_BYTES, PAGE_BYTES, Span, coalesce
from tensorhub_core.transport.base import Region

PAGE = 64


@st.composite
def disjoint_spans(draw: st.DrawFn) -> list[Span]:
    spans, at = [], draw(st.integers(0, 200))
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(0, 150))
        spans.append(Span(at, at + length, draw(st.sampled_from(["cpu", "cuda:0"]))))
        at += length + draw(st.integers(0, 200))
    return spans


def covered(regions: list[Region], device: str) -> set[int]:
    return {a for r in regions if r.device == device for a in range(r.address, r.address + r.length_bytes)}


@given(disjoint_spans(), st.randoms())
@settings(max_examples=300, deadline=None)
def test_regions_cover_the_spans_and_only_owned_pages(spans: list[Span], rng: object) -> None:
    shuffled = list(spans)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    regions = coalesce(shuffled, page_bytes=PAGE)
    assert regions == coalesce(spans, page_bytes=PAGE)
    for device in ("cpu", "cuda:0"):
        owned = {a for s in spans if s.device == device for a in range(s.low, s.high)}
        registered = covered(regions, device)
        assert owned <= registered
        assert sum(r.length_bytes for r in regions if r.device == device) == len(registered), "regions overlap"
        if device == "cpu":
            assert {a // PAGE for a in registered} == {a // PAGE for a in owned}
        else:
            assert registered == owned


def test_touching_and_nearly_touching_spans_become_one_region() -> None:
    spans = [Span(64 * i, 64 * i + 60) for i in range(10_000)]
    assert len(coalesce(spans)) == 1


def test_a_gap_of_a_whole_page_separates_unless_it_is_in_one_allocation() -> None:
    a, b = Span(0, PAGE_BYTES), Span(2 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert len(coalesce([a, b])) == 2
    block = (0, 3 * PAGE_BYTES)
    same = [Span(s.low, s.high, "cpu", block) for s in (a, b)]
    assert coalesce(same) == [Region(0, 3 * PAGE_BYTES)]


def test_the_gap_registered_inside_one_allocation_is_bounded() -> None:
    block = (0, 1 << 40)
    spans = [Span(0, 8, "cuda:0", block), Span(8 + MAX_GAP_BYTES + 1, 16 + MAX_GAP_BYTES + 1, "cuda:0", block)]
    assert len(coalesce(spans)) == 2


def test_device_memory_of_two_allocations_is_never_joined() -> None:
    spans = [Span(0, 8, "cuda:0", (0, 8)), Span(8, 16, "cuda:0", (8, 16)), Span(16, 24, "cuda:1", (8, 16))]
    assert len(coalesce(spans)) == 3
