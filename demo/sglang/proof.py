"""Decide whether a mixed fleet did what its demo claims. Pure: records in, checks out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from demo.engines import FirstFill, Report
from demo.proof import Check
from demo.sglang.engines import Kind, Traced

Prompt = tuple[int, ...]
Ask = tuple[Prompt, int]
"""A prompt and how many tokens are wanted."""

References = Mapping[tuple[Kind, int], Mapping[Ask, tuple[int, ...]]]
"""What fresh engines, by kind and version, answer at temperature 0."""


@dataclass(frozen=True)
class Followed:
    """What was seen of one version: the engines' reports, and how long the trainer's step waited for readers."""

    version: int
    reports: Mapping[str, Report]
    waited_s: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What is to be proved of: what was heard, and who was there from which version to which."""

    completions: Sequence[Traced]
    lost: Mapping[str, int]
    failures: Sequence[str]
    seen: Sequence[Followed]
    members: Mapping[str, range] = field(default_factory=dict)


def segments(completion: Traced) -> list[tuple[int, Ask, tuple[int, ...]]]:
    """Return for each span: its version, what that version was asked by then, and what it answered.

    A span that does not begin at the start was asked for the prompt and all tokens before it.
    """
    return [
        (
            span.version,
            (completion.prompt + completion.token_ids[: span.start], span.end - span.start),
            completion.token_ids[span.start : span.end],
        )
        for span in completion.spans
    ]


def wanted(
    completions: Sequence[Traced], prompts: Sequence[Prompt], max_tokens: int, versions: Sequence[int]
) -> dict[tuple[Kind, int], list[Ask]]:
    """Return what to ask a fresh engine of each kind and version: every span's, and every prompt to its end."""
    found: dict[tuple[Kind, int], dict[Ask, None]] = {
        (kind, version): dict.fromkeys((prompt, max_tokens) for prompt in prompts)
        for kind in sorted({each.kind for each in completions})
        for version in versions
    }
    for each in completions:
        for version, ask, _ in segments(each):
            found.setdefault((each.kind, version), {})[ask] = None
    return {key: list(asks) for key, asks in found.items()}


def versions_true(kind: Kind, completions: Sequence[Traced], references: References) -> Check:
    """Check that each completion's record is true: every token is what a fresh engine of that version says."""
    ours = [each for each in completions if each.kind == kind]
    name = {"vllm": "vLLM", "sglang": "SGLang"}[kind]
    claim = f"the version that {name} records for each token is true: a fresh {name} of that version says the same"
    for each in ours:
        wrong = _untrue(each, references)
        if wrong:
            return Check(claim, False, f"{each.engine}: {wrong}")
    by_engine = Counter(each.engine for each in ours)
    tokens, mixed = sum(len(each.token_ids) for each in ours), sum(len(each.spans) > 1 for each in ours)
    figures = (
        f"{len(ours)} completions ({', '.join(f'{count} of {who}' for who, count in sorted(by_engine.items()))}), "
        f"{tokens} tokens equal; {mixed} of them went on under a newer version half way"
    )
    return Check(claim, bool(ours), figures)


def _untrue(each: Traced, references: References) -> str:
    """Return what is wrong with a completion's record, or nothing."""
    ends = [0, *(span.end for span in each.spans)]
    if [span.start for span in each.spans] != ends[:-1] or ends[-1] != len(each.token_ids):
        return f"its record does not cover {len(each.token_ids)} tokens: {each.spans}"
    for version, ask, answer in segments(each):
        right = references.get((each.kind, version), {}).get(ask)
        if right is None:
            return f"nobody published version {version}"
        if right != answer:
            place = next(at for at, pair in enumerate(zip(right, answer, strict=False)) if pair[0] != pair[1])
            return f"token {len(ask[0]) - len(each.prompt) + place} of an answer is not version {version}'s"
    return ""


def told_apart(references: References, prompts: Sequence[Prompt], max_tokens: int, versions: Sequence[int]) -> Check:
    """Check that the proof can fail: no two versions answer all prompts alike."""
    alike = []
    kinds = sorted({kind for kind, _ in references})
    for kind in kinds:
        answers = [tuple(references[kind, version][prompt, max_tokens] for prompt in prompts) for version in versions]
        alike += [
            f"{versions[one]} and {versions[other]} of {kind}"
            for other in range(len(versions))
            for one in range(other)
            if answers[one] == answers[other]
        ]
    figures = f"alike: {alike[0]}" if alike else f"{len(versions)} versions, {len(prompts)} prompts, all told apart"
    return Check("any other version would have answered otherwise", bool(kinds) and not alike, figures)


def all_followed(run: Run) -> Check:
    """Check that every engine served and answered by each version that came while it was there."""
    claim = "each engine followed from its first version to the last one, or to its death"
    for replica, there in run.members.items():
        made = Counter(span.version for each in run.completions if each.engine == replica for span in each.spans)
        for version in there:
            report = next((each.reports.get(replica) for each in run.seen if each.version == version), None)
            if report is None or (report.version, report.state) != (version, "serving"):
                return Check(claim, False, f"{replica} was not seen serving version {version}")
            if not made[version]:
                return Check(claim, False, f"{replica} answered nothing by version {version}")
    figures = "; ".join(f"{replica} {there[0]} to {there[-1]}" for replica, there in run.members.items())
    return Check(claim, bool(run.members), figures)


def ended_on(last: int, reports: Mapping[str, Report]) -> Check:
    """Check that in the end all engines that live serve the last version."""
    wrong = [
        f"{replica}: version {each.version}, {each.state}"
        for replica, each in reports.items()
        if (each.version, each.state) != (last, "serving")
    ]
    figures = wrong[0] if wrong else f"{', '.join(reports)} serve version {last}"
    return Check("all engines that are left end on the last version", bool(reports) and not wrong, figures)


def none_lost(run: Run, killed: str) -> Check:
    """Check that requests were lost with the killed engine only."""
    others = sum(run.lost.values()) - run.lost.get(killed, 0)
    figures = (
        run.failures[0]
        if run.failures
        else (f"{len(run.completions)} answered, {run.lost.get(killed, 0)} lost with {killed}")
    )
    return Check("no request was lost but those that the killed engine had", not run.failures and not others, figures)


def filled_from_peer(fill: FirstFill | None, late: str, peers: Sequence[str]) -> Check:
    """Check that the engine that joined late got its first weights from another engine."""
    claim = f"{late} joined late and filled its memory from another engine, no weight file read"
    if fill is None:
        return Check(claim, False, "it never joined")
    figures = f"version {fill.version}, {fill.total_bytes / 1e6:.1f} MB from {fill.source}"
    return Check(claim, fill.source in peers, figures)


def went_on(seen: Sequence[Followed], versions: Sequence[int], limit_s: float) -> Check:
    """Check that the trainer published all versions, and never waited longer for readers than a dead one's lease."""
    waited = max((each.waited_s for each in seen), default=0.0)
    figures = f"{len(seen)} versions; no step waited longer than {waited:.2f} s for readers"
    return Check(
        "the trainer went on, whoever was killed or joined",
        [each.version for each in seen] == list(versions) and waited <= limit_s,
        figures,
    )
