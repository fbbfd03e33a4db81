"""Flow control alone, under a clock that the test moves."""

from __future__ import annotations

import pytest

from tensorhub_core.client.flow import Flow, FlowSettings

MIB = 1 << 20
SETTINGS = FlowSettings(
    chunk_bytes=4 * MIB, most_chunk_bytes=16 * MIB, window=8, stall_timeout_s=5.0, min_bytes_per_s=64 << 10
)


class Link:
    """A source that delivers batches in order at a rate; keeps the flow full."""

    def __init__(self, bytes_per_s: float, settings: FlowSettings = SETTINGS, delay_s: float = 0.0) -> None:
        self.flow = Flow(settings)
        self.bytes_per_s = bytes_per_s
        self.delay_s = delay_s
        self.now = 100.0
        self.flying: list[tuple[int, float]] = []
        self.free_s = self.now
        self.most_bytes = 0
        self.moved_bytes = 0
        self.sizes: list[int] = []

    def fill(self) -> None:
        while room := self.flow.room_bytes():
            self.flow.posted(room, self.now)
            self.flying.append((room, self.now))
            self.sizes.append(room)
        self.most_bytes = max(self.most_bytes, sum(size for size, _ in self.flying))

    def run(self, seconds: float) -> str:
        """Deliver for a time; returns why the flow gave up, if it did."""
        end = self.now + seconds
        while self.now < end:
            self.fill()
            size, posted = self.flying[0]
            free = max(self.free_s, posted) + size / self.bytes_per_s
            done = free + self.delay_s
            while self.now < min(done, end):
                self.now = min(done, end, self.now + 0.5)
                if reason := self.flow.stalled(self.now):
                    return reason
            if self.now >= done:
                self.free_s = free
                self.moved_bytes += size
                self.flying.pop(0)
                self.flow.ended(size, posted, self.now)
        return ""


@pytest.mark.parametrize("bytes_per_s", [80e3, 1e6, 10e6, 100e6, 1e9, 10e9])
def test_a_living_source_is_never_taken_for_a_dead_one(bytes_per_s: float) -> None:
    link = Link(bytes_per_s)
    assert link.run(20) == ""
    assert link.most_bytes <= max(256 << 10, 2.5 * bytes_per_s, MIB)
    assert link.most_bytes <= 8 * 16 * MIB


def test_swift_sources_get_large_batches_and_slower_ones_do_not() -> None:
    swift, slower = Link(50e9), Link(200e6)
    swift.run(0.2)
    slower.run(2)
    assert max(swift.sizes) == 16 * MIB
    assert max(slower.sizes) <= 4 * MIB


@pytest.mark.parametrize("bytes_per_s", [12e6, 25e6, 100e6])
def test_on_a_slow_link_little_waits_in_a_queue(bytes_per_s: float) -> None:
    """Those who follow this reader see a byte only when its whole batch is there."""
    link = Link(bytes_per_s)
    link.run(5)
    assert link.most_bytes <= max(2 * MIB, 0.1 * bytes_per_s)
    assert link.moved_bytes >= 0.99 * 5 * bytes_per_s - MIB


@pytest.mark.parametrize("bytes_per_s", [12e6, 25e6, 60e6])
def test_on_a_slow_link_batches_are_as_small_as_ever(bytes_per_s: float) -> None:
    """What is in one batch is passed on at once, so that followers get it in spurts, and rest between them."""
    link = Link(bytes_per_s)
    link.run(1)
    link.sizes.clear()
    link.run(4)
    assert max(link.sizes) <= 256 << 10


def test_on_a_long_way_the_window_is_used() -> None:
    """Batches that take long because the way is long, not because they queue, do not keep others back."""
    link = Link(1e9, delay_s=0.1)
    link.run(5)
    assert link.most_bytes >= 0.9 * 8 * 4 * MIB


def test_a_small_window_keeps_batches_small() -> None:
    link = Link(50e9, FlowSettings(window=2))
    link.run(0.1)
    assert max(link.sizes) == 4 * MIB
    assert link.most_bytes <= 8 * MIB


def test_a_source_that_slows_down_is_asked_for_less_and_kept() -> None:
    link = Link(20e6)
    assert link.run(10) == ""
    before = link.most_bytes
    link.bytes_per_s, link.most_bytes = 5e6, 0
    assert link.run(10) == ""
    link.most_bytes = 0
    assert link.run(5) == ""
    assert link.most_bytes < before


def test_a_source_that_stops_is_noticed_after_the_timeout() -> None:
    link = Link(100e6)
    assert link.run(3) == ""
    stopped = link.now
    link.bytes_per_s = 1e-3
    assert "nothing arrived" in link.run(60)
    assert 5.0 <= link.now - stopped <= 6.0


def test_a_source_below_the_floor_is_left() -> None:
    link = Link(30e3, FlowSettings(window=8, stall_timeout_s=5.0, min_bytes_per_s=64 << 10))
    flow = link.flow
    for _ in range(40):
        flow.posted(10_000, link.now)
        link.now += 1.0
        flow.ended(10_000, link.now - 1.0, link.now)
        flow.posted(1, link.now)
        if reason := flow.stalled(link.now):
            assert "below" in reason
            return
        flow.ended(1, link.now, link.now)
    raise AssertionError("10,000 bytes/s passed for enough")


def test_time_in_which_nothing_was_asked_for_does_not_count() -> None:
    flow = Flow(SETTINGS)
    now = 0.0
    for _ in range(20):
        flow.posted(MIB, now)
        flow.ended(MIB, now, now + 0.1)
        now += 60.0
    flow.posted(MIB, now)
    assert flow.stalled(now + 4.9) == ""
    assert "nothing arrived" in flow.stalled(now + 5.0)


def test_a_pause_of_this_process_is_not_the_sources_fault() -> None:
    flow = Flow(SETTINGS)
    flow.posted(MIB, 0.0)
    flow.paused(100.0)
    assert flow.stalled(104.9) == ""
    assert flow.stalled(105.0) != ""


def test_little_that_came_quickly_because_there_was_no_more_makes_no_batch_larger() -> None:
    """Who follows an unfinished copy gets a little at a time: that says nothing about how long much would take."""
    flow, now = Flow(SETTINGS), 100.0
    first = flow.room_bytes()
    for _ in range(50):
        flow.posted(64 << 10, now)
        flow.limited(now)
        flow.ended(64 << 10, now, now + 0.003)
        now += 0.01
    assert flow.room_bytes() == first
    flow.posted(first, now)
    flow.ended(first, now, now + 0.003)
    flow.posted(flow.room_bytes(), now + 0.004)
    assert flow.room_bytes(), "with enough to ask for it grows as ever"
