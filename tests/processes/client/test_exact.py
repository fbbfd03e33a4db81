"""Readers of other layouts take no more bytes than they need, and every one of them is verified."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub_core import Worker, connect, serve
from tensorhub_core.client import stock as stocks
from tensorhub_core.client.vouching import Voucher
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.types import Box
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import Tensors, make
from tests.processes.client.test_faults import MIB, Brake, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
EXACT = {"segment_bytes": 1 << 18, "min_run_bytes": 1024, "stall_s": 10.0}
QUICK = {**EXACT, "stall_s": 1.0}
SLOW_READS = {**QUICK, "segment_bytes": 1 << 16, "window": 1, "transport": "tcp"}
each_transport = pytest.mark.parametrize("way", ["tcp", "cma", "nixl"])


def columns_of(tensors: Tensors, shard: int, count: int) -> tuple[Tensors, dict[str, list[Box]]]:
    """Return blank tensors for one of `count` shards by columns, and where they lie; vectors are whole everywhere."""
    mine: Tensors = {}
    boxes: dict[str, list[Box]] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            mine[name], at = torch.zeros_like(tensor), (0,)
        else:
            rows, width = tensor.shape
            begin, end = shard * width // count, (shard + 1) * width // count
            mine[name], at = torch.zeros(rows, end - begin, dtype=tensor.dtype), (0, begin)
        boxes[name] = [Box(name, at, tuple(mine[name].shape), (0,) * tensor.dim())]
    return mine, boxes


def holds(mine: Tensors, boxes: dict[str, list[Box]], right: Tensors) -> bool:
    """Compare bits with what slicing gives."""
    for name, tensor in mine.items():
        box = boxes[name][0]
        part = right[name][tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
        if part.contiguous().view(torch.uint8).numpy().tobytes() != tensor.view(torch.uint8).numpy().tobytes():
            return False
    return True


class Shard:
    """A worker of this process that takes some columns."""

    def __init__(self, here: Hub, shard: int = 0, replica: str = "reader", together: int = 1, **settings: Any) -> None:
        """One of two column shards, of a replica that has `together` shards."""
        more = {"shard": shard, "num_shards": together} if together > 1 else {}
        self.worker: Worker = here.worker(replica, settings={**EXACT, **settings}, **more)
        self.tensors, self.boxes = columns_of(make("plain", 1, mib=MIB), shard, 2)
        self.worker.register(self.tensors, self.boxes)
        self.needed = sum(tensor.nbytes for tensor in self.tensors.values())

    def holds(self, seed: int = 1) -> bool:
        return holds(self.tensors, self.boxes, make("plain", seed, mib=MIB))

    def is_filled(self, value: int) -> bool:
        return all(bool((tensor.view(torch.uint8) == value).all()) for tensor in self.tensors.values())

    @property
    def share(self) -> float:
        """Return the bytes that were read, as a share of those that were needed."""
        return self.worker.counters.bytes_read / self.needed


def publish_here(here: Hub, **settings: Any) -> tuple[Worker, Tensors]:
    trainer, tensors = here.worker("trainer", settings={**EXACT, **settings}), make("plain", 1, mib=MIB)
    trainer.register(tensors)
    trainer.publish(1)
    return trainer, tensors


@each_transport
@pytest.mark.parametrize("verify", ["always", "sampled", "off"])
def test_two_column_shards_take_what_they_need(here: Hub, other: Actor, way: str, verify: str) -> None:
    settings = {"transport": way, "verify": verify}
    trainer = here.publisher(other, "plain", mib=MIB, settings={**EXACT, **settings})
    shards = [Shard(here, k, together=2, **settings) for k in (0, 1)]
    for version in (1, 2):
        if version == 2:
            other.do("call", trainer, method="unpublish")
            other.do("fill", trainer, value=7)
            other.do("call", trainer, method="publish", version=2)
        calls = [in_background(shard.worker.update) for shard in shards]
        assert [call.result(60) for call in calls] == [version, version]
        for shard in shards:
            assert shard.holds() if version == 1 else shard.is_filled(7)
            assert version <= shard.share <= 1.02 * version
            assert shard.worker.counters.failovers == 0


def test_whole_segments_are_read_where_that_is_set(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", mib=MIB, settings=EXACT)
    shard = Shard(here, min_run_bytes=0)
    assert shard.worker.replicate() == 1
    assert shard.holds()
    assert shard.share > 1.7


def test_a_staged_version_is_exact_too_and_serves_others_by_its_parts(here: Hub, other: Actor) -> None:
    trainer = here.publisher(other, "plain", mib=MIB, settings=EXACT)
    staging = here.worker("staging", settings=EXACT)
    whole = {name: torch.zeros_like(tensor) for name, tensor in make("plain", 1, mib=MIB).items()}
    staging.register(whole)
    shard = Shard(here)
    with staging.stage() as staged:
        with shard.worker.stage() as mine:
            assert shard.share <= 1.02
            assert mine.install(publish=False) == 1
            assert shard.holds()
        other.do("call", trainer, method="close")
        late = Shard(here, 1, "late")
        assert late.worker.replicate() == 1
        assert late.holds()
        assert late.share <= 1.02
        assert staged.install() == 1


def test_an_offload_copy_vouches_for_its_parts(here: Hub, other: Actor) -> None:
    trainer = here.publisher(other, "plain", mib=MIB, settings=EXACT)
    other.do("call", trainer, method="unpublish")
    other.do("fill", trainer, value=7)
    shard = Shard(here)
    assert shard.worker.replicate() == 1
    assert shard.holds()
    assert shard.share <= 1.02


@pytest.mark.parametrize("asked", ["never", "before"])
def test_a_byte_that_was_changed_after_the_publish_is_found_and_named(here: Hub, other: Actor, asked: str) -> None:
    trainer = here.publisher(other, "plain", mib=MIB, settings=EXACT)
    if asked == "before":  # then its checksums are known, and are those of the version
        assert Shard(here, 0, "first").worker.replicate(publish=False) == 1
    other.do("flip", trainer, name="layers.0.weight")
    shard = Shard(here)
    with pytest.raises(CorruptTransfer, match=r"segment [0-9]+"):
        shard.worker.replicate()
    assert shard.worker.version is None


def test_the_tensor_is_named_by_who_holds_it(here: Hub, other: Actor) -> None:
    trainer = here.publisher(other, "plain", mib=MIB, settings=EXACT)
    other.do("flip", trainer, name="layers.1.weight")
    with pytest.raises(CorruptTransfer, match=r"trainer: corrupt .*'layers\.1\.weight'"):
        Shard(here).worker.replicate()


def test_a_changed_byte_at_one_trainer_is_made_good_by_another(here: Hub, other: Actor) -> None:
    trainers = [here.publisher(other, "plain", mib=MIB, replica=f"trainer {k}", settings=EXACT) for k in (0, 1)]
    other.do("flip", trainers[0], name="layers.1.weight")
    for number in range(4):
        shard = Shard(here, number % 2, f"reader {number}")
        assert shard.worker.replicate(publish=False) == 1
        assert shard.holds()


def is_safe(here: Hub, replica: str) -> bool:
    """Read after a byte was changed; tell whether the reader got the version, or nothing."""
    shard = Shard(here, 0, replica)
    try:
        shard.worker.replicate(publish=False)
    except CorruptTransfer:
        return True
    return shard.holds()


def test_a_source_that_vouches_for_what_it_did_not_compare_is_noticed(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of law L12: sums of cuts are taken unverified."""
    _, tensors = publish_here(here)
    tensors["layers.0.weight"].view(torch.uint8)[5, 5] ^= 1
    assert is_safe(here, "reader")
    monkeypatch.setattr(stocks, "_wrong_of", lambda memory, segments, manifest, devices: segments[:0])
    assert not is_safe(here, "misled")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_another_trainer_takes_over_and_nothing_is_read_twice(here: Hub, how: signal.Signals) -> None:
    with Actor() as one, Actor() as two:
        actors = {"one": one, "two": two}
        for replica, actor in actors.items():
            here.publisher(actor, "plain", replica=replica, mib=MIB, settings=SLOW_READS)
        shard, brake = Shard(here, **SLOW_READS), Brake()
        reading = in_background(lambda: shard.worker.replicate(progress=brake))
        assert brake.half.wait(60)
        actors[brake.sources[-1]].signal(how)
        brake.go.set()
        assert reading.result(60) == 1
        assert shard.holds()
        assert shard.worker.counters.failovers == 1
        assert shard.share <= 1.1
        assert set(brake.sources) == {"one", "two"}


