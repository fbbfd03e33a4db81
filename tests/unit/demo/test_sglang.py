from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from demo.engines import FirstFill, Report
from demo.processes import DemoError, wait_until
from demo.sglang.engines import SGLangEngine, Span, Traced, TracedEngine, VLLMEngine, read_spans
from demo.sglang.prompting import Prompter
from demo.sglang.proof import (
    Ask,
    Followed,
    Run,
    all_followed,
    ended_on,
    filled_from_peer,
    none_lost,
    segments,
    told_apart,
    versions_true,
    wanted,
    went_on,
)
from demo.sglang.serving import ForkedProcess

PROMPTS = [(1, 2), (3,)]
LENGTH = 4


def truth(version: int, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Return how a model goes on of which a token is made by its version and all tokens before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((sum(tokens) * 7 + version) % 1000)
    return tuple(tokens[len(prompt) :])


def traced(*spans: tuple[int, int], prompt: tuple[int, ...] = PROMPTS[0], engine: str = "sglang-1") -> Traced:
    """Return a true completion: `spans` are versions and how many tokens each made."""
    tokens: tuple[int, ...] = ()
    recorded = []
    for version, count in spans:
        recorded.append(Span(version, len(tokens), len(tokens) + count))
        tokens += truth(version, prompt + tokens, count)
    return Traced(engine, "vllm" if engine.startswith("vllm") else "sglang", prompt, tokens, tuple(recorded))


def references(completions: Sequence[Traced], versions: Sequence[int] = (1, 2)) -> Any:
    asked = wanted(completions, PROMPTS, LENGTH, versions)
    return {
        (kind, version): {(prompt, count): truth(version, prompt, count) for prompt, count in asks}
        for (kind, version), asks in asked.items()
    }


def test_a_completion_of_two_versions_is_asked_for_in_two_parts() -> None:
    both = traced((1, 3), (2, 1))
    first, second = segments(both)
    assert first == (1, ((1, 2), 3), both.token_ids[:3])
    assert second == (2, ((1, 2, *both.token_ids[:3]), 1), both.token_ids[3:])


def test_what_fresh_engines_are_asked() -> None:
    both = traced((1, 3), (2, 1))
    asked = wanted([both, both, traced((2, 4), engine="vllm-1")], PROMPTS, LENGTH, [1, 2])
    whole: list[Ask] = [((1, 2), 4), ((3,), 4)]
    assert asked == {
        ("sglang", 1): [*whole, ((1, 2), 3)],
        ("sglang", 2): [*whole, segments(both)[1][1]],
        ("vllm", 1): whole,
        ("vllm", 2): whole,
    }


def test_true_records_hold_for_each_kind_alone() -> None:
    run = [traced((1, 4)), traced((1, 3), (2, 1), prompt=(3,)), traced((2, 4), engine="vllm-1")]
    check = versions_true("sglang", run, references(run))
    assert check.held
    assert check.figures.startswith("2 completions (2 of sglang-1), 8 tokens equal; 1 of them went on")
    assert versions_true("vllm", run, references(run)).held
    assert not versions_true("vllm", run[:2], references(run[:2])).held, "nothing proves nothing"


def untrue(right: Traced, **changes: Any) -> tuple[bool, str]:
    wrong = replace(right, **changes)
    check = versions_true("sglang", [traced((1, 4)), wrong], references([right]))
    return check.held, check.figures


def test_a_record_that_names_another_version_is_found() -> None:
    right = traced((1, 3), (2, 1))
    assert untrue(right) == (True, "2 completions (2 of sglang-1), 8 tokens equal; 1 of them went on under a newer "
                             "version half way")  # fmt: skip
    held, figures = untrue(traced((1, 4)), spans=(Span(2, 0, 4),))
    assert (held, figures) == (False, "sglang-1: token 0 of an answer is not version 2's")
    held, figures = untrue(right, token_ids=(*right.token_ids[:3], right.token_ids[3] + 1))
    assert (held, figures) == (False, "sglang-1: token 3 of an answer is not version 2's")


@pytest.mark.parametrize(
    "spans",
    [(), (Span(1, 0, 3),), (Span(1, 1, 4),), (Span(1, 0, 2), Span(1, 3, 4)), (Span(1, 0, 3), Span(2, 2, 4))],
    ids=str,
)
def test_a_record_with_gaps_or_overlaps_is_found(spans: tuple[Span, ...]) -> None:
    held, figures = untrue(traced((1, 4)), spans=spans)
    assert not held
    assert "does not cover 4 tokens" in figures


def test_a_version_that_nobody_published_is_found() -> None:
    held, figures = untrue(traced((1, 4)), spans=(Span(9, 0, 4),))
    assert (held, figures) == (False, "sglang-1: nobody published version 9")


def test_versions_that_answer_alike_prove_nothing() -> None:
    right = references([traced((1, 4))])
    assert told_apart(right, PROMPTS, LENGTH, [1, 2]).held
    right["sglang", 2] = right["sglang", 1]
    check = told_apart(right, PROMPTS, LENGTH, [1, 2])
    assert (check.held, check.figures) == (False, "alike: 1 and 2 of sglang")
    assert not told_apart({}, PROMPTS, LENGTH, []).held


def serving(version: int, state: str = "serving") -> Report:
    return Report(version, state, "", ("trainer",), 8, 0.0, 0.0, 0.0, 0.0)


def fleet() -> Run:
    """Return a run of three versions in which sglang-2 dies after the first and sglang-3 comes with the last."""
    members = {"vllm-1": range(1, 4), "sglang-2": range(1, 2), "sglang-3": range(3, 4)}
    seen = [
        Followed(version, {name: serving(version) for name, there in members.items() if version in there}, 0.1, 1.0)
        for version in (1, 2, 3)
    ]
    made = [traced((v, 4), engine=name) for name, there in members.items() for v in there]
    return Run(made, {"sglang-2": 1}, [], seen, members)


def test_a_run_in_which_all_is_right_holds() -> None:
    run = fleet()
    check = all_followed(run)
    assert (check.held, check.figures) == (True, "vllm-1 1 to 3; sglang-2 1 to 1; sglang-3 3 to 3")
    assert none_lost(run, "sglang-2").figures == "5 answered, 1 lost with sglang-2"
    assert none_lost(run, "sglang-2").held
    assert went_on(run.seen, [1, 2, 3], 5.0).held
    assert ended_on(3, {"vllm-1": serving(3), "sglang-3": serving(3)}).held
    assert filled_from_peer(FirstFill(3, "sglang-1", 100), "sglang-3", ["sglang-1"]).held


def test_each_claim_is_found_out_where_it_is_wrong() -> None:
    run = fleet()
    silent = replace(run, completions=run.completions[1:])
    assert all_followed(silent).figures == "vllm-1 answered nothing by version 1"
    behind = replace(run.seen[1], reports={"vllm-1": serving(1)})
    late = replace(run, seen=[run.seen[0], behind, run.seen[2]])
    assert all_followed(late).figures == "vllm-1 was not seen serving version 2"
    assert not all_followed(replace(run, members={})).held
    assert not none_lost(replace(run, lost={"vllm-1": 1}), "sglang-2").held
    assert none_lost(replace(run, failures=["it refused"]), "sglang-2").figures == "it refused"
    assert not went_on(run.seen, [1, 2], 5.0).held
    assert not went_on(run.seen, [1, 2, 3], 0.05).held
    assert not ended_on(3, {}).held
    assert ended_on(3, {"vllm-1": serving(3, "paused")}).figures == "vllm-1: version 3, paused"
    assert not ended_on(3, {"vllm-1": serving(2)}).held
    assert not filled_from_peer(None, "sglang-3", ["sglang-1"]).held
    assert not filled_from_peer(FirstFill(3, "trainer", 100), "sglang-3", ["sglang-1"]).held


# --- asking ---------------------------------------------------------------------------------------------------------


def answering(engine: TracedEngine, monkeypatch: pytest.MonkeyPatch, reply: Any) -> list[Any]:
    sent: list[Any] = []

    def post(path: str, body: Any) -> Any:
        sent.append((path, body))
        return reply

    monkeypatch.setattr(engine, "_post", post)
    return sent


SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
READ = (Span(1, 0, 1), Span(2, 1, 2))


def test_each_kind_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, sglang = VLLMEngine("vllm-1", 1, timeout_s=1), SGLangEngine("sglang-1", 1, timeout_s=1)
    sent = answering(vllm, monkeypatch, {"choices": [{"token_ids": [7, 8], "weight_versions": SPANS}]})
    assert vllm.trace([1, 2], 2) == Traced("vllm-1", "vllm", (1, 2), (7, 8), READ)
    assert sent[0][0] == "/inference/v1/generate"
    assert sent[0][1]["sampling_params"] == {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    sent = answering(sglang, monkeypatch, {"output_ids": [7, 8], "meta_info": {"weight_versions": SPANS}})
    assert sglang.trace([1, 2], 2) == Traced("sglang-1", "sglang", (1, 2), (7, 8), READ)
    assert sent[0] == ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 0,
                                                                              "ignore_eos": True}})  # fmt: skip
    with pytest.raises(DemoError, match="made 2 tokens of 3"):
        sglang.trace([1, 2], 3)


