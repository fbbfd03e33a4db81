from __future__ import annotations

from dataclasses import replace

import pytest

from demo.engines import Answer, FirstFill, Report
from demo.proof import (
    LOGPROB_TOLERANCE,
    Greedy,
    Step,
    engines_followed,
    late_one_filled_from_first,
    none_left,
    reward_rose,
    same_answers,
    same_memory,
    versions_known,
)


def answer(version: int, before: int | None = None, after: int | None = None) -> Answer:
    return Answer(
        "rollout-1", "why?", "so", True, (1,), (2,), (-0.5,), before or version, version if after is None else after
    )


def report(version: int, *sources: str) -> Report:
    return Report(version, "serving", "", sources, 100, 0.0, 0.1, 0.2, 0.3)


def step(version: int, *engines: str, answers: tuple[Answer, ...] | None = None) -> Step:
    made = (answer(version), answer(version)) if answers is None else answers
    return Step(version, 0.5, 3.0, made, {name: report(version, "trainer") for name in engines})


@pytest.mark.parametrize(
    ("rewards", "held"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], True),  # 0.15 -> 0.55
        ([0.1, 0.2, 0.9, 0.9, 0.2, 0.3], False),  # high in the middle only: 0.15 -> 0.25
        ([0.5] * 9, False),
        ([0.9, 0.1, 0.1], False),
        ([0.1, 0.5], False),  # too few to speak of thirds
        ([0.1, 0.3, 0.5], True),
    ],
)
def test_reward_rose(rewards: list[float], held: bool) -> None:
    assert reward_rose(rewards, 0.3).held is held


def test_every_answer_belongs_to_the_version_it_trained() -> None:
    assert versions_known([step(1, "a"), step(2, "a")]).held
    assert "4 completions, 2 versions" in versions_known([step(1, "a"), step(2, "a")]).figures


@pytest.mark.parametrize("wrong", [answer(2, before=1), answer(2, after=3), answer(1), answer(3)])
def test_an_answer_of_another_version_is_found(wrong: Answer) -> None:
    check = versions_known([step(1, "a"), step(2, "a", answers=(answer(2), wrong))])
    assert not check.held
    assert "version 2" in check.figures


def test_no_answers_prove_nothing() -> None:
    assert not versions_known([]).held
    assert not versions_known([step(1, "a", answers=())]).held


def test_engines_followed() -> None:
    both = [step(1, "a"), step(2, "a", "b"), step(3, "a", "b")]
    assert engines_followed(both, "a", "b").held
    assert not engines_followed([step(1, "a"), step(2, "a")], "a", "b").held, "the late one never came"
    assert not engines_followed([step(1, "a", "b"), step(2, "a"), step(3, "a", "b")], "a", "b").held, "a gap"
    assert not engines_followed([step(1, "b"), step(2, "a", "b")], "a", "b").held, "the first one missed a version"
    stale = replace(both[2], reports={"a": report(3, "trainer"), "b": report(2, "a")})
    assert not engines_followed([*both[:2], stale], "a", "b").held, "an old version"


def test_the_late_engine_filled_from_the_first() -> None:
    assert late_one_filled_from_first(FirstFill(4, "rollout-1", 100), "rollout-1").held
    assert not late_one_filled_from_first(FirstFill(4, "trainer", 100), "rollout-1").held
    assert not late_one_filled_from_first(None, "rollout-1").held


def test_memory_stays_where_it_was() -> None:
    assert same_memory({"a": 1, "b": 2}, {"a": 1, "b": 2}).held
    assert not same_memory({"a": 1, "b": 2}, {"a": 1, "b": 3}).held
    assert not same_memory({"a": 1}, {}).held
    assert not same_memory({}, {}).held


GREEDY = [Greedy("x", (1, 2), (-0.5, -0.25)), Greedy("y", (3,), (-1.0,))]


def test_equal_answers() -> None:
    check = same_answers("a", GREEDY, GREEDY)
    assert check.held
    assert "2 prompts, 3 tokens" in check.figures


@pytest.mark.parametrize(
    "fresh",
    [
        [],
        GREEDY[:1],
        [GREEDY[1], GREEDY[0]],
        [Greedy("x", (1, 3), (-0.5, -0.25)), GREEDY[1]],
        [Greedy("x", (1,), (-0.5,)), GREEDY[1]],
        [Greedy("x", (1, 2), (-0.5, -0.25 + 2 * LOGPROB_TOLERANCE)), GREEDY[1]],
        [Greedy("x", (1, 2), (-0.5,)), GREEDY[1]],
        [Greedy("x", (1, 2), (-0.5, float("nan"))), GREEDY[1]],
    ],
)
def test_other_answers_are_found(fresh: list[Greedy]) -> None:
    assert not same_answers("a", GREEDY, fresh).held


def test_nothing_compared_proves_nothing() -> None:
    assert not same_answers("a", [], []).held
    assert not same_answers("a", [Greedy("x", (), ())], [Greedy("x", (), ())]).held


def test_processes_left() -> None:
    assert none_left([]).held
    assert none_left(["12 vllm serve"]).figures == "12 vllm serve"
    assert not none_left(["12 vllm serve"]).held
