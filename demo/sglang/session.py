"""One run of the mixed fleet's demo, from the hub's start to the proof."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.account import Account, megabytes
from demo.engines import FirstFill, Report, read_first_fill
from demo.grpo import Policy
from demo.ports import free_ports
from demo.processes import Child, Children, DemoError, wait_until
from demo.proof import Check, same_memory
from demo.record import write_rows
from demo.rhymes import DTYPE, Bare, write_bare
from demo.serving import MODEL, cores, engine_environment, start_engine, start_hub
from demo.session import addresses
from demo.sglang.engines import Kind, SGLangEngine, TracedEngine, VLLMEngine
from demo.sglang.profiles import DIES, JOINS, MODES, STAYS, VLLM, Profile
from demo.sglang.prompting import Prompter
from demo.sglang.proof import (
    Ask,
    Followed,
    References,
    Run,
    all_followed,
    ended_on,
    filled_from_peer,
    none_lost,
    told_apart,
    versions_true,
    wanted,
    went_on,
)
from demo.sglang.serving import SGLang
from demo.sglang.training import build, documents, save, train

_READY_S, _STEP_S, _FRESH_S = 300.0, 120.0, 300.0
_DEAD_S = 20.0
"""How long the trainer may wait for a reader that was killed: the hub's patience, and some."""

_ON_CPU = (
    "runs its torch code on the CPU here; for the packages of its kernels, which want CUDA, a shim of the tests "
    "(tests/engines/sglang/shim) stands in"
)


@dataclass
class Member:
    """One engine of the fleet: its program, its HTTP side, the versions it was there for."""

    program: Child
    engine: TracedEngine
    first: int
    last: int = 0


