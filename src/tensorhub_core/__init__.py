"""TensorHub: versioned weights by reference, moved peer to peer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from tensorhub_core.client.connect import connect
    from tensorhub_core.client.staged import Staged
    from tensorhub_core.client.versions import Version, VersionInfo
    from tensorhub_core.client.worker import Worker
    from tensorhub_core.errors import (
        AddressInUse,
        ConfigError,
        CorruptTransfer,
        DeadlineExceeded,
        LayoutMismatch,
        ProtocolMismatch,
        RegistrationError,
        ServerUnreachable,
        StateError,
        TensorHubError,
        TransportError,
        VersionConflict,
        VersionUnavailable,
    )
    from tensorhub_core.layout.types import Box
    from tensorhub_core.server.serving import Server, serve
    from tensorhub_core.settings import Settings

_PLACES = {
    "connect": "client.connect",
    "Worker": "client.worker",
    "Staged": "client.staged",
    "Version": "client.versions",
    "VersionInfo": "client.versions",
    "serve": "server.serving",
    "Server": "server.serving",
    "Box": "layout.types",
    "Settings": "settings",
    **dict.fromkeys(
        (
            "AddressInUse",
            "ConfigError",
            "CorruptTransfer",
            "DeadlineExceeded",
            "LayoutMismatch",
            "ProtocolMismatch",
            "RegistrationError",
            "ServerUnreachable",
            "StateError",
            "TensorHubError",
            "TransportError",
            "VersionConflict",
            "VersionUnavailable",
        ),
        "errors",
    ),
}
"""Where each public name is defined; imported when first used, so that a server loads no transport."""

__all__ = [
    "AddressInUse",
    "Box",
    "ConfigError",
    "CorruptTransfer",
    "DeadlineExceeded",
    "LayoutMismatch",
    "ProtocolMismatch",
    "RegistrationError",
    "Server",
    "ServerUnreachable",
    "Settings",
    "Staged",
    "StateError",
    "TensorHubError",
    "TransportError",
    "Version",
    "VersionConflict",
    "VersionInfo",
    "VersionUnavailable",
    "Worker",
    "connect",
    "serve",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
