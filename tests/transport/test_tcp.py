"""What only our own sockets have: their threads, revoking while they send, forks, addresses, readers that die."""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from tensorhub_core.clock import SystemClock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Progress, ReadId, ReadState, Region
from tensorhub_core.transport.extents import Extents, pack_regions
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_serving import ServingLimits, TcpServer
from tensorhub_core.transport.tcp_wire import TcpOffer
from tests.transport.lab import PEER_BYTES, SENTINEL, ProcessPeer, batch
from tests.transport.tcp_sides import MIB, Side, described, offer_of, seeded, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(size: int = MIB, seed: int | None = None) -> Side:
        content = np.full(size, SENTINEL, np.uint8) if seed is None else seeded(seed, size)
        made.append(Side(content, f"test{len(made)}"))
        return made[-1]

    yield make
    for side in made:
        side.transport.shutdown()


@pytest.fixture
def source() -> Iterator[ProcessPeer]:
    peer = ProcessPeer("tcp", 3)
    yield peer
    peer.end()


def test_readers_killed_in_the_middle_of_a_read_leave_a_source_that_serves_on(source: ProcessPeer) -> None:
    tasks = f"/proc/{source.process.pid}/task"
    idle = len(os.listdir(tasks))
    memory = np.full(PEER_BYTES, SENTINEL, np.uint8)
    for _ in range(20):
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                side = Side(memory)
                side.post(side.transport.attach(source.description), source.address, PEER_BYTES)
                while memory[0] == SENTINEL and memory[1] == SENTINEL:
                    side.transport.poll(ReadId(1))
                os.write(said, b"!")
                signal.pause()
            os._exit(1)
        os.close(said)
        assert os.read(heard, 1) == b"!"
        os.close(heard)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    side = Side(memory)
    assert np.array_equal(side.read(side.transport.attach(source.description), source.address, MIB), source.data[:MIB])
    side.transport.shutdown()
    assert source.alive()
    wait_until(lambda: len(os.listdir(tasks)) == idle)


def test_a_stopped_source_that_goes_on_finds_its_read_closed(source: ProcessPeer, sides: Callable[..., Side]) -> None:
    side = sides(PEER_BYTES)
    peer = side.transport.attach(source.description)
    for _ in range(3):
        side.memory[:] = SENTINEL
        read = side.post(peer, source.address, PEER_BYTES)
        wait_until(lambda read=read: side.transport.poll(read) is not None and side.memory[5] != SENTINEL)
        source.stop()
        for _ in range(50):  # more than what can be on its way
            side.transport.wait([read], 0.001)
        assert side.transport.poll(read) == Progress(ReadState.ACTIVE, idle=True)
        assert side.transport.close(read)
        side.memory[:] = SENTINEL
        source.go_on()
        assert np.array_equal(side.read(peer, source.address, 100), source.data[:100])
        assert (side.memory[100:] == SENTINEL).all()


def test_a_source_whose_memory_is_gone_without_a_word_lives(source: ProcessPeer, sides: Callable[..., Side]) -> None:
    source.revoke()
    answer = source._ask("serve")  # registers what is unmapped by now
    side = sides(MIB)
    peer = side.transport.attach(bytes.fromhex(str(answer["description"])))
    for _ in range(3):
        assert side.end_of(side.post(peer, int(str(answer["address"])), MIB)) is ReadState.FAILED
    assert source.alive()
    assert (side.memory == SENTINEL).all()


def test_after_revoke_no_thread_sends_what_the_memory_holds_then(sides: Callable[..., Side]) -> None:
    size = 24 * MIB
    side = sides(size)
    mapped = mmap.mmap(-1, size)
    held = np.frombuffer(mapped, np.uint8)
    serving = TcpTransport("revoked")
    address = held.ctypes.data
    for number in range(12):
        held[:] = 1
        side.memory[:] = SENTINEL
        serving.register([Region(address, size)])
        peer = side.transport.attach(serving.describe())
        read = side.post(peer, address, size)
        wait_until(lambda read=read: side.transport.poll(read) is not None and side.memory[0] == 1)
        for _ in range(number % 4):
            side.transport.poll(read)
        serving.revoke()
        held[:] = 2
        state = side.end_of(read)
        side.transport.close(read)
        begin = int(np.argmin(side.memory == 1)) if not (side.memory == 1).all() else size
        assert (side.memory[begin:] == SENTINEL).all()
        assert state is (ReadState.DONE if begin == size else ReadState.FAILED)
    del held
    mapped.close()


def test_a_reader_that_takes_nothing_is_given_up_and_may_come_again(sides: Callable[..., Side]) -> None:
    memory, side = seeded(1, 32 * MIB), sides(32 * MIB)
    server = TcpServer("patient", None, SystemClock(), ServingLimits(stalled_s=0.3))
    regions = [Region(memory.ctypes.data, memory.nbytes)]
    server.allowed = Extents(regions)
    try:
        offer = TcpOffer(server.secret, None, server.endpoints, pack_regions(regions))
        peer = side.transport.attach(described(server.agent, offer))
        read = side.post(peer, memory.ctypes.data, memory.nbytes)
        wait_until(lambda: len(server._connections) == 1)
        wait_until(lambda: not server._connections)
        assert side.end_of(read) is ReadState.FAILED
        assert np.array_equal(side.read(peer, memory.ctypes.data, MIB), memory[:MIB])
    finally:
        server.stop()


