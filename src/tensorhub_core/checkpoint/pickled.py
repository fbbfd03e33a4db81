"""Read the pickles inside of torch's checkpoints without running any code that they name.

The one place that unpickles: torch keeps the index of a distributed checkpoint as a pickle on disk, and what describes
a saved tensor as another one. No object of a class they name is ever made. Names are looked up in a short table of
inert stand-ins, and every other name is refused before anything is done with it. Nothing that came over a wire gets
here.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tensorhub_core.errors import ConfigError

_MOST_VISITS_A_BYTE = 64
_FREE_VISITS = 1 << 16
_NOTING = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_NOTED = {"GET", "BINGET", "LONG_BINGET"}
_HASHING = {"SETITEM", "SETITEMS", "ADDITEMS"}
"""What changes a collection that the stack has below the keys: those are visited once more each time."""
_PUSHING = {op.name for op in pickletools.opcodes if not op.stack_before and len(op.stack_after) == 1}
_PUSHING -= {"MARK", *_NOTED}
_TO_MARK = {op.name for op in pickletools.opcodes if pickletools.markobject in op.stack_before}
_EFFECTS = {
    op.name: ([*op.stack_before, pickletools.markobject].index(pickletools.markobject), len(op.stack_after))
    for op in pickletools.opcodes
}
"""How many values each operation takes from the stack, beside all down to a mark (`_TO_MARK`), and puts there."""


class _Sealed(type):
    """Keep a pickle from changing the stand-ins themselves."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__} cannot be changed")


class Record(metaclass=_Sealed):
    """Stand for an object: the arguments it would have been made from, and the state it would have been given."""

    __slots__ = ("args", "state")

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        """Keep the arguments."""
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def get(self, field: str) -> Any:
        """Return a field of the state, None without it."""
        return self.state.get(field) if isinstance(self.state, dict) else None


Names = Mapping[tuple[str, str], Any]
"""What (module, name) stands for: a subclass of Record, `tuple`, `dict`, or a text."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, names: Names, persistent: Callable[[Any], Any] | None, what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent, self._what = names, persistent, what

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None:
            raise ConfigError(
                f"{self._what} names {f'{module}.{name}'[:200]!r}, which is not among the classes of a checkpoint: "
                "refused, and nothing of it was run"
            )
        return found

    def persistent_load(self, key: Any) -> Any:
        if self._persistent is None:
            raise ConfigError(f"{self._what} refers to data outside of itself")
        return self._persistent(key)


def read_pickle(data: bytes, names: Names, what: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return what a pickle holds, made of plain values and of what `names` has.

    `what` names the file in messages. `persistent` resolves references to data outside of the pickle. Raises
    ConfigError naming the class if any other is asked for, or saying that the pickle is damaged. Any thread.
    """
    try:
        _check_work(data)
        return _Reader(data, names, persistent, what).load()
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle fails in as many ways as there are operations
        damaged(what, f"{type(error).__name__}: {str(error)[:200]}")


def _check_work(data: bytes) -> None:
    """Refuse what would take more memory or time than the pickle's size explains, by stepping through it in numbers.

    The reader makes room for notes up to their number at once. A tuple of twice the tuple before it, and so on, is
    small as a pickle and in memory, but whoever compares or hashes it as the key of a dictionary visits all of it.
    """
    most, spent = _MOST_VISITS_A_BYTE * len(data) + _FREE_VISITS, 0
    stack, notes, marks = [0], dict[int, int](), list[int]()
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name in _PUSHING:
            stack.append(1)
        elif name in _NOTED:
            stack.append(notes.get(argument or 0, 0))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _NOTING:
            number = len(notes) if argument is None else argument
            if number > len(data):
                raise ValueError(f"it takes note number {number:,}")
            notes[number] = stack[-1]
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            takes, gives = _EFFECTS[name]
            begin = marks.pop() - takes if name in _TO_MARK else len(stack) - takes
            visits = 1 + sum(stack[begin:])
            spent += visits - stack[begin] if name in _HASHING else 0
            if max(visits, spent) > most:
                raise ValueError("its values are nested in each other over and over")
            stack[begin:] = [visits] * gives


def damaged(what: str, why: str) -> NoReturn:
    """Raise the ConfigError of a file that is not what it should be."""
    raise ConfigError(f"{what} is damaged or not a checkpoint of torch's: {why}")


def is_count(value: object) -> bool:
    """Tell whether a value from a pickle is a whole number that can be a size."""
    return type(value) is int and 0 <= value < 1 << 62


def counts(value: object) -> tuple[int, ...] | None:
    """Return a tuple or list of sizes as a tuple, None if it is anything else."""
    if isinstance(value, tuple | list) and len(value) <= 64 and all(map(is_count, value)):
        return tuple(value)
    return None
