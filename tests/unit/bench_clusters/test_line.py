"""The long link of the mini-clusters: when a frame arrives, what is dropped, and how long a packet is on a wire."""

from __future__ import annotations

import struct

import pytest
from bench.clusters.line import Line, size_on_wire


def test_a_frame_arrives_when_it_is_sent_and_has_travelled() -> None:
    line = Line(rate_bytes_per_s=1000.0, delay_s=0.5, queue_bytes=1e9)
    assert line.next_s() is None
    assert line.offer(b"a", 100, now_s=10.0)
    assert line.next_s() == pytest.approx(10.6)
    assert line.arrived(10.59) == []
    assert line.arrived(10.61) == [b"a"]
    assert line.next_s() is None


def test_frames_queue_behind_each_other_and_keep_their_order() -> None:
    line = Line(rate_bytes_per_s=1000.0, delay_s=0.5, queue_bytes=1e9)
    for frame in (b"a", b"b", b"c"):
        assert line.offer(frame, 100, now_s=10.0)
    assert line.arrived(10.75) == [b"a", b"b"]
    assert line.arrived(10.85) == [b"c"]
    assert line.longest_queue_bytes == pytest.approx(200)


def test_a_line_that_was_idle_does_not_make_up_for_it() -> None:
    line = Line(rate_bytes_per_s=1000.0, delay_s=0.0, queue_bytes=1e9)
    line.offer(b"a", 100, now_s=10.0)
    line.offer(b"b", 100, now_s=20.0)
    assert line.arrived(20.0) == [b"a"]
    assert line.next_s() == pytest.approx(20.1)


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted() -> None:
    line = Line(rate_bytes_per_s=1000.0, delay_s=0.5, queue_bytes=150)
    taken = [line.offer(bytes([number]), 100, now_s=10.0) for number in range(4)]
    assert taken == [True, True, False, False]
    assert (line.carried_bytes, line.dropped_bytes) == (200, 200)
    assert line.offer(b"later", 100, now_s=10.15), "the queue has run down"


def packet(frame_bytes: int, segment_bytes: int = 0) -> bytes:
    """Return a TCP packet as a TAP device hands it over: 14 + 20 + 32 bytes of headers."""
    header = struct.pack("<BBHHHH", 1, 1 if segment_bytes else 0, 66, segment_bytes, 34, 16)
    frame = bytearray(frame_bytes)
    frame[34 + 12] = 8 << 4
    return header + bytes(frame)


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        (packet(1500), 1500),
        (packet(66 + 1000, 1000), 1066),
        (packet(66 + 3000, 1000), 3066 + 2 * 66),
        (packet(66 + 3001, 1000), 3067 + 3 * 66),
        (packet(66 + 3000, 1000)[:40], 30),
    ],
    ids=["one segment", "a run of one", "a run of three", "a run of four", "cut off"],
)
def test_every_segment_of_a_run_has_its_headers(given: bytes, size_bytes: int) -> None:
    assert size_on_wire(given) == size_bytes
