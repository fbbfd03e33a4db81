"""A stand-in for Triton, for tests without a GPU: kernels can be defined, and never launched.

SGLang imports Triton everywhere and launches no kernel of it on a CPU. Every submodule and attribute exists; what is a
class by its name can be derived from, and everything else can decorate. Nothing computes: a decorated function stays
what it is, so that launching it (`kernel[grid](...)`) is a TypeError. Real are the few helpers that host code calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "3.0.0"
__path__: list[str] = []


class StandIn(types.ModuleType):
    """A module, or anything in one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Decorate: return the function, or what returns it."""
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class constexpr:
    """A constant that kernels are compiled for; some are made when their module is imported."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class OutOfResources(Exception):
    """Is caught, and so must be an exception; nothing raises it."""


class Config:
    """What a kernel is tuned over."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs, self.options = kwargs, options


def cdiv(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below `number`."""
    return 1 << (number - 1).bit_length() if number > 0 else 1


_REAL: dict[str, Any] = {
    "triton.language.constexpr": constexpr,
    "triton.runtime.autotuner.OutOfResources": OutOfResources,
    "triton.runtime.autotuner.PTXASError": OutOfResources,
}


def _attribute(owner: str, name: str, holder: Any) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{owner}.{name}"
    if full in _REAL:
        made = _REAL[full]
    elif name[0].isupper():
        made = type(name, (), {"__module__": owner})
    else:
        made = sys.modules.get(full) or StandIn(full)
    setattr(holder, name, made)
    return made


def __getattr__(name: str) -> Any:
    return _attribute(__name__, name, sys.modules[__name__])


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code."""


sys.meta_path.insert(0, _Submodules())
