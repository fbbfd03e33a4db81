"""Retained means reachable (law L11): no call of a client loses one of the newest versions, only failures do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tensorhub_core.client import offload_copy
from tensorhub_core.client.offload_copy import OffloadMemory, Original
from tensorhub_core.errors import ConfigError, DeadlineExceeded, StateError, VersionUnavailable
from tests.processes.client.actor import Actor, RemoteError
from tests.processes.client.retaining import BYTES, MIB, Site, rewrite, site, until
from tests.processes.client.samples import make, same
from tests.processes.client.test_faults import in_background

pytestmark = pytest.mark.timeout(120)
LARGE_MIB = 64


@pytest.fixture
def here() -> Iterator[Site]:
    with site() as made:
        yield made


class Brake:
    """Holds the making of offload copies until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        fill = OffloadMemory.fill

        def slowly(copy: OffloadMemory, original: Original, stop: Callable[[], bool], **more: Any) -> bool:
            self.begun.set()
            while not self.go.wait(0.01):
                if stop():
                    return False
            return fill(copy, original, stop, **more)

        monkeypatch.setattr(offload_copy.OffloadMemory, "fill", slowly)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_a_lone_trainer_keeps_a_copy_until_the_next_version(here: Site, way: str) -> None:
    with Actor() as actor:
        settings = {"transport": way}
        trainer = here.remote(actor, "trainer", 1, mib=LARGE_MIB, settings=settings)
        size = sum(tensor.nbytes for tensor in make("plain", 1, mib=LARGE_MIB).values())
        before = actor.do("resident_bytes")
        actor.do("call", trainer, method="unpublish")
        actor.do("fill", trainer, value=0)
        assert actor.do("resident_bytes") - before > 0.9 * size
        assert (here.retained(), here.offload_bytes()) == ([1], size)
        assert here.check(1, LARGE_MIB) == "trainer"
        shard = here.status().replicas[0].shards[0]
        assert (shard.version, shard.state) == (1, "offload")
        actor.do("register", trainer, sample="plain", seed=2, mib=LARGE_MIB)
        actor.do("call", trainer, method="publish", version=2)
        until(lambda: actor.do("resident_bytes") - before < 0.3 * size)
        assert (here.retained(), here.offload_bytes()) == ([2], 0)
        with pytest.raises(VersionUnavailable):
            here.check(1, LARGE_MIB)
        assert here.check(2, LARGE_MIB) == "trainer"


def test_two_versions_are_kept_of_a_lone_trainer() -> None:
    with site(retain=2) as here:
        trainer, tensors = here.trainer(1)
        for version in (2, 3, 4):
            rewrite(trainer, tensors, version)
            assert here.check(version - 1) == here.check(version) == "trainer"
            if version > 2:
                with pytest.raises(VersionUnavailable):
                    here.check(version - 2)
        assert here.offload_bytes() == BYTES


def test_with_retain_zero_a_version_is_gone_with_its_last_copy() -> None:
    with site(retain=0) as here:
        trainer, _ = here.trainer(1)
        trainer.unpublish()
        with pytest.raises(VersionUnavailable):
            here.check(1)
        assert len(trainer._resources.offloads) == 0


def test_no_room_is_said_at_publish(here: Site) -> None:
    trainer = here.worker("trainer", settings={"offload_limit_bytes": BYTES - 1})
    trainer.register(make("plain", 1, mib=MIB))
    with pytest.raises(ConfigError, match="offload_limit_bytes") as refused:
        trainer.publish(1)
    assert all(word in str(refused.value) for word in (f"{BYTES:,}", f"{BYTES - 1:,}", "retain = 0", "seed --keep"))
    assert (trainer.version, trainer.versions()) == (None, [])


def test_room_for_one_copy_is_enough_for_one_retained_version(here: Site) -> None:
    trainer, tensors = here.trainer(1, settings={"offload_limit_bytes": BYTES})
    for version in (2, 3, 4):
        rewrite(trainer, tensors, version)
        assert here.check(version) == "trainer"
    trainer.unpublish()
    assert here.check(4) == "trainer"


def test_a_spot_publisher_needs_no_room_and_keeps_what_it_can(here: Site) -> None:
    trainer, _ = here.trainer(1, spot=True, settings={"offload_limit_bytes": 0})
    trainer.unpublish()
    with pytest.raises(VersionUnavailable):
        here.check(1)


def test_another_reliable_holder_is_enough(here: Site) -> None:
    trainer, _ = here.trainer(7)
    rollout, _ = here.reader("rollout")
    assert rollout.replicate() == 7
    trainer.unpublish()
    assert (len(trainer._resources.offloads), here.retained()) == (0, [7])
    assert here.check(7) == "rollout"


def test_a_copy_goes_when_another_reliable_holder_has_come(here: Site) -> None:
    trainer, _ = here.trainer(7)
    trainer.unpublish()
    assert here.offload_bytes() == BYTES
    rollout, tensors = here.reader("rollout")
    assert rollout.replicate() == 7
    assert same(tensors, make("plain", 7, mib=MIB))
    until(lambda: len(trainer._resources.offloads) == 0 and trainer._resources.offloads.held_bytes() == 0)
    assert here.check(7) == "rollout"


