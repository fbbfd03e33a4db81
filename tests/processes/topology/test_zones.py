"""Who reads from whom between datacentres and behind one link, counted in bytes on the links; every byte is checked."""

from __future__ import annotations

import time

import pytest

from tests.processes.topology.site import NEAR, REMOTE, TIMEOUT_S, TOTAL_BYTES, Fleet, Site

pytestmark = pytest.mark.timeout(120)


def test_three_readers_in_another_zone_take_one_copy_across(site: Site) -> None:
    fleet = Fleet(site, REMOTE)
    before = fleet.crossed_models()
    fleet.check(fleet.read(REMOTE))
    assert 1.0 <= fleet.crossed_models() - before < 1.3


def test_when_the_seed_of_a_zone_is_killed_one_more_copy_crosses(site: Site) -> None:
    fleet = Fleet(site, REMOTE)
    before = fleet.crossed_models()
    reading = fleet.read(REMOTE)
    seed = half_read_seed(fleet)
    site.kill(seed)
    assert reading.pop(seed).exception(TIMEOUT_S) is not None, "it was killed before its end"
    fleet.check(reading)
    assert fleet.crossed_models() - before < 2.3


def test_sixteen_readers_behind_links_take_one_copy_from_the_trainer(site: Site) -> None:
    fleet = Fleet(site, NEAR)
    before = fleet.sent_models()
    fleet.check(fleet.read(NEAR))
    assert 1.0 <= fleet.sent_models() - before <= 1.5


def half_read_seed(fleet: Fleet) -> str:
    """Wait until one reader has half of the trainer's copy, read from the trainer itself; return its name."""
    seed, half_bytes, end = "", 0, time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        for name in REMOTE:
            events = fleet.nodes[name].events
            while not events.empty():
                done_bytes, _, source = events.get()
                if source == "trainer" and done_bytes >= half_bytes:
                    seed, half_bytes = name, done_bytes
        if 2 * half_bytes >= TOTAL_BYTES:
            return seed
        time.sleep(0.01)
    raise AssertionError(f"no reader had half of it from the trainer within {TIMEOUT_S:g} s")
