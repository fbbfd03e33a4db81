"""The RL loop: ask the engines, score the answers, learn, publish the next version in place.

It knows the trainer's side of TensorHub by two calls, `publish` and `unpublish`, and the engines by HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from demo.account import Account
from demo.engines import Answer, Engine, Report
from demo.grpo import Policy, Sample, advantages
from demo.processes import Child, wait_until
from demo.profiles import Profile
from demo.proof import Step

_FOLLOW_S = 120.0
FIRST_VERSION = 1


class Publisher(Protocol):
    """What the loop needs of a TensorHub worker."""

    def publish(self, version: int) -> object:
        """Commit not to change the parameters, which are this version."""

    def unpublish(self) -> None:
        """Take them back; returns when no reader can see them any more."""


class Newcomer(Protocol):
    """Whoever may join while the loop runs."""

    def join(self, version: int) -> Engine | None:
        """Return an engine that takes part from this version on, if there is one."""

    def hold(self) -> None:
        """Return when the next version may be published."""


@dataclass
class Loop:
    """One training run: `engines` are those that take part, `programs` what ends the run if it ends."""

    profile: Profile
    policy: Policy
    publisher: Publisher
    engines: list[Engine]
    programs: Sequence[Child]
    account: Account
    late: Newcomer
    steps: list[Step] = field(default_factory=list)

    def run(self) -> int:
        """Train through all versions; returns the last one published, which nobody trained on yet."""
        last = FIRST_VERSION + self.profile.versions
        pool = ThreadPoolExecutor(max_workers=self.profile.prompts_at_once)
        try:
            for version in range(FIRST_VERSION, last):
                self._step(version, pool)
        finally:
            # When the run is broken off, requests end with their engine: not waited for here.
            pool.shutdown(wait=False, cancel_futures=True)
        self.wait_for_engines(last)
        return last

    def wait_for_engines(self, version: int) -> dict[str, Report]:
        """Wait until every engine serves `version`; returns what they say about it."""

        def all_serve() -> bool:
            return all(engine.serves(version) for engine in self.engines)

        wait_until(f"the engines serve version {version}", all_serve, self.programs, _FOLLOW_S)
        reports = {engine.replica: engine.report() for engine in self.engines}
        self.account.arrived(version, reports)
        return reports

    def _step(self, version: int, pool: ThreadPoolExecutor) -> None:
        newcomer = self.late.join(version)
        if newcomer is not None:
            self.engines.append(newcomer)
        reports = self.wait_for_engines(version)
        if (version - FIRST_VERSION) % self.profile.show_every == 0:
            self.show_answer(version)
        began = time.monotonic()
        groups = self._ask(version, pool)
        asked = time.monotonic()
        rewards = [[self.profile.rule.score(a.text, a.finished) for a in group] for group in groups]
        used = self.policy.accumulate(_samples(groups, rewards))
        learnt = time.monotonic()
        self.late.hold()
        held = time.monotonic()
        self.publisher.unpublish()
        taken_back = time.monotonic()
        self.policy.apply()
        self.publisher.publish(version + 1)
        published = time.monotonic()
        answers = tuple(answer for group in groups for answer in group)
        flat = [reward for group in rewards for reward in group]
        words = sum(len(answer.text.split()) for answer in answers) / len(answers)
        self.steps.append(Step(version, sum(flat) / len(flat), words, answers, reports))
        self.account.learnt(
            self.steps[-1],
            used,
            {
                "ask": asked - began,
                "learn": learnt - asked,
                "unpublish": taken_back - held,
                "step + publish": published - taken_back,
            },
            words=self.profile.rule.about_words,
        )

    def _ask(self, version: int, pool: ThreadPoolExecutor) -> list[list[Answer]]:
        """Send the version's prompts to the engines in turn, all at once; returns one group of answers a prompt."""
        questions = self.profile.questions(version)
        chosen = [self.engines[(version + place) % len(self.engines)] for place in range(len(questions))]
        return list(pool.map(lambda engine, question: engine.ask(question), chosen, questions))

    def show_answer(self, version: int) -> None:
        """Print the likeliest answer to one prompt."""
        self.account.answer(version, self.engines[0].ask(self.profile.greedy(self.profile.shown[0]))[0])


def _samples(groups: Sequence[Sequence[Answer]], rewards: Sequence[Sequence[float]]) -> list[Sample]:
    """Pair every answer with how much better than its group it was."""
    return [
        Sample(answer.prompt_ids, answer.answer_ids, advantage)
        for group, scores in zip(groups, rewards, strict=True)
        for answer, advantage in zip(group, advantages(scores), strict=True)
    ]
