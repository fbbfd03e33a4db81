"""Decide whether a run did what the demo claims. Pure: records in, checks out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demo.engines import Answer, FirstFill, Report

LOGPROB_TOLERANCE = 1e-4
"""Numbers travel through JSON and two builds of the same kernels; other weights differ by far more."""


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and the figures that say so."""

    claim: str
    held: bool
    figures: str


@dataclass(frozen=True)
class Step:
    """What happened with one version: its mean reward, the answers it was computed from, how each engine got it."""

    version: int
    reward: float
    words: float
    answers: tuple[Answer, ...]
    reports: Mapping[str, Report]


def third(count: int) -> int:
    """Return how many of `count` versions a third is, at least one."""
    return max(1, count // 3)


def reward_rose(rewards: Sequence[float], margin: float) -> Check:
    """Compare the mean reward of the last third of the versions with that of the first third."""
    part = third(len(rewards))
    first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
    return Check(
        "the reward rose",
        len(rewards) >= 3 and last - first >= margin,
        f"{first:.3f} in the first {part} versions, {last:.3f} in the last {part} (at least +{margin:g} wanted)",
    )


def versions_known(steps: Sequence[Step]) -> Check:
    """Check that every answer used in training was made by the version the step trained, from start to end."""
    answers = [(step.version, answer) for step in steps for answer in step.answers]
    wrong = [
        f"version {version} was trained on an answer of {answer.engine} by {answer.before}..{answer.after}"
        for version, answer in answers
        if not answer.before == answer.after == version
    ]
    figures = wrong[0] if wrong else f"{len(answers)} completions, {len(steps)} versions"
    return Check(
        "every completion used in training was made by the version it trained", bool(answers) and not wrong, figures
    )


def engines_followed(steps: Sequence[Step], first: str, late: str) -> Check:
    """Check that the first engine served every version and the late one every version from its first on."""
    joined = [step.version for step in steps if late in step.reports]
    complete = all(first in step.reports for step in steps)
    gapless = bool(joined) and joined == list(range(joined[0], steps[-1].version + 1))
    right = all(report.version == step.version for step in steps for report in step.reports.values())
    figures = f"{first} served {len(steps)} versions, {late} {len(joined)}" + (
        f" from {joined[0]} on" if joined else ""
    )
    return Check("both engines followed the trainer, version by version", complete and gapless and right, figures)


def late_one_filled_from_first(fill: FirstFill | None, first: str) -> Check:
    """Check where the engine that joined late got its first weights from."""
    claim = f"the engine that joined late filled its memory from {first}, no weight file read"
    if fill is None:
        return Check(claim, False, "it never joined")
    figures = f"version {fill.version}, {fill.total_bytes / 1e6:.1f} MB from {fill.source}"
    return Check(claim, fill.source == first, figures)


def same_memory(before: Mapping[str, int], after: Mapping[str, int]) -> Check:
    """Check that the trainer's parameters never moved: every version was published in place. Values are addresses."""
    moved = [name for name, address in before.items() if after.get(name) != address]
    figures = f"{moved[0]} moved" if moved else f"{len(before)} tensors at unchanged addresses"
    return Check("every version was published in place, from the live parameters", bool(before) and not moved, figures)


def none_left(processes: Sequence[str]) -> Check:
    """Check that nothing the demo started still runs, given the processes that do."""
    return Check("no process is left behind", not processes, "; ".join(processes) or "none")


@dataclass(frozen=True)
class Greedy:
    """A temperature-0 answer: token ids and the log-probability of each."""

    prompt: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def same_answers(engine: str, ours: Sequence[Greedy], fresh: Sequence[Greedy]) -> Check:
    """Compare an engine's temperature-0 answers with those of a fresh engine: tokens and log-probabilities."""
    claim = f"{engine} answers like a fresh stock vLLM loaded from the saved checkpoint"
    if not ours or [g.prompt for g in ours] != [g.prompt for g in fresh]:
        return Check(claim, False, f"{len(ours)} answers against {len(fresh)}")
    other = [mine.prompt for mine, right in zip(ours, fresh, strict=True) if mine.token_ids != right.token_ids]
    if other:
        return Check(claim, False, f"other tokens for {other[0]!r}, in {len(other)} of {len(ours)} prompts")
    apart = max(
        (abs(a - b) for mine, right in zip(ours, fresh, strict=True) for a, b in _pairs(mine, right)), default=0.0
    )
    tokens = sum(len(mine.token_ids) for mine in ours)
    figures = f"{len(ours)} prompts, {tokens} tokens equal, log-probabilities at most {apart:.1e} apart"
    return Check(claim, tokens > 0 and apart <= LOGPROB_TOLERANCE, figures)


def _pairs(mine: Greedy, right: Greedy) -> list[tuple[float, float]]:
    if not len(mine.logprobs) == len(right.logprobs) == len(mine.token_ids):
        return [(float("inf"), 0.0)]
    pairs = list(zip(mine.logprobs, right.logprobs, strict=True))
    return [(float("inf"), 0.0)] if any(math.isnan(number) for pair in pairs for number in pair) else pairs
