"""Say what went wrong and what the caller can do about it.

Every error raised to users is a `TensorHubError`; each class has a stable wire `code`, so that a server's refusal
arrives in the client as the same type.
"""

from __future__ import annotations

from typing import ClassVar


class TensorHubError(Exception):
    """Base of all errors of TensorHub."""

    code: ClassVar[str] = "error"


class ServerUnreachable(TensorHubError):
    """The reference server did not answer in time: check the address, or start `tensorhub serve`."""

    code = "server_unreachable"


class DeadlineExceeded(TensorHubError):
    """The call did not finish by its deadline: nothing was half done; call again or wait longer."""

    code = "deadline_exceeded"


class VersionUnavailable(TensorHubError):
    """No reachable worker holds the version any more: ask for a newer one, or publish it again."""

    code = "version_unavailable"


class VersionConflict(TensorHubError):
    """The version number is taken, too old, or of an earlier stream: publish a newer number or name a new stream."""

    code = "version_conflict"


class LayoutMismatch(TensorHubError):
    """The registered tensors cannot be filled from this version: `differences` lists every reason."""

    code = "layout_mismatch"

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class CorruptTransfer(TensorHubError):
    """Bytes did not match the version's checksums and no other holder could replace them."""

    code = "corrupt_transfer"


class StateError(TensorHubError):
    """The call does not fit the worker's state: the text names the call that has to come first."""

    code = "state_error"


class RegistrationError(TensorHubError):
    """A tensor cannot be registered, or its memory moved since: the text names it."""

    code = "registration_error"


class ProtocolMismatch(TensorHubError):
    """Client and server speak different protocol versions: run the same release on both sides."""

    code = "protocol_mismatch"


class AddressInUse(TensorHubError):
    """Another process listens on this address: choose another `--bind`, or stop the other one."""

    code = "address_in_use"


class ConfigError(TensorHubError):
    """A setting is unknown or has an impossible value: the text names it and what is allowed."""

    code = "config_error"


class TransportError(TensorHubError):
    """The data plane could not be set up or used on this machine: `tensorhub doctor` says why."""

    code = "transport_error"


ERRORS: dict[str, type[TensorHubError]] = {
    kind.code: kind
    for kind in (
        TensorHubError,
        ServerUnreachable,
        DeadlineExceeded,
        VersionUnavailable,
        VersionConflict,
        LayoutMismatch,
        CorruptTransfer,
        StateError,
        RegistrationError,
        ProtocolMismatch,
        AddressInUse,
        ConfigError,
        TransportError,
    )
}


def error_from_wire(code: str, message: str, differences: tuple[str, ...] = ()) -> TensorHubError:
    """Build the error of a wire `code`; unknown codes become plain `TensorHubError`."""
    kind = ERRORS.get(code, TensorHubError)
    if kind is LayoutMismatch:
        return LayoutMismatch(message, differences)
    return kind(message)
