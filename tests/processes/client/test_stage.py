"""Stage and install with real processes: what others read meanwhile, and who dies when."""

from __future__ import annotations

import threading
import time

import pytest

from tensorhub_core import ConfigError, DeadlineExceeded, Staged, StateError, Worker, connect, serve
from tensorhub_core.server.serving import Server
from tensorhub_core.transport.registry import make_transport
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import Tensors, blank, digest, make, same
from tests.processes.client.test_faults import BY, MIB, SMALL, Brake, each_way, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]


def trains(actor: Actor, handle: str, version: int, seed: int, mib: int = MIB) -> None:
    """Let a trainer publish the next version."""
    actor.do("call", handle, method="unpublish")
    actor.do("register", handle, sample="plain", seed=seed, mib=mib)
    actor.do("call", handle, method="publish", version=version)


@each_way
def test_the_old_version_is_read_during_the_whole_stage(here: Hub, other: Actor, way: str) -> None:
    settings = BY[way]
    trainer = here.publisher(other, "plain", mib=MIB, settings=settings)
    holder, tensors = here.reader("plain", mib=MIB, settings=settings)
    assert holder.replicate() == 1
    trains(other, trainer, 2, seed=2)
    brake = Brake()
    staging = in_background(lambda: holder.stage(progress=brake))
    assert brake.half.wait(60)
    old = digest(make("plain", 1, mib=MIB))
    for replica in ("a", "b"):
        reader = here.remote(other, replica, settings=settings)
        other.do("register", reader, sample="plain", seed=1, blank=True, mib=MIB)
        assert other.do("call", reader, method="replicate", version=1) == 1
        assert other.do("digest", reader) == old
        other.do("call", reader, method="unpublish")
    assert not staging.done()
    assert digest(tensors) == old
    brake.go.set()
    with staging.result(60) as staged:
        assert digest(tensors) == old
        assert staged.install() == 2
    assert same(tensors, make("plain", 2, mib=MIB))


@each_way
def test_others_read_from_what_is_staged_and_from_its_prefix(here: Hub, other: Actor, way: str) -> None:
    settings = BY[way]
    trainer = here.publisher(other, "plain", mib=MIB, settings=settings)
    holder, tensors = here.reader("plain", "holder", mib=MIB, settings=settings)
    brake = Brake()
    staging = in_background(lambda: holder.stage(progress=brake))
    assert brake.half.wait(60)
    reader, copied = here.reader("plain", "follower", mib=MIB, settings=settings)
    sources: list[str] = []
    following = in_background(lambda: reader.replicate(progress=lambda done, total, source: sources.append(source)))
    end = time.monotonic() + 30
    while not sources:
        assert time.monotonic() < end
        time.sleep(0.01)
    brake.go.set()
    staged = staging.result(60)
    assert following.result(60) == 1
    assert set(sources) == {"holder"}
    assert same(copied, make("plain", 1, mib=MIB))
    assert set(tensors["norm"].view(-1).tolist()) == set(blank(tensors)["norm"].tolist()), "only host memory was filled"
    reader.unpublish()
    other.do("call", trainer, method="unpublish")
    assert reader.replicate(1) == 1, "only the staged copy is left"
    assert same(copied, make("plain", 1, mib=MIB))
    assert staged.install() == 1


@each_way
def test_a_source_that_is_killed_during_a_stage_is_replaced(here: Hub, way: str) -> None:
    settings = BY[way]
    with Actor() as one, Actor() as two:
        actors = {"one": one, "two": two}
        for replica, actor in actors.items():
            here.publisher(actor, "plain", replica=replica, mib=MIB, settings=settings)
        holder, tensors = here.reader("plain", mib=MIB, settings=settings)
        brake = Brake()
        staging = in_background(lambda: holder.stage(progress=brake))
        assert brake.half.wait(60)
        actors[brake.sources[-1]].kill()
        brake.go.set()
        with staging.result(60) as staged:
            assert holder.counters.failovers == 1
            total = sum(tensor.nbytes for tensor in tensors.values())
            assert total <= holder.counters.bytes_read < 1.5 * total
            staged.install()
        assert same(tensors, make("plain", 1, mib=MIB))


def test_a_stage_that_is_too_late_leaves_the_old_version(here: Hub, other: Actor) -> None:
    trainer = here.publisher(other, "plain", mib=MIB)
    holder, tensors = here.reader("plain", mib=MIB, settings=SMALL)
    holder.replicate()
    trains(other, trainer, 2, seed=2)
    brake = Brake()
    late = threading.Timer(1.5, brake.go.set)
    late.start()
    with pytest.raises(DeadlineExceeded):
        holder.stage(timeout_s=1.0, progress=brake)
    late.join()
    assert holder.version == 1
    assert same(tensors, make("plain", 1, mib=MIB))
    with holder.stage() as staged:
        staged.install()
    assert same(tensors, make("plain", 2, mib=MIB))