@pytest.mark.parametrize("given", [[{"version": "default", "start": 0, "end": 1}], [{"version": "1"}], [None]], ids=str)
def test_what_is_no_record_is_refused(given: Any) -> None:
    with pytest.raises(DemoError, match="not the versions"):
        read_spans(given)


class FakeEngine(TracedEngine):
    """An engine that answers by a version that the test sets, until it dies."""

    kind = "sglang"

    def __init__(self, replica: str) -> None:
        super().__init__(replica, 1, timeout_s=1)
        self.version, self.dead = 1, threading.Event()

    def trace(self, prompt: Sequence[int], max_tokens: int) -> Traced:
        if self.dead.wait(0.001):
            raise DemoError(f"{self.replica} did not answer")
        return traced((self.version, max_tokens), prompt=tuple(prompt), engine=self.replica)


def test_prompts_go_on_until_an_engine_is_killed_or_all_is_over() -> None:
    stays, dies = FakeEngine("sglang-1"), FakeEngine("sglang-2")
    prompter = Prompter(PROMPTS, LENGTH)
    for engine in (stays, dies):
        prompter.include(engine)
    wait_until("both answered", lambda: all(prompter.made(e, 1) > 2 for e in ("sglang-1", "sglang-2")), [], 10)
    stays.version = 2
    wait_until("the new version answered", lambda: prompter.made("sglang-1", 2) > 0, [], 10)
    prompter.excuse("sglang-2")
    dies.dead.set()
    wait_until("its last request is lost", lambda: prompter.heard().lost["sglang-2"] == 1, [], 10)
    heard = prompter.end()
    assert heard.failures == []
    assert {each.prompt for each in heard.completions} == set(PROMPTS)
    assert sum(heard.lost.values()) == 1


def test_a_request_that_fails_while_its_engine_should_live_is_a_failure() -> None:
    engine, prompter = FakeEngine("sglang-1"), Prompter(PROMPTS, LENGTH)
    engine.dead.set()
    prompter.include(engine)
    wait_until("it failed", lambda: bool(prompter.heard().failures), [], 10)
    heard = prompter.end()
    assert (heard.failures, heard.lost) == (["sglang-1 did not answer"], {})


class FakeForked:
    """A forked program whose zygote answers until it is gone."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code, self.gone = pid, None, False

    def poll(self) -> int | None:
        assert not self.gone, "the zygote has ended"
        return self.code


def test_a_forked_program_counts_as_killed_when_nobody_is_left_to_ask() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        pass
    forked = FakeForked(process.pid)
    program = ForkedProcess(cast(Any, forked))
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.0)
    forked.code = 3
    assert (program.poll(), program.wait(1.0)) == (3, 3)
    forked.gone = True
    assert program.poll() == -signal.SIGKILL
    forked.pid = os.getpid()
    assert program.poll() is None
