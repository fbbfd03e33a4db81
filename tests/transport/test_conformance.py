"""What every transport has to keep: one suite for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, ReadState, Region
from tests.transport.lab import HAS_NIXL, PEER_BYTES, QUIET, SENTINEL, Lab, Pool, batch, open_lab

KINDS = ["memory", "faults", "nixl", "nixl-tcp", "cma", "tcp", "auto", "auto-tcp"]
IN_FLIGHT = ["memory", "faults", "nixl-tcp", "tcp", "auto-tcp"]
"""The kinds on which a read can be caught on its way: UCX copies between processes of one machine inside `post`."""
UNQUIET = [kind for kind in IN_FLIGHT if kind not in QUIET]
"""Those of them whose reads go on by themselves; those of the others go on only while they are polled."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    opened = Pool()
    yield opened
    opened.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    if request.param.startswith("nixl") and not HAS_NIXL:
        pytest.skip("NIXL is not installed")
    with open_lab(request.param, pool, monkeypatch.setenv) as opened:
        yield opened


every = pytest.mark.parametrize("lab", KINDS, indirect=True)
in_flight = pytest.mark.parametrize("lab", IN_FLIGHT, indirect=True)
unquiet = pytest.mark.parametrize("lab", UNQUIET, indirect=True)
quiet = pytest.mark.parametrize("lab", QUIET, indirect=True)

BIG = PEER_BYTES


