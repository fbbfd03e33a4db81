"""Decide whether a run of the Megatron demo did what it claims. Pure: records in, checks out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from demo.engines import Report
from demo.megatron.gathered import Array
from demo.proof import LOGPROB_TOLERANCE, Check


@dataclass(frozen=True)
class Seen:
    """What was seen of one version.

    `trainer` and `engine` are log-probabilities of the same tokens, document by document; `moved` of the ranks'
    `tensors` parameters lie elsewhere than in the beginning. `waited_s` is how long the step that made the version
    waited for readers of the one before.
    """

    version: int
    trainer: Sequence[Sequence[float]]
    engine: Sequence[Sequence[float]]
    report: Report
    tensors: int
    moved: int
    took_s: float
    waited_s: float

    @property
    def loss(self) -> float:
        """Mean loss of a token, by the trainer."""
        numbers = [number for document in self.trainer for number in document]
        return -math.fsum(numbers) / len(numbers)

    @property
    def apart(self) -> float:
        """Largest difference between what trainer and engine think of a token."""
        pairs = [pair for a, b in zip(self.trainer, self.engine, strict=True) for pair in zip(a, b, strict=True)]
        return max((math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs), default=math.inf)


def learnt(seen: Sequence[Seen], reached: float) -> Check:
    """Check that the loss fell to at most `reached` times what it was."""
    first, last = seen[0].loss, seen[-1].loss
    figures = f"loss {first:.3f} at version {seen[0].version}, {last:.3f} at {seen[-1].version}"
    return Check("Megatron trains: the loss fell", last <= reached * first, f"{figures} (x {reached:g} wanted)")


def followed(seen: Sequence[Seen], steps: int, trainer: str) -> Check:
    """Check that each step's version was served, and came from the trainer's memory."""
    versions = [each.version for each in seen]
    right = versions == list(range(steps + 1)) and all(each.report.version == each.version for each in seen)
    others = [(each.version, name) for each in seen for name in each.report.sources if name != trainer]
    waits = max((each.waited_s for each in seen), default=0.0)
    figures = f"{len(versions)} versions; no step waited longer than {waits:.3f} s for readers"
    if others:
        figures = "version {} came from {}".format(*others[0])
    return Check(
        "both ranks of the engine took every version out of the trainer's ranks, which hold other parts",
        right and not others,
        figures,
    )


def agreed(seen: Sequence[Seen]) -> Check:
    """Check that the engine thinks of the documents what Megatron's own forward pass does, at every version."""
    worst = max(seen, key=lambda each: each.apart)
    tokens = sum(len(document) for document in seen[0].trainer)
    figures = f"{len(seen)} versions, {tokens} tokens: log-probabilities at most {worst.apart:.1e} apart"
    if worst.apart > LOGPROB_TOLERANCE:
        figures += f", at version {worst.version}"
    claim = "at each version the engine computes what Megatron computes from the same tokens"
    return Check(claim, tokens > 0 and worst.apart <= LOGPROB_TOLERANCE, figures)


def in_place(seen: Sequence[Seen]) -> Check:
    """Check that the parameters never moved."""
    moved = [each for each in seen if each.moved]
    figures = f"{seen[-1].tensors} tensors of four ranks at unchanged addresses"
    if moved:
        figures = f"{moved[0].moved} tensors had moved at version {moved[0].version}"
    return Check("every version was published in place, nothing was gathered", not moved, figures)


def same_bytes(version: int, pulled: Mapping[str, Array], gathered: Mapping[str, Array], tied: bool) -> Check:
    """Compare what `tensorhub pull` wrote with Megatron's gathered weights, byte by byte.

    `tied`: the head of the model is its embedding, and a checkpoint may hold it under both names.
    """
    claim = f"version {version} pulled from the hub is what gathering Megatron's weights gives"
    wanted = dict(gathered)
    if tied and "lm_head.weight" in pulled:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    names = pulled.keys() ^ wanted.keys()
    if names:
        return Check(claim, False, f"{min(names)!r} is in one of them only")
    other = [name for name, array in wanted.items() if not _equal(array, pulled[name])]
    figures = f"{other[0]!r} differs" if other else f"{len(wanted)} tensors, {_bytes(pulled) / 1e6:.2f} MB equal"
    return Check(claim, bool(wanted) and not other, figures)


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(int(np.asarray(array).nbytes) for array in arrays.values())
