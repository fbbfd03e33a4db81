"""TensorHub: versioned weights by reference, moved peer to peer."""

from __future__ import annotations

import importlib

_PLACES = {
    "connect": "client.connect",
    "Worker": "client.worker",
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

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
