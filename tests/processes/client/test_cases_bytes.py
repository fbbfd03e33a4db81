"""Bytes that are wrong at a holder or on the way: on every transport, read in place, into staging, by any plan."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tensorhub_core import CorruptTransfer, StateError, Worker
from tensorhub_core.clock import SystemClock
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.registry import make_transport
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import Tensors, is_filled, make, same
from tests.processes.client.test_faults import MIB, SMALL, each_way

pytestmark = pytest.mark.timeout(120)
OTHER_LAYOUT = {"segment_bytes": 128 << 10}
each_how = pytest.mark.parametrize("how", ["replicate", "stage", "another layout"])


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def fetch(worker: Worker, how: str) -> int:
    """Get version 1 into the registered memory, by way of staging memory if asked for."""
    if how != "stage":
        return worker.replicate(1, timeout_s=30)
    with worker.stage(1, timeout_s=30) as staged:
        return staged.install()


@each_way
@each_how
def test_a_byte_that_its_publisher_changed_is_found(here: Hub, other: Actor, way: str, how: str) -> None:
    settings = {"transport": way}
    source = here.publisher(other, "plain", settings=settings)
    other.do("flip", source, name="layers.1.weight")
    more: dict[str, Any] = OTHER_LAYOUT if how == "another layout" else {}
    reader, tensors = here.reader("plain", settings=settings | more)
    with pytest.raises(CorruptTransfer, match="trainer"):
        fetch(reader, how)
    assert reader.version is None
    assert [set(info.replicas) for info in reader.versions()] == [{"trainer"}], "nobody publishes it further"
    if how == "stage":
        assert is_filled(tensors), "the registered memory was not touched"
    else:
        with pytest.raises(StateError, match="dirty"):
            reader.publish(1)


@each_way
@each_how
def test_another_holder_is_tried_and_the_first_one_named(
    here: Hub, other: Actor, way: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The corrupt one is nearer, and its name comes first, so that it is read from first, and alone."""
    settings, near = {"transport": way}, {"host": "near"}
    bad = here.publisher(other, "plain", replica="bad", settings=settings | near)
    here.publisher(other, "plain", replica="good", settings=settings | {"host": "far"})
    other.do("flip", bad, name="norm")
    more: dict[str, Any] = OTHER_LAYOUT if how == "another layout" else {}
    reader, tensors = here.reader("plain", settings=settings | near | more)
    with caplog.at_level(logging.WARNING):
        assert fetch(reader, how) == 1
    assert same(tensors, make("plain", 1))
    assert reader.counters.failovers == 1
    assert reader.counters.bytes_read < 1.5 * bytes_of(tensors)
    assert "leaves bad: corrupt" in caplog.text


def faulty(way: str, plan: FaultPlan) -> FaultyTransport:
    return FaultyTransport(make_transport(way), plan, SystemClock())


@each_way
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("kind", [FaultKind.FLIP, FaultKind.LIE])
def test_what_came_wrong_once_is_read_again_and_counted(
    here: Hub, other: Actor, way: str, number: int, kind: FaultKind
) -> None:
    settings = {**SMALL, "transport": way}
    here.publisher(other, "plain", mib=MIB, settings=settings)
    transport = faulty(way, FaultPlan(reads={number: Fault(kind)}))
    reader, tensors = here.reader("plain", mib=MIB, settings=settings, transport=transport)
    assert reader.replicate(timeout_s=30) == 1
    assert same(tensors, make("plain", 1, mib=MIB))
    assert reader.counters.failovers == 0
    assert reader.counters.bytes_read == bytes_of(tensors)
    if kind is FaultKind.FLIP:
        assert reader.counters.rereads == 1, "one bit is in one segment"
    else:
        assert reader.counters.rereads >= 1


@each_way
def test_a_transport_that_never_moves_a_byte_is_found_out(here: Hub, other: Actor, way: str) -> None:
    settings = {"transport": way}
    here.publisher(other, "plain", settings=settings)
    transport = faulty(way, FaultPlan(chances={Fault(FaultKind.LIE): 1.0}))
    reader, tensors = here.reader("plain", settings=settings, transport=transport)
    with pytest.raises(CorruptTransfer, match="trainer"):
        reader.replicate(timeout_s=20)
    assert reader.version is None
    assert is_filled(tensors)
    assert reader.counters.commits == 0
