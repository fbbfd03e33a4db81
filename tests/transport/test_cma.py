"""What only reading a neighbour's memory has: processes that are not the one they were, nonces, permissions."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, ReadState, Region
from tensorhub_core.transport.cma import CmaTransport, Serving
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.process_memory import MOST_RUNS
from tests.transport.lab import PEER_BYTES, SENTINEL, ProcessPeer, batch

pytestmark = pytest.mark.timeout(60)
SIZE = 1 << 20


@pytest.fixture
def memory() -> np.ndarray:
    return np.full(SIZE, SENTINEL, np.uint8)


@pytest.fixture
def reader(memory: np.ndarray) -> Iterator[CmaTransport]:
    opened = CmaTransport("reader")
    opened.register([Region(memory.ctypes.data, SIZE)])
    yield opened
    opened.shutdown()


@pytest.fixture
def truth() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def source(truth: np.ndarray) -> Iterator[CmaTransport]:
    opened = CmaTransport("source")
    opened.register([Region(truth.ctypes.data, SIZE)])
    yield opened
    opened.shutdown()


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    started = ProcessPeer("cma", 5)
    yield started
    started.end()


def forged(description: bytes, **changes: Any) -> bytes:
    """Return a description of the same agent with other contents."""
    found = decode_description(description, "cma")
    serving = msgspec.structs.replace(msgspec.msgpack.decode(found.metadata, type=Serving), **changes)
    return encode_description("cma", found.agent, msgspec.msgpack.encode(serving))


def all_of(memory: np.ndarray, remote: int, run_bytes: int = SIZE) -> Batch:
    """Return a batch over the whole memory, in equal runs."""
    at = np.arange(0, SIZE, run_bytes, dtype=np.uint64)
    return Batch(at + np.uint64(memory.ctypes.data), at + np.uint64(remote), np.full(len(at), run_bytes, np.uint64))


def serving_of(source: CmaTransport) -> Serving:
    return msgspec.msgpack.decode(decode_description(source.describe(), "cma").metadata, type=Serving)


def test_a_number_that_belongs_to_another_process_now(reader: CmaTransport, peer: ProcessPeer) -> None:
    other = ProcessPeer("cma", 6)
    try:
        with pytest.raises(TransportError, match="another process's now"):
            reader.attach(forged(peer.description, pid=other.process.pid))
    finally:
        other.end()
    with pytest.raises(TransportError, match="is gone"):
        reader.attach(forged(peer.description, pid=other.process.pid))
    reader.attach(peer.description)


def test_another_life_of_the_same_process(reader: CmaTransport, source: CmaTransport) -> None:
    stale = source.describe()
    nonce = bytearray(serving_of(source).nonce)
    nonce[3] ^= 1
    with pytest.raises(TransportError, match="no longer serves"):
        reader.attach(forged(stale, nonce=bytes(nonce)))
    # Only the nonce proves anything: a start time alone may be told differently to a container.
    reader.attach(forged(stale, start_ticks=1))


@pytest.mark.parametrize(
    ("where", "text"),
    [({"boot_id": "another"}, "another machine"), ({"pid_namespace": 1}, "another container")],
)
def test_peers_elsewhere_are_refused_with_the_reason(
    reader: CmaTransport, source: CmaTransport, where: dict[str, Any], text: str
) -> None:
    elsewhere = msgspec.structs.replace(serving_of(source).host, **where)
    with pytest.raises(TransportError, match=text):
        reader.attach(forged(source.describe(), host=elsewhere))
    # Another network is no hindrance.
    reader.attach(forged(source.describe(), host=msgspec.structs.replace(serving_of(source).host, net_namespace=1)))


def test_revoked_memory_is_still_there_and_not_read(
    reader: CmaTransport, source: CmaTransport, memory: np.ndarray, truth: np.ndarray
) -> None:
    wanted = all_of(memory, truth.ctypes.data)
    description = source.describe()
    attached = reader.attach(description)
    assert reader.poll(reader.post(attached, wanted)).state is ReadState.DONE
    for end in (source.revoke, source.deregister):
        end()
        progress = reader.poll(reader.post(attached, wanted))
        assert (progress.state, "no longer serves" in progress.error) == (ReadState.FAILED, True)
        source.register([Region(truth.ctypes.data, SIZE)])
        assert source.describe() != description, "what was described before must not be proven again"
        assert reader.poll(reader.post(attached, wanted)).state is ReadState.FAILED
        attached, description = reader.attach(source.describe()), source.describe()
    del source
    gc.collect()


def test_a_side_that_is_gone_without_a_word_is_not_read(
    reader: CmaTransport, memory: np.ndarray, truth: np.ndarray
) -> None:
    source = CmaTransport("source")
    source.register([Region(truth.ctypes.data, SIZE)])
    attached = reader.attach(source.describe())
    del source
    gc.collect()
    assert reader.poll(reader.post(attached, all_of(memory, truth.ctypes.data))).state is ReadState.FAILED


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_batch_in_flight_while_its_source_revokes_fails(
    reader: CmaTransport,
    source: CmaTransport,
    memory: np.ndarray,
    truth: np.ndarray,
    call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = all_of(memory, truth.ctypes.data, run_bytes=SIZE // (2 * MOST_RUNS))
    attached = reader.attach(source.describe())
    real: Callable[..., int] = reader._memory._readv
    calls = 0

    def readv(*arguments: int) -> int:
        nonlocal calls
        if calls == call:
            source.revoke()
        calls += 1
        return real(*arguments)

    monkeypatch.setattr(reader._memory, "_readv", readv)
    assert reader.poll(reader.post(attached, wanted)).state is ReadState.FAILED
    assert calls == call + 1, "after the first failure nothing more is read"
    assert len(wanted.local) > 2 * (MOST_RUNS - 1)


def test_what_was_read_while_memory_changed_owner_never_counts(reader: CmaTransport, memory: np.ndarray) -> None:
    """The promise of the nonce, with both sides at full speed: a read is done only if nothing was revoked before."""
    served, source = np.empty(SIZE, np.uint8), CmaTransport("source")
    offers: list[tuple[int, bytes]] = [(0, b"")]
    over = threading.Event()

    def serve() -> None:
        for version in range(1, 200):
            served[:] = version
            source.register([Region(served.ctypes.data, SIZE)])
            offers.append((version, source.describe()))
            time.sleep(0.001)
            source.revoke()
            served[:] = 0xEE
        over.set()

    serving = threading.Thread(target=serve)
    serving.start()
    counts = {ReadState.DONE: 0, ReadState.FAILED: 0}
    while not over.is_set():
        version, description = offers[-1]
        try:
            attached = reader.attach(description)
        except TransportError:
            continue
        for _ in range(3):
            state = reader.poll(reader.post(attached, all_of(memory, served.ctypes.data))).state
            counts[state] += 1
            assert state is ReadState.FAILED or (memory == version).all()
    serving.join()
    source.shutdown()
    assert min(counts.values()) > 10, counts


def test_unmapped_memory_fails_and_harms_nobody(reader: CmaTransport, memory: np.ndarray) -> None:
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, SIZE)
    place = np.frombuffer(mapped, np.uint8).ctypes.data
    source = CmaTransport("source")
    source.register([Region(place, SIZE)])
    attached = reader.attach(source.describe())
    assert reader.poll(reader.post(attached, all_of(memory, place))).state is ReadState.DONE
    gc.collect()
    mapped.resize(SIZE // 2)
    for run in (all_of(memory, place), all_of(memory, place, page)):
        progress = reader.poll(reader.post(attached, run))
        assert (progress.state, "no longer there" in progress.error) == (ReadState.FAILED, True)
    half = batch((memory.ctypes.data, place, SIZE // 2))
    assert reader.poll(reader.post(attached, half)).state is ReadState.DONE
    source.shutdown()


def test_a_stopped_source_is_read_and_a_killed_one_is_not(
    reader: CmaTransport, memory: np.ndarray, peer: ProcessPeer
) -> None:
    wanted = batch((memory.ctypes.data, peer.address + 64, SIZE))
    attached = reader.attach(peer.description)
    peer.stop()
    assert reader.poll(reader.post(attached, wanted)).state is ReadState.DONE
    assert np.array_equal(memory, peer.data[64 : 64 + SIZE])
    memory[:] = SENTINEL
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.wait()
    progress = reader.poll(reader.post(attached, wanted))
    assert (progress.state, "is gone" in progress.error) == (ReadState.FAILED, True)
    assert (memory == SENTINEL).all()


def test_a_source_killed_while_it_is_read_gives_whole_reads_or_none(peer: ProcessPeer) -> None:
    memory = np.zeros(PEER_BYTES, np.uint8)
    reader = CmaTransport("reader")
    reader.register([Region(memory.ctypes.data, PEER_BYTES)])
    attached = reader.attach(peer.description)
    timer = threading.Timer(0.05, peer.process.kill)
    timer.start()
    end, done = time.monotonic() + 30, 0
    while True:
        memory[:] = SENTINEL
        progress = reader.poll(reader.post(attached, batch((memory.ctypes.data, peer.address, PEER_BYTES))))
        if progress.state is ReadState.FAILED:
            break
        assert np.array_equal(memory, peer.data)
        done += 1
        assert time.monotonic() < end
    assert done
    assert "process" in progress.error
    timer.join()
    reader.shutdown()


def test_a_forked_child_refuses_and_leaves_the_parent_serving(
    reader: CmaTransport, source: CmaTransport, memory: np.ndarray, truth: np.ndarray
) -> None:
    attached = reader.attach(source.describe())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            source.describe()
        except TransportError as error:
            code = 0 if "forked" in str(error) else 2
        source.shutdown()
        source._nonce.renew()
        del source
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert reader.poll(reader.post(attached, all_of(memory, truth.ctypes.data))).state is ReadState.DONE
    assert np.array_equal(memory, truth)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_users_process_is_refused_with_what_to_do(source: CmaTransport) -> None:
    description = source.describe()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            CmaTransport("stranger").attach(description)
        except Exception as error:
            os.write(into, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    assert text.startswith("TransportError")
    assert "CAP_SYS_PTRACE" in text
    assert "transport='tcp'" in text


def test_hostile_contents_are_refused(reader: CmaTransport, source: CmaTransport) -> None:
    good = source.describe()
    for changes in (
        {"nonce": b""},
        {"nonce": bytes(17)},
        {"nonce_address": 0},
        {"nonce_address": 2**64 - 8},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**31},
        {"regions": b"odd"},
        {"regions": np.array([[2**64 - 1, 2]], "<u8").tobytes()},
    ):
        with pytest.raises(TransportError):
            reader.attach(forged(good, **changes))
    metadata = decode_description(good, "cma").metadata
    chance = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(metadata[: int(chance.integers(1, len(metadata)))])
        broken[int(chance.integers(len(broken)))] ^= int(chance.integers(1, 256))
        with pytest.raises(TransportError):
            reader.attach(encode_description("cma", "x", bytes(broken)))
    reader.attach(good)


def test_a_run_that_no_region_holds_is_refused(reader: CmaTransport, memory: np.ndarray, truth: np.ndarray) -> None:
    source = CmaTransport("source")
    source.register([Region(truth.ctypes.data, 4096), Region(truth.ctypes.data + 8192, 4096)])
    attached = reader.attach(source.describe())
    here, there = memory.ctypes.data, truth.ctypes.data
    for wrong in ((here, there + 4000, 200), (here, there + 5000, 8), (here, 2**64 - 8, 64)):
        with pytest.raises(TransportError, match="peer registered"):
            reader.post(attached, batch((here, there, 8), wrong))
    # What is registered later is read once it is described.
    source.register([Region(truth.ctypes.data + 4096, 4096)])
    again = reader.attach(source.describe())
    assert reader.poll(reader.post(again, batch((here, there + 5000, 8)))).state is ReadState.DONE
    source.shutdown()


def test_other_memory_than_the_cpus_names_what_moves_it(source: CmaTransport, memory: np.ndarray) -> None:
    with pytest.raises(TransportError, match="'nixl' or 'auto'"):
        source.register([Region(memory.ctypes.data, 16, "cuda:0")])


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys\nfrom tensorhub_core.transport.registry import make_transport\nmake_transport('cma').shutdown()\n"
        "print(sorted({'torch', 'nixl', 'zmq'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_five_hundred_transports_leave_nothing_behind(memory: np.ndarray) -> None:
    process = psutil.Process()

    def once(number: int) -> None:
        opened = CmaTransport(f"leak{number}")
        opened.register([Region(memory.ctypes.data, SIZE)])
        opened.attach(opened.describe())
        opened.shutdown()

    def state() -> tuple[int, int, int]:
        gc.collect()
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        return process.num_threads(), process.num_fds(), maps

    for number in range(20):
        once(number)
    before = state()
    for number in range(500):
        once(number)
    after = state()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 50
