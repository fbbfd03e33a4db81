"""A source over TCP that has no files left goes on accepting when there are some again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tensorhub_core.transport.base import Batch, ReadState, Region
from tensorhub_core.transport.description import decode_description
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_wire import decode_metadata

pytestmark = pytest.mark.timeout(60)

SOURCE = """
import os, resource, sys
import numpy as np
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.tcp import TcpTransport

resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
data = np.arange(100, dtype=np.uint8)
transport = TcpTransport("source")
transport.register([Region(data.ctypes.data, data.nbytes)])
print(transport.describe().hex(), data.ctypes.data, flush=True)
sys.stdin.readline()
hogs = []
try:
    while True:
        hogs.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
for hog in hogs:
    os.close(hog)
print("free", flush=True)
sys.stdin.readline()
"""


def test_a_source_without_files_accepts_again_later() -> None:
    with subprocess.Popen([sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        described, address = source.stdout.readline().split()
        description = bytes.fromhex(described.decode())
        source.stdin.write(b"\n")
        source.stdin.flush()
        assert source.stdout.readline() == b"full\n"
        endpoint = decode_metadata(decode_description(description, "tcp").metadata).endpoints[-1]
        reader = TcpTransport("reader", connect_timeout_s=1.0)
        with socket.create_connection((endpoint.address, endpoint.port), timeout=5.0) as waits:
            waits.settimeout(0.3)
            with pytest.raises(TimeoutError):
                waits.recv(1)
            source.stdin.write(b"\n")
            source.stdin.flush()
            assert source.stdout.readline() == b"free\n"
        here = np.zeros(100, np.uint8)
        reader.register_local([Region(here.ctypes.data, here.nbytes)])
        peer = reader.attach(description)
        runs = [np.array([number], np.uint64) for number in (here.ctypes.data, int(address), 100)]
        read = reader.post(peer, Batch(*runs))
        while (progress := reader.poll(read)).state is ReadState.ACTIVE:
            pass
        assert progress.state is ReadState.DONE
        assert (here == np.arange(100)).all()
        reader.shutdown()
        source.stdin.close()


def test_connections_to_sources_that_are_gone_give_their_files_back() -> None:
    """A trainer that registers anew for every version is another source each time."""
    reader = TcpTransport("reader")
    data = np.arange(100, dtype=np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        source = TcpTransport(f"source {number}")
        source.register([Region(data.ctypes.data, data.nbytes)])
        reader.attach(source.describe())
        source.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.shutdown()
