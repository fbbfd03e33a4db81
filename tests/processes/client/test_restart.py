"""The reference server dies and comes back, in a process of its own, while bytes move."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorhub_core import Worker, connect, serve
from tensorhub_core.server.embedded import read_record
from tests.processes.client.samples import Tensors, blank, make, same
from tests.processes.client.test_faults import MIB, SMALL, Brake, each_way

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def reader_of(worker: Worker) -> Tensors:
    tensors = blank(make("plain", 1, mib=MIB))
    worker.register(tensors)
    return tensors


@each_way
def test_a_read_in_flight_outlives_the_server(tmp_path: Path, way: str) -> None:
    settings = {**SMALL, "close_timeout_s": 2.0, "transport": way}
    server = serve(lease_s=1.0, heartbeat_s=0.1)
    address = server.address
    with (
        connect(address, model="m", replica="trainer", settings=settings) as trainer,
        connect(address, model="m", replica="reader", settings=settings) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.register(make("plain", 1, mib=MIB))
        trainer.publish(1)
        tensors, brake = reader_of(reader), Brake()
        reading = pool.submit(reader.replicate, timeout_s=40, progress=brake)
        assert brake.half.wait(60)
        server.close()
        server = serve(address, lease_s=1.0, heartbeat_s=0.1)
        try:
            time.sleep(0.5)
            brake.go.set()
            assert reading.result(60) == 1
            assert same(tensors, make("plain", 1, mib=MIB))
            assert reader.counters.reconnects >= 1
            total = sum(tensor.nbytes for tensor in tensors.values())
            assert reader.counters.bytes_read == total, "nothing was read twice"
            trainer.unpublish(timeout_s=20)
        finally:
            reader.close()
            trainer.close()
            server.close()


def test_an_embedded_hub_that_was_killed_is_started_again_by_its_workers(tmp_path: Path) -> None:
    settings = {"runtime_dir": str(tmp_path), "idle_s": 0.5, "lease_s": 1.0, "heartbeat_s": 0.1}
    with (
        connect(model="m", replica="trainer", settings=settings) as trainer,
        connect(model="m", replica="reader", settings=settings) as reader,
    ):
        trainer.register(make("plain", 1))
        trainer.publish(1)
        record = read_record(tmp_path)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        until(lambda: trainer.counters.reconnects > 0 and reader.counters.reconnects > 0)
        again = read_record(tmp_path)
        assert again is not None
        assert again.epoch > record.epoch
        tensors = blank(make("plain", 1))
        reader.register(tensors)
        assert reader.replicate(timeout_s=30) == 1
        assert same(tensors, make("plain", 1))
