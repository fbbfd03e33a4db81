"""How `auto` carries out its choice: fall-backs that leave nothing behind, members that refuse, fences of all."""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, ReadState, Region
from tensorhub_core.transport.description import decode_offer
from tensorhub_core.transport.memory import MemoryNetwork
from tests.transport.auto_world import HERE, SIZE, THERE, Side, noise

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(step_bytes=SIZE // 4)


def pair(network: MemoryNetwork, source: dict[str, Any], reader: dict[str, Any]) -> tuple[Side, Side]:
    there, here = Side(network, fill=noise, **source), Side(network, **reader)
    here.auto.register([here.region])
    return there, here


FAR = {"host": THERE}
RDMA = {"host": THERE, "rdma": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, set[str]]] = {
    "neighbours": ({}, {}, "cma", {"cma", "tcp"}),
    "neighbours with RDMA": ({"rdma": True}, {"rdma": True}, "cma", {"cma", "tcp", "nixl"}),
    "neighbours without cma here": ({}, {"missing": ["cma"]}, "tcp", {"cma", "tcp"}),
    "neighbours without cma there": ({"missing": ["cma"]}, {}, "tcp", {"tcp"}),
    "machines": (FAR, {}, "tcp", {"cma", "tcp"}),
    "machines with RDMA": (RDMA, {"rdma": True}, "nixl", {"cma", "tcp", "nixl"}),
    "RDMA on one side": (RDMA, {}, "tcp", {"cma", "tcp", "nixl"}),
    "RDMA, NIXL missing there": ({**RDMA, "nixl": False}, {"rdma": True}, "tcp", {"cma", "tcp"}),
    "RDMA, NIXL missing here": (RDMA, {"rdma": True, "missing": ["nixl"]}, "tcp", {"cma", "tcp", "nixl"}),
    "RDMA alone": ({**RDMA, "missing": ["tcp", "cma"]}, {}, "nixl", {"nixl"}),
    "NIXL alone, without RDMA": ({"missing": ["tcp", "cma"]}, {}, "nixl", {"nixl"}),
    "a source that does not say where it is": ({"host": None}, {}, "tcp", {"cma", "tcp"}),
    "device memory there": ({"device": "cuda:0"}, {}, "nixl", {"nixl"}),
    "device memory on both sides": ({"device": "cuda:0", **FAR}, {"device": "cuda:1"}, "nixl", {"nixl"}),
    "device memory here": (RDMA, {"device": "cuda:1"}, "nixl", {"cma", "tcp", "nixl"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_pair_is_read_by_the_best_way(case: str, network: MemoryNetwork) -> None:
    source, reader, way, offered = CASES[case]
    there, here = pair(network, source, reader)
    description = there.serve()
    assert set(decode_offer(description).descriptions) == offered
    assert here.read(here.auto.attach(description), there) == way


def test_nixl_is_loaded_only_where_it_is_needed(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    here.read(here.auto.attach(there.serve()), there)
    assert "nixl" not in here.members
    assert "nixl" not in there.members
    there.auto.register([Region(there.region.address, 16, "cuda:0")])
    assert [region.device for region in there.members["nixl"].regions] == ["cpu", "cuda:0"]
    assert [region.device for region in there.members["tcp"].regions] == ["cpu"]


def test_memory_of_a_device_without_nixl_says_what_to_install(network: MemoryNetwork) -> None:
    here = Side(network, missing=["nixl"], device="cuda:0")
    with pytest.raises(TransportError, match="'cuda:0' is moved by NIXL alone: nixl is not installed"):
        here.serve()
    with pytest.raises(TransportError, match="register"):
        here.auto.describe()


def test_device_memory_that_reads_from_a_source_without_nixl_is_told(network: MemoryNetwork) -> None:
    there, here = pair(network, FAR, {"device": "cuda:0"})
    with pytest.raises(TransportError, match=r"connect\(transport='nixl'\)"):
        here.auto.attach(there.serve())


def test_a_device_is_filled_from_a_source_without_nixl_through_staging_memory(network: MemoryNetwork) -> None:
    there, here = pair(network, FAR, {"device": "cuda:0"})
    staging = np.full(SIZE, 0xA5, np.uint8)
    here.auto.register_local([Region(staging.ctypes.data, SIZE)])
    peer = here.auto.attach(there.serve())
    run = np.array([SIZE], np.uint64)
    place = np.array([staging.ctypes.data], np.uint64), np.array([there.region.address], np.uint64)
    read = here.auto.post(peer, Batch(*place, run))
    while here.auto.poll(read).state is ReadState.ACTIVE:
        pass
    assert here.auto.poll(read).state is ReadState.DONE
    assert np.array_equal(staging, there.memory)
    assert not here.auto.fills_devices
    with pytest.raises(TransportError, match=r"connect\(transport='nixl'\)"):
        here.auto.post(peer, Batch(*place, run, "cuda:0"))


def test_what_refuses_to_attach_is_followed_by_the_next(network: MemoryNetwork) -> None:
    there, here = pair(network, RDMA | {"host": HERE}, {"rdma": True})
    description = there.serve()
    for refusing, used in ((["cma"], "nixl"), (["cma", "nixl"], "tcp")):
        for way in refusing:
            here.members[way].refuse.add("attach")
        assert here.read(here.auto.attach(description), there) == used
    here.members["tcp"].refuse.add("attach")
    with pytest.raises(TransportError) as refused:
        here.auto.attach(description)
    assert all(f"{way}: {way} does not attach" in str(refused.value) for way in ("cma", "nixl", "tcp"))


def test_a_first_read_that_fails_goes_on_by_the_next_way_and_nothing_of_it_lands(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    peer = here.auto.attach(there.serve())
    here.members["cma"].fail = 1
    assert here.read(peer, there) == "cma then tcp"
    assert here.members["cma"].fences == 1
    here.memory[:] = 0xA5
    for _ in range(10):
        network.step()
    assert (here.memory == 0xA5).all(), "bytes of the failed read landed"
    assert here.read(peer, there) == "tcp"


def test_all_ways_may_fail(network: MemoryNetwork) -> None:
    there, here = pair(network, RDMA, {"rdma": True})
    peer = here.auto.attach(there.serve())
    here.members["nixl"].fail = here.members["tcp"].fail = 1
    read = here.auto.post(peer, here.batch(there))
    progress = here.end_of(read)
    assert progress.state is ReadState.FAILED
    assert "tcp is broken" in progress.error
    assert not here.auto.close(read), "the last one may still write"
    with pytest.raises(TransportError, match="fence"):
        here.auto.post(peer, here.batch(there))
    here.auto.fence()
    here.memory[:] = 0xA5
    network.step()
    assert (here.memory == 0xA5).all()


def test_a_failed_first_read_whose_next_way_cannot_be_attached_ends_quiet(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    peer = here.auto.attach(there.serve())
    here.members["cma"].fail = 1
    here.members["tcp"].refuse.add("attach")
    read = here.auto.post(peer, here.batch(there))
    progress = here.end_of(read)
    assert progress.state is here.auto.poll(read).state is ReadState.FAILED
    assert "cma is broken" in progress.error
    assert "tcp does not attach" in progress.error
    assert here.auto.close(read)


def test_with_other_reads_on_the_failed_way_nothing_is_tried(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    description = there.serve()
    peer = here.auto.attach(description)
    here.members["cma"].fail = 1
    reads = [here.auto.post(peer, here.batch(there)) for _ in range(2)]
    assert here.auto.poll(reads[0]).state is ReadState.FAILED
    assert here.members["cma"].fences == 0
    assert not here.auto.close(reads[0])
    here.auto.fence()
    assert here.auto.close(reads[1]), "a fence ends it"
    assert here.read(here.auto.attach(description), there) == "tcp", "what failed comes last the next time"
    here.auto.fence()
    assert here.read(here.auto.attach(description), there) == "cma", "and first again after that"


def test_a_proven_way_that_fails_is_reported(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    description = there.serve()
    peer = here.auto.attach(description)
    here.read(peer, there)
    here.members["cma"].fail = 1
    read = here.auto.post(peer, here.batch(there))
    assert here.end_of(read).error == "cma is broken"
    assert here.members["tcp"].posts == 0
    assert not here.auto.close(read)
    here.auto.fence()
    assert here.read(here.auto.attach(description), there) == "tcp", "some memory can be read by its own process alone"


def test_rdma_that_worked_once_is_not_left_for_one_failure(network: MemoryNetwork) -> None:
    there, here = pair(network, RDMA, {"rdma": True})
    description = there.serve()
    peer = here.auto.attach(description)
    here.read(peer, there)
    here.members["nixl"].fail = 1
    read = here.auto.post(peer, here.batch(there))
    assert here.end_of(read).state is ReadState.FAILED
    assert not here.auto.close(read)
    here.auto.fence()
    assert here.read(here.auto.attach(description), there) == "nixl"


def test_another_peer_survives_a_fence_inside_a_fall_back(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    other = Side(network, fill=noise)
    first = here.auto.attach(other.serve())
    assert here.read(first, other) == "cma"
    second = here.auto.attach(there.serve())
    here.members["cma"].fail = 1
    assert here.read(second, there) == "cma then tcp"
    assert here.read(first, other) == "cma"


def test_a_fall_back_that_cannot_be_fenced_is_not_quiet(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    peer = here.auto.attach(there.serve())
    here.members["cma"].fail = 1
    here.members["cma"].refuse.add("fence")
    read = here.auto.post(peer, here.batch(there))
    assert "could not be fenced" in here.end_of(read).error
    assert here.members["tcp"].posts == 0
    assert not here.auto.close(read)
    with pytest.raises(TransportError, match="cma does not fence"):
        here.auto.fence()
    with pytest.raises(TransportError, match="fence"):
        here.auto.post(here.auto.attach(there.auto.describe()), here.batch(there))


def test_a_fence_reaches_every_member_whatever_one_of_them_raises(network: MemoryNetwork) -> None:
    near, here = pair(network, {}, {})
    far = Side(network, host=THERE, fill=noise)
    reads = [here.auto.post(here.auto.attach(side.serve()), here.batch(side)) for side in (near, far)]
    assert {way for way, member in here.members.items() if member.posts} == {"cma", "tcp"}
    assert [here.auto.close(read) for read in reads] == [False, False]
    here.members["cma"].refuse.add("fence")
    with pytest.raises(TransportError, match="cma does not fence"):
        here.auto.fence()
    assert here.members["tcp"].fences == 1
    here.members["cma"].refuse.clear()
    here.auto.fence()
    here.memory[:] = 0xA5
    network.step()
    assert (here.memory == 0xA5).all()


def test_an_unquiet_read_of_one_way_stops_all(network: MemoryNetwork) -> None:
    near, here = pair(network, {}, {})
    far = Side(network, host=THERE, fill=noise)
    peers = [here.auto.attach(side.serve()) for side in (near, far)]
    assert not here.auto.close(here.auto.post(peers[1], here.batch(far)))
    for call in (
        lambda: here.auto.post(peers[0], here.batch(near)),
        lambda: here.auto.register([here.region]),
        lambda: here.auto.register_local([here.region]),
        here.auto.deregister,
    ):
        with pytest.raises(TransportError, match="fence"):
            call()


def test_staging_memory_and_served_memory_reach_members_made_later(network: MemoryNetwork) -> None:
    there, here = pair(network, {**RDMA, "missing": ["tcp", "cma"]}, {})
    staging = np.zeros(SIZE, np.uint8)
    lent = Region(staging.ctypes.data, SIZE)
    here.auto.register_local([lent])
    peer = here.auto.attach(there.serve())
    assert here.members["nixl"].lent == [here.region, lent]
    assert here.members["nixl"].regions == [], "reading by a way is no reason to serve by it"
    assert here.members["cma"].lent == here.members["tcp"].lent == [lent]
    assert here.read(peer, there) == "nixl"
    here.auto.fence()
    here.auto.revoke()
    here.auto.register_local([])
    assert here.members["nixl"].lent == []
    here.members["nixl"].refuse.add("register_local")
    with pytest.raises(TransportError, match="nixl does not register_local"):
        here.auto.register_local([lent])
    assert here.members["tcp"].lent == [], "a failure keeps the last set in every member"


def test_a_way_that_cannot_serve_is_left_out_with_a_warning(
    network: MemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = pair(network, RDMA, {})
    there.auto.register([there.region])
    there.members["nixl"].refuse.add("register")
    more = np.zeros(64, np.uint8)
    there.auto.register([Region(more.ctypes.data, 64)])
    assert set(decode_offer(there.auto.describe()).descriptions) == {"cma", "tcp"}
    assert "memory is not served by nixl: nixl does not register" in caplog.text
    assert here.read(here.auto.attach(there.auto.describe()), there) == "tcp"
    there.members["nixl"].refuse.clear()
    there.auto.register([Region(more.ctypes.data, 64)])
    assert set(decode_offer(there.auto.describe()).descriptions) == {"cma", "tcp", "nixl"}
    assert there.members["nixl"].regions[0] == there.region, "all of it is served again"
    for member in there.members.values():
        member.refuse.add("register")
    with pytest.raises(TransportError, match=r"cannot be served.*nixl does not.*tcp does not.*cma does not"):
        there.auto.register([Region(more.ctypes.data, 64)])


def test_device_memory_that_nixl_refuses_changes_nothing(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    there.auto.register([there.region])
    description = there.auto.describe()
    nixl = there.auto._members["nixl"].transport
    nixl.refuse.add("register")  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match="nixl does not register"):
        there.auto.register([Region(there.region.address, 16, "cuda:0")])
    assert there.auto.describe() == description
    assert here.read(here.auto.attach(description), there) == "cma"


def test_revoking_ends_every_way_and_agents_are_never_named_twice(network: MemoryNetwork) -> None:
    there, here = pair(network, RDMA, {"rdma": True})
    names = set()
    for _ in range(3):
        description = there.serve()
        names.add(decode_offer(description).agent)
        peer = here.auto.attach(description)
        here.read(peer, there)
        there.auto.revoke()
        with pytest.raises(TransportError):
            here.auto.post(peer, here.batch(there))
        with pytest.raises(TransportError, match="register"):
            there.auto.describe()
        with pytest.raises(TransportError):
            here.auto.attach(description)
    assert len(names) == 3


def test_one_line_says_how_a_peer_is_read(network: MemoryNetwork, caplog: pytest.LogCaptureFixture) -> None:
    there, here = pair(network, {}, {})
    description = there.serve()
    with caplog.at_level(logging.INFO, "tensorhub"):
        for _ in range(3):
            here.read(here.auto.attach(description), there)
            here.auto.fence()
    agent = decode_offer(description).agent
    assert [record.message for record in caplog.records] == [
        f"{agent} is read by cma: both processes are on this machine"
    ]


def test_without_any_way_every_reason_is_said(network: MemoryNetwork) -> None:
    with pytest.raises(TransportError) as refused:
        Side(network, missing=["cma", "nixl", "tcp"])
    assert all(f"{way} is not installed" in str(refused.value) for way in ("cma", "nixl", "tcp"))


def test_the_reason_of_the_choice_is_one_line(network: MemoryNetwork) -> None:
    expected = {
        "cma within this machine, tcp between machines (not both sides have RDMA)": {},
        "cma within this machine, nixl between machines (both sides have RDMA)": {"rdma": True},
        "cma within this machine, tcp between machines (RDMA needs NIXL on both sides)": {"rdma": True, "nixl": False},
        "tcp within this machine, tcp between machines (not both sides have RDMA)": {"missing": ["cma"]},
        "nixl within this machine, nixl between machines (the peer offers nothing better)": {"missing": ["cma", "tcp"]},
    }
    assert {Side(network, **more).auto.reason for more in expected.values()} == set(expected)


def test_a_forked_child_is_told(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    description = there.serve()
    child = os.fork()
    if child == 0:
        try:
            here.auto.attach(description)
        except TransportError as error:
            here.auto.shutdown()
            del here
            gc.collect()
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert here.read(here.auto.attach(description), there) == "cma"


def test_the_end_reaches_every_member(network: MemoryNetwork) -> None:
    there, here = pair(network, RDMA, {"rdma": True})
    here.read(here.auto.attach(there.serve()), there)
    for _ in range(2):
        here.auto.shutdown()
    for member in here.members.values():
        with pytest.raises(TransportError, match="shut down"):
            member.describe()


def test_a_peer_is_detached_from_its_members_whatever_failed_since(network: MemoryNetwork) -> None:
    there, here = pair(network, {}, {})
    peer = here.auto.attach(there.serve())
    assert here.read(peer, there) == "cma"
    here.members["cma"].refuse.add("attach")
    other = Side(network, fill=noise)
    assert here.read(here.auto.attach(other.serve()), other) == "tcp"
    here.auto.detach(peer)
    assert not here.members["cma"]._peers
    assert len(here.members["tcp"]._peers) == 1
