"""Sources, readers and wires that fail in the middle of a read."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tensorhub_core import (
    CorruptTransfer,
    DeadlineExceeded,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub_core.clock import SystemClock
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.registry import make_transport
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import LEASE_S, Hub
from tests.processes.client.samples import is_filled, make, same
from tests.transport.lab import needs_nixl

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
MIB = 48
SMALL = {"segment_bytes": 256 << 10, "window": 2, "stall_s": 1.0}
ONE_BY_ONE = {**SMALL, "window": 1, "stall_s": 3.0}
"""For memory of this machine, which is there at once: little is read ahead of verification, so that much is missing
when half is verified; and a brake is not taken for a slow source, to which ever less would be posted."""
BY: dict[str, dict[str, Any]] = {
    "auto": {**ONE_BY_ONE, "transport": "auto"},
    "tcp": {**SMALL, "segment_bytes": 1 << 20, "transport": "tcp"},  # it reports each segment, and each is braked
    "nixl": {**SMALL, "window": 1, "transport": "nixl"},
}
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
NIXL = pytest.param("nixl", marks=needs_nixl)
each_way = pytest.mark.parametrize("way", ["auto", "tcp", NIXL])
"""`auto` reads processes of this machine by cma."""


def in_background(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


class Brake:
    """A progress callback that slows a read down, and holds it at half, or another share, until it is let go."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.half, self.go = threading.Event(), threading.Event()
        self.sources: list[str] = []

    def __call__(self, done: int, total: int, source: str) -> None:
        self.sources.append(source)
        if done < total * self.share:
            time.sleep(0.03)
        elif not self.half.is_set():
            self.half.set()
            self.go.wait(30)


def faulty(plan: FaultPlan) -> FaultyTransport:
    return FaultyTransport(make_transport("auto"), plan, SystemClock())


@each_way
def test_a_killed_source_is_replaced_by_another_holder(here: Hub, way: str) -> None:
    settings = BY[way]
    with Actor() as one, Actor() as two:
        actors = {"one": one, "two": two}
        for replica, actor in actors.items():
            here.publisher(actor, "plain", replica=replica, mib=MIB, settings=settings)
        reader, tensors = here.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        reading = in_background(lambda: reader.replicate(progress=brake))
        assert brake.half.wait(60)
        actors[brake.sources[-1]].kill()
        brake.go.set()
        assert reading.result(60) == 1
        assert same(tensors, make("plain", 1, mib=MIB))
        assert reader.counters.failovers == 1
        total = sum(tensor.nbytes for tensor in tensors.values())
        assert total <= reader.counters.bytes_read < 1.5 * total
        assert set(brake.sources) == {"one", "two"}


