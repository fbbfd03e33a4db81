"""One rank of a toy engine against a real hub: what it fills, offers and says, for every kind of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorhub_core import LayoutMismatch, Worker, serve
from tensorhub_core.client.observer import observe
from tensorhub_core.engine.shard import EngineShard

from .toy import Hub, ToyMemory, shard_of, weights


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve("tcp://127.0.0.1:0", lease_s=2.0, heartbeat_s=0.5) as server:
        yield Hub(server.address)


class Trainer:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.tensors = weights(1)
        worker.register(self.tensors)
        worker.publish(1)

    def publish(self, version: int) -> None:
        self.worker.unpublish()
        for name, tensor in weights(version).items():
            self.tensors[name].copy_(tensor)
        self.worker.publish(version)


@pytest.fixture
def trainer(hub: Hub) -> Iterator[Trainer]:
    with hub.connect("trainer") as worker:
        yield Trainer(worker)


def holders(hub: Hub) -> set[str]:
    with observe(hub.address, model="policy") as observer:
        _, held = observer.holders()
    return {row.replica for row in held}


def put_to_use(shard: EngineShard) -> None:
    assert shard.process().ok
    assert shard.publish().ok


def test_memory_that_stays_apart_is_offered_from_the_start(hub: Hub, trainer: Trainer) -> None:
    memory = ToyMemory()
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        assert holders(hub) == {"trainer", "engine"}, "before anything was processed"
        put_to_use(shard)
        assert memory.computes_with(1)
        trainer.publish(2)
        report = shard.update("latest")
        assert (report.ok, report.version, report.served, report.published) == (True, 2, None, True)
        assert report.source == "trainer"
        assert holders(hub) == {"trainer", "engine"}
        assert memory.computes_with(1), "what is loaded is not what is computed with"
        assert shard.process().served == 2
        assert memory.computes_with(2)


def test_memory_that_is_processed_in_place_is_offered_only_after_it_and_only_to_its_like(
    hub: Hub, trainer: Trainer
) -> None:
    memory = ToyMemory(in_place=True)
    with shard_of(hub, memory) as shard:
        for version in (1, 2, 3):
            if version > 1:
                trainer.publish(version)
                report = shard.update("latest")
                assert (report.ok, report.version, report.served, report.published) == (True, version, None, False)
            else:
                shard.fill("latest", 5.0)
            assert holders(hub) == {"trainer"}, "its raw form is never offered"
            put_to_use(shard)
            assert memory.computes_with(version)
            assert shard.report().published
            with observe(hub.address, model="policy") as observer:
                _, held = observer.holders()
            assert {row.replica: row.layout.tag for row in held} == {"trainer": "", "engine": "processed:toy"}
        other = ToyMemory()
        with shard_of(hub, other, "other") as second:
            second.fill("latest", 5.0)
            assert second.report().source == "trainer"


def test_loading_that_computes_is_staged_and_says_so(hub: Hub, trainer: Trainer) -> None:
    memory, like = ToyMemory(computes=True), ToyMemory(computes=True)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        assert memory.computes_with(1)
        assert "staging copy" in shard.report().note
        trainer.worker.unpublish()
        with shard_of(hub, like, "like") as second:
            second.fill("latest", 5.0)
            put_to_use(second)
            assert second.report().source == "engine"
            assert like.computes_with(1)
        trainer.publish(2)
        report = shard.update("latest")
        assert (report.ok, report.version, bool(report.digest)) == (True, 2, True)
        put_to_use(shard)
        assert memory.computes_with(2)
        same = shard.update("latest")
        assert (same.ok, same.version, same.served) == (True, 2, 2), "nothing newer, nothing loaded"


@pytest.mark.parametrize("kind", [{}, {"in_place": True}, {"computes": True}])
def test_a_version_that_does_not_fit_leaves_everything_as_it_was(
    hub: Hub, trainer: Trainer, kind: dict[str, bool]
) -> None:
    memory = ToyMemory(**kind)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        before = {name: tensor.clone() for name, tensor in memory.loaded.items()}
        for version, change in ((2, {"q": torch.zeros(12, 8)}), (3, {"extra": torch.zeros(1)}), (4, {"k": None})):
            with hub.connect(f"other-{version}") as worker:
                other = {name: tensor for name, tensor in {**weights(1), **change}.items() if tensor is not None}
                worker.register(other)
                worker.publish(version)
                report = shard.update("latest")
            assert (report.ok, report.code) == (False, "layout_mismatch"), report
            assert (report.version, report.served, report.published) == (1, 1, True), report
            assert all(torch.equal(memory.loaded[name], tensor) for name, tensor in before.items())
            assert memory.computes_with(1)
        trainer.publish(5)
        assert shard.update("latest").ok
        put_to_use(shard)
        assert memory.computes_with(5)


@pytest.mark.parametrize("kind", [{}, {"in_place": True}])
def test_corrupt_bytes_make_the_memory_dirty_until_a_whole_version_comes(
    hub: Hub, trainer: Trainer, kind: dict[str, bool]
) -> None:
    memory = ToyMemory(**kind)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        trainer.publish(2)
        trainer.tensors["norm"][0] += 1
        report = shard.update("latest")
        assert not report.ok
        assert (report.version, report.served, report.published, report.digest) == (None, None, False, "")
        assert not shard.process().ok, "dirty memory is not processed"
        assert not shard.report().published
        trainer.publish(3)
        assert shard.update("latest").version == 3
        put_to_use(shard)
        assert memory.computes_with(3)


def test_processing_that_fails_is_a_report_and_is_tried_again(hub: Hub, trainer: Trainer) -> None:
    memory = ToyMemory()
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        memory.fails = True
        report = shard.process()
        assert (report.ok, report.served, report.message) == (False, None, "the kernel could not be made")
        memory.fails = False
        assert shard.process().served == 1
        assert memory.computes_with(1)


def test_bootstrap_offers_what_the_engine_loaded_itself(hub: Hub, trainer: Trainer) -> None:
    memory = ToyMemory()
    with shard_of(hub, memory) as shard:
        memory.load(weights(9).items())
        memory.process()
        shard.bootstrap(9)
        report = shard.report()
        assert (report.version, report.served, report.source, report.published) == (9, 9, "disk", True)
        with hub.connect() as reader:
            got = {name: torch.zeros_like(tensor) for name, tensor in weights(9).items()}
            reader.register(got)
            assert reader.replicate(9, 5.0) == 9
        assert all(torch.equal(got[name], tensor) for name, tensor in weights(9).items())


def test_an_engine_of_the_same_layout_gives_its_bytes_as_they_are(hub: Hub, trainer: Trainer) -> None:
    with shard_of(hub, ToyMemory()) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        trainer.worker.unpublish()
        other = ToyMemory()
        with shard_of(hub, other, "other") as second:
            second.fill("latest", 5.0)
            put_to_use(second)
            assert (second.report().source, second.report().digest) == ("engine", shard.report().digest)
            assert other.computes_with(1)


def test_what_does_not_fit_is_refused_before_it_is_registered(hub: Hub) -> None:
    with hub.connect("trainer") as worker:
        worker.register({"q": torch.zeros(6, 9), "k": torch.zeros(4, 8, dtype=torch.bfloat16), "more": torch.zeros(1)})
        worker.publish(1)
        with pytest.raises(LayoutMismatch) as caught, shard_of(hub, ToyMemory()):
            pytest.fail("it was registered")
        text = "\n".join(caught.value.differences)
        for word in ("q must be (6, 8)", "dtype of 'k'", "more"):
            assert word in text