class Session:
    """Own a run's parts: the hub, the trainer (this process), the engines, the prompts."""

    def __init__(self, profile: Profile, folder: Path, children: Children, account: Account) -> None:
        self._profile, self._folder = profile, folder
        self._children, self._account = children, account
        self._sglang = SGLang(children, folder / "logs" / "sglang")
        self._fleet: dict[str, Member] = {}
        self._others: list[Child] = []
        self._first_fill: FirstFill | None = None
        self._address = ""

    def run(self) -> list[Check]:
        """Run it; returns the checks, shown already. Raises DemoError."""
        try:
            self._account.title(self._profile.title)
            return self._run()
        finally:
            self._sglang.close()

    def _run(self) -> list[Check]:
        profile, account = self._profile, self._account
        self._sglang.begin()
        bare = write_bare(self._folder / "bare", profile.sizes, profile.lines, profile.prompt_tokens)
        others = [bare.tokenizer(text)["input_ids"] for text in profile.others]
        prompts = [tuple(prompt) for prompt in (*bare.prompts, *others)]
        prompter = Prompter(prompts, profile.max_tokens)
        run, ended, in_place = self._train(bare, prompter)
        self._end()
        account.title("proof")
        (self._folder / "logs" / "completions.json").write_text(json.dumps([asdict(each) for each in run.completions]))
        versions = list(range(1, profile.versions + 1))
        references = self._references(wanted(run.completions, prompts, profile.max_tokens, versions))
        checks = [
            versions_true("vllm", run.completions, references),
            versions_true("sglang", run.completions, references),
            told_apart(references, prompts, profile.max_tokens, versions),
            all_followed(run),
            ended_on(versions[-1], ended),
            filled_from_peer(self._first_fill, JOINS, [VLLM, STAYS]),
            none_lost(run, DIES),
            went_on(run.seen, versions, _DEAD_S),
            in_place,
        ]
        account.checks(checks)
        write_rows(profile.name, [_row(each) for each in run.seen], checks)
        return checks

    # --- the engines ------------------------------------------------------------------------------------------------

    def _programs(self) -> list[Child]:
        return [member.program for member in self._fleet.values() if not member.last]

    def _start_first(self, bare: Path) -> None:
        """Start the hub and the engines that are there from the beginning."""
        hub, self._address = start_hub(self._children)
        self._others.append(hub)
        self._account.fact("hub", f"{self._address} (watch it: tensorhub status --watch --server {self._address})")
        (port,) = free_ports(1)
        program = start_engine(
            *(self._children, VLLM, bare, self._address, port, _core(0)),
            mode=MODES[VLLM],
            dtype=DTYPE,
            options=["--enable-scale-out"],  # brings the route whose answers name versions
        )
        self._fleet[VLLM] = Member(program, VLLMEngine(VLLM, port, timeout_s=_STEP_S), 1)
        for replica in (STAYS, DIES):
            self._start_sglang(replica, bare, first=1)

    def _start_sglang(self, replica: str, bare: Path, *, first: int) -> None:
        program, port = self._sglang.serve(replica, bare, self._address, _core(1), mode=MODES[replica])
        self._fleet[replica] = Member(program, SGLangEngine(replica, port, timeout_s=_STEP_S), first)

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
        wait_until(what, ready, [*self._programs(), *self._others], timeout_s)

    def _end(self) -> None:
        """End everything: cores and memory for the fresh engines. Nobody needs the engines' copies any more."""
        for program in (*self._programs(), *self._others):
            program.send(signal.SIGKILL)
            self._children.stop(program)

    def _ready(self, replica: str) -> None:
        self._wait(f"{replica} is ready", lambda: self._fleet[replica].engine.look() is not None, _READY_S)

    # --- training ---------------------------------------------------------------------------------------------------

    def _train(self, bare: Bare, prompter: Prompter) -> tuple[Run, dict[str, Report], Check]:
        """Publish all versions while prompts run; returns what was seen, and what the engines say in the end."""
        from tensorhub_core import connect

        profile, account = self._profile, self._account
        self._start_first(bare.folder)
        policy = build(bare, profile)
        where, seen = addresses(policy), []
        with connect(self._address, model=MODEL, replica="trainer") as worker:
            worker.register(policy.tensors())
            worker.publish(1)
            self._introduce(policy)
            for replica in list(self._fleet):
                self._ready(replica)
                prompter.include(self._fleet[replica].engine)
            account.title("training")
            waited_s, samples = 0.0, documents(bare, profile)
            for version in range(1, profile.versions + 1):
                reports = self._arrived(version, prompter)
                save(policy, bare, self._folder / f"version-{version}")
                loss = policy.loss(samples)
                seen.append(Followed(version, reports, waited_s, loss))
                self._tell(seen[-1], prompter, bare)
                if version == profile.joined_at:
                    self._join(version, bare.folder, prompter)
                if version == profile.versions:
                    break
                began_s = time.monotonic()
                worker.unpublish()
                waited_s = time.monotonic() - began_s
                train(policy, samples, profile.steps)
                worker.publish(version + 1)
                if version + 1 == profile.killed_at:
                    self._kill(version, prompter)
            heard = prompter.end()
            ended = {name: each.engine.report() for name, each in self._fleet.items() if not each.last}
        members = {name: range(each.first, (each.last or profile.versions) + 1) for name, each in self._fleet.items()}
        run = Run(heard.completions, heard.lost, heard.failures, seen, members)
        return run, ended, same_memory(where, addresses(policy))

    def _arrived(self, version: int, prompter: Prompter) -> dict[str, Report]:
        """Wait until all engines that live serve a version and have answered by it; returns what they say."""
        there = [name for name, each in self._fleet.items() if not each.last]

        def all_serve() -> bool:
            return all(self._fleet[name].engine.serves(version) for name in there)

        def all_answered() -> bool:
            failures = prompter.heard().failures
            if failures:
                raise DemoError(failures[0])
            return all(prompter.made(name, version) >= self._profile.completions for name in there)

        self._wait(f"the engines serve version {version}", all_serve, _STEP_S)
        reports = {name: self._fleet[name].engine.report() for name in there}
        self._account.arrived(version, reports)
        self._wait(f"the engines answer by version {version}", all_answered, _STEP_S)
        return reports

    def _kill(self, last: int, prompter: Prompter) -> None:
        """Kill an engine of which nobody knows whether it has begun to read the newest version."""
        member = self._fleet[DIES]
        prompter.excuse(DIES)
        member.last = last
        member.program.send(signal.SIGKILL)
        self._account.fact(DIES, f"is killed (-9) while version {last + 1} is on its way to it")

    def _join(self, version: int, bare: Path, prompter: Prompter) -> None:
        """Start an engine and take it in when it answers. The step after `version` takes so long; prompts go on.

        With a newer version it could begin in the moment in which only the trainer has that, and fill from there.
        """
        self._account.fact(JOINS, "is started now, while prompts run")
        self._start_sglang(JOINS, bare, first=version + 1)
        self._ready(JOINS)
        member = self._fleet[JOINS]
        self._first_fill = fill = read_first_fill(member.program.text(), JOINS)
        if fill is None:
            raise DemoError(f"{JOINS} is ready, but does not say in {member.program.log} what it started with")
        text = f"has joined: it started with version {fill.version}, {megabytes(fill.total_bytes)} from {fill.source}"
        self._account.fact(JOINS, text)
        prompter.include(member.engine)

    # --- the account ------------------------------------------------------------------------------------------------

    def _introduce(self, policy: Policy) -> None:
        tensors, account = policy.tensors().values(), self._account
        size = megabytes(sum(tensor.nbytes for tensor in tensors))
        account.fact("trainer", f"{size} in {DTYPE}, published in place from {len(tensors)} live tensors")
        account.fact(VLLM, f"vllm serve --weight-source tensorhub, mode {MODES[VLLM]}; no engine has a weight file")
        for replica in (STAYS, DIES):
            account.fact(replica, f"sglang.launch_server --weight-source tensorhub, mode {MODES[replica]}")
        account.fact("SGLang", _ON_CPU)

    def _tell(self, seen: Followed, prompter: Prompter, bare: Bare) -> None:
        heard = prompter.heard()
        self._account.fact("loss", f"{seen.loss:.3f} a token; {len(heard.completions)} completions so far")
        said = [each.token_ids for each in heard.completions if each.prompt == tuple(bare.prompts[0])]
        self._account.fact("it says", f"{bare.starts[0]!r} -> {bare.tokenizer.decode(said[-1])!r}")

    # --- the proof --------------------------------------------------------------------------------------------------

    def _references(self, asks: Mapping[tuple[Kind, int], list[Ask]]) -> References:
        """Ask fresh engines, those of each kind one after the other, both kinds beside each other."""
        outs: dict[tuple[Kind, int], Path] = {}
        spec, waiting = [], []
        for (kind, version), wanted_here in asks.items():
            ask, out = (self._folder / f"{name}-{kind}-{version}.json" for name in ("ask", "fresh"))
            bodies = [{"prompt": prompt, "max_tokens": count, "ignore_eos": True} for prompt, count in wanted_here]
            ask.write_text(json.dumps(bodies), encoding="utf-8")
            outs[kind, version], checkpoint = out, self._folder / f"version-{version}"
            if kind == "vllm":
                spec.append([str(checkpoint), str(ask), str(out), DTYPE])
            else:
                waiting.append((f"fresh-{kind}-{version}", checkpoint, ask, out))
        file = self._folder / "fresh.json"
        file.write_text(json.dumps(spec), encoding="utf-8")
        environment = {**engine_environment(_core(0)), "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-m", "demo.sglang.fresh", str(file)]
        vllm = self._children.start("fresh-vllm", command, environment)
        for name, checkpoint, ask, out in waiting:
            _done(self._sglang.fresh(name, checkpoint, ask, out, _core(1)))
        _done(vllm)
        return {key: dict(zip(asks[key], _read(out), strict=True)) for key, out in outs.items()}


def _done(child: Child) -> None:
    if child.wait(_FRESH_S) != 0:
        child.check()


def _read(out: Path) -> list[tuple[int, ...]]:
    return [tuple(answer["token_ids"]) for answer in json.loads(out.read_text(encoding="utf-8"))]


def _core(number: int) -> int:
    return cores()[number % len(cores())]


def _row(seen: Followed) -> dict[str, Any]:
    """Return a version's figures for the record."""
    engines = {replica: asdict(report) for replica, report in seen.reports.items()}
    return {"version": seen.version, "loss": seen.loss, "waited_s": seen.waited_s, "engines": engines}
