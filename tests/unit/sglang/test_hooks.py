"""Late hooks are applied, and one that SGLang dropped without a word is noticed."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tensorhub_core.errors import StateError
from tensorhub_sglang import compat

TARGET = f"{__name__}.Scheduler.table"


class Scheduler:
    """What is hooked."""

    def table(self) -> list[str]:
        """Return what there is."""
        return ["theirs"]


class Registry:
    """SGLang's registry, in what the adapter relies on: a function that was wrapped once is not wrapped again."""

    def __init__(self) -> None:
        self._hooks: dict[str, list[tuple[str, Callable[..., Any], object]]] = {}
        self._patched: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any]) -> None:
        """Note a hook that runs after a function."""
        self._hooks.setdefault(target, []).append(("after", hook, None))

    def apply_hooks(self) -> None:
        """Wrap what has not been."""
        for target, hooks in self._hooks.items():
            if target in self._patched or target.startswith("nowhere."):
                continue
            self._apply_target(target, hooks)
            self._patched.add(target)

    def _apply_target(self, target: str, hooks: list[tuple[str, Callable[..., Any], object]]) -> None:
        called: Any = Scheduler.table
        for _, hook, _ in hooks:
            called = _after(called, hook)
        Scheduler.table = called  # type: ignore[method-assign]


def _after(called: Any, hook: Callable[..., Any]) -> Any:
    @functools.wraps(called)
    def wrapper(*args: Any) -> Any:
        result = called(*args)
        hook(result, *args)
        return result

    wrapper.__wrapped__ = called  # type: ignore[attr-defined]
    return wrapper


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry of an SGLang that has loaded its plug-ins."""
    registry = Registry()
    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = registry  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Scheduler, "table", Scheduler.table)
    return registry


def hook(name: str, module: str) -> Callable[..., None]:
    """Return a hook of a package that adds its name."""

    def add(result: list[str], *args: Any) -> None:
        result.append(name)

    add.__module__ = module
    return add


def test_a_hook_that_is_registered_late_is_applied(registry: Registry) -> None:
    assert not compat.is_hooked(TARGET)
    registry.register(TARGET, hook("ours", "tensorhub_sglang.server"))
    compat.apply_hooks()
    compat.apply_hooks()
    assert compat.is_hooked(TARGET)
    assert Scheduler().table() == ["theirs", "ours"]


def test_a_late_hook_goes_around_what_another_plug_in_has_wrapped(registry: Registry) -> None:
    registry.register(TARGET, hook("another", "another_plugin"))
    registry.apply_hooks()
    registry.register(TARGET, hook("ours", "tensorhub_sglang.server"))
    registry.apply_hooks()
    assert Scheduler().table() == ["theirs", "another"], "SGLang drops it"
    compat.apply_hooks()
    compat.apply_hooks()
    assert Scheduler().table() == ["theirs", "another", "ours"]


def test_a_hook_that_was_taken_away_is_missed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register(TARGET, hook("ours", "tensorhub_sglang.server"))
    monkeypatch.setattr(registry, "_apply_target", lambda target, hooks: None)
    with pytest.raises(StateError, match=f"did not apply the adapter's hooks on {TARGET}"):
        compat.apply_hooks()


def test_a_hook_that_cannot_be_applied_is_missed(registry: Registry) -> None:
    registry.register("nowhere.at.all", hook("ours", "tensorhub_sglang.server"))
    with pytest.raises(StateError, match=r"on nowhere\.at\.all"):
        compat.apply_hooks()


def test_hooks_of_others_are_their_own_business(registry: Registry) -> None:
    registry.register("nowhere.at.all", hook("another", "another_plugin"))
    compat.apply_hooks()