def test_spot_holders_do_not_count(here: Site) -> None:
    trainer, _ = here.trainer(7)
    spot, _ = here.reader("spot", spot=True)
    assert spot.replicate() == 7
    trainer.unpublish()
    assert here.offload_bytes() == BYTES
    spot.close()
    assert here.check(7) == "trainer"


def test_the_last_spot_holder_keeps_a_copy_too(here: Site) -> None:
    """It is better than nothing: a newcomer can get it as long as the spot worker lives."""
    trainer, _ = here.trainer(7, settings={"handover_s": 0})
    spot, held = here.reader("spot", spot=True)
    assert spot.replicate() == 7
    trainer.close()
    spot.unpublish()
    for tensor in held.values():
        tensor.zero_()
    assert here.check(7) == "spot"
    reliable, _ = here.reader("reliable")
    assert reliable.replicate() == 7
    until(lambda: spot._resources.offloads.held_bytes() == 0)
    assert here.check(7) == "reliable"


@pytest.mark.parametrize("how", ["update", "stage", "replicate"])
def test_the_last_holder_keeps_what_it_replaces(here: Site, how: str) -> None:
    """The trainer has gone on to 8 with nobody reading it yet; the only rollout lets 7 go to take 8 in place."""
    trainer, tensors = here.trainer(7)
    rollout, held = here.reader("rollout")
    assert rollout.replicate() == 7
    rewrite(trainer, tensors, 8)
    seen: list[int] = []

    def look(done: int, total: int, source: str) -> None:
        if not seen:
            seen.append(here.offload_bytes())

    if how == "update":
        assert rollout.update(progress=look) == 8
    elif how == "replicate":
        rollout.unpublish()
        seen.append(here.offload_bytes())
        assert rollout.replicate() == 8
    else:
        with rollout.stage() as staged:
            assert staged.install() == 8
    assert seen in ([BYTES], []), "7 was in host memory before a byte of it was overwritten"
    assert same(held, make("plain", 8, mib=MIB))
    until(lambda: here.offload_bytes() == 0)
    assert here.retained() == [8]


def test_a_trainer_crashes_while_every_rollout_replaces_in_place(here: Site) -> None:
    little = {"segment_bytes": 256 << 10, "window": 1}  # so that much is missing when half of it is verified
    with Actor() as home, Actor() as one, Actor() as two:
        trainer = here.remote(home, "trainer", 7, settings=little)
        rollouts = [(actor, here.remote(actor, name, settings=little)) for actor, name in ((one, "one"), (two, "two"))]
        for actor, rollout in rollouts:
            assert actor.do("call", rollout, method="replicate") == 7
        home.do("call", trainer, method="unpublish")
        home.do("register", trainer, sample="plain", seed=8, mib=MIB)
        home.do("call", trainer, method="publish", version=8)
        filling = [actor.begin("call", rollout, method="update", hold=True) for actor, rollout in rollouts]
        for actor, _ in rollouts:
            _, done, total, _ = actor.events.get(timeout=30)
            assert done <= total
        until(
            lambda: all(
                replica.state == "filling" for replica in here.status().replicas if replica.replica != "trainer"
            )
        )
        home.kill()
        for actor, _ in rollouts:
            actor.do("go")
        for future in filling:
            with pytest.raises(RemoteError) as lost:
                future.result(60)
            assert lost.value.kind == "VersionUnavailable"
        assert here.check(7) in ("one", "two")


