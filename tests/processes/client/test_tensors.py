"""Every kind of tensor, from another process: equal bit by bit, and moved once."""

from __future__ import annotations

import pytest

from tensorhub_core.errors import LayoutMismatch
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import blank, is_filled, make, same
from tests.transport.lab import needs_nixl

pytestmark = pytest.mark.timeout(120)


SAMPLES = ["plain", "dtypes", "shapes", "only_empty", "names", "tied", "strided"]


@pytest.mark.parametrize(
    ("sample", "way"),
    [
        *((sample, "auto") for sample in SAMPLES),
        *((sample, "tcp") for sample in ("plain", "shapes", "only_empty", "strided")),
        *(pytest.param(sample, "nixl", marks=needs_nixl) for sample in ("plain", "only_empty", "strided")),
    ],
)
def test_a_version_arrives_bit_by_bit_and_goes_on_from_its_reader(
    here: Hub, other: Actor, sample: str, way: str
) -> None:
    by = {"transport": way}
    source = here.publisher(other, sample, settings=by)
    reader, tensors = here.reader(sample, settings=by)
    original = make(sample, 1)
    assert is_filled(tensors)
    assert reader.replicate() == 1
    assert same(tensors, original)
    assert {name: (t.shape, t.dtype, t.stride()) for name, t in tensors.items()} == {
        name: (t.shape, t.dtype, t.stride()) for name, t in original.items()
    }
    other.do("call", source, method="unpublish")
    second = here.remote(other, "second", settings=by)
    other.do("register", second, sample=sample, seed=1, blank=True)
    assert other.do("call", second, method="replicate") == 1
    assert other.do("digest", second) == other.do("digest", source)


def test_tied_tensors_move_once(here: Hub, other: Actor) -> None:
    here.publisher(other, "tied")
    reader, tensors = here.reader("tied")
    reader.replicate()
    assert reader.counters.bytes_read == tensors["embed.weight"].nbytes + tensors["norm"].nbytes


@pytest.mark.parametrize(("published", "registered"), [("tied", "untied"), ("untied", "tied")])
def test_tied_on_one_side_only_fills_both(here: Hub, other: Actor, published: str, registered: str) -> None:
    here.publisher(other, published)
    reader, tensors = here.reader(registered)
    assert reader.replicate() == 1
    assert same(tensors, make(registered, 1))


def test_tied_memory_for_untied_tensors_of_different_bytes_is_refused(here: Hub, other: Actor) -> None:
    here.publisher(other, "untied_different")
    reader, tensors = here.reader("tied")
    with pytest.raises(LayoutMismatch, match="lm_head"):
        reader.replicate()
    assert is_filled(tensors)
    assert reader.version is None


def test_very_many_small_tensors_take_few_messages_and_regions(here: Hub, other: Actor) -> None:
    count = 60_000
    before = here.server.counters.received
    here.publisher(other, "tiny", count=count)
    reader, tensors = here.reader("tiny", count=count)
    memory = reader._resources.memory
    assert memory is not None
    assert len(memory.regions()) < count / 20
    assert reader.replicate() == 1
    assert same(tensors, make("tiny", 1, count=count))
    assert here.server.counters.received - before < 2_000, "heartbeats included"


@pytest.mark.parametrize("sample", ["plain", "strided"])
def test_an_update_replaces_every_byte(here: Hub, other: Actor, sample: str) -> None:
    source = here.publisher(other, sample)
    reader, tensors = here.reader(sample)
    reader.replicate()
    other.do("call", source, method="unpublish")
    newer = here.publisher(other, sample, version=2, seed=2, replica="trainer 2")
    assert reader.update() == 2
    assert same(tensors, make(sample, 2))
    assert other.do("version", newer) == 2


def test_bytes_around_registered_views_are_never_written(here: Hub, other: Actor) -> None:
    here.publisher(other, "strided")
    reader = here.worker()
    views = blank(make("strided", 1))
    base = views["t"]._base if views["t"]._base is not None else views["t"]
    del views["k"], base
    reader.register(views)
    with pytest.raises(LayoutMismatch, match="'k'"):
        reader.replicate()
    assert is_filled(views)
