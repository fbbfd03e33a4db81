"""Copy the server's state by its structure: what the machine changes is copied, what it only replaces is shared.

The walk copies a state for every transition, so this has to be fast; `copy.deepcopy` takes most of a walk's time. How
each field is copied follows from its declared type, so that a field somebody adds is copied as well.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from tensorhub_core.state.records import BlobEntry, Copy, MachineConfig, Registration, ServerState

SHARED = (MachineConfig, Registration, BlobEntry)
"""Records that the machine replaces but never changes (or, of blobs, only when they were touched last)."""

Copier = Callable[[Any, dict[str, Copy]], Any]


def clone(state: ServerState) -> ServerState:
    """Return a copy of a state that shares nothing the machine changes."""
    copies: dict[str, Copy] = {}
    for key, copy in state.copies.items():
        copies[key] = _record(copy, copies)
    return typing.cast(ServerState, _record(state, copies))


def _record(old: Any, copies: dict[str, Copy]) -> Any:
    kind = type(old)
    values, plain, deep = _plan(kind)
    arguments = list(values(old))
    for index in plain:
        arguments[index] = arguments[index].copy()
    for index, copier in deep:
        value = arguments[index]
        if value:
            arguments[index] = copier(value, copies)
        elif value is not None:
            arguments[index] = value.copy()
    return kind(*arguments)


@functools.cache
def _plan(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], list[int], list[tuple[int, Copier]]]:
    """Return how to read all fields of a record at once, which are copied as they are, and which by their content."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    copiers = [copier_of(hints[name]) for name in names]
    plain = [index for index, copier in enumerate(copiers) if copier is _plain]
    deep = [(index, copier) for index, copier in enumerate(copiers) if copier not in (None, _plain)]
    return attrgetter(*names), plain, deep  # type: ignore[return-value]


def _plain(value: Any, _: dict[str, Copy]) -> Any:
    return value.copy()


def copier_of(hint: Any) -> Copier | None:
    """Return how a value of a declared type is copied; None: it may be shared."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        found = [copier for a in arguments if (copier := copier_of(a)) is not None]
        assert len(found) <= 1, f"how is {hint} copied?"
        return found[0] if found else None
    if origin is set:
        return _plain
    if origin in (dict, list):
        return _container(origin, copier_of(arguments[-1]))
    if hint is Copy:
        return lambda value, copies: copies[value.id]
    if is_dataclass(hint) and not hint.__dataclass_params__.frozen and hint not in SHARED:  # type: ignore[attr-defined]
        return _record
    return None


def _container(origin: type, inner: Copier | None) -> Copier:
    if inner is None:
        return _plain
    if origin is dict:
        return lambda value, copies: {key: inner(each, copies) for key, each in value.items()}
    return lambda value, copies: [inner(each, copies) for each in value]
