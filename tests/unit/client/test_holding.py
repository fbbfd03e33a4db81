"""The account of what memory holds, and the versions users see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client.holding import Holding
from tensorhub_core.client.versions import Version, number_of, wanted
from tensorhub_core.errors import ConfigError, StateError


def registered() -> Holding:
    holding = Holding()
    holding.now_registered()
    return holding


def published(number: int = 3) -> Holding:
    holding = registered()
    holding.now_published((1, number))
    return holding


def draining() -> Holding:
    holding = published()
    holding.now_draining()
    return holding


def dirty() -> Holding:
    holding = registered()
    holding.now_spoiled()
    return holding


def committed(offer: bool) -> Holding:
    holding = registered()
    holding.now_committed((1, 3), offer)
    return holding


ALLOWED: dict[str, tuple[Callable[[], Holding], set[str]]] = {
    "unregistered": (Holding, {"register"}),
    "registered": (registered, {"register", "publish", "replicate", "update", "fresh"}),
    "published": (published, {"same", "update"}),
    "draining": (draining, {"update"}),
    "dirty": (dirty, {"register", "replicate", "update", "fresh"}),
    "held": (lambda: committed(False), {"register", "publish", "replicate", "update", "fresh"}),
    "committed and offered": (lambda: committed(True), {"same", "update"}),
}
CALLS: dict[str, Callable[[Holding], Any]] = {
    "register": lambda h: h.check_register(),
    "publish": lambda h: h.check_publish(4, False),
    "fresh": lambda h: h.check_publish(4, True),
    "same": lambda h: h.check_publish(3, False) or h.published or h.check_replicate(),
    "replicate": lambda h: h.check_replicate(),
    "update": lambda h: h.check_update(),
}


@pytest.mark.parametrize("call", [name for name in CALLS if name != "same"])
@pytest.mark.parametrize("state", ALLOWED)
def test_each_call_is_allowed_in_its_states_only(state: str, call: str) -> None:
    make, allowed = ALLOWED[state]
    if call in allowed:
        CALLS[call](make())
    else:
        with pytest.raises(StateError, match=r"call |dirty"):
            CALLS[call](make())


def test_publishing_the_same_version_again_is_nothing_to_do() -> None:
    assert published().check_publish(3, False) is False
    assert registered().check_publish(3, False) is True


def test_a_creator_creates_and_a_holder_of_a_committed_round_holds() -> None:
    creator = published()
    creator.now_withdrawn(keep=False)
    assert creator.origin_of(3, False)[0] is None
    holder = committed(False)
    assert holder.origin_of(3, False)[0] == 1
    assert holder.origin_of(4, False)[0] is None
    assert holder.origin_of(3, True)[0] is None
    holder.now_registered()
    holder.now_published((1, 3))
    holder.now_withdrawn(keep=False)
    assert holder.origin_of(3, False)[0] == 1, "engines put copies back after they slept"


def test_what_is_held_ends_with_the_commitment() -> None:
    holding = published()
    holding.now_draining()
    holding.now_withdrawn(keep=False)
    assert holding.held is None
    holding = published()
    holding.now_withdrawn(keep=True)
    assert holding.held == (1, 3)
    holding.now_spoiled()
    assert (holding.held, holding.dirty) == (None, True)
    holding.now_registered()
    assert holding.dirty, "garbage in memory does not become a version by registering it again"
    holding.now_committed((1, 4), True)
    assert (holding.held, holding.dirty, holding.published) == ((1, 4), False, True)


def test_a_version_is_an_integer_with_an_epoch() -> None:
    version = Version(7, epoch=2)
    assert version == 7
    assert version + 1 == 8
    assert hash(version) == hash(7)
    assert f"{version} {version:03d} {version!s}" == "7 007 7"
    assert repr(version) == "Version(7, epoch=2)"
    assert version.key == (2, 7)
    for twin in (copy.copy(version), copy.deepcopy(version)):
        assert (twin, twin.epoch) == (7, 2)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "7", None, 2**63, "Latest"])
def test_what_is_no_version_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wanted(wrong)
    with pytest.raises(ConfigError):
        number_of(wrong)


def test_latest_and_numbers_are_wanted() -> None:
    assert wanted("latest") is None
    assert wanted(0) == 0
    assert wanted(Version(7, 1)) == 7


@pytest.mark.parametrize("right", [np.int64(3), np.uint8(3), torch.tensor(3), Version(3, 1)])
def test_whole_numbers_of_any_kind_are_versions(right: object) -> None:
    assert number_of(right) == 3
    assert wanted(right) == 3


def test_what_was_converted_stays_so_for_as_long_as_it_is_published_again() -> None:
    holding = Holding(registered=True)
    holding.now_committed((1, 4), published=True, converted=True)
    assert holding.origin_of(4, fresh=False) == (1, True)
    assert holding.origin_of(5, fresh=False) == (None, False), "a version of its own"
    assert holding.origin_of(4, fresh=True) == (None, False), "rewritten"
    holding.now_committed((1, 5), published=True)
    assert holding.origin_of(5, fresh=False) == (1, False)
