"""One run of the demo, from the hub's start to the proof."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch

from demo.account import Account, megabytes
from demo.engines import Engine, Report
from demo.grpo import Policy
from demo.loop import FIRST_VERSION, Loop
from demo.models import without_weights
from demo.ports import free_ports
from demo.processes import Child, Children, DemoError, wait_until
from demo.profiles import Profile
from demo.proof import (
    Check,
    Greedy,
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


class Session:
    """Own a run's parts: the model in training, the hub, the engines."""

    def __init__(self, profile: Profile, folder: Path, children: Children, account: Account) -> None:
        self._profile, self._folder = profile, folder
        self._children, self._account = children, account
        self._programs: list[Child] = []
        self._newcomer: Newcomer | None = None

    def run(self) -> list[Check]:
        """Run it; returns the checks, shown already. Raises DemoError."""
        from tensorhub_core import connect

        profile, account = self._profile, self._account
        account.title(profile.title)
        checkpoint = profile.model(self._folder)
        bare = without_weights(checkpoint, self._folder / "bare")
        hub, address = start_hub(self._children)
        self._programs.append(hub)
        account.fact("hub", address)
        first_port, late_port = free_ports(2)
        first = self._start(_FIRST, bare, address, first_port)
        policy = load_policy(profile, checkpoint)
        tensors = policy.tensors()
        where = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        with connect(address, model=MODEL, replica="trainer") as worker:
            worker.register(tensors)
            worker.publish(FIRST_VERSION)
            account.fact("trainer", _described(tensors))
            account.fact("reward", profile.rule.says)
            account.fact("prompt", f"{profile.instruction!r} + a question; {profile.group} answers each")
            account.fact(_FIRST, f"starts without a weight file: {bare.name}/ holds config and tokenizer only")
            wait_until(f"{_FIRST} is ready", lambda: first.look() is not None, self._programs, _READY_S)

            def late(version: int) -> Engine | None:
                return self._late(version, bare, address, late_port, worker)

            loop = Loop(profile, policy, worker, [first], self._programs, account, late)
            account.title("training")
            last = loop.run()
            loop.show_answer(last)
            account.title("proof")
            greedy = {engine.replica: self._greedy(engine, last) for engine in loop.engines}
            saved = save(policy, checkpoint, self._folder / "saved")
            moved = same_memory(where, {name: tensor.data_ptr() for name, tensor in policy.tensors().items()})
        for program in reversed(self._programs):  # the engines first: cores and memory for the fresh one
            self._children.stop(program)
        fresh = self._fresh(saved)
        filled = None if self._newcomer is None else self._newcomer.first
        checks = [
            reward_rose([step.reward for step in loop.steps], profile.margin),
            versions_known(loop.steps),
            engines_followed(loop.steps, _FIRST, _LATE),
            late_one_filled_from_first(filled, _FIRST),
            moved,
            *(same_answers(name, greedy.get(name, []), fresh) for name in (_FIRST, _LATE)),
        ]
        account.checks(checks)
        write_record(profile.name, loop.steps, checks)
        return checks

    def _start(self, replica: str, bare: Path, address: str, port: int) -> Engine:
        """Start an engine on a core of its own, as far as there are cores."""
        core = cores()[(len(self._programs) - 1) % len(cores())]
        self._programs.append(start_engine(self._children, replica, bare, address, port, core))
        return Engine(replica, port, timeout_s=_READY_S)

    def _late(self, version: int, bare: Path, address: str, port: int, worker: Any) -> Engine | None:
        """Start the second engine when it is time; return it once, when it is ready.

        Training goes on while it starts. It is waited for only from the moment its memory is filled.
        """
        if self._newcomer is None:
            if version >= self._profile.joins_at:
                self._newcomer = Newcomer(self._start(_LATE, bare, address, port))
                self._account.fact(_LATE, "is started now, while training goes on")
            return None
        newcomer = self._newcomer
        if newcomer.joined:
            return None
        last = FIRST_VERSION + self._profile.versions - 1
        filled = any(_LATE in row.replicas for row in worker.versions())
        if newcomer.first is None and (filled or version > last - self._profile.versions // 2):
            wait_until(f"{_LATE} is ready", lambda: newcomer.first is not None, self._programs, _READY_S)
        if newcomer.first is None:
            return None
        newcomer.joined = True
        source = ", ".join(newcomer.first.sources)
        self._account.fact(
            _LATE,
            f"has joined with version {newcomer.first.version}: {megabytes(newcomer.first.total_bytes)} from {source}",
        )
        return newcomer.engine

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


class Newcomer:
    """An engine that is starting: a thread notes what it says first, before it follows the trainer any further."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.first: Report | None = None
        self.joined = False
        self._deadline = time.monotonic() + _READY_S
        threading.Thread(target=self._watch, name="newcomer", daemon=True).start()

    def _watch(self) -> None:
        while self.first is None and time.monotonic() < self._deadline:
            self.first = self.engine.look()
            time.sleep(0.05)


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


def _described(tensors: dict[str, torch.Tensor]) -> str:
    count = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    return f"{count / 1e6:.1f} M parameters, {megabytes(size)}, published in place from {len(tensors)} live tensors"
