"""Choosing a transport by name, or the best there is."""

from __future__ import annotations

import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tensorhub_core.transport.registry import make_transport, why_unavailable
from tensorhub_core.transport.select import choose_transport
from tests.transport.lab import needs_nixl


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TransportError, match="nixl, memory"):
        choose_transport("carrier pigeon")
    assert "carrier pigeon" in why_unavailable("carrier pigeon")


def test_memory_needs_its_network() -> None:
    with pytest.raises(TransportError, match="network"):
        make_transport("memory")
    assert isinstance(make_transport("memory", network=MemoryNetwork()), MemoryTransport)


def test_auto_says_why() -> None:
    assert choose_transport("auto", network=MemoryNetwork()).reason == "memory: all peers are in this process"


@needs_nixl
def test_auto_takes_nixl() -> None:
    choice = choose_transport("auto")
    assert (choice.transport.name, choice.reason) == ("nixl", "nixl: the best that loads here")
    choice.transport.shutdown()
