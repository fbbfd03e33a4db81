"""Whose prefix is served while it fills: of memory that stays as it is read, never of memory processed in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tensorhub_core import VersionUnavailable
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub, nothing_retained
from tests.processes.client.samples import make, same
from tests.processes.client.test_faults import MIB, SMALL, Brake, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]


def heard_by(sources: set[str]) -> Callable[[int, int, str], None]:
    return lambda done, total, source: sources.add(source)


@nothing_retained
@pytest.mark.parametrize("offered", [True, False])
def test_a_filling_copy_is_read_from_only_if_it_is_offered(here: Hub, other: Actor, offered: bool) -> None:
    source = here.publisher(other, "plain", mib=MIB, settings=SMALL)
    first, first_tensors = here.reader("plain", "first", mib=MIB, settings=SMALL)
    brake = Brake()
    filling = in_background(lambda: first.replicate(progress=brake, publish=offered))
    assert brake.half.wait(60)
    time.sleep(0.3)  # what is verified is announced every 20 ms, if it is at all
    sources: set[str] = set()
    second, tensors = here.reader("plain", "second", mib=MIB, settings=SMALL)
    reading = in_background(lambda: second.replicate(progress=heard_by(sources)))
    if not offered:
        assert reading.result(60) == 1, "it needs nothing of the copy that is held at half"
        assert sources == {"trainer"}
    brake.go.set()
    assert filling.result(60) == 1
    assert reading.result(60) == 1
    assert same(tensors, make("plain", 1, mib=MIB))
    assert same(first_tensors, make("plain", 1, mib=MIB))
    assert ("first" in set(second.versions()[-1].replicas)) is offered
    if not offered:
        _only_the_rest_is_left(here, other, source, second)
        assert first.publish(1) == 1, "whoever processed it publishes it when it is done"


def _only_the_rest_is_left(here: Hub, other: Actor, source: str, second: Any) -> None:
    """Withdraw all copies that are offered: the one that is not does not step in."""
    other.do("call", source, method="unpublish")
    second.unpublish()
    third, _ = here.reader("plain", "third", mib=MIB, settings=SMALL)
    with pytest.raises(VersionUnavailable):
        third.replicate(1, timeout_s=20)