@every
def test_reads_give_the_peers_bytes_and_touch_nothing_else(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(20 << 20)
    attached = lab.reader.attach(peer.description)
    at = 3
    expected = memory.copy()
    for size in (1, 2, 7, 64, 4095, 4096, 4097, (1 << 20) + 3, 4 << 20, 12 << 20):
        remote = at * 7 % (peer.data.size - size)
        lab.read(attached, batch((memory.ctypes.data + at, peer.address + remote, size)))
        expected[at : at + size] = peer.data[remote : remote + size]
        at += size + 5
    assert np.array_equal(memory, expected)


@every
@pytest.mark.parametrize("runs", [2, 256, 2000])
def test_batches_of_many_runs(lab: Lab, runs: int) -> None:
    chance = np.random.default_rng(runs)
    length = chance.integers(1, 4096, runs)
    gap = chance.integers(0, 9, runs)
    at = np.cumsum(length + gap) - length
    peer = lab.peer()
    memory = lab.memory(int(at[-1] + length[-1]))
    expected = memory.copy()
    order = chance.permutation(runs)
    for begin, size in zip(at, length, strict=True):
        expected[begin : begin + size] = peer.data[begin : begin + size]
    wanted = Batch(
        (at[order] + memory.ctypes.data).astype(np.uint64),
        (at[order] + peer.address).astype(np.uint64),
        length[order].astype(np.uint64),
    )
    lab.read(lab.reader.attach(peer.description), wanted)
    assert np.array_equal(memory, expected)


@every
def test_several_reads_at_once_from_several_peers(lab: Lab) -> None:
    size = 1 << 20
    peers = [lab.peer() for _ in range(2)]
    memory = lab.memory(2 * size)
    reads = []
    for number, peer in enumerate(peers):
        attached = lab.reader.attach(peer.description)
        for begin in range(0, size, size // 4):
            run = (memory.ctypes.data + number * size + begin, peer.address + begin, size // 4)
            reads.append(lab.reader.post(attached, batch(run)))
    assert {lab.end_of(read) for read in reads} == {ReadState.DONE}
    assert all(lab.reader.close(read) for read in reads)
    assert np.array_equal(memory, np.concatenate([peer.data[:size] for peer in peers]))


@every
def test_waiting_for_several_peers_at_once_lets_all_of_them_end(lab: Lab) -> None:
    size = 6 << 20
    peers = [lab.peer() for _ in range(2)]
    memory = lab.memory(2 * size)
    reads = []
    for number, peer in enumerate(peers):
        attached = lab.reader.attach(peer.description)
        run = (memory.ctypes.data + number * size, peer.address, size // (1 + number))
        reads.append(lab.reader.post(attached, batch(run)))
    active = list(reads)
    while active:  # the time-out of all tests here ends it
        lab.reader.wait(active, 0.001)
        active = [read for read in active if lab.reader.poll(read).state is ReadState.ACTIVE]
    lab.reader.wait(reads, 0.0)  # ones that have ended
    assert {lab.reader.poll(read).state for read in reads} == {ReadState.DONE}
    assert all(lab.reader.close(read) for read in reads)
    assert np.array_equal(memory[:size], peers[0].data[:size])
    assert np.array_equal(memory[size:][: size // 2], peers[1].data[: size // 2])


@every
def test_memory_that_is_not_registered_is_refused(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(4096)
    other = lab.memory(4096, register=False)
    attached = lab.reader.attach(peer.description)
    here, there = memory.ctypes.data, peer.address
    for wrong in [
        (other.ctypes.data, there, 4096),
        (here, there + PEER_BYTES - 4095, 4096),
        (here, there + PEER_BYTES, 1),
        (here, other.ctypes.data, 16),
    ]:
        with pytest.raises(TransportError):
            lab.reader.post(attached, batch((here, there, 16), wrong))
    assert (memory == SENTINEL).all()
    assert (other == SENTINEL).all()
    lab.read(attached, batch((here, there, 4096)))
    assert np.array_equal(memory, peer.data[:4096])


@every
def test_local_memory_is_written_but_not_served(lab: Lab) -> None:
    peer = lab.peer()
    staging = lab.memory(4096, register=False)
    served = lab.memory(64)
    lab.reader.register_local([Region(staging.ctypes.data, 4096)])
    attached = lab.reader.attach(peer.description)
    lab.read(attached, batch((staging.ctypes.data, peer.address, 4096)))
    assert np.array_equal(staging, peer.data[:4096])
    own = lab.reader.attach(lab.reader.describe())
    with pytest.raises(TransportError):
        lab.reader.post(own, batch((served.ctypes.data, staging.ctypes.data, 16)))
    smaller = lab.memory(512, register=False)
    lab.reader.register_local([Region(smaller.ctypes.data, 512)])
    lab.read(attached, batch((smaller.ctypes.data, peer.address, 512)))
    with pytest.raises(TransportError):
        lab.reader.post(attached, batch((staging.ctypes.data, peer.address, 16)))


@every
def test_a_description_that_is_not_one_is_refused(lab: Lab) -> None:
    peer = lab.peer()
    lab.memory(64)
    broken = [peer.description[:-1], _damaged(peer.description), b"\x93\x01\xa4nixl"]
    for wrong in [*broken, b"", b"\x80\x04.", b"\0" * 100, bytes(17 << 20)]:
        with pytest.raises(TransportError):
            lab.reader.attach(wrong)
    with pytest.raises(TransportError, match="register"):
        lab.reader.__class__.describe(_unregistered(lab))


def _damaged(description: bytes) -> bytes:
    at = len(description) - 20
    return description[:at] + bytes([description[at] ^ 1]) + description[at + 1 :]


def _unregistered(lab: Lab) -> object:
    lab.reader.deregister()
    return lab.reader


@every
def test_peers_that_were_dropped_are_unknown(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(4096)
    run = batch((memory.ctypes.data, peer.address, 4096))
    first = lab.reader.attach(peer.description)
    second = lab.reader.attach(peer.description)
    with pytest.raises(TransportError):
        lab.reader.post(first, run)
    lab.read(second, run)
    lab.reader.detach(second)
    lab.reader.detach(second)
    with pytest.raises(TransportError):
        lab.reader.post(second, run)


@every
def test_a_fence_loses_peers_and_attaching_again_works(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(4096)
    run = batch((memory.ctypes.data, peer.address, 4096))
    description = lab.reader.describe()
    for _ in range(3):
        attached = lab.reader.attach(peer.description)
        lab.read(attached, run)
        lab.reader.fence()
        with pytest.raises(TransportError):
            lab.reader.post(attached, run)
    assert lab.reader.describe() == description, "a fence must leave the serving side alone"
    assert np.array_equal(memory, peer.data[:4096])


@every
def test_reads_from_a_killed_peer_fail(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(1 << 20)
    run = batch((memory.ctypes.data, peer.address, 1 << 20))
    attached = lab.reader.attach(peer.description)
    lab.read(attached, run)
    peer.kill()
    assert _next_end(lab, attached, run) is ReadState.FAILED
    lab.reader.fence()


@every
def test_revoked_memory_is_not_read_and_its_process_lives(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(1 << 20)
    run = batch((memory.ctypes.data, peer.address, 1 << 20))
    attached = lab.reader.attach(peer.description)
    lab.read(attached, run)
    peer.revoke()
    assert _next_end(lab, attached, run) is ReadState.FAILED
    lab.reader.fence()
    assert peer.alive()


def _next_end(lab: Lab, attached: object, run: Batch) -> ReadState:
    """Return how the next read ends; a peer that is known to be gone is refused at once."""
    try:
        read = lab.reader.post(attached, run)  # type: ignore[arg-type]
    except TransportError:
        return ReadState.FAILED
    state = lab.end_of(read)
    lab.reader.close(read)
    return state


@in_flight
def test_a_peer_killed_while_it_sends(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(BIG)
    attached = lab.reader.attach(peer.description)
    read = lab.reader.post(attached, batch((memory.ctypes.data, peer.address, BIG)))
    assert lab.reader.poll(read).state is ReadState.ACTIVE
    peer.kill()
    assert lab.end_of(read) is ReadState.FAILED
    assert lab.reader.poll(read).error
    lab.give_up([read])
    memory[:] = SENTINEL
    lab.settle()
    assert (memory == SENTINEL).all()


@in_flight
def test_a_reader_that_had_no_time_for_a_while_reads_on(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(BIG)
    attached = lab.reader.attach(peer.description)
    run = batch((memory.ctypes.data, peer.address, BIG))
    read = lab.reader.post(attached, run)
    assert lab.reader.poll(read).state is ReadState.ACTIVE
    time.sleep(lab.busy_s)
    assert lab.end_of(read) is ReadState.DONE
    assert lab.reader.close(read)
    assert np.array_equal(memory, peer.data)


@in_flight
def test_nothing_of_a_stopped_peer_lands_after_a_fence(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(BIG)
    attached = lab.reader.attach(peer.description)
    lab.read(attached, batch((memory.ctypes.data, peer.address, 4096)))
    peer.stop()
    reads = [lab.reader.post(attached, run) for run in _quarters(memory.ctypes.data, peer.address)]
    assert [lab.end_of(read, 0.3) for read in reads] == [ReadState.ACTIVE] * 4
    assert [lab.reader.close(read) for read in reads] == [lab.quiet] * 4
    if not lab.quiet:
        with pytest.raises(TransportError, match="fence"):
            lab.reader.post(attached, batch((memory.ctypes.data, peer.address, 16)))
    started = time.monotonic()
    lab.reader.fence()
    assert time.monotonic() - started < 10
    memory[:] = SENTINEL
    peer.go_on()
    lab.settle()
    assert (memory == SENTINEL).all()


def _quarters(here: int, there: int) -> list[Batch]:
    return [batch((here + begin, there + begin, BIG // 4)) for begin in range(0, BIG, BIG // 4)]


@quiet
def test_nothing_lands_after_a_quiet_close_without_any_fence(lab: Lab) -> None:
    peer, other = lab.peer(), lab.peer()
    memory, apart = lab.memory(BIG), lab.memory(4096)
    attached, beside = lab.reader.attach(peer.description), lab.reader.attach(other.description)
    reads = [lab.reader.post(attached, run) for run in _quarters(memory.ctypes.data, peer.address)]
    end = time.monotonic() + 10
    while (memory[: BIG // 4] == SENTINEL).all() and time.monotonic() < end:
        lab.reader.poll(reads[0])
    assert lab.reader.poll(reads[3]).state is ReadState.ACTIVE, "it is to be caught on its way"
    assert [lab.reader.close(read) for read in reads] == [True] * 4
    memory[:] = SENTINEL
    for source, of in ((attached, peer), (beside, other)):
        lab.read(source, batch((apart.ctypes.data, of.address + 5, 4096)))
        assert np.array_equal(apart, of.data[5:4101])
    lab.settle()
    assert all(lab.reader.poll(read).state is ReadState.FAILED for read in reads)
    assert (memory == SENTINEL).all()
    lab.read(attached, batch((memory.ctypes.data, peer.address, BIG)))
    assert np.array_equal(memory, peer.data)


@quiet
def test_a_quiet_close_ends_the_other_reads_from_the_same_peer_and_no_others(lab: Lab) -> None:
    peer, other = lab.peer(), lab.peer()
    memory, apart = lab.memory(BIG), lab.memory(BIG)
    attached, beside = lab.reader.attach(peer.description), lab.reader.attach(other.description)
    first, second = (lab.reader.post(attached, run) for run in _quarters(memory.ctypes.data, peer.address)[:2])
    third = lab.reader.post(beside, batch((apart.ctypes.data, other.address, BIG)))
    assert lab.reader.close(first)
    progress = lab.reader.poll(second)
    assert (progress.state, "post again" in progress.error) == (ReadState.FAILED, True)
    assert lab.end_of(third) is ReadState.DONE
    assert np.array_equal(apart, other.data)


@unquiet
def test_without_a_fence_bytes_of_an_unquiet_read_do_land(lab: Lab) -> None:
    """Show that the test before this one can fail: unquiet is the truth, not a formality."""
    peer = lab.peer()
    memory = lab.memory(BIG)
    attached = lab.reader.attach(peer.description)
    run = batch((memory.ctypes.data, peer.address, BIG))
    unquiet = lab.reader.post(attached, run)
    other = lab.reader.post(attached, batch((memory.ctypes.data, peer.address, 1)))
    assert not lab.reader.close(unquiet)
    memory[:] = SENTINEL
    lab.end_of(other)
    lab.settle()
    assert not (memory == SENTINEL).all()
    lab.reader.fence()


@in_flight
def test_a_fence_while_the_peer_answers_spares_its_process(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(BIG)
    for _ in range(5):
        attached = lab.reader.attach(peer.description)
        size = BIG // 8
        reads = [
            lab.reader.post(attached, batch((memory.ctypes.data + at, peer.address + at, size)))
            for at in range(0, BIG, size)
        ]
        lab.give_up(reads)
    memory[:] = SENTINEL
    lab.settle()
    assert (memory == SENTINEL).all()
    assert peer.alive()


@every
def test_a_closed_transport_refuses_everything(lab: Lab) -> None:
    peer = lab.peer()
    lab.memory(64)
    lab.reader.attach(peer.description)
    lab.reader.shutdown()
    lab.reader.shutdown()
    with pytest.raises(TransportError):
        lab.reader.attach(peer.description)
    with pytest.raises(TransportError):
        lab.reader.describe()


@every
def test_regions_that_cannot_be_registered_change_nothing(lab: Lab) -> None:
    peer = lab.peer()
    memory = lab.memory(4096)
    for wrong in (Region(0, 16), Region(memory.ctypes.data, -1), Region(memory.ctypes.data, 16, "tpu:0")):
        with pytest.raises(TransportError):
            lab.reader.register([Region(memory.ctypes.data, 16), wrong])
    lab.read(lab.reader.attach(peer.description), batch((memory.ctypes.data, peer.address, 4096)))
    assert np.array_equal(memory, peer.data[:4096])
    lab.reader.attach(lab.reader.describe())