def test_a_source_that_never_answers_is_read_in_whole_segments(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_here(here)
    monkeypatch.setattr(Voucher, "on_push", lambda self, message: None)
    shard = Shard(here, stall_s=0.6)
    assert shard.worker.replicate() == 1
    assert shard.holds()
    assert shard.worker.counters.failovers == 0, "it did not fail"
    assert shard.share > 1.5


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop whoever sums cuts in this process when it has read its first segments: (reached, go on)."""
    reached, go_on, real = threading.Event(), threading.Event(), stocks._sums_of_segments

    def slow(*what: Any) -> Any:
        reached.set()
        assert go_on.wait(30)
        return real(*what)

    monkeypatch.setattr(stocks, "_sums_of_segments", slow)
    yield reached, go_on
    go_on.set()


def test_unpublish_waits_for_a_reader_whose_sums_are_being_computed(
    here: Hub, held_up: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held_up
    trainer, tensors = publish_here(here)
    shard = Shard(here)
    reading = in_background(shard.worker.replicate)
    assert reached.wait(30)
    drained = in_background(trainer.unpublish)
    assert not drained.done()
    go_on.set()
    assert reading.result(60) == 1
    drained.result(60)
    for tensor in tensors.values():
        tensor.zero_()
    assert shard.holds()
    assert shard.share <= 1.02


def test_unpublish_waits_for_what_is_summed_in_advance(
    here: Hub, held_up: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held_up
    go_on.set()
    trainer, tensors = publish_here(here)
    assert Shard(here).worker.replicate(publish=False) == 1
    trainer.unpublish()
    tensors["norm"].zero_()
    go_on.clear()
    reached.clear()
    trainer.publish(2)
    assert reached.wait(30), "nobody asked yet"
    drained = in_background(trainer.unpublish)
    with pytest.raises(TimeoutError):
        drained.result(0.5)
    go_on.set()
    drained.result(30)


def test_closing_and_registering_end_what_is_summed(
    here: Hub, held_up: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held_up
    go_on.set()
    trainer, tensors = publish_here(here)
    assert Shard(here).worker.replicate(publish=False) == 1
    trainer.unpublish()
    trainer.register({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    go_on.clear()
    reached.clear()
    trainer.publish(2)
    assert reached.wait(30)
    threading.Timer(0.3, go_on.set).start()
    trainer.close()
    assert "tensorhub-vouch" not in {thread.name for thread in threading.enumerate()}


def test_what_was_asked_is_asked_again_of_a_restarted_server(
    monkeypatch: pytest.MonkeyPatch, held_up: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = held_up
    settings = {**EXACT, "stall_s": 60.0, "close_timeout_s": 2.0}
    server = serve(lease_s=1.0, heartbeat_s=0.1)
    address, right = server.address, make("plain", 1, mib=MIB)
    try:
        with (
            connect(address, model="m", replica="trainer", settings=settings) as trainer,
            connect(address, model="m", replica="reader", settings=settings) as reader,
        ):
            trainer.register(right)
            trainer.publish(1)
            mine, boxes = columns_of(right, 0, 2)
            reader.register(mine, boxes)
            reading = in_background(lambda: reader.replicate(timeout_s=60))
            assert reached.wait(30)
            server.close()
            server = serve(address, lease_s=1.0, heartbeat_s=0.1)
            go_on.set()
            assert reading.result(60) == 1
            assert holds(mine, boxes, right)
            assert reader.counters.reconnects >= 1
            assert reader.counters.bytes_read <= 1.02 * sum(tensor.nbytes for tensor in mine.values())
            trainer.unpublish(timeout_s=20)
    finally:
        server.close()