def test_unpublish_may_be_called_again_while_the_copy_is_made(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    trainer, _ = here.trainer(7)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            trainer.unpublish(timeout_s=0.2)
    assert brake.begun.is_set()
    brake.go.set()
    trainer.unpublish()
    assert here.check(7) == "trainer"
    assert trainer._resources.offloads.made == 1


def test_a_copy_that_is_not_needed_any_more_is_given_up(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    trainer, _ = here.trainer(7)
    rollout, _ = here.reader("rollout")
    assert rollout.replicate(publish=False) == 7
    withdrawing = in_background(trainer.unpublish)
    assert brake.begun.wait(20)
    assert rollout.publish(7) == 7
    withdrawing.result(20)
    until(lambda: trainer._resources.offloads.held_bytes() == 0)
    assert trainer._resources.offloads.made == 0
    assert here.check(7) == "rollout"


def test_a_copy_that_cannot_be_made_is_said_and_tried_again(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = here.trainer(7)
    with monkeypatch.context() as patch:
        patch.setattr("tensorhub_core.client.offload.available_bytes", lambda: 5)
        with pytest.raises(StateError, match=f"{BYTES:,} bytes of host memory, 5 are available"):
            trainer.unpublish()
        assert here.check(7) == "trainer", "it is offered as before"
        assert trainer.publish(7) == 7
        with pytest.raises(StateError):
            trainer.unpublish()
    trainer.unpublish()
    assert here.check(7) == "trainer"


def test_what_was_changed_too_early_is_let_go_with_a_warning(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    trainer, tensors = here.trainer(7)
    tensors["norm"].zero_()
    with caplog.at_level(logging.WARNING):
        trainer.unpublish()
    assert "does not hold the bytes of version 7 any more" in caplog.text
    assert "has lost its last" in caplog.text
    trainer.publish(8)
    with pytest.raises(VersionUnavailable):
        here.check(7)


def test_all_shards_keep_their_parts(here: Site) -> None:
    shards = [here.worker("trainer", shard=i, num_shards=2) for i in range(2)]
    for number, shard in enumerate(shards):
        shard.register(make("plain", 10 + number))
        shard.publish(1)
    first = in_background(shards[0].unpublish)
    first.result(20)
    assert here.retained() == [1], "the other shard offers its own, and the first one its copy"
    shards[1].unpublish()
    readers = [here.worker("reader", shard=i, num_shards=2, spot=True) for i in range(2)]
    blanks = [make("plain", 0) for _ in readers]
    for reader, tensors in zip(readers, blanks, strict=True):
        reader.register(tensors)
    reading = [in_background(reader.replicate) for reader in readers]
    assert [each.result(40) for each in reading] == [1, 1]
    assert all(same(tensors, make("plain", 10 + number)) for number, tensors in enumerate(blanks))


def test_other_registered_memory_leaves_the_copy_alone(here: Site) -> None:
    trainer, _ = here.trainer(7)
    trainer.unpublish()
    trainer.register(make("dtypes", 3))
    assert here.check(7) == "trainer"
    assert trainer.publish(8) == 8
    until(lambda: trainer._resources.offloads.held_bytes() == 0)


def test_close_while_a_copy_is_made_ends_in_time(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    trainer, _ = here.trainer(7)
    with pytest.raises(DeadlineExceeded):
        trainer.unpublish(timeout_s=0.1)
    assert brake.begun.wait(20)
    started = time.monotonic()
    trainer.close()
    assert time.monotonic() - started < 15
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorhub-offload")]


@pytest.mark.parametrize("move", ["exchange", "resize", "free"])
def test_memory_that_was_moved_is_kept_as_long_as_it_is_there(here: Site, move: str) -> None:
    trainer = here.worker("trainer")
    tensors = {name: tensor.clone() for name, tensor in make("plain", 7, mib=MIB).items()}
    trainer.register(tensors)
    trainer.publish(7)
    weight = tensors["layers.0.weight"]
    if move == "exchange":
        weight.data = weight.new_zeros(3)
    else:
        weight.untyped_storage().resize_(0 if move == "free" else weight.nbytes // 2)
    trainer.unpublish()
    if move == "exchange":
        assert here.check(7) == "trainer", "the old memory has its bytes still"
    else:
        with pytest.raises(VersionUnavailable):
            here.check(7)


@pytest.mark.parametrize("how", ["unpublish", "update"])
def test_memory_is_the_callers_again_only_when_a_needless_copy_has_stopped_reading_it(
    here: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    begun, go = threading.Event(), threading.Event()
    copy_batch = offload_copy._Copying._copy_batch

    def slowly(copying: Any, begin: int, end: int) -> None:
        begun.set()
        assert go.wait(30)
        copy_batch(copying, begin, end)

    with Actor() as actor:
        trainer, tensors = here.trainer(7)
        reader = here.remote(actor, "reader")
        actor.do("call", reader, method="replicate", publish=False)
        if how == "update":
            here.remote(actor, "newer", 8, spot=True)
        monkeypatch.setattr(offload_copy._Copying, "_copy_batch", slowly)
        ended = in_background(getattr(trainer, how))
        assert begun.wait(20)
        actor.do("call", reader, method="publish", version=7)
        until(lambda: trainer._session.standing.held is None)
        assert same(tensors, make("plain", 7, mib=MIB)), "it is still being read"
        assert not ended.done()
        go.set()
        ended.result(30)
        assert same(tensors, make("plain", 8 if how == "update" else 7, mib=MIB))
        assert not [r for r in caplog.records if "changed before" in r.getMessage()]


@pytest.mark.parametrize("way", ["auto", "tcp", "cma"])
def test_versions_without_a_byte_are_kept_like_others(way: str) -> None:
    with site(retain=2) as here:
        trainer = here.worker("trainer", transport=way)
        trainer.register({"none": torch.empty(0, 16), "nor here": torch.empty(0, dtype=torch.int64)})
        for version in (1, 2, 3, 4):
            trainer.publish(version)
            trainer.unpublish(timeout_s=20)
            newest = min(version, 2)
            assert here.retained() == list(range(version - newest + 1, version + 1))
            until(lambda newest=newest: len(trainer._resources.offloads) == newest)
        reader = here.worker("reader", transport=way)
        reader.register({"none": torch.empty(0, 16), "nor here": torch.empty(0, dtype=torch.int64)})
        assert reader.replicate(3, timeout_s=20) == 3
        assert reader.update(timeout_s=20) == 4
