"""Send prompts to engines all the time, one after the other to each, and keep what comes back."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from demo.processes import DemoError
from demo.sglang.engines import Traced, TracedEngine

_END_S = 60.0
_REST_S = 0.05
"""Between two prompts to one engine: a tiny engine that is never idle leaves no core to the others."""


@dataclass
class Heard:
    """What prompting brought so far: completions, requests that ended with a killed engine, and all that failed."""

    completions: list[Traced] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Prompter:
    """Ask each engine that takes part, in a thread of its own, until it is killed or all is over."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._prompts, self._max_tokens = prompts, max_tokens
        self._heard = Heard()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._killed: set[str] = set()
        self._threads: list[threading.Thread] = []

    def include(self, engine: TracedEngine) -> None:
        """Begin to ask an engine."""
        thread = threading.Thread(target=self._ask, args=(engine,), name=f"prompts-{engine.replica}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def excuse(self, replica: str) -> None:
        """Expect an engine to be gone from now on."""
        with self._lock:
            self._killed.add(replica)

    def made(self, replica: str, version: int) -> int:
        """Return how many completions an engine made by one version from start to end."""
        return sum(
            each.engine == replica and [span.version for span in each.spans] == [version]
            for each in self.heard().completions
        )

    def heard(self) -> Heard:
        """Return what came so far; raises nothing: failures are in it."""
        with self._lock:
            return Heard(list(self._heard.completions), Counter(self._heard.lost), list(self._heard.failures))

    def end(self) -> Heard:
        """Let the last requests finish and return everything; raises DemoError if one does not come back."""
        self._over.set()
        for thread in self._threads:
            thread.join(_END_S)
            if thread.is_alive():
                raise DemoError(f"{thread.name}: a request has not been answered")
        return self.heard()

    def _ask(self, engine: TracedEngine) -> None:
        for prompt in itertools.cycle(self._prompts):
            if self._over.wait(_REST_S):
                return
            try:
                found = engine.trace(prompt, self._max_tokens)
            except DemoError as error:
                with self._lock:
                    if engine.replica in self._killed:
                        self._heard.lost[engine.replica] += 1
                    else:
                        self._heard.failures.append(str(error))
                return
            with self._lock:
                self._heard.completions.append(found)
