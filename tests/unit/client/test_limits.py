"""A system that has no threads or files left: an error of ours, at once, and things work when there are some again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensorhub_core import TransportError, Worker, connect, serve
from tensorhub_core.client.installing import LocalCopy, list_copies
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.client.staged import Staged
from tensorhub_core.client.staged_memory import Arena, StagedMemory, storage_lengths
from tensorhub_core.client.sums import segment_sums
from tensorhub_core.limits import check_files
from tensorhub_core.server.serving import Server
from tests.unit.client.hubs import blank, equal, weights

pytestmark = pytest.mark.timeout(60)
ALL = ("session", "tcp-accept", "verifier-0", "executor", "install")


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(lease_s=1.0, heartbeat_s=0.1) as running:
        yield running


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what lets no thread start whose name begins so."""
    start = threading.Thread.start

    def forbid(name: str) -> None:
        def refuse(thread: threading.Thread) -> None:
            if name and thread.name.startswith(name):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)

    return forbid


def join(server: Server, replica: str) -> Worker:
    settings = {"call_timeout_s": 20.0, "close_timeout_s": 1.0}
    return connect(server.address, model="policy", replica=replica, transport="tcp", settings=settings)


@pytest.mark.parametrize("name", ALL)
def test_without_a_thread_a_call_fails_by_name_and_succeeds_when_there_is_one(
    server: Server, without: Callable[[str], None], name: str
) -> None:
    with join(server, "trainer") as trainer:
        trainer.register(weights())
        trainer.publish(1)
        made: list[Worker] = []
        staged: list[Staged] = []
        tensors = blank()
        steps: list[Callable[[], object]] = [
            lambda: made.append(join(server, "rollout")),
            lambda: made[0].register(tensors),
            lambda: made[0].replicate(),
            lambda: (trainer.unpublish(), trainer.register(weights(5)), trainer.publish(2)),
            lambda: staged.append(made[0].stage()),
            lambda: staged[0].install(),
        ]
        refused: list[str] = []
        for step in steps:
            without(f"tensorhub-{name}" if not refused else "")
            try:
                step()
            except TransportError as error:
                refused.append(str(error))
                without("")
                step()
        assert [f"tensorhub-{name}" in text for text in refused] == [True]
        assert made[0].version == 2
        assert equal(tensors, weights(5))
        made[0].close()


def test_an_install_does_with_the_threads_that_there_are(without: Callable[[str], None]) -> None:
    live = RegisteredMemory(blank(), None, shard=0, num_shards=1)
    arena = Arena(storage_lengths(live))
    staged = StagedMemory(live, arena)
    for number, buffer in enumerate(staged.buffers):
        assert buffer is not None
        buffer[:] = 7 + number
    without("tensorhub-install-helper")
    outcome = LocalCopy(list_copies(live, staged, 4096), Silent(), threads=4).wait(10)
    assert outcome is not None
    assert outcome.end is ReadEnd.VERIFIED
    for number, buffer in enumerate(live.buffers):
        assert buffer is not None
        assert (buffer == 7 + number).all()


def test_sums_do_with_the_threads_that_there_are(without: Callable[[str], None]) -> None:
    data = np.arange(9 << 20, dtype=np.int64)
    memory = RegisteredMemory({"data": data}, None, shard=0, num_shards=1)
    alone = segment_sums(memory.table, memory.addresses, threads=1)
    without("tensorhub-sums")
    assert (segment_sums(memory.table, memory.addresses, threads=3) == alone).all()


class Silent:
    """Hears nothing."""

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Ignore it."""


FEW_FILES = """
import os, resource, sys
import numpy as np
from tensorhub_core import TensorHubError, connect

truth = np.arange(50_000)

def use(address, few):
    w = connect(address, model="policy", replica=f"r{few}", transport="tcp", settings={"call_timeout_s": 10.0})
    try:
        tensors = {"w": np.zeros_like(truth)}
        w.register(tensors)
        w.replicate(timeout_s=5.0)
        assert (tensors["w"] == truth).all()
    finally:
        w.close()

use(sys.argv[1], "warm")
resource.setrlimit(resource.RLIMIT_NOFILE, (150, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for few in range(24):
    hogs = []
    try:
        while True:
            hogs.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(few):
        os.close(hogs.pop())
    try:
        use(sys.argv[1], few)
        said = "ok"
    except TensorHubError as error:
        said = error.code
    for hog in hogs:
        os.close(hog)
    print(said)
"""


def test_with_few_files_calls_end_in_an_error_of_ours_and_the_process_lives(server: Server) -> None:
    """libzmq aborts a process that has none left when it makes a context."""
    truth = {"w": np.arange(50_000)}
    with join(server, "trainer") as trainer:
        trainer.register(truth)
        trainer.publish(1)
        ran = subprocess.run([sys.executable, "-c", FEW_FILES, server.address], capture_output=True, timeout=50)
    said = ran.stdout.decode().split()
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    assert len(said) == 24
    assert (said[0], said[-1]) == ("transport_error", "ok")
    assert set(said) <= {"transport_error", "version_unavailable", "ok"}


def test_files_are_counted_and_given_back() -> None:
    check_files(16, "a thing")
    with pytest.raises(TransportError, match="a thing cannot be opened"):
        check_files(10_000_000, "a thing")
    check_files(16, "a thing")
