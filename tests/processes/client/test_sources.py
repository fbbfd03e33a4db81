"""One version from several holders at once, and holders that are alive but far too slow."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator

import pytest

from tensorhub_core.clock import SystemClock
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.registry import make_transport
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import make, same
from tests.processes.client.test_faults import MIB, SMALL, Brake, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
PATIENT = {**SMALL, "stall_s": 30.0}
"""Stalls are noticed so late that nothing but the comparison of sources can save a read from a slow one in time."""


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_holders_give_parts_of_one_read(here: Hub, way: str) -> None:
    settings = {**SMALL, "transport": way}
    with Actor() as one, Actor() as two:
        for replica, actor in (("one", one), ("two", two)):
            here.publisher(actor, "plain", replica=replica, mib=MIB, settings=settings)
        reader, tensors = here.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        brake.go.set()
        assert reader.replicate(progress=brake) == 1
        assert same(tensors, make("plain", 1, mib=MIB))
        assert set(brake.sources) == {"one", "two"}
        assert reader.counters.failovers == 0
        assert reader.counters.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


def test_a_changed_byte_at_one_of_several_is_made_good_within_the_read(here: Hub, other: Actor) -> None:
    bad = here.publisher(other, "plain", replica="bad")
    here.publisher(other, "plain", replica="good")
    other.do("flip", bad, name="norm")
    for number in range(4):
        reader, tensors = here.reader("plain", f"reader {number}")
        assert reader.replicate() == 1
        assert same(tensors, make("plain", 1))


@contextlib.contextmanager
def pulses(actor: Actor) -> Iterator[None]:
    """Let a process run for one part in a hundred of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            actor.signal(signal.SIGSTOP)
            over.wait(0.3)
            actor.signal(signal.SIGCONT)
            over.wait(0.003)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


@pytest.mark.parametrize("how", ["stopped", "crawling"])
def test_a_holder_that_is_far_slower_than_another_is_left(
    here: Hub, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**PATIENT, "transport": "tcp"}
    with Actor() as fast, Actor() as slow, caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        for replica, actor in (("fast", fast), ("slow", slow)):
            here.publisher(actor, "plain", replica=replica, mib=MIB, settings=settings)
        reader, tensors = here.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        reading = in_background(lambda: reader.replicate(timeout_s=25, progress=brake))
        assert brake.half.wait(60)
        assert set(brake.sources) == {"fast", "slow"}
        stack.enter_context(pulses(slow)) if how == "crawling" else slow.signal(signal.SIGSTOP)
        brake.go.set()
        assert reading.result(60) == 1
        assert same(tensors, make("plain", 1, mib=MIB))
        assert reader.counters.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
        if how == "stopped":
            slow.signal(signal.SIGCONT)
            assert reader.counters.failovers == 1
            assert "slow" in caplog.text


def test_a_reader_of_one_source_is_told_that_others_read_faster(here: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Each reader has a holder on its own host; the second one's gives a hundredth of what the first one's does."""
    shared = {**PATIENT, "transport": "tcp"}
    rates = {"first": 12e6, "second": 120e3}
    with caplog.at_level(logging.WARNING):
        for host in rates:
            publisher = here.worker(f"holder of {host}", settings={**shared, "host": host})
            publisher.register(make("plain", 1, mib=MIB))
            publisher.publish(1)
        calls, heard = {}, {host: [] for host in rates}
        for host, rate in rates.items():
            slow = Fault(FaultKind.SLOW, bytes_per_s=rate)
            # The first reads are slow: those from the first source.
            plan = FaultPlan(reads={number: slow for number in range(4 if host == "second" else 10_000)})
            transport = FaultyTransport(make_transport("tcp"), plan, SystemClock())
            worker, tensors = here.reader(
                "plain", f"reader of {host}", mib=MIB, transport=transport, settings={**PATIENT, "host": host}
            )
            listen = heard[host].append
            call = in_background(lambda w=worker, f=listen: w.replicate(timeout_s=35, progress=lambda d, t, s: f(s)))
            calls[host] = (call, worker, tensors)
        for call, _, tensors in calls.values():
            assert call.result(60) == 1
            assert same(tensors, make("plain", 1, mib=MIB))
    assert calls["first"][1].counters.failovers == 0
    assert calls["second"][1].counters.failovers >= 1
    assert heard["second"][0] == "holder of second"
    assert heard["second"][-1] != "holder of second"
    assert "slow" in caplog.text
