"""What only NIXL has: forks, agents that must not leak, failed registrations, a library that may be missing."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.nixl import NixlTransport
from tensorhub_core.transport.nixl_agent import NixlAgent
from tensorhub_core.transport.tcp_addresses import InterfaceAddress, interface_addresses
from tests.transport.lab import batch, needs_nixl

pytestmark = [needs_nixl, pytest.mark.timeout(120)]


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(1 << 20, np.uint8)


@pytest.fixture
def transport(memory: np.ndarray) -> Iterator[NixlTransport]:
    opened = NixlTransport("test")
    opened.register([Region(memory.ctypes.data, memory.nbytes)])
    yield opened
    opened.shutdown()


def test_the_interface_decides_where_it_can_be_reached(memory: np.ndarray) -> None:
    near = InterfaceAddress("lo", "127.0.0.1")
    far = next((each for each in interface_addresses() if not each.loopback and ":" not in each.address), None)
    if far is None:
        pytest.skip("this machine has no other interface than loopback")
    told = {}
    for each in (near, far):
        opened = NixlTransport("test", interface=each.interface)
        opened.register([Region(memory.ctypes.data, memory.nbytes)])
        found = decode_description(opened.describe(), "nixl")
        told[each.interface] = socket.inet_aton(far.address) in found.metadata
        assert f"{each.interface} {each.address}" in found.places
        opened.shutdown()
    assert told == {"lo": False, far.interface: True}


def test_a_forked_child_refuses_and_ends(transport: NixlTransport) -> None:
    transport.attach(transport.describe())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            transport.describe()
        except TransportError as error:
            code = 0 if "forked" in str(error) else 2
        transport.shutdown()
        del transport
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    transport.attach(transport.describe())


def test_a_forked_child_that_ends_as_usual_does_not_wait_for_threads_it_has_not() -> None:
    program = (
        "import os, sys\nimport numpy as np\n"
        "from tensorhub_core.transport.base import Region\nfrom tensorhub_core.transport.nixl import NixlTransport\n"
        "memory = np.zeros(4096, np.uint8)\ntransport = NixlTransport('x')\n"
        "transport.register([Region(memory.ctypes.data, 4096)])\n"
        "if os.fork() == 0:\n    sys.exit(0)\n"
        "print(os.wait()[1])\ntransport.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
    assert done.stderr == ""


def test_a_failed_registration_leaves_what_was_registered_usable(transport: NixlTransport, memory: np.ndarray) -> None:
    other = np.zeros(4096, np.uint8)
    if _has_cuda():
        pytest.skip("CUDA memory can be registered here")
    with pytest.raises(TransportError):
        transport.register([Region(other.ctypes.data, 4096, "cuda:0")])
    source = np.arange(4096, dtype=np.uint16).view(np.uint8)
    transport.register([Region(source.ctypes.data, source.nbytes)])
    peer = transport.attach(transport.describe())
    read = transport.post(peer, batch((memory.ctypes.data, source.ctypes.data, source.nbytes)))
    while (progress := transport.poll(read)).state.value != "done":
        assert progress.state.value == "active", progress.error
    assert transport.close(read)
    assert np.array_equal(memory[: source.nbytes], source)


def _has_cuda() -> bool:
    return os.path.exists("/dev/nvidiactl")


def test_agents_are_never_named_twice(memory: np.ndarray) -> None:
    names = set()
    for _ in range(3):
        with_one_token = NixlTransport("same")
        with_one_token.register([Region(memory.ctypes.data, memory.nbytes)])
        names.add(decode_description(with_one_token.describe(), "nixl").agent)
        with_one_token.revoke()
        with_one_token.register([Region(memory.ctypes.data, memory.nbytes)])
        names.add(decode_description(with_one_token.describe(), "nixl").agent)
        with_one_token.shutdown()
    # The token is what tells transports of one process apart; within one, agents are counted.
    assert len(names) == 2


def test_a_description_under_another_name_is_refused(transport: NixlTransport) -> None:
    metadata = decode_description(transport.describe(), "nixl").metadata
    with pytest.raises(TransportError, match="somebody"):
        transport.attach(encode_description("nixl", "somebody", metadata))
    transport.attach(transport.describe())


def test_what_was_damaged_on_the_way_never_comes_to_nixl(
    transport: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX ends the process over some of it, for example an address of another version of it."""
    description = transport.describe()
    chance = np.random.default_rng(0)
    with monkeypatch.context() as patch:
        patch.setattr(NixlAgent, "add_peer", lambda *_: pytest.fail("NIXL was given something damaged"))
        for _ in range(300):
            broken = bytearray(description[: int(chance.integers(1, len(description) + 1))])
            broken[int(chance.integers(len(broken)))] ^= int(chance.integers(1, 256))
            with pytest.raises(TransportError):
                transport.attach(bytes(broken))
    transport.attach(description)


