"""The shards of one replica, when not all of them call, or not all at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import DeadlineExceeded, TensorHubError
from tests.unit.client.hubs import Hub, blank, hub, in_background, weights

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


def shards(here: Hub, replica: str) -> list[Worker]:
    return [here.connect(replica, shard=shard, num_shards=2) for shard in range(2)]


def update_all(workers: list[Worker], timeout_s: float) -> list[object]:
    """Let all shards update at the same time; return their versions or errors."""
    futures = [in_background(lambda w=worker: w.update(timeout_s=timeout_s)) for worker in workers]
    ends: list[object] = []
    for future in futures:
        try:
            ends.append(future.result(30))
        except TensorHubError as error:
            ends.append(error)
    return ends


def test_shards_meet_again_after_a_call_that_one_of_them_did_not_make(here: Hub) -> None:
    for number, trainer in enumerate(shards(here, "trainer")):
        trainer.register(weights(number))
        trainer.publish(1)
    readers = shards(here, "reader")
    for reader in readers:
        reader.register(blank())
    with pytest.raises(DeadlineExceeded):
        readers[0].update(timeout_s=0.3)  # the other one's own code failed before its call, say
    tries = [update_all(readers, 1.0) for _ in range(3)]
    assert [1, 1] in tries, tries
    assert tries[-1] == [1, 1]
