"""Workers that were told which transport to use, and workers that choose, from `connect()` to the last byte."""

from __future__ import annotations

import logging
import time

import pytest

from tensorhub_core import VersionUnavailable
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import is_filled, make, same
from tests.transport.lab import HAS_NIXL

pytestmark = pytest.mark.timeout(90)


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


def test_transports_without_a_way_in_common_are_named(
    here: Hub, other: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    here.publisher(other, "plain", settings={"transport": "tcp"})
    reader, tensors = here.reader("plain", transport="cma")
    begun = time.monotonic()
    with pytest.raises(VersionUnavailable, match="trainer: unreachable"):
        reader.replicate(timeout_s=20)
    assert time.monotonic() - begun < 15
    assert "the source is reached by 'tcp', this worker reads by 'cma'" in caplog.text
    assert "give both the same transport" in caplog.text
    assert is_filled(tensors)


def test_the_setting_is_what_auto_as_an_argument_means(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain")
    reader, tensors = here.reader("plain", settings={"transport": "tcp"})
    assert reader.replicate() == 1
    assert same(tensors, make("plain", 1))
    assert reader._resources.transport.name == "tcp"
