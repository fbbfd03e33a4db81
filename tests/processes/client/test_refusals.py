"""What does not fit is refused before a byte moves, with every reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorhub_core.errors import LayoutMismatch, RegistrationError, VersionConflict
from tests.processes.client.actor import Actor, RemoteError
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import Tensors, blank, is_filled, make, same

pytestmark = pytest.mark.timeout(90)


def without(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "norm"}


def with_more(tensors: Tensors) -> Tensors:
    return tensors | {"bias": torch.ones(3)}


def other_shape(tensors: Tensors) -> Tensors:
    return tensors | {"norm": tensors["norm"].reshape(32, 32)}


def other_dtype(tensors: Tensors) -> Tensors:
    return tensors | {"norm": tensors["norm"].view(torch.int32)}


def everything(tensors: Tensors) -> Tensors:
    wrong = with_more(tensors)
    wrong["layers.0.weight"] = wrong["layers.0.weight"].t().contiguous()
    wrong["layers.1.weight"] = wrong["layers.1.weight"].view(torch.int32)
    del wrong["norm"]
    return wrong


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without, ["norm"]),
        (with_more, ["bias"]),
        (other_shape, ["norm"]),
        (other_dtype, ["norm"]),
        (everything, ["norm", "bias", "layers.0.weight", "layers.1.weight"]),
    ],
)
def test_another_layout_is_refused_with_all_differences(
    here: Hub, other: Actor, change: object, named: list[str]
) -> None:
    assert callable(change)
    here.publisher(other, "plain")
    tensors = change(blank(make("plain", 1)))
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
    reader = here.worker()
    reader.register(tensors)
    with pytest.raises(LayoutMismatch) as error:
        reader.replicate()
    for name in named:
        assert any(name in difference for difference in error.value.differences), error.value.differences
        assert name in str(error.value)
    assert is_filled(tensors)
    assert reader.version is None


def test_a_refused_update_leaves_the_old_copy_published_and_whole(here: Hub, other: Actor) -> None:
    here.publisher(other, "plain", version=1)
    reader, tensors = here.reader("plain")
    reader.replicate()
    here.publisher(other, "dtypes", version=2, replica="other trainer")
    with pytest.raises(LayoutMismatch):
        reader.update()
    assert reader.version == 1
    assert same(tensors, make("plain", 1))
    third, copied = here.reader("plain", "third")
    assert third.replicate(1) == 1
    assert same(copied, make("plain", 1))


def test_a_number_is_taken_once(here: Hub, other: Actor) -> None:
    first = here.publisher(other, "plain", version=3)
    assert other.do("call", first, method="publish", version=3) == 3
    second = here.worker("second")
    second.register(make("plain", 2))
    with pytest.raises(VersionConflict):
        second.publish(3)
    third = here.worker("third")
    third.register(make("plain", 1))
    assert third.publish(3) == 3, "the same bytes are the same version"
    with pytest.raises(RemoteError) as error:
        other.do("call", first, method="publish", version=4)
    assert error.value.kind == "StateError"


def test_one_name_for_two_tensors_is_refused(here: Hub) -> None:
    worker = here.worker()
    shards = [("w", torch.ones(3)), ("b", torch.ones(2)), ("w", torch.zeros(3))]
    with pytest.raises(RegistrationError, match="'w'"):
        worker.register(shards)
    with pytest.raises(RegistrationError, match="position 1"):
        worker.register([("w", torch.ones(3)), ("", torch.ones(2))])


@pytest.mark.parametrize("how", ["resize", "reallocate", "free", "numpy"])
def test_memory_that_moved_is_noticed_and_never_served(here: Hub, how: str) -> None:
    worker, parameter = here.worker("trainer"), torch.nn.Parameter(torch.ones(64, 64))
    tensors = {"w": parameter, "b": torch.ones(4)}
    worker.register(tensors)
    worker.publish(1)
    worker.unpublish()
    if how == "resize":
        parameter.data.resize_(200, 200)
    elif how == "reallocate":
        parameter.data = parameter.data + 1
    elif how == "free":
        parameter.data.untyped_storage().resize_(0)
    else:
        parameter.data = torch.from_numpy(np.ones((64, 64), np.float32))
    for call in (lambda: worker.publish(2), lambda: worker.replicate(1), lambda: worker.update()):
        with pytest.raises(RegistrationError, match="'w'"):
            call()
    # What was taken back before is kept as a copy in host memory, with the bytes it had then.
    old = {"w": torch.zeros(64, 64), "b": torch.zeros(4)}
    late = here.worker("late")
    late.register(old)
    assert [info.version for info in worker.versions() if info.whole] == [1]
    assert late.replicate(1) == 1
    assert torch.equal(old["w"], torch.ones(64, 64))
    if how != "free":
        worker.register(tensors)
        worker.publish(2)
        reader = here.worker()
        copied = blank({"w": parameter.detach().clone(), "b": tensors["b"]})
        reader.register(copied)
        assert reader.replicate() == 2
        assert torch.equal(copied["w"], parameter.detach())
