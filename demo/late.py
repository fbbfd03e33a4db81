"""The engine that joins late: it starts while training goes on, and fills itself from the engine that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from demo.account import Account, megabytes
from demo.engines import Engine, FirstFill, read_first_fill
from demo.processes import Child, DemoError, wait_until

_READY_S = 400.0
_LOADING = "Starting to load model"
"""vLLM's log line just before the weights are filled."""


class LateEngine:
    """Start an engine at version `starts_at`, and have it join when it is ready, at version `joins_by` at the latest.

    `start` starts the program and returns it with its HTTP side. `others` are the programs without which it cannot.
    """

    def __init__(
        self,
        start: Callable[[], tuple[Engine, Child]],
        others: Sequence[Child],
        account: Account,
        *,
        starts_at: int,
        joins_by: int,
    ) -> None:
        self._start, self._others, self._account = start, others, account
        self._starts_at, self._joins_by = starts_at, joins_by
        self._engine: Engine | None = None
        self._program: Child | None = None
        self._joined = False
        self.first_fill: FirstFill | None = None

    def join(self, version: int) -> Engine | None:
        """Start it if it is time; return it once, when it answers requests."""
        if self._joined or version < self._starts_at:
            return None
        if self._engine is None or self._program is None:
            self._engine, self._program = self._start()
            self._account.fact(self._engine.replica, "is started now, while training goes on")
            return None
        engine, program = self._engine, self._program
        if version >= self._joins_by:
            wait_until(f"{engine.replica} is ready", lambda: engine.look() is not None, self._watched(), _READY_S)
        elif engine.look() is None:
            program.check()
            return None
        self.first_fill = fill = read_first_fill(program.text(), engine.replica)
        if fill is None:
            raise DemoError(f"{engine.replica} is ready, but does not say in {program.log} what it started with")
        self._joined = True
        text = f"has joined: it started with version {fill.version}, {megabytes(fill.total_bytes)} from {fill.source}"
        self._account.fact(engine.replica, text)
        return engine

    def hold(self) -> None:
        """Wait while it is being filled: then the newest version is the one that the first engine holds, too.

        Otherwise it could start in the moment in which only the trainer has the newest version, and fill from there.
        """
        engine, program = self._engine, self._program
        if engine is None or program is None or self._joined or _LOADING not in program.text():
            return

        def filled() -> bool:
            return read_first_fill(program.text(), engine.replica) is not None

        wait_until(f"{engine.replica} is filled", filled, self._watched(), _READY_S)

    def _watched(self) -> list[Child]:
        return [*self._others, *([] if self._program is None else [self._program])]
