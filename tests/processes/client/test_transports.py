"""Workers that were told which transport to use, and workers that choose, from `connect()` to the last byte."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tensorhub_core import VersionUnavailable
from tensorhub_core.transport.host import rdma_devices
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import is_filled, make, same
from tests.transport.lab import HAS_NIXL

pytestmark = pytest.mark.timeout(90)

PAIR = ("tcp", "cma")


@pytest.mark.parametrize(
    ("source", "reader"),
    [("auto", "auto"), ("auto", "tcp"), ("auto", "cma"), ("tcp", "auto"), ("cma", "auto"), ("nixl", "auto")],
)
def test_a_named_transport_and_one_that_chooses_understand_each_other(
    here: Hub, other: Actor, source: str, reader: str, caplog: pytest.LogCaptureFixture
) -> None:
    if "nixl" in (source, reader) and not HAS_NIXL:
        pytest.skip("NIXL is not installed")
    here.publisher(other, "plain", settings={"transport": source})
    with caplog.at_level(logging.INFO, "tensorhub"):
        worker, tensors = here.reader("plain", transport=reader)
        assert worker.replicate() == 1
    assert same(tensors, make("plain", 1))
    way = next(name for name in (reader, source, "cma") if name != "auto")
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith(f"data plane {reader}: ") for text in said)
    if reader == "auto":
        (line,) = [text for text in said if " is read by " in text]
        assert f" is read by {way}: " in line


@pytest.mark.parametrize(
    ("source", "reader", "serves"),
    [
        ("cma", "tcp", "cma"),
        ("tcp", "cma", "tcp"),
        ("tcp", "nixl", "tcp"),
        ("nixl", "tcp", "nixl"),
        ("auto", "nixl", ""),
    ],
)
def test_transports_without_a_way_in_common_are_named_in_the_error(
    here: Hub, other: Actor, source: str, reader: str, serves: str
) -> None:
    if "nixl" in (source, reader) and not HAS_NIXL:
        pytest.skip("NIXL is not installed")
    if source == "auto" and rdma_devices():
        pytest.skip("auto serves by NIXL here")
    here.publisher(other, "plain", settings={"transport": source})
    worker, tensors = here.reader("plain", transport=reader)
    begun = time.monotonic()
    with pytest.raises(VersionUnavailable) as raised:
        worker.replicate(timeout_s=20)
    assert time.monotonic() - begun < 15
    said = str(raised.value)
    assert f"trainer: unreachable (the source serves by {serves}" in said
    assert f"this worker reads by {reader} alone: set transport='auto'" in said
    assert f"or transport='{reader}' for the source" in said
    assert is_filled(tensors)


def test_all_shards_hear_which_of_them_has_no_way_to_its_source(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", settings={"transport": "tcp"})
    readers = [here.reader("plain", replica="pair", shard=n, num_shards=2, transport=t) for n, t in enumerate(PAIR)]
    errors: dict[int, Exception] = {}

    def replicate(number: int) -> None:
        try:
            readers[number][0].replicate(timeout_s=20)
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=replicate, args=(number,)) for number in range(len(PAIR))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(len(PAIR)):
        assert isinstance(errors[number], VersionUnavailable)
        assert "pair/1 (tried: trainer: unreachable (the source serves by tcp" in str(errors[number])


def test_the_setting_is_what_auto_as_an_argument_means(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain")
    reader, tensors = here.reader("plain", settings={"transport": "tcp"})
    assert reader.replicate() == 1
    assert same(tensors, make("plain", 1))
    assert reader._resources.transport.name == "tcp"
