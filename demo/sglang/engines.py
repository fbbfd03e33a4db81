"""Ask engines of both kinds for completions together with their own record of the version that made each token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from demo.engines import Engine
from demo.processes import DemoError

Kind = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Span:
    """The tokens `[start, end)` of a completion were made by `version`: what the engine says."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Traced:
    """One completion at temperature 0, as token ids, and what its engine says about where it comes from."""

    engine: str
    kind: Kind
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


class TracedEngine(Engine):
    """A running engine that says which version made which token."""

    kind: Kind

    def trace(self, prompt: Sequence[int], max_tokens: int) -> Traced:
        """Get exactly `max_tokens` tokens; raises DemoError on any other answer than success."""
        token_ids, spans = self._ask(list(prompt), max_tokens)
        if len(token_ids) != max_tokens:
            raise DemoError(f"{self.replica} made {len(token_ids)} tokens of {max_tokens}")
        return Traced(self.replica, self.kind, tuple(prompt), tuple(token_ids), read_spans(spans))

    def _ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], Iterable[Mapping[str, Any]]]:
        raise NotImplementedError


class VLLMEngine(TracedEngine):
    """`vllm serve --enable-scale-out`: its route for token ids is the one that names versions."""

    kind = "vllm"

    def _ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], Iterable[Mapping[str, Any]]]:
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        reply = self._post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        (choice,) = reply["choices"]
        return choice["token_ids"], choice["weight_versions"]


class SGLangEngine(TracedEngine):
    """`sglang.launch_server`: `meta_info` names the versions."""

    kind = "sglang"

    def _ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], Iterable[Mapping[str, Any]]]:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        reply = self._post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return reply["output_ids"], reply["meta_info"]["weight_versions"]


def read_spans(given: Iterable[Mapping[str, Any]]) -> tuple[Span, ...]:
    """Read an engine's record; raises DemoError if a version in it is none of the trainer's."""
    try:
        return tuple(Span(int(each["version"]), int(each["start"]), int(each["end"])) for each in given)
    except (KeyError, TypeError, ValueError):
        raise DemoError(f"not the versions of a completion: {given!r}") from None
