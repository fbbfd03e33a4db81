"""One rank of a toy engine against a real hub: what it fills, offers and says, for every kind of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tensorhub_core import LayoutMismatch, Worker, serve
from tensorhub_core.client.observer import observe
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.steps import ShardReport

from .toy import Hub, ToyMemory, shard_of, weights


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    settings = {"retain": 0}  # a transport that is given as an object cannot show copies that keep a version
    with serve("tcp://127.0.0.1:0", lease_s=2.0, heartbeat_s=0.5, settings=settings) as server:
        yield Hub(server.address, transport="tcp" if "stage" in request.node.name else "")


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


def holders(hub: Hub, version: int | None = None) -> set[str]:
    with observe(hub.address, model="policy") as observer:
        _, held = observer.holders(version)
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


def test_loading_that_computes_is_streamed_and_says_so(hub: Hub, trainer: Trainer) -> None:
    memory, like = ToyMemory(computes=True), ToyMemory(computes=True)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        assert memory.computes_with(1)
        assert "streamed in pieces" in shard.report().note
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


def test_a_stream_that_breaks_leaves_dirty_memory_that_nobody_gets(hub: Hub, trainer: Trainer) -> None:
    """Its first piece has not come: the old version serves on. Later: memory is no version, until one comes whole."""
    hub.staging_bytes = 0
    memory = ToyMemory(computes=True)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        trainer.publish(2)
        trainer.tensors["k"][0] += 1
        report = shard.update("latest")
        assert (report.ok, report.version, report.served, report.published) == (False, 1, 1, True)
        assert memory.computes_with(1)
        trainer.publish(3)
        trainer.tensors["norm"][0] += 1
        report = shard.update("latest")
        assert (report.ok, report.version, report.served, report.digest) == (False, None, None, "")
        assert not shard.process().ok, "dirty memory is not processed"
        assert not shard.report().published
        assert holders(hub) == {"trainer"}
        trainer.publish(4)
        memory.loading = fail_at("q")
        report = shard.update("latest")
        assert (report.ok, report.version, report.message) == (False, None, "q cannot be loaded")
        memory.loading = lambda name: None
        assert shard.update("latest").version == 4
        put_to_use(shard)
        assert memory.computes_with(4)


def fail_at(where: str) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name == where:
            raise RuntimeError(f"{name} cannot be loaded")

    return fail


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


def staged(shard: EngineShard, version: int | str = "latest") -> ShardReport:
    """Stage to the end, as an adapter does: begin, then look until it is over."""
    report = shard.stage(version)  # type: ignore[arg-type]
    assert report.ok, report.message
    until_s = time.monotonic() + 10
    while (found := shard.staged(0.01)) is None:
        assert time.monotonic() < until_s
    return found


@pytest.mark.parametrize("kind", [{}, {"computes": True}])
def test_a_version_is_staged_beside_the_one_that_serves(hub: Hub, trainer: Trainer, kind: dict[str, bool]) -> None:
    memory = ToyMemory(**kind)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        for version in (2, 3):
            trainer.publish(version)
            before = shard.report()
            report = staged(shard)
            assert report.staged == (1, version)
            assert replace(report, staged=None) == before, "what is staged changes nothing of what is held"
            assert holders(hub, version - 1) == {"engine"}, "the old version is offered all the time"
            assert memory.computes_with(version - 1)
            report = shard.install()
            assert (report.ok, report.version, report.served, report.source) == (True, version, None, "trainer")
            assert report.digest not in ("", before.digest)
            put_to_use(shard)
            assert memory.computes_with(version)
            assert holders(hub) == {"trainer", "engine"}
        assert not shard.install().ok, "nothing is left to install"


@pytest.mark.parametrize("kind", [{}, {"computes": True}])
def test_what_is_staged_can_be_dropped_and_staged_again(hub: Hub, trainer: Trainer, kind: dict[str, bool]) -> None:
    memory = ToyMemory(**kind)
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        trainer.publish(2)
        assert staged(shard, 2).ok
        assert shard.discard().ok
        assert shard.install().code == "state_error"
        assert (shard.report().version, shard.report().served, shard.report().published) == (1, 1, True)
        assert memory.computes_with(1)
        assert staged(shard, 2).ok
        assert staged(shard, 2).ok, "staging again takes the place of what waits"
        assert shard.install().version == 2
        put_to_use(shard)
        assert memory.computes_with(2)


def test_what_cannot_be_staged_leaves_everything_as_it_was(hub: Hub, trainer: Trainer) -> None:
    memory = ToyMemory()
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        assert shard.stage(7, 0.2).ok
        while (report := shard.staged(0.01)) is None:
            pass
        assert (report.ok, report.code, report.version, report.served) == (False, "deadline_exceeded", 1, 1)
        with hub.connect("stranger") as stranger:
            stranger.register({"q": torch.zeros(3, 8), "k": torch.zeros(4, 8), "norm": torch.zeros(8)})
            stranger.publish(2)
            report = staged(shard)
        assert (report.ok, report.code, report.version) == (False, "layout_mismatch", 1), (
            "judged by the engine's thread"
        )
        assert memory.computes_with(1)
        assert holders(hub, 1) == {"trainer", "engine"}


def test_memory_that_is_processed_in_place_is_not_staged(hub: Hub, trainer: Trainer) -> None:
    with shard_of(hub, ToyMemory(in_place=True)) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        report = shard.stage("latest")
        assert (report.ok, report.code, report.version) == (False, "state_error", 1)
        assert "staged = false" in report.message


@pytest.mark.parametrize("kind", ["apart", "in_place", "computes"])
def test_memory_that_was_released_holds_nothing_and_is_filled_anew_with_the_same_version(
    hub: Hub, trainer: Trainer, kind: str
) -> None:
    memory = ToyMemory(in_place=kind == "in_place", computes=kind == "computes")
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        for _ in range(2):
            report = shard.withdraw()
            assert (report.ok, report.version, report.served, report.published) == (True, None, None, False)
            assert report.digest == ""
            assert holders(hub) == {"trainer"}
        assert not shard.publish().published, "there is nothing to offer"
        for tensor in memory.parameters().values():
            tensor.fill_(0)
        report = shard.update("latest")
        assert (report.ok, report.version) == (True, 1)
        put_to_use(shard)
        assert memory.computes_with(1)
        assert holders(hub) == {"trainer", "engine"}


def test_memory_that_cannot_be_filled_again_is_not_offered(hub: Hub, trainer: Trainer) -> None:
    memory = ToyMemory()
    with shard_of(hub, memory) as shard:
        shard.fill("latest", 5.0)
        put_to_use(shard)
        assert shard.withdraw().ok
        trainer.worker.unpublish()
        report = shard.update("latest", 0.3)
        assert (report.ok, report.version, report.published) == (False, None, False)
        trainer.worker.publish(1)
        assert shard.update("latest").version == 1
        put_to_use(shard)
        assert memory.computes_with(1)