@pytest.mark.parametrize(
    ("how", "way"),
    [
        *((KILLED, "auto"), (KILLED, "tcp"), (STOPPED, "tcp")),
        *(pytest.param(how, "nixl", marks=needs_nixl) for how in (KILLED, STOPPED)),
    ],
)
def test_without_another_holder_the_read_ends_unavailable_and_nothing_lands_later(
    here: Hub, how: signal.Signals, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # shared memory is read from a stopped process without its help
    settings = BY[way]
    with Actor() as only:
        here.publisher(only, "plain", mib=MIB, settings=settings)
        reader, tensors = here.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        reading = in_background(lambda: reader.replicate(timeout_s=40, progress=brake))
        assert brake.half.wait(60)
        only.signal(how)
        brake.go.set()
        with pytest.raises(VersionUnavailable, match="trainer"):
            reading.result(60)
        assert reader.version is None
        with pytest.raises(StateError, match="dirty"):
            reader.publish(1)
        for tensor in tensors.values():
            tensor.zero_()
        if how == signal.SIGSTOP:
            only.signal(signal.SIGCONT)
        time.sleep(1.0)
        assert is_filled(tensors, 0), "late bytes landed in memory that the caller has back"
        fresh, copied = make("plain", 2, mib=MIB), here.worker("fresh", settings=settings)
        copied.register(fresh)
        assert copied.publish(2) == 2
        assert reader.replicate(2, timeout_s=30) == 2
        assert same(tensors, fresh)


def test_a_stopped_source_of_this_machine_is_read_on_without_its_help(here: Hub) -> None:
    """As long as the hub takes it for alive: what has arrived is whole, or not there at all."""
    with Actor() as only:
        here.publisher(only, "plain", mib=MIB, settings=BY["auto"])
        reader, tensors = here.reader("plain", mib=MIB, settings=BY["auto"])
        brake = Brake()
        reading = in_background(lambda: reader.replicate(timeout_s=40, progress=brake))
        assert brake.half.wait(60)
        only.signal(STOPPED)
        brake.go.set()
        try:
            version = reading.result(60)
        except VersionUnavailable:
            assert reader.version is None
        else:
            assert version == 1
            assert same(tensors, make("plain", 1, mib=MIB))


@pytest.mark.parametrize(
    ("how", "way"),
    [
        *((KILLED, "auto"), (KILLED, "tcp"), (STOPPED, "tcp")),
        *(pytest.param(how, "nixl", marks=needs_nixl) for how in (KILLED, STOPPED)),
    ],
)
def test_a_dead_reader_does_not_keep_a_publisher_from_its_memory(here: Hub, how: signal.Signals, way: str) -> None:
    settings = {**SMALL, "transport": way}
    trainer = here.worker("trainer", settings=settings)
    trainer.register(make("plain", 1, mib=MIB))
    trainer.publish(1)
    with Actor() as rollout:
        handle = here.remote(rollout, "rollout", settings=settings)
        rollout.do("register", handle, sample="plain", seed=1, mib=MIB, blank=True)
        rollout.begin("call", handle, method="replicate", report=True)
        assert rollout.events.get(timeout=30)
        rollout.signal(how)
        begun = time.monotonic()
        trainer.unpublish(timeout_s=30)
        assert time.monotonic() - begun < 6 * LEASE_S
        rollout.kill()


@each_way
def test_a_reader_that_is_stopped_is_no_danger_when_it_goes_on(here: Hub, way: str) -> None:
    """Its leases are gone: what it reads on is never taken for the version, and the source survives."""
    settings = {**SMALL, "transport": way}
    trainer, tensors = here.worker("trainer", settings=settings), make("plain", 1, mib=MIB)
    trainer.register(tensors)
    trainer.publish(1)
    with Actor() as rollout:
        handle = here.remote(rollout, "rollout", settings=settings)
        rollout.do("register", handle, sample="plain", seed=1, mib=MIB, blank=True)
        reading = rollout.begin("call", handle, method="replicate", timeout_s=25, report=True)
        assert rollout.events.get(timeout=30)
        rollout.signal(signal.SIGSTOP)
        trainer.unpublish(timeout_s=30)
        for tensor in tensors.values():
            tensor.zero_()
        trainer.publish(2)
        rollout.signal(signal.SIGCONT)
        with pytest.raises(Exception, match=r"VersionUnavailable|DeadlineExceeded|StateError|CorruptTransfer"):
            reading.result(60)
        assert rollout.do("version", handle) is None
        assert rollout.do("call", handle, method="update", timeout_s=30) == 2


def test_a_changed_byte_is_found_and_the_publisher_named(here: Hub, other: Actor) -> None:
    source = here.publisher(other, "plain")
    other.do("flip", source, name="norm")
    reader, _ = here.reader("plain")
    with pytest.raises(CorruptTransfer, match="trainer"):
        reader.replicate()
    assert reader.version is None
    assert [set(info.replicas) for info in reader.versions()] == [{"trainer"}]


def test_a_changed_byte_at_one_holder_is_made_good_by_another(here: Hub, other: Actor) -> None:
    bad = here.publisher(other, "plain", replica="bad")
    here.publisher(other, "plain", replica="good")
    other.do("flip", bad, name="norm")
    for number in range(4):
        reader, tensors = here.reader("plain", f"reader {number}")
        assert reader.replicate() == 1
        assert same(tensors, make("plain", 1))


def test_a_bit_flipped_on_the_way_is_read_again(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", mib=MIB, settings=SMALL)
    # So far apart that neither can be the other one's second read.
    plan = FaultPlan(reads={2: Fault(FaultKind.FLIP), 60: Fault(FaultKind.FLIP)})
    reader, tensors = here.reader("plain", mib=MIB, settings=SMALL, transport=faulty(plan))
    assert reader.replicate() == 1
    assert same(tensors, make("plain", 1, mib=MIB))
    assert reader.counters.rereads == 2
    assert reader.counters.failovers == 0


@pytest.mark.parametrize("reads", [{0: Fault(FaultKind.LIE)}, {3: Fault(FaultKind.LIE)}])
def test_success_without_bytes_is_made_good_once(here: Hub, other: Actor, reads: dict[int, Fault]) -> None:
    here.publisher(other, "plain", mib=MIB, settings=SMALL)
    reader, tensors = here.reader("plain", mib=MIB, settings=SMALL, transport=faulty(FaultPlan(reads=reads)))
    assert reader.replicate() == 1
    assert same(tensors, make("plain", 1, mib=MIB))


def test_success_without_bytes_for_ever_is_an_error(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain")
    plan = FaultPlan(chances={Fault(FaultKind.LIE): 1.0})
    reader, tensors = here.reader("plain", transport=faulty(plan))
    with pytest.raises(TensorHubError) as error:
        reader.replicate(timeout_s=20)
    assert isinstance(error.value, CorruptTransfer | VersionUnavailable)
    assert reader.version is None
    assert is_filled(tensors)


@pytest.mark.parametrize("kind", [FaultKind.LATE, FaultKind.STALL])
def test_bytes_that_come_after_the_deadline_never_land(here: Hub, other: Actor, kind: FaultKind) -> None:
    here.publisher(other, "plain")
    plan = FaultPlan(chances={Fault(kind): 1.0})
    reader, tensors = here.reader("plain", settings={"stall_s": 30.0}, transport=faulty(plan))
    with pytest.raises(DeadlineExceeded):
        reader.replicate(timeout_s=5.0)
    assert reader.version is None
    assert reader.counters.fences == 1
    for tensor in tensors.values():
        tensor.zero_()
    reader._resources.transport.land_late()  # type: ignore[attr-defined]
    time.sleep(0.5)
    assert is_filled(tensors, 0)


def test_a_slow_transfer_ends_at_its_deadline_and_can_be_repeated(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", mib=MIB, settings=SMALL)
    plan = FaultPlan(reads={number: Fault(FaultKind.SLOW, bytes_per_s=2e6) for number in range(60)})
    reader, tensors = here.reader("plain", mib=MIB, settings=SMALL, transport=faulty(plan))
    with pytest.raises(DeadlineExceeded):
        reader.replicate(timeout_s=0.8)
    assert reader.version is None
    assert reader.replicate(timeout_s=60) == 1
    assert same(tensors, make("plain", 1, mib=MIB))


def test_a_reader_follows_a_reader_that_is_still_filling(here: Hub, other: Actor) -> None:
    """Once the publisher has left, the second reader can only have read from the first one's prefix."""
    here.publisher(other, "plain", mib=MIB, settings=SMALL)
    first, first_tensors = here.reader("plain", "first", mib=MIB, settings=SMALL)
    brake = Brake()
    filling = in_background(lambda: first.replicate(progress=brake))
    assert brake.half.wait(60)
    seconds = [here.reader("plain", f"second {number}", mib=MIB, settings=SMALL) for number in range(2)]
    heard: list[str] = []
    reading = [
        in_background(lambda w=worker: w.replicate(progress=lambda d, t, s: heard.append(s)))  # type: ignore[misc]
        for worker, _ in seconds
    ]
    time.sleep(1.0)
    brake.go.set()
    assert filling.result(60) == 1
    assert [future.result(60) for future in reading] == [1, 1]
    for tensors in (first_tensors, *(tensors for _, tensors in seconds)):
        assert same(tensors, make("plain", 1, mib=MIB))
    assert "first" in heard


def test_close_with_readers_drains_or_expires(here: Hub, other: Actor) -> None:
    trainer = here.worker("trainer", settings=SMALL | {"close_timeout_s": 1.0})
    trainer.register(make("plain", 1, mib=MIB))
    trainer.publish(1)
    reader, _ = here.reader("plain", mib=MIB, settings=SMALL)
    brake = Brake()
    reading = in_background(lambda: reader.replicate(timeout_s=30, progress=brake))
    assert brake.half.wait(60)
    begun = time.monotonic()
    trainer.close()
    assert time.monotonic() - begun < 15
    brake.go.set()
    with pytest.raises(TensorHubError) as error:
        reading.result(60)
    assert isinstance(error.value, VersionUnavailable)
    assert reader.version is None


def test_the_block_of_a_worker_ends_in_time_whatever_happens_in_it(here: Hub) -> None:
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        _publish_and_raise(here)
    assert time.monotonic() - begun < 20


def _publish_and_raise(here: Hub) -> None:
    with here.worker("trainer") as trainer:
        trainer.register(make("plain", 1))
        trainer.publish(1)
        raise ZeroDivisionError