def test_discard_gives_the_memory_back(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", mib=MIB)
    with Actor() as actor:
        reader = here.remote(actor, "reader")
        actor.do("register", reader, sample="plain", seed=1, blank=True, mib=MIB)
        actor.do("stage", reader)
        full = actor.do("resident_bytes")
        actor.do("staged", reader, method="discard")
        total_bytes = sum(tensor.nbytes for tensor in make("plain", 1, mib=MIB).values())
        assert full - actor.do("resident_bytes") > 0.9 * total_bytes
        actor.do("stage", reader)
        assert actor.do("staged", reader, method="install") == 1
        assert actor.do("digest", reader) == digest(make("plain", 1, mib=MIB))


def test_a_transport_that_cannot_be_made_twice_is_refused(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain")
    holder, tensors = here.reader("plain", transport=make_transport("auto"))
    with pytest.raises(ConfigError, match="name"):
        holder.stage()
    assert holder.replicate() == 1
    assert same(tensors, make("plain", 1))


def shard(server: Server, model: str, number: int) -> tuple[Worker, Tensors]:
    """Connect a shard of the replica `pair` to this process."""
    worker = connect(server.address, model=model, replica="pair", shard=number, num_shards=2, settings=SMALL)
    tensors = blank(make("plain", number))
    worker.register(tensors)
    return worker, tensors


def pair_of_shards(here: Hub, trainers: list[Worker], actor: Actor) -> tuple[Worker, Tensors, str, Staged]:
    """Let both shards of `pair` hold version 1 and stage version 2; one is of this process."""
    for number in (0, 1):
        trainer = connect(
            here.server.address, model=here.model, replica="trainer", shard=number, num_shards=2, settings=SMALL
        )
        trainers.append(trainer)
        trainer.register(make("plain", number))
        trainer.publish(1)
    worker, tensors = shard(here.server, here.model, 0)
    trainers.append(worker)
    place = {"server": here.server.address, "model": here.model, "replica": "pair", "shard": 1, "num_shards": 2}
    actor.do("connect", "other half", **place)
    actor.do("register", "other half", sample="plain", seed=1, blank=True)
    theirs = actor.begin("call", "other half", method="replicate")
    assert worker.replicate(timeout_s=30) == 1
    assert theirs.result(30) == 1
    for number, trainer in enumerate(trainers[:2]):
        trainer.unpublish()
        trainer.register(make("plain", 10 + number))
        trainer.publish(2)
    theirs = actor.begin("stage", "other half")
    staged = worker.stage(timeout_s=30)
    assert theirs.result(30) == 2
    return worker, tensors, "other half", staged


@pytest.fixture
def workers() -> list[Worker]:
    return []


def test_nobody_installs_when_a_shard_is_killed_with_what_it_staged(here: Hub, workers: list[Worker]) -> None:
    with Actor() as actor:
        worker, tensors, _, staged = pair_of_shards(here, workers, actor)
        actor.kill()
        with pytest.raises((DeadlineExceeded, StateError)):
            staged.install(timeout_s=3)
        assert same(tensors, make("plain", 0)), "not a byte was overwritten"
        assert worker.version == 1
        for each in reversed(workers):
            each.close()


def test_a_replica_that_is_killed_in_the_middle_of_an_install_is_never_offered(
    here: Hub, workers: list[Worker]
) -> None:
    with Actor() as actor:
        worker, _, handle, staged = pair_of_shards(here, workers, actor)
        actor.do("hang_installs", handle)
        theirs = actor.begin("staged", handle, method="install")
        ours = in_background(lambda: staged.install(timeout_s=40))
        assert actor.events.get(timeout=30) == [handle, "installing"]
        actor.kill()
        assert theirs.exception(10) is not None
        with pytest.raises(StateError, match="gone"):
            ours.result(40)
        assert worker.version is None, "dirty: its own half was overwritten"
        with pytest.raises(StateError, match="dirty"):
            worker.publish(2)
        assert {int(v.version): v.replicas for v in worker.versions()} == {2: ("trainer",)}
        for each in reversed(workers):
            each.close()


def test_a_hub_that_restarts_between_stage_and_install(other: Actor) -> None:
    server = serve(lease_s=1.0, heartbeat_s=0.1)
    address = server.address
    with connect(address, model="m", replica="reader", settings=SMALL) as worker:
        other.do("connect", "m", server=address, model="m", replica="trainer")
        other.do("register", "m", sample="plain", seed=1)
        other.do("call", "m", method="publish", version=1)
        tensors = blank(make("plain", 1))
        worker.register(tensors)
        staged = worker.stage()
        server.close()
        server = serve(address, lease_s=1.0, heartbeat_s=0.1)
        assert staged.install(timeout_s=30) == 1
        assert same(tensors, make("plain", 1))
        other.do("call", "m", method="unpublish")
        assert [v.replicas for v in worker.versions()] == [("reader",)]
        other.do("close", "m")
    server.close()
