"""One run of the Megatron demo, from the hub's start to the proof."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.account import Account, megabytes
from demo.engines import Completion, Engine
from demo.megatron.gathered import Array, hugging_face, join, read_checkpoint, read_ranks
from demo.megatron.profiles import Profile
from demo.megatron.proof import Seen, agreed, followed, in_place, learnt, same_bytes
from demo.ports import free_ports
from demo.processes import Child, Children, DemoError, wait_until
from demo.proof import Check, Greedy, same_answers
from demo.record import write_rows
from demo.rhymes import DTYPE, Bare, write_bare
from demo.serving import MODEL, cores, start_engine, start_fresh, start_hub

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".envs" / "megatron" / "bin" / "python"
_TRAINER, _ENGINE = "trainer", "rollout-1"

_READY_S, _STEP_S, _END_S = 300.0, 120.0, 30.0
_REPORT = re.compile(r"report (\[.*\])$", re.MULTILINE)


@dataclass(frozen=True)
class Parts:
    """What runs while the trainer trains."""

    bare: Bare
    address: str
    trainer: Child
    engine: Engine


@dataclass(frozen=True)
class Exported:
    """One version outside of the trainer: pulled from the hub, gathered from the ranks, and the engine's answers."""

    version: int
    folder: Path
    pulled: Mapping[str, Array]
    gathered: Mapping[str, Array]
    answers: Sequence[Completion]


