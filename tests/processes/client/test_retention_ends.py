"""The ends of workers and hubs under retention: hand-over at close, and hubs that forget everything."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.errors import DeadlineExceeded, VersionUnavailable
from tests.processes.client.retaining import BYTES, MIB, Site, rewrite, site, until
from tests.processes.client.samples import make, same
from tests.processes.client.test_faults import in_background
from tests.processes.client.test_retention import Brake

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def here() -> Iterator[Site]:
    with site() as made:
        yield made


def test_a_lone_trainer_ends_at_once_with_a_warning(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = here.trainer(7, settings={"handover_s": 30})
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        trainer.close()
    assert time.monotonic() - started < 15, "nobody is there to wait for"
    assert "last reliable holder of version 7 of model 'm' leaves" in caplog.text
    assert "tensorhub seed --keep" in caplog.text


def test_a_shard_that_leaves_with_the_last_version_says_that_it_is_one(
    here: Site, caplog: pytest.LogCaptureFixture
) -> None:
    shards = [here.worker("trainer", shard=shard, num_shards=2) for shard in range(2)]
    for shard in shards:
        shard.register(make("plain", 7, mib=MIB))
        shard.publish(7)
    with caplog.at_level(logging.WARNING):
        shards[1].close()
    assert "shard 1 of the last reliable holder of version 7 of model 'm' leaves" in caplog.text


def test_who_is_not_the_last_leaves_without_a_word(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = here.trainer(7)
    rollout, _ = here.reader("rollout")
    rollout.replicate()
    with caplog.at_level(logging.WARNING):
        trainer.close()
    assert caplog.text == ""
    assert here.check(7) == "rollout"


def test_close_waits_for_somebody_who_takes_it_over(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = here.trainer(7, settings={"handover_s": 30})
    rollout, tensors = here.reader("rollout")
    with caplog.at_level(logging.WARNING):
        closing = in_background(trainer.close)
        time.sleep(0.3)
        assert not closing.done()
        assert rollout.replicate() == 7
        closing.result(20)
    assert "leaves" not in caplog.text
    assert same(tensors, make("plain", 7, mib=MIB))
    assert here.check(7) == "rollout"


def test_close_does_not_wait_longer_than_it_may(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = here.trainer(7, settings={"handover_s": 0.5})
    here.reader("rollout")
    with caplog.at_level(logging.WARNING):
        trainer.close()
    assert "nobody took it over in time" in caplog.text


def test_hand_over_can_be_asked_for_and_says_what_came_of_it(here: Site) -> None:
    trainer, _ = here.trainer(7)
    rollout, _ = here.reader("rollout")
    with pytest.raises(DeadlineExceeded, match="version 7"):
        trainer.hand_over(timeout_s=0.2)
    rollout.replicate()
    trainer.hand_over()
    alone, _ = here.trainer(8, "other")
    rollout.close()
    trainer.close()
    with pytest.raises(VersionUnavailable, match="nobody is there"):
        alone.hand_over()


def test_an_offload_copy_is_handed_over_too(here: Site) -> None:
    trainer, _ = here.trainer(7, settings={"handover_s": 30})
    trainer.unpublish()
    rollout, _ = here.reader("rollout")
    closing = in_background(trainer.close)
    assert rollout.replicate(timeout_s=20) == 7
    closing.result(20)
    assert here.check(7) == "rollout"


def test_an_error_in_the_block_ends_it_within_a_lease(here: Site) -> None:
    started = time.monotonic()
    here.reader("rollout")
    with pytest.raises(ZeroDivisionError), here.trainer(7, settings={"handover_s": 60, "close_timeout_s": 60})[0]:
        raise ZeroDivisionError
    assert time.monotonic() - started < 20


def test_a_spot_worker_hands_nothing_over(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    here.reader("rollout")
    trainer, _ = here.trainer(7, spot=True, settings={"handover_s": 60})
    with caplog.at_level(logging.WARNING, "tensorhub.client"):
        started = time.monotonic()
        trainer.close()
    assert time.monotonic() - started < 20
    assert "last reliable holder" not in caplog.text


def test_a_restarted_hub_knows_the_offload_copies(here: Site) -> None:
    trainer, tensors = here.trainer(7)
    trainer.unpublish()
    made = trainer._resources.offloads.made
    before = trainer.counters.reconnects
    here.stop()
    here.start()
    until(lambda: trainer.counters.reconnects > before)
    assert here.check(7) == "trainer"
    assert (here.retained(), here.offload_bytes()) == ([7], BYTES)
    for name, tensor in make("plain", 8, mib=MIB).items():
        tensors[name].copy_(tensor)
    trainer.publish(8)
    until(lambda: trainer._resources.offloads.held_bytes() == 0)
    assert (made, here.offload_bytes()) == (1, 0), "its ids are new, but it is dropped all the same"
    rewrite(trainer, tensors, 9)
    assert here.check(9) == "trainer"


def test_a_hub_restarts_while_a_copy_is_made(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    trainer, tensors = here.trainer(7)
    withdrawing = in_background(trainer.unpublish)
    assert brake.begun.wait(20)
    before = trainer.counters.reconnects
    here.stop()
    here.start()
    until(lambda: trainer.counters.reconnects > before)
    assert not withdrawing.done()
    brake.go.set()
    withdrawing.result(30)
    for tensor in tensors.values():
        tensor.zero_()
    assert here.check(7) == "trainer"
    assert here.offload_bytes() == BYTES
    trainer.register(make("plain", 8, mib=MIB))
    trainer.publish(8)
    until(lambda: trainer._resources.offloads.held_bytes() == 0)


def test_a_hub_dies_after_the_copy_and_before_anybody_hears_of_it(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    trainer, _ = here.trainer(7)
    withdrawing = in_background(trainer.unpublish)
    assert brake.begun.wait(20)
    before = trainer.counters.reconnects
    here.stop()
    brake.go.set()
    offloads = trainer._resources.offloads
    until(lambda: any(entry.whole for entry in offloads._entries))
    time.sleep(0.3)
    here.start()
    until(lambda: trainer.counters.reconnects > before)
    withdrawing.result(30)
    assert here.check(7) == "trainer"
    assert offloads.held_bytes() == BYTES, "one copy, not two"


@pytest.mark.parametrize("more", [{"spot": True}, {"settings": {"handover_s": 0}}])
def test_who_does_not_wait_is_asked_for_no_copy(
    here: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    brake = Brake(monkeypatch)
    here.reader("rollout")
    trainer, _ = here.trainer(7, **more)
    with caplog.at_level(logging.WARNING, "tensorhub.client"):
        trainer.close()
    assert not brake.begun.is_set()
    told = [record.getMessage() for record in caplog.records if record.name == "tensorhub.client"]
    assert told == [], "it was told to wait for nobody"