def test_metadata_of_a_liar_make_no_peer() -> None:
    """With a digest that is right: NIXL refuses most, and UCX ends the process over a few, which nobody can prevent."""
    program = (
        "import sys, numpy as np\nfrom tensorhub_core.errors import TransportError\n"
        "from tensorhub_core.transport.base import Region\nfrom tensorhub_core.transport.nixl import NixlTransport\n"
        "from tensorhub_core.transport.description import decode_description, encode_description\n"
        "memory, chance = np.zeros(1 << 20, np.uint8), np.random.default_rng(0)\n"
        "transport = NixlTransport('test')\ntransport.register([Region(memory.ctypes.data, memory.nbytes)])\n"
        "good = transport.describe()\nmetadata = decode_description(good, 'nixl').metadata\n"
        "for number in range(300):\n"
        "    broken = bytearray(metadata[: int(chance.integers(1, 400))])\n"
        "    broken[int(chance.integers(len(broken)))] ^= int(chance.integers(1, 256))\n"
        "    if number < int(sys.argv[1]):\n        continue\n"
        "    print(number, flush=True)\n"
        "    try:\n        transport.attach(encode_description('nixl', 'x', bytes(broken)))\n"
        "    except TransportError:\n        continue\n    sys.exit(1)\n"
        "transport.attach(good)\nprint('all', flush=True)\n"
    )
    begin, ends = 0, []
    while begin < 300:
        command = [sys.executable, "-c", program, str(begin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = done.stdout.split()
        if said[-1] == "all":
            break
        assert done.returncode < 0, f"number {said[-1]} was attached: {done.stderr}"
        ends.append(int(said[-1]))
        begin = ends[-1] + 1
    assert len(ends) < 30, f"the process ended over {ends}"


def test_waiting_costs_next_to_no_cpu(transport: NixlTransport) -> None:
    """NIXL's own class lets the progress thread spin."""
    process = psutil.Process()
    transport.attach(transport.describe())
    before = process.cpu_times()
    threading.Event().wait(2.0)
    after = process.cpu_times()
    assert (after.user - before.user) + (after.system - before.system) < 1.0


def test_nothing_is_printed_and_logging_is_left_alone() -> None:
    program = (
        "import logging, numpy as np\n"
        "from tensorhub_core.errors import TransportError\n"
        "from tensorhub_core.transport.base import Region\nfrom tensorhub_core.transport.nixl import NixlTransport\n"
        "memory = np.zeros(4096, np.uint8)\ntransport = NixlTransport('x')\n"
        "transport.register([Region(memory.ctypes.data, 4096)])\n"
        "try:\n    transport.register([Region(memory.ctypes.data, 16, 'cuda:0')])\nexcept TransportError:\n    pass\n"
        "transport.attach(transport.describe())\ntransport.shutdown()\n"
        "assert logging.raiseExceptions\nassert not logging.getLogger('nixl').handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_nixl_the_error_says_how_to_install_it() -> None:
    program = (
        "import sys\nsys.modules['nixl'] = None\n"
        "from tensorhub_core.transport.registry import why_unavailable\n"
        "print(why_unavailable('nixl'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install 'tensorhub-core[nixl]'" in done.stdout


@pytest.mark.slow
def test_a_hundred_transports_leave_nothing_behind() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    process = psutil.Process()

    def once(number: int) -> None:
        opened = NixlTransport(f"leak{number}")
        opened.register([Region(memory.ctypes.data, memory.nbytes)])
        if number % 5 == 0:
            opened.attach(opened.describe())
            opened.fence()
            opened.attach(opened.describe())
        opened.shutdown()

    for number in range(20):
        once(number)
    before = process.num_threads(), process.num_fds(), process.memory_info().rss
    for number in range(20, 120):
        once(number)
    after = process.num_threads(), process.num_fds(), process.memory_info().rss
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 12 << 20