class Session:
    """Own a run's parts: the hub, the trainer of four ranks, the engine of two."""

    def __init__(self, profile: Profile, folder: Path, children: Children, account: Account) -> None:
        self._profile, self._folder = profile, folder
        self._children, self._account = children, account
        self._programs: list[Child] = []
        self._heard = 0

    def run(self) -> list[Check]:
        """Run it; returns the checks, shown already. Raises DemoError."""
        profile, account = self._profile, self._account
        account.title(profile.title)
        parts = self._start()
        seen, exported = self._train(parts)
        parts.trainer.end_input()
        parts.trainer.wait(_END_S)
        self._programs.remove(parts.trainer)
        for program in reversed(self._programs):  # the engine first: cores and memory for the fresh one
            self._children.stop(program)
        account.title("proof")
        tied = bool(parts.bare.config["tie_word_embeddings"])
        checks = [
            learnt(seen, profile.reached),
            followed(seen, profile.steps, _TRAINER),
            agreed(seen),
            in_place(seen),
            *(same_bytes(each.version, each.pulled, each.gathered, tied) for each in exported),
            *(self._same_answers(each, parts.bare) for each in exported),
        ]
        account.checks(checks)
        write_rows(profile.name, [_row(each) for each in seen], checks)
        return checks

    def _start(self) -> Parts:
        """Start the hub, and beside each other trainer and engine."""
        bare = write_bare(self._folder / "bare", self._profile.sizes, self._profile.lines, self._profile.prompt_tokens)
        hub, address = start_hub(self._children)
        self._programs.append(hub)
        self._account.fact("hub", f"{address} (watch it: tensorhub status --watch --server {address})")
        trainer = self._start_trainer(address, bare)
        (port,) = free_ports(1)
        two = [cores()[number % len(cores())] for number in (0, 1)]
        self._programs.append(start_engine(self._children, _ENGINE, bare.folder, address, port, *two, dtype=DTYPE))
        return Parts(bare, address, trainer, Engine(_ENGINE, port, timeout_s=_READY_S))

    def _start_trainer(self, address: str, bare: Bare) -> Child:
        """Start the trainer's ranks, in an environment of their own."""
        if not PYTHON.exists():
            raise DemoError(f"{PYTHON} does not exist: run `make env-megatron`")
        length, end = max(map(len, bare.documents)), bare.config["eos_token_id"]
        spec = {
            "hf_config": bare.config,
            "server": address,
            "model": MODEL,
            "stream": "demo",
            "documents": [[*document, *[end] * (length - len(document))] for document in bare.documents],
            "lengths": [len(document) for document in bare.documents],
            "learning_rate": self._profile.learning_rate,
            "seed": self._profile.seed,
        }
        file = self._folder / "spec.json"
        file.write_text(json.dumps(spec), encoding="utf-8")
        command = [str(PYTHON), "-m", "demo.megatron.trainer", str(file)]
        trainer = self._children.start(_TRAINER, command, {"PYTHONWARNINGS": "ignore"}, listens=True)
        self._programs.append(trainer)
        return trainer

    def _train(self, parts: Parts) -> tuple[list[Seen], list[Exported]]:
        """Train all steps, each after the engine has followed the one before; export where that is asked for."""
        profile, account = self._profile, self._account
        ranks = self._hear(parts.trainer)
        stages = " and ".join(megabytes(sum(rank["bytes"] for rank in ranks[half : half + 2])) for half in (0, 2))
        account.fact(_TRAINER, f"Megatron-Core, tensor 2 x pipeline 2: four ranks, stages of {stages} in {DTYPE}")
        wait_until(f"{_ENGINE} is ready", lambda: parts.engine.look() is not None, self._programs, _READY_S)
        account.fact(_ENGINE, "vllm serve --tensor-parallel-size 2 --weight-source tensorhub, without a weight file")
        account.title("training")
        seen, exported = [self._look(ranks, parts)], []
        for version in range(1, profile.steps + 1):
            parts.trainer.tell("step")
            seen.append(self._look(self._hear(parts.trainer), parts))
            if version in profile.proved:
                exported.append(self._export(version, parts))
        return seen, exported

    def _hear(self, trainer: Child) -> list[dict[str, Any]]:
        """Return the ranks' next report."""
        found: list[str] = []

        def heard() -> bool:
            found[:] = _REPORT.findall(trainer.text())
            return len(found) > self._heard

        what = "the trainer has done a step" if self._heard else "the trainer is ready"
        wait_until(what, heard, self._programs, _STEP_S if self._heard else _READY_S)
        self._heard += 1
        ranks: list[dict[str, Any]] = json.loads(found[self._heard - 1])
        return ranks

    def _look(self, ranks: Sequence[Mapping[str, Any]], parts: Parts) -> Seen:
        """Wait until the engine serves the ranks' version, and ask it what it thinks of the documents."""
        version, engine = ranks[0]["version"], parts.engine
        wait_until(f"{_ENGINE} serves version {version}", lambda: engine.serves(version), self._programs, _STEP_S)
        seen = Seen(
            version=version,
            trainer=ranks[-1]["logprobs"],  # the last stage's
            engine=engine.judge(parts.bare.documents),
            report=engine.report(),
            tensors=sum(rank["tensors"] for rank in ranks),
            moved=sum(rank["moved"] for rank in ranks),
            took_s=max(rank["took_s"] for rank in ranks),
            waited_s=max(rank["waited_s"] for rank in ranks),
        )
        if version % self._profile.show_every == 0:
            self._show(seen, parts)
        return seen

    def _show(self, seen: Seen, parts: Parts) -> None:
        """Tell how a version came, and what it says."""
        profile, account = self._profile, self._account
        account.arrived(seen.version, {_ENGINE: seen.report})
        of_step = f"a step of {seen.took_s:.2f} s waited {seen.waited_s:.3f} s for readers" if seen.took_s else ""
        account.fact(
            "loss", f"{seen.loss:.4f} a token, {seen.apart:.0e} apart on {_ENGINE}; {of_step or 'no step yet'}"
        )
        number = seen.version // profile.show_every % len(parts.bare.documents)
        text = parts.engine.complete(parts.bare.prompts[number], profile.max_tokens).text
        account.fact("it says", f"{parts.bare.starts[number]!r} -> {text!r}")

    def _export(self, version: int, parts: Parts) -> Exported:
        """Export a version in two ways, and ask the engine how it goes on with the first tokens of each document."""
        saved, pulled = self._folder / f"ranks-{version}", self._folder / f"pulled-{version}"
        saved.mkdir()
        parts.trainer.tell(f"save {saved}")
        command = [sys.executable, "-m", "tensorhub_core.cli.main", "pull", "--server", parts.address]
        command += ["--model", MODEL, "--version", str(version), "--out", str(pulled)]
        pull = self._children.start(f"pull-{version}", command)
        self._hear(parts.trainer)
        if pull.wait(_STEP_S) != 0:
            pull.check()
        answers = [parts.engine.complete(prompt, self._profile.max_tokens) for prompt in parts.bare.prompts]
        if parts.engine.report().version != version:
            raise DemoError(f"{_ENGINE} does not serve version {version} any more")
        gathered = hugging_face(join(read_ranks(saved)), parts.bare.config)
        return Exported(version, pulled, read_checkpoint(pulled), gathered, answers)

    def _same_answers(self, exported: Exported, bare: Bare) -> Check:
        """Ask a fresh stock vLLM of one rank, on the pulled checkpoint, the same."""
        for file in bare.folder.iterdir():
            shutil.copy(file, exported.folder / file.name)
        ask, out = self._folder / f"ask-{exported.version}.json", self._folder / f"fresh-{exported.version}.json"
        ask.write_text(json.dumps([{"prompt": p, "max_tokens": self._profile.max_tokens} for p in bare.prompts]))
        child = start_fresh(self._children, exported.folder, ask, out, cores()[0], dtype=DTYPE)
        if child.wait(_READY_S) != 0:
            child.check()
        lines, answers = self._profile.lines, json.loads(out.read_text())
        ours = [Greedy(line, a.token_ids, a.logprobs) for line, a in zip(lines, exported.answers, strict=True)]
        fresh = [
            Greedy(line, tuple(a["token_ids"]), tuple(a["logprobs"])) for line, a in zip(lines, answers, strict=True)
        ]
        return same_answers(f"{_ENGINE} at version {exported.version}", ours, fresh)


def _row(seen: Seen) -> dict[str, Any]:
    """Return a version's figures for the record."""
    figures = {"loss": seen.loss, "apart": seen.apart, "step_s": seen.took_s, "waited_s": seen.waited_s}
    return {"version": seen.version, **figures, "engines": {_ENGINE: asdict(seen.report)}}