def test_two_hundred_readers_at_once(sides: Callable[..., Side]) -> None:
    server_side = sides(MIB, seed=4)
    readers = [sides(4096) for _ in range(200)]
    description = server_side.transport.describe()
    peers = [side.transport.attach(description) for side in readers]
    reads = [
        side.post(peer, server_side.at + at, 4096) for at, (side, peer) in enumerate(zip(readers, peers, strict=True))
    ]
    for at, (side, read) in enumerate(zip(readers, reads, strict=True)):
        assert side.end_of(read) is ReadState.DONE
        assert np.array_equal(side.memory, server_side.memory[at : at + 4096])


def test_idle_readers_make_room_for_others_and_busy_ones_do_not(sides: Callable[..., Side]) -> None:
    memory, readers = seeded(12, 32 * MIB), [sides(32 * MIB) for _ in range(3)]
    regions = [Region(memory.ctypes.data, memory.nbytes)]
    server = TcpServer("small", None, SystemClock(), ServingLimits(readers=2, idle_s=0.0))
    server.allowed = Extents(regions)
    offer = described("small", TcpOffer(server.secret, None, server.endpoints, pack_regions(regions)))
    try:
        peers = [side.transport.attach(offer) for side in readers]
        for side, peer in zip(readers, peers, strict=True):
            wait_until(lambda: len(server._connections) <= 2)  # or one that is ended now may have been asked already
            assert np.array_equal(side.read(peer, memory.ctypes.data, MIB), memory[:MIB])
        wait_until(lambda: len(server._connections) <= 2)
        reads = [side.post(peer, memory.ctypes.data, memory.nbytes) for side, peer in zip(readers, peers, strict=True)]
        wait_until(lambda: sum(each.admitted and each.idle_since_s == math.inf for each in server._connections) == 2)
        with pytest.raises(TransportError, match="as many readers as it can"):
            sides(16).transport.attach(offer)
        states = [side.end_of(read) for side, read in zip(readers, reads, strict=True)]
        assert states.count(ReadState.DONE) == 2
        wait_until(lambda: server._readers == 2)
        sides(16).transport.attach(offer)
    finally:
        server.stop()


def test_a_later_life_has_another_name_and_secret(sides: Callable[..., Side]) -> None:
    serving, side = sides(4096, seed=8), sides(4096)
    first, peer = offer_of(serving), side.transport.attach(serving.transport.describe())
    stale = serving.transport.describe()
    serving.transport.revoke()
    serving.transport.register([Region(serving.at, 4096)])
    second = offer_of(serving)
    assert first[0] != second[0]
    assert first[1].secret != second[1].secret
    assert side.end_of(side.post(peer, serving.at, 16)) is ReadState.FAILED
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:"):
        side.transport.attach(stale)
    # Even at the address of its new life the old description opens nothing.
    with pytest.raises(TransportError, match="not the peer of this description"):
        side.transport.attach(described(first[0], TcpOffer(first[1].secret, None, second[1].endpoints, b"")))


def test_a_forked_child_refuses_and_ends_and_its_parent_reads_on(sides: Callable[..., Side]) -> None:
    serving, side = sides(MIB, seed=9), sides(MIB)
    peer = side.transport.attach(serving.transport.describe())
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                serving.transport.describe()
            except TransportError as error:
                code = 0 if "forked" in str(error) else 2
            serving.transport.shutdown()
            side.transport.shutdown()
            gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(side.read(peer, serving.at, MIB), serving.memory)


def test_revoke_ends_connections_that_a_forked_child_still_holds(sides: Callable[..., Side]) -> None:
    serving, side = sides(MIB, seed=10), sides(MIB)
    peer = side.transport.attach(serving.transport.describe())
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        serving.transport.revoke()
        assert side.end_of(side.post(peer, serving.at, 16)) is ReadState.FAILED
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_program_that_forgets_to_shut_down_ends_by_itself() -> None:
    program = (
        "import os, sys\nimport numpy as np\n"
        "from tensorhub_core.transport.base import Region\nfrom tensorhub_core.transport.tcp import TcpTransport\n"
        "memory = np.zeros(4096, np.uint8)\ntransport = TcpTransport('x')\n"
        "transport.register([Region(memory.ctypes.data, 4096)])\ntransport.attach(transport.describe())\n"
        "if os.fork() == 0:\n    sys.exit(0)\nprint(os.wait()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_five_hundred_transports_leave_nothing_behind() -> None:
    memory, process = np.zeros(4096, np.uint8), psutil.Process()

    def once(number: int) -> None:
        opened = Side(memory, f"leak{number}").transport
        peer = opened.attach(opened.describe())
        opened.post(peer, batch((memory.ctypes.data, memory.ctypes.data, 16)))
        if number % 5 == 0:
            opened.fence()
            opened.revoke()
        opened.shutdown()

    for number in range(20):
        once(number)
    gc.collect()
    before = process.num_threads(), process.num_fds(), process.memory_info().rss
    for number in range(20, 500):
        once(number)
    gc.collect()
    wait_until(lambda: (process.num_threads(), process.num_fds()) == before[:2])
    assert process.memory_info().rss - before[2] < 16 * MIB
