from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from demo.account import Account
from demo.engines import Answer, Engine, Report, Request
from demo.grpo import Policy, Recipe
from demo.loop import FIRST_VERSION, Loop
from demo.profiles import FULL, QUICK, Profile
from demo.proof import engines_followed, reward_rose, versions_known
from demo.reward import Rule
from tests.unit.demo.tiny import TinyModel

PROFILE = replace(
    QUICK,
    rule=Rule("fives", "the share of fives", lambda text, finished: text.count("5") / len(text.split())),
    prompts=("1", "2 3", "4"),
    shown=("1",),
    prompts_at_once=2,
    group=8,
    max_tokens=4,
    versions=12,
    recipe=Recipe(learning_rate=0.05, temperature=1.0),
)


class World:
    """A trainer's worker and engines that see only what is published, and nothing in between."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.published: int | None = None
        self.log: list[str] = []
        self._frozen: dict[str, torch.Tensor] = {}

    def publish(self, version: int) -> None:
        assert self.published is None
        self.published = version
        self._frozen = {name: tensor.clone() for name, tensor in self.policy.tensors().items()}
        self.log.append(f"publish {version}")

    def unpublish(self) -> None:
        self.check_untouched()
        self.log.append(f"unpublish {self.published}")
        self.published = None

    def check_untouched(self) -> None:
        assert self.published is not None
        assert all(torch.equal(self._frozen[n], tensor) for n, tensor in self.policy.tensors().items())


class FakeEngine(Engine):
    """Draw answers from the policy itself, as a real engine does from its copy."""

    def __init__(self, replica: str, world: World) -> None:
        super().__init__(replica, 1, timeout_s=1)
        self.world = world
        self.asked: list[Request] = []

    def report(self) -> Report:
        return Report(self.world.published, "serving", "", ("trainer",), 10, 0.0, 0.1, 0.1, 0.2)

    def ask(self, request: Request) -> list[Answer]:
        self.asked.append(request)
        self.world.check_untouched()
        version = self.world.published
        assert version is not None
        return [self._draw(request, request.seed + place, version) for place in range(request.count)]

    def _draw(self, request: Request, seed: int, version: int) -> Answer:
        generator = torch.Generator().manual_seed(seed)
        prompt = tuple(int(word) for word in request.prompt.split())
        answer: tuple[int, ...] = ()
        with torch.no_grad():
            for _ in range(request.max_tokens):
                odds = self.world.policy.model.log_probabilities(prompt + answer, 1.0).exp()
                answer += (int(torch.multinomial(odds, 1, generator=generator)),)
        text = " ".join(str(token) for token in answer)
        return Answer(self.replica, request.prompt, text, True, prompt, answer, (), version, version)


class FakeNewcomer:
    """Let a second engine join at a version; note when it was waited for."""

    def __init__(self, world: World, joins_at: int | None) -> None:
        self._world, self._joins_at = world, joins_at

    def join(self, version: int) -> Engine | None:
        return FakeEngine("rollout-2", self._world) if version == self._joins_at else None

    def hold(self) -> None:
        self._world.log.append(f"hold {self._world.published}")


def trained(profile: Profile, joins_at: int | None = 4) -> tuple[Loop, World, str]:
    policy = Policy(TinyModel(), profile.recipe)
    world, output = World(policy), io.StringIO()
    account = Account(Console(file=output, width=200))
    loop = Loop(
        profile=profile,
        policy=policy,
        publisher=world,
        engines=[FakeEngine("rollout-1", world)],
        programs=[],
        account=account,
        late=FakeNewcomer(world, joins_at),
    )
    world.publish(FIRST_VERSION)
    last = loop.run()
    assert last == FIRST_VERSION + profile.versions
    return loop, world, output.getvalue()


@pytest.fixture(scope="module")
def run() -> tuple[Loop, World, str]:
    return trained(PROFILE)


def test_it_publishes_every_version_once_and_in_order(run: tuple[Loop, World, str]) -> None:
    expected = ["publish 1"]
    for version in range(1, PROFILE.versions + 1):
        expected += [f"hold {version}", f"unpublish {version}", f"publish {version + 1}"]
    assert run[1].log == expected


def test_it_learns_and_proves_it(run: tuple[Loop, World, str]) -> None:
    steps = run[0].steps
    assert reward_rose([step.reward for step in steps], 0.15).held
    assert versions_known(steps).held
    assert engines_followed(steps, "rollout-1", "rollout-2").held


def test_an_engine_that_never_joins_is_noticed() -> None:
    loop, _, _ = trained(replace(PROFILE, versions=3), joins_at=None)
    assert not engines_followed(loop.steps, "rollout-1", "rollout-2").held


def test_both_engines_share_the_work_once_both_are_there(run: tuple[Loop, World, str]) -> None:
    by_version = [{answer.engine for answer in step.answers} for step in run[0].steps]
    assert by_version == [{"rollout-1"}] * 3 + [{"rollout-1", "rollout-2"}] * 9


def test_the_account_tells_what_happened(run: tuple[Loop, World, str]) -> None:
    text = run[2]
    assert "version 13" in text
    assert "<- trainer" in text
    assert "stall  0.200 s: drain 0.000 + transfer 0.100 + process 0.100" in text
    assert text.count("reward ") == PROFILE.versions


def test_the_same_seeds_give_the_same_run(run: tuple[Loop, World, str]) -> None:
    assert [step.reward for step in trained(PROFILE)[0].steps] == [step.reward for step in run[0].steps]


@pytest.mark.parametrize("profile", [FULL, QUICK], ids=lambda profile: profile.name)
def test_no_seed_is_used_twice(profile: Profile) -> None:
    requests = [q for version in range(1, profile.versions + 1) for q in profile.questions(version)]
    seeds = [request.seed + place for request in requests for place in range(request.count)]
    assert len(seeds) == len(set(seeds)) == profile.versions * profile.prompts_at_once * profile.group
    assert {request.prompt for request in requests} == set(profile.prompts)
    assert not set(profile.prompts) & set(profile.held_out)
