from __future__ import annotations

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demo.grpo import Policy, Recipe, Sample, advantages
from tests.unit.demo.tiny import VOCABULARY, TinyModel

RECIPE = Recipe(learning_rate=0.05, temperature=0.7, samples_at_once=3)


def samples(count: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6)))
        answer = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5)))
        made.append(Sample(prompt, answer, rng.uniform(-2, 2)))
    return made


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_advantages_are_standard_scores(rewards: list[float]) -> None:
    found = advantages(rewards)
    deviation = statistics.pstdev(rewards)
    if deviation > 1e-5:
        assert found == pytest.approx([(r - statistics.fmean(rewards)) / deviation for r in rewards], abs=1e-3)
    elif deviation == 0:
        assert found == [0.0] * len(rewards)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_the_gradient_is_the_policy_gradient(at_once: int) -> None:
    """Against one token at a time, no padding, no batches."""
    recipe = Recipe(learning_rate=0.05, temperature=0.7, samples_at_once=at_once)
    policy, truth, drawn = Policy(TinyModel(dtype=torch.float32), recipe), TinyModel(dtype=torch.float32), samples(7)
    assert policy.accumulate(drawn) == 7
    loss = torch.zeros(())
    for sample in drawn:
        for place, token in enumerate(sample.answer):
            so_far = sample.prompt + sample.answer[:place]
            loss = loss - sample.advantage * truth.log_probabilities(so_far, recipe.temperature)[token]
    (loss / sum(len(sample.answer) for sample in drawn)).backward()
    for ours, right in zip(policy.model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_the_tokens_of_all_answers() -> None:
    recipe = Recipe(learning_rate=0.05, temperature=1.0)
    policy, truth, drawn = Policy(TinyModel(dtype=torch.float32), recipe), TinyModel(dtype=torch.float32), samples(7)
    losses = [
        -float(truth.log_probabilities(sample.prompt + sample.answer[:place], 1.0)[token].detach())
        for sample in drawn
        for place, token in enumerate(sample.answer)
    ]
    assert policy.loss(drawn) == pytest.approx(statistics.fmean(losses), rel=1e-4)


def test_accumulating_only_reads() -> None:
    policy = Policy(TinyModel(), RECIPE)
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    policy.accumulate(samples(7))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.tensors().items())


def test_a_step_rewrites_the_live_parameters_where_they_are() -> None:
    policy = Policy(TinyModel(), RECIPE)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in policy.tensors().items()}
    policy.accumulate(samples(7))
    assert policy.apply() > 0.0
    for name, tensor in policy.tensors().items():
        assert tensor.data_ptr() == before[name][0]
        assert tensor.dtype == torch.bfloat16
        assert not torch.equal(tensor, before[name][1])


def test_steps_smaller_than_a_bfloat16_add_up() -> None:
    """What a bfloat16 loses to rounding is kept in the masters."""
    policy = Policy(TinyModel(), Recipe(learning_rate=1e-5, temperature=1.0))
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    sample = [Sample((1, 2), (3,), 1.0)]
    for _ in range(300):
        policy.accumulate(sample)
        policy.apply()
    moved = (policy.tensors()["head.weight"][3] - before["head.weight"][3]).abs().float().mean()
    assert moved > 1e-3, "300 steps of 1e-5 are 3e-3, and none of them alone changes a bfloat16 near 0.3"


def test_nothing_to_learn_changes_nothing() -> None:
    policy = Policy(TinyModel(), RECIPE)
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    assert policy.accumulate([Sample((1,), (2,), 0.0), Sample((1,), (), 1.0)]) == 0
    assert policy.apply() == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.tensors().items())


def test_a_gradient_is_used_once() -> None:
    policy = Policy(TinyModel(), RECIPE)
    policy.accumulate(samples(4))
    policy.apply()
    after = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    assert policy.apply() == 0.0
    assert all(torch.equal(after[name], tensor) for name, tensor in policy.tensors().items())


def test_a_broken_gradient_is_refused() -> None:
    policy = Policy(TinyModel(), RECIPE)
    policy.accumulate([Sample((1,), (2,), float("inf"))])
    with pytest.raises(FloatingPointError):
        policy.apply()


def test_it_learns_what_is_rewarded() -> None:
    """Draw from the policy, reward one token, and its probability rises."""
    policy, generator = Policy(TinyModel(), RECIPE), torch.Generator().manual_seed(0)
    prompt, wanted = (4, 7), 5

    def chance() -> float:
        with torch.no_grad():
            return float(policy.model.log_probabilities(prompt, 1.0)[wanted].exp())

    before = chance()
    for _ in range(25):
        with torch.no_grad():
            odds = policy.model.log_probabilities(prompt, RECIPE.temperature).exp()
        drawn = torch.multinomial(odds, 16, replacement=True, generator=generator).tolist()
        scores = advantages([float(token == wanted) for token in drawn])
        policy.accumulate([Sample(prompt, (token,), score) for token, score in zip(drawn, scores, strict=True)])
        policy.apply()
    assert before < 0.5 < chance()
