"""Pairs of processes of which each has its own transport, real ones; and machines that lack something."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.auto import AutoTransport
from tensorhub_core.transport.auto_members import Surroundings
from tensorhub_core.transport.base import PeerId, ReadState, Region, Transport
from tensorhub_core.transport.description import decode_offer
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.registry import make_transport
from tests.transport.lab import HAS_NIXL, PEER_BYTES, Pool, ProcessPeer, batch, needs_nixl

pytestmark = pytest.mark.timeout(120)

NAMES = ["auto", "cma", "tcp", "nixl"]
REFUSED = {
    ("cma", "tcp"): "serves by tcp, this worker reads by cma alone",
    ("cma", "nixl"): "serves by nixl, this worker reads by cma alone",
    ("tcp", "cma"): "serves by cma, this worker reads by tcp alone",
    ("tcp", "nixl"): "serves by nixl, this worker reads by tcp alone",
    ("nixl", "cma"): "serves by cma, this worker reads by nixl alone",
    ("nixl", "tcp"): "serves by tcp, this worker reads by nixl alone",
    ("nixl", "auto"): "serves by cma, tcp, this worker reads by nixl alone",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    opened = Pool()
    yield opened
    opened.close()


def read_all(reader: Transport, attached: PeerId, memory: np.ndarray, address: int) -> None:
    read = reader.post(attached, batch((memory.ctypes.data, address, PEER_BYTES)))
    while (progress := reader.poll(read)).state is ReadState.ACTIVE:
        pass
    assert progress.state is ReadState.DONE, progress.error
    assert reader.close(read)


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("reader", NAMES)
def test_every_reader_from_every_source(reader: str, source: str, pool: Pool) -> None:
    if "nixl" in (reader, source) and not HAS_NIXL:
        pytest.skip("NIXL is not installed")
    memory = np.zeros(PEER_BYTES, np.uint8)
    transport, peer = make_transport(reader), pool.take(source)
    try:
        transport.register([Region(memory.ctypes.data, PEER_BYTES)])
        if (reader, source) in REFUSED:
            with pytest.raises(TransportError, match=REFUSED[reader, source]):
                transport.attach(peer.description)
        else:
            read_all(transport, transport.attach(peer.description), memory, peer.address)
            assert np.array_equal(memory, peer.data)
    finally:
        transport.shutdown()
        pool.give_back(source, peer)


def test_one_reader_of_sources_of_every_kind_at_once(pool: Pool) -> None:
    kinds = [name for name in NAMES if name != "nixl" or HAS_NIXL]
    reader, peers = make_transport("auto"), [pool.take(kind) for kind in kinds]
    memory = np.zeros((len(kinds), PEER_BYTES), np.uint8)
    try:
        reader.register([Region(memory.ctypes.data, memory.nbytes)])
        for _ in range(2):
            reads = []
            for row, peer in zip(memory, peers, strict=True):
                attached = reader.attach(peer.description)
                reads.append(reader.post(attached, batch((row.ctypes.data, peer.address, PEER_BYTES))))
            while any(reader.poll(read).state is ReadState.ACTIVE for read in reads):
                pass
            assert [reader.poll(read).state for read in reads] == [ReadState.DONE] * len(reads)
            assert all(reader.close(read) for read in reads)
            assert all(np.array_equal(row, peer.data) for row, peer in zip(memory, peers, strict=True))
            memory[:] = 0
            reader.fence()
    finally:
        reader.shutdown()
        for kind, peer in zip(kinds, peers, strict=True):
            pool.give_back(kind, peer)


def test_without_nixl_memory_of_the_cpu_moves_and_nothing_heavy_is_loaded(pool: Pool) -> None:
    peer = pool.take("auto")
    program = (
        "import sys\nsys.modules['nixl'] = None\nimport numpy as np\n"
        "from tensorhub_core.errors import TransportError\n"
        "from tensorhub_core.transport.base import Region\n"
        "from tensorhub_core.transport.select import choose_transport\n"
        "from tests.transport.lab import batch\n"
        "memory = np.zeros(4096, np.uint8)\nchoice = choose_transport('auto')\nauto = choice.transport\n"
        "auto.register([Region(memory.ctypes.data, 4096)])\n"
        "peer = auto.attach(bytes.fromhex(sys.argv[1]))\n"
        "read = auto.post(peer, batch((memory.ctypes.data, int(sys.argv[2]), 4096)))\n"
        "while (state := auto.poll(read).state.value) == 'active':\n    pass\n"
        "print(state, auto.close(read), memory.tobytes().hex())\nprint(choice.reason)\n"
        "print('torch' in sys.modules)\n"
        "try:\n    auto.register([Region(memory.ctypes.data, 16, 'cuda:0')])\n"
        "except TransportError as error:\n    print(error)\n"
        "auto.shutdown()\n"
    )
    command = [sys.executable, "-c", program, peer.description.hex(), str(peer.address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    pool.give_back("auto", peer)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"done True {peer.data[:4096].tobytes().hex()}"
    assert lines[1] == "auto: cma within this machine, tcp between machines (not both sides have RDMA)"
    assert lines[2] == "False"
    assert "pip install 'tensorhub-core[nixl]'" in lines[3]


def test_nixl_is_not_loaded_for_memory_of_the_cpu_without_rdma() -> None:
    program = (
        "import sys, numpy as np\n"
        "from tensorhub_core.transport.base import Region\n"
        "from tensorhub_core.transport.registry import make_transport\n"
        "memory = np.zeros(4096, np.uint8)\nauto = make_transport('auto')\n"
        "auto.register([Region(memory.ctypes.data, 4096)])\nauto.attach(auto.describe())\n"
        "print(sorted({'torch', 'nixl'} & set(sys.modules)))\nauto.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@needs_nixl
def test_real_nixl_as_a_member_registers_fences_and_revokes() -> None:
    """As between two machines with RDMA; UCX takes what it has here."""
    ends = []
    for machine in ("one", "other"):
        around = Surroundings(Host(machine, 1, 1), nixl=True, rdma=True)
        ends.append(AutoTransport(machine, make=make_transport, around=lambda around=around: around))  # type: ignore[misc]
    source, reader = ends
    truth = np.random.default_rng(1).integers(0, 256, PEER_BYTES, np.uint8)
    memory, staging = np.zeros(PEER_BYTES, np.uint8), np.zeros(PEER_BYTES, np.uint8)
    source.register([Region(truth.ctypes.data, PEER_BYTES)])
    reader.register([Region(memory.ctypes.data, PEER_BYTES)])
    assert source.reason.startswith("cma within this machine, nixl between machines")
    for into in (memory, staging, memory):
        reader.register_local([Region(staging.ctypes.data, PEER_BYTES)])
        attached = reader.attach(source.describe())
        assert attached.startswith("tensorhub-one-")
        read_all(reader, attached, into, truth.ctypes.data)
        assert np.array_equal(into, truth)
        into[:] = 0
        reader.fence()
    attached = reader.attach(source.describe())
    source.revoke()
    read = reader.post(attached, batch((memory.ctypes.data, truth.ctypes.data, PEER_BYTES)))
    while (progress := reader.poll(read)).state is ReadState.ACTIVE:
        pass
    assert progress.state is ReadState.FAILED, "NIXL failed, and tcp is revoked too"
    assert "nixl: " in progress.error
    assert "tcp: " in progress.error
    assert reader.close(read), "NIXL's reader was fenced before the next way was tried"
    for end in ends:
        end.shutdown()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root to make namespaces")
@pytest.mark.parametrize(
    ("namespaces", "way"),
    [
        (("--mount",), "cma"),
        (("--pid", "--fork", "--mount-proc", "--kill-child"), "tcp"),
        (("--net",), "cma"),  # nothing leads there over a network, and its memory can be read
    ],
    ids=["its own mounts", "its own processes", "its own network"],
)
def test_a_source_in_namespaces_of_its_own(
    namespaces: tuple[str, ...], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = ProcessPeer("auto", 1, ("unshare", *namespaces))
    memory = np.zeros(PEER_BYTES, np.uint8)
    reader = make_transport("auto")
    try:
        reader.register([Region(memory.ctypes.data, PEER_BYTES)])
        with caplog.at_level(logging.INFO, "tensorhub"):
            read_all(reader, reader.attach(peer.description), memory, peer.address)
        assert np.array_equal(memory, peer.data)
        assert f"is read by {way}: " in caplog.text
    finally:
        reader.shutdown()
        peer.end()


def test_an_interface_without_address_leaves_the_way_within_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    memory = np.zeros(4096, np.uint8)
    auto = make_transport("auto", interface="nosuch0")
    auto.register([Region(memory.ctypes.data, 4096)])
    assert set(decode_offer(auto.describe()).descriptions) == {"cma"}
    assert "memory is not served by tcp" in caplog.text
    assert "nosuch0" in caplog.text
    auto.attach(auto.describe())
    auto.shutdown()
