"""Choosing a transport by name, or the best there is."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tensorhub_core.transport.registry import TRANSPORTS, make_transport, why_unavailable
from tensorhub_core.transport.select import choose_transport
from tests.transport.lab import HAS_NIXL


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TransportError, match="auto, nixl, tcp, cma, memory"):
        choose_transport("carrier pigeon")
    assert "carrier pigeon" in why_unavailable("carrier pigeon")


def test_memory_needs_its_network() -> None:
    with pytest.raises(TransportError, match="network"):
        make_transport("memory")
    assert isinstance(make_transport("memory", network=MemoryNetwork()), MemoryTransport)


def test_auto_says_why() -> None:
    assert choose_transport("auto", network=MemoryNetwork()).reason == "memory: all peers are in this process"


@pytest.mark.parametrize("name", ["nixl", "tcp", "cma"])
def test_a_name_is_taken_at_its_word(name: str) -> None:
    if name == "nixl" and not HAS_NIXL:
        pytest.skip("NIXL is not installed")
    choice = choose_transport(name)
    assert (choice.transport.name, choice.reason) == (name, f"{name}: as configured")
    choice.transport.shutdown()


def test_auto_goes_on_choosing_and_says_what() -> None:
    choice = choose_transport("auto")
    assert choice.transport.name == "auto"
    assert re.fullmatch(r"auto: \w+ within this machine, \w+ between machines \(.+\)", choice.reason)
    choice.transport.shutdown()


def test_every_name_is_one_of_the_settings_choices() -> None:
    (choices,) = [field.metadata["choices"] for field in dataclasses.fields(ClientConfig) if field.name == "transport"]
    assert set(choices) == {"auto", "memory", *TRANSPORTS}
    assert [name for name in TRANSPORTS if why_unavailable(name)] in ([], ["nixl"])
