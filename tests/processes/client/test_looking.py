"""Followers see for themselves how far their sources are: also while the hub is silent, until a source is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import blank, make, same
from tests.processes.client.test_cases_holders import MIB, TOTAL_BYTES, at_rest, held_at_half, until
from tests.processes.client.test_chains import Traffic
from tests.processes.client.test_faults import BY, Brake, each_way, in_background
from tests.processes.client.test_hub_killed import KilledHub

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]


class SilentHub(KilledHub):
    """A hub that can be stopped, and go on; so seldom looked for that nobody minds."""

    lease_s = 20.0

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        super().close()


@pytest.fixture
def silent() -> Iterator[SilentHub]:
    made = SilentHub()
    yield made
    made.close()


@each_way
def test_a_chain_comes_to_its_end_while_the_hub_is_silent(silent: SilentHub, way: str) -> None:
    truth = make("plain", 1, mib=MIB)
    trainer = silent.worker("trainer", truth, **BY[way])
    trainer.publish(1)
    names = ("first", "second", "third")
    tensors = {name: blank(truth) for name in names}
    workers = {name: silent.worker(name, tensors[name], **BY[way]) for name in names}
    brake, traffic = Brake(), {name: Traffic() for name in names[1:]}
    calls = [in_background(lambda: workers["first"].replicate(progress=brake))]
    assert brake.half.wait(60)
    for before, name in pairwise(names):
        calls.append(in_background(lambda n=name: workers[n].replicate(progress=traffic[n])))  # type: ignore[misc]
        assert 0 < at_rest(tensors[name], truth) < TOTAL_BYTES, f"it waits for {before}"
    silent.stop()
    brake.go.set()
    until(lambda: all(same(tensors[name], truth) for name in names), 40)
    assert not any(call.done() for call in calls), "whether it counts only the hub knows"
    silent.go_on()
    assert [call.result(60) for call in calls] == [1, 1, 1]
    assert all(same(tensors[name], truth) for name in names)
    assert [set(each.bytes) for each in traffic.values()] == [{"first"}, {"second"}]
    assert [workers[name].counters.bytes_read for name in names] == [TOTAL_BYTES] * 3


@each_way
def test_a_source_that_is_killed_while_it_is_looked_at_is_left_at_once(here: Hub, other: Actor, way: str) -> None:
    here.publisher(other, "plain", mib=MIB, settings=BY[way])
    truth = make("plain", 1, mib=MIB)
    with Actor() as doomed:
        handle = here.remote(doomed, "first", settings=BY[way])
        doomed.do("register", handle, sample="plain", blank=True, mib=MIB)
        reading = doomed.begin("call", handle, method="replicate", hold=True)
        held_at_half(doomed, reading)
        (second, tensors), traffic = here.reader("plain", "second", mib=MIB, settings=BY[way]), Traffic()
        call = in_background(lambda: second.replicate(progress=traffic))
        assert 0 < at_rest(tensors, truth) < TOTAL_BYTES
        began = time.monotonic()
        doomed.kill()
        assert call.result(60) == 1
        assert time.monotonic() - began < 20
    assert same(tensors, truth)
    assert set(traffic.bytes) == {"first", "trainer"}
    assert second.counters.failovers == 1
    assert second.counters.bytes_read == TOTAL_BYTES, "what it had of the first one counts"
