"""One run of the demo, from the hub's start to the proof."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from demo.account import Account, megabytes
from demo.engines import Answer, Engine, FirstFill
from demo.grpo import Policy
from demo.late import LateEngine
from demo.loop import FIRST_VERSION, Loop
from demo.models import without_weights
from demo.ports import free_ports
from demo.processes import Child, Children, DemoError, wait_until
from demo.profiles import Profile
from demo.proof import (
    Check,
    Greedy,
    Step,
    engines_followed,
    late_one_filled_from_first,
    reward_rose,
    same_answers,
    same_memory,
    versions_known,
)
from demo.record import write_record
from demo.serving import MODEL, cores, start_engine, start_fresh, start_hub

_READY_S = 400.0
_FRESH_S = 300.0
_FIRST, _LATE = "rollout-1", "rollout-2"


@dataclass(frozen=True)
class Trained:
    """What training left for the proof."""

    steps: list[Step]
    greedy: dict[str, list[Greedy]]
    first_fill: FirstFill | None
    saved: Path
    in_place: Check


class Session:
    """Own a run's parts: the model in training, the hub, the engines."""

    def __init__(self, profile: Profile, folder: Path, children: Children, account: Account) -> None:
        self._profile, self._folder = profile, folder
        self._children, self._account = children, account
        self._programs: list[Child] = []

    def run(self) -> list[Check]:
        """Run it; returns the checks, shown already. Raises DemoError."""
        profile, account = self._profile, self._account
        account.title(profile.title)
        trained = self._train()
        for program in reversed(self._programs):  # the engines first: cores and memory for the fresh one
            self._children.stop(program)
        fresh = self._fresh(trained.saved)
        checks = [
            reward_rose([step.reward for step in trained.steps], profile.margin),
            versions_known(trained.steps),
            engines_followed(trained.steps, _FIRST, _LATE),
            late_one_filled_from_first(trained.first_fill, _FIRST),
            trained.in_place,
            *(same_answers(name, trained.greedy.get(name, []), fresh) for name in (_FIRST, _LATE)),
        ]
        account.checks(checks)
        write_record(profile.name, trained.steps, checks)
        return checks

    def _train(self) -> Trained:
        """Start everything, train, ask for the temperature-0 answers and save the checkpoint."""
        from tensorhub_core import connect

        profile, account = self._profile, self._account
        checkpoint = profile.model(self._folder)
        bare = without_weights(checkpoint, self._folder / "bare")
        hub, address = start_hub(self._children)
        self._programs.append(hub)
        account.fact("hub", f"{address} (watch it: tensorhub status --watch --server {address})")
        first_port, late_port = free_ports(2)
        first, _ = self._start(_FIRST, bare, address, first_port)
        policy = load_policy(profile, checkpoint)
        where = addresses(policy)
        with connect(address, model=MODEL, replica="trainer") as worker:
            worker.register(policy.tensors())
            worker.publish(FIRST_VERSION)
            self._introduce(policy, bare)
            wait_until(f"{_FIRST} is ready", lambda: first.look() is not None, self._programs, _READY_S)
            late = LateEngine(
                lambda: self._start(_LATE, bare, address, late_port),
                list(self._programs),
                account,
                starts_at=FIRST_VERSION + profile.late_after,
                joins_by=FIRST_VERSION + profile.versions // 2,
            )
            before = self._shown(first)
            account.title("training")
            loop = Loop(profile, policy, worker, [first], self._programs, account, late)
            last = loop.run()
            account.changes(FIRST_VERSION, before, last, self._shown(first))
            account.title("proof")
            greedy = {engine.replica: self._greedy(engine, last) for engine in loop.engines}
            saved = save(policy, checkpoint, self._folder / "saved")
            return Trained(loop.steps, greedy, late.first_fill, saved, same_memory(where, addresses(policy)))

    def _start(self, replica: str, bare: Path, address: str, port: int) -> tuple[Engine, Child]:
        """Start an engine on a core of its own, as far as there are cores."""
        core = cores()[(len(self._programs) - 1) % len(cores())]
        program = start_engine(self._children, replica, bare, address, port, core, staged=replica == _LATE)
        self._programs.append(program)
        return Engine(replica, port, timeout_s=_READY_S), program

    def _introduce(self, policy: Policy, bare: Path) -> None:
        """Say who takes part."""
        tensors, profile = policy.tensors().values(), self._profile
        count, size = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
        self._account.fact(
            "trainer",
            f"{count / 1e6:.1f} M parameters, {megabytes(size)}, published in place from {len(tensors)} live tensors",
        )
        self._account.fact("reward", profile.rule.says)
        self._account.fact("prompt", f"{profile.instruction!r} + a question; {profile.group} answers each")
        self._account.fact(_FIRST, f"starts without a weight file: {bare.name}/ holds config and tokenizer only")

    def _shown(self, engine: Engine) -> list[Answer]:
        """Return the likeliest answers to some prompts."""
        return [engine.ask(self._profile.greedy(prompt))[0] for prompt in self._profile.shown]

    def _greedy(self, engine: Engine, version: int) -> list[Greedy]:
        """Ask for temperature-0 answers, one request at a time."""
        found = []
        for prompt in (*self._profile.prompts, *self._profile.held_out):
            (answer,) = engine.ask(self._profile.greedy(prompt))
            if not answer.before == answer.after == version:
                raise DemoError(
                    f"{engine.replica} serves {answer.before}..{answer.after}, not the last version {version}"
                )
            found.append(Greedy(prompt, answer.answer_ids, answer.logprobs))
        return found

    def _fresh(self, saved: Path) -> list[Greedy]:
        """Ask the same of a fresh stock engine on the saved checkpoint."""
        requests = [self._profile.greedy(prompt) for prompt in (*self._profile.prompts, *self._profile.held_out)]
        ask, out = self._folder / "ask.json", self._folder / "fresh.json"
        ask.write_text(json.dumps([{"messages": r.messages(), "max_tokens": r.max_tokens} for r in requests]))
        child = start_fresh(self._children, saved, ask, out, cores()[0])
        if child.wait(_FRESH_S) != 0:
            child.check()
        answers = json.loads(out.read_text())
        return [
            Greedy(request.prompt, tuple(answer["token_ids"]), tuple(answer["logprobs"]))
            for request, answer in zip(requests, answers, strict=True)
        ]


def load_policy(profile: Profile, checkpoint: Path) -> Policy:
    """Load the model that is trained: live parameters in bfloat16, masters in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(profile.seed)
    torch.set_num_threads(min(2, len(cores())))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return Policy(model.eval(), profile.recipe)  # eval: no dropout, so that learning sees what the engines saw


def save(policy: Policy, checkpoint: Path, folder: Path) -> Path:
    """Write the live parameters as a checkpoint that any engine loads."""
    without_weights(checkpoint, folder)
    policy.model.save_pretrained(folder)
    shutil.copy(checkpoint / "config.json", folder / "config.json")
    return folder


def addresses(policy: Policy) -> dict[str, int]:
    """Return where each live parameter is."""
    return {name: tensor.data_ptr() for name, tensor in policy.tensors().items()}
