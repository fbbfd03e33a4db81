"""Links are cut in the middle of a read, without a sign to anybody; every byte is checked."""

from __future__ import annotations

import time

import pytest
from bench.content import SENTINEL
from bench.remote import RemoteError

from tests.processes.links.site import LEASE_S, TOTAL_BYTES, Links, half_read, right_digest

pytestmark = pytest.mark.timeout(120)
each_transport = pytest.mark.parametrize("links", ["tcp", "nixl"], indirect=True)
RETRANSMIT_S = 3.0
"""After a cut of some seconds the kernel sends again what was on its way within this time."""


@each_transport
def test_a_source_that_is_cut_off_is_left_for_another_holder(links: Links) -> None:
    _, reader = links.started("one", "two")
    reading = reader.begin("replicate", timeout_s=40)
    links.cut(half_read(reader, reading))
    got = reading.result(60)
    assert got["version"] == 1
    assert reader.do("digest") == right_digest()
    assert set(got["first_s"]) == {"one", "two"}
    counters = reader.do("counters")
    assert counters["failovers"] >= 1
    assert TOTAL_BYTES <= counters["bytes_read"] < 1.5 * TOTAL_BYTES


@each_transport
def test_without_another_holder_the_read_ends_unavailable_and_nothing_lands_later(links: Links) -> None:
    _, reader = links.started("one")
    reading = reader.begin("replicate", timeout_s=40)
    links.cut(half_read(reader, reading))
    with pytest.raises(RemoteError) as error:
        reading.result(60)
    assert error.value.kind == "VersionUnavailable", "its type says that it ended before the deadline"
    assert reader.do("version") is None
    with pytest.raises(RemoteError, match="dirty"):
        reader.do("publish", version=1)
    reader.do("fill", value=SENTINEL)
    links.mend("one")
    time.sleep(RETRANSMIT_S)
    assert reader.do("is_filled", value=SENTINEL), "late bytes landed in memory that the caller has back"
    assert reader.do("replicate", version=1, timeout_s=30)["version"] == 1, "the holder is there again"
    assert reader.do("digest") == right_digest()


def test_a_reader_that_is_cut_off_holds_its_source_no_longer_than_its_lease(links: Links) -> None:
    (trainer,), reader = links.started("one")
    reading = reader.begin("replicate", timeout_s=20)
    half_read(reader, reading)
    links.cut("reader")
    trainer.do("unpublish", timeout_s=2 * LEASE_S)
    assert not reading.done(), "the reader cannot have heard of it"
    trainer.do("make", total_bytes=TOTAL_BYTES, count=links.count, seed=2)
    trainer.do("publish", version=2)
    links.mend("reader")
    with pytest.raises(RemoteError) as error:
        reading.result(60)
    assert error.value.kind in ("VersionUnavailable", "DeadlineExceeded", "StateError")
    assert reader.do("version") is None, "half of a version that is no more"
    assert reader.do("replicate", timeout_s=30, update=True)["version"] == 2
    assert reader.do("digest") == right_digest(2)


def test_a_hub_that_is_cut_off_for_less_than_a_lease_does_not_stop_a_read(links: Links) -> None:
    _, reader = links.started("one")
    reading = reader.begin("replicate", timeout_s=40)
    half_read(reader, reading)
    cut_hub(links, 0.3 * LEASE_S)
    assert reading.result(60)["version"] == 1
    assert reader.do("digest") == right_digest()
    assert reader.do("counters")["bytes_read"] == TOTAL_BYTES
    assert fresh_read(links) == right_digest(), "the hub knows who holds what"


def test_a_hub_that_is_cut_off_for_more_than_a_lease_hears_again_who_holds_what(links: Links) -> None:
    """It takes everybody for dead meanwhile, so the round may be lost; nothing else is."""
    _, reader = links.started("one")
    reading = reader.begin("replicate", timeout_s=40)
    half_read(reader, reading)
    cut_hub(links, 2.5 * LEASE_S)
    broken = reading.exception(60)
    assert broken is None or (isinstance(broken, RemoteError) and broken.kind == "VersionUnavailable")
    assert reader.do("version") == (1 if broken is None else None)
    again = reading
    end = time.monotonic() + 30
    while again.exception(60) is not None and time.monotonic() < end:
        time.sleep(0.2)
        again = reader.begin("replicate", timeout_s=30, update=True)
    assert again.result(60)["version"] == 1, "the holder has said hello again"
    assert reader.do("digest") == right_digest()
    assert fresh_read(links) == right_digest(), "the hub knows who holds what"


def cut_hub(links: Links, cut_s: float) -> None:
    links.cut("hub")
    time.sleep(cut_s)
    links.mend("hub")


def fresh_read(links: Links) -> str:
    """Read with a process that was not there before; return the digest of what it got."""
    other = links.node("two")
    other.do("make", total_bytes=TOTAL_BYTES, count=links.count, seed=1, blank=True)
    other.do("register")
    assert other.do("replicate", timeout_s=30)["version"] == 1
    return str(other.do("digest"))
