"""Talk to a vLLM engine over HTTP: completions, and which version of the weights it serves."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demo.processes import DemoError

SERVED_NAME = "policy"
_QUICK_S = 10.0


@dataclass(frozen=True)
class Request:
    """What to ask: a chat, how many answers, how to draw them. `temperature` 0 takes the likeliest token each time."""

    instruction: str
    prompt: str
    max_tokens: int
    count: int = 1
    temperature: float = 0.0
    seed: int = 0

    def messages(self) -> list[dict[str, str]]:
        """Return the chat's messages."""
        return [{"role": "system", "content": self.instruction}, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Answer:
    """One completion and the versions the engine reported `before` and `after` it was made.

    `logprobs` are the log-probabilities of the tokens in `answer_ids`, one each.
    """

    engine: str
    prompt: str
    text: str
    finished: bool
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    before: int
    after: int


@dataclass(frozen=True)
class Report:
    """What an engine says about its weights: `GET /tensorhub/version`.

    `sources` are the replicas its shards were filled from, `drain_s`, `transfer_s`, `process_s` the parts of the time
    in which it did not answer during its last swap; `stage_s` is how long the bytes took before that, 0.0 if they came
    in that time.
    """

    version: int | None
    state: str
    error: str
    sources: tuple[str, ...]
    total_bytes: int
    drain_s: float
    transfer_s: float
    process_s: float
    total_s: float
    stage_s: float = 0.0


@dataclass(frozen=True)
class FirstFill:
    """Where an engine's first weights came from."""

    version: int
    source: str
    total_bytes: int


@dataclass(frozen=True)
class Completion:
    """How an engine goes on after some token ids: text, token ids and the log-probability of each."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


_ALWAYS = {"model": SERVED_NAME, "return_token_ids": True}
_FIRST_FILL = re.compile(r"shard 0 of 1 of '(?P<replica>[^']+)' serves version (\d+) from (\S+) \((\d+) bytes")


def read_first_fill(log: str, replica: str) -> FirstFill | None:
    """Find in an engine's log what it started with; None if it has not got so far.

    Its HTTP side cannot tell for certain: it comes up later, and may have followed the trainer further by then.
    """
    for match in _FIRST_FILL.finditer(log):
        if match["replica"] == replica:
            return FirstFill(int(match[2]), match[3], int(match[4]))
    return None


def read_report(body: dict[str, Any]) -> Report:
    """Read the body of `/tensorhub/version`."""
    shards = body["shards"]
    swap = body.get("last_swap") or {}
    return Report(
        version=body["version"],
        state=body["state"],
        error=body.get("error") or "",
        sources=tuple(sorted({shard["source"] or "" for shard in shards})),
        total_bytes=sum(shard["total_bytes"] or 0 for shard in shards),
        drain_s=swap.get("drain_s", 0.0),
        transfer_s=swap.get("transfer_s", 0.0),
        process_s=swap.get("process_s", 0.0),
        total_s=swap.get("total_s", 0.0),
        stage_s=swap.get("stage_s", 0.0),
    )


class Engine:
    """One running engine, known to the hub as `replica`. Threads may share it."""

    def __init__(self, replica: str, port: int, *, timeout_s: float) -> None:
        self.replica = replica
        self._url = f"http://127.0.0.1:{port}"
        self._timeout_s = timeout_s
        # Without the user's proxies: the engine runs on this machine.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def look(self) -> Report | None:
        """Return what it says about its weights if it is up and serves some, else None."""
        try:
            self._get("/health")
            report = self.report()
        except (OSError, http.client.HTTPException, ValueError):
            return None
        return report if report.state == "serving" else None

    def report(self) -> Report:
        """Ask which version it serves and where that came from; raises OSError while it does not listen."""
        return read_report(json.loads(self._get("/tensorhub/version")))

    def serves(self, version: int) -> bool:
        """Tell whether it serves this version; raises DemoError if it failed."""
        report = self.report()
        if report.state == "failed":
            raise DemoError(f"{self.replica} failed: {report.error}")
        return report.state == "serving" and report.version == version

    def ask(self, request: Request) -> list[Answer]:
        """Get completions, and the version before and after; raises DemoError on any other answer than success."""
        before = self._version()
        body = {
            "model": SERVED_NAME,
            "messages": request.messages(),
            "n": request.count,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": True,
            "return_token_ids": True,
        }
        reply = self._post("/v1/chat/completions", body)
        after = self._version()
        prompt_ids = tuple(reply["prompt_token_ids"])
        return [
            Answer(
                engine=self.replica,
                prompt=request.prompt,
                text=choice["message"]["content"] or "",
                finished=choice["finish_reason"] == "stop",
                prompt_ids=prompt_ids,
                answer_ids=tuple(choice["token_ids"]),
                logprobs=tuple(place["logprob"] for place in choice["logprobs"]["content"]),
                before=before,
                after=after,
            )
            for choice in reply["choices"]
        ]

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Get the likeliest continuation of token ids; raises DemoError on any other answer than success."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
        (choice,) = self._post("/v1/completions", {**_ALWAYS, **body})["choices"]
        logprobs = tuple(choice["logprobs"]["token_logprobs"])
        return Completion(choice["text"], tuple(choice["token_ids"]), logprobs)

    def judge(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return for each text, as token ids, the log-probability of each of its tokens after the first."""
        body = {"prompt": [list(text) for text in texts], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choices = self._post("/v1/completions", {**_ALWAYS, **body})["choices"]
        return [
            [place[str(token)]["logprob"] for place, token in zip(choice["prompt_logprobs"][1:], text[1:], strict=True)]
            for choice, text in zip(sorted(choices, key=lambda choice: choice["index"]), texts, strict=True)
        ]

    def _version(self) -> int:
        version = self.report().version
        if version is None:
            raise DemoError(f"{self.replica} answers requests, but says that it serves no version")
        return version

    def _get(self, path: str) -> bytes:
        with self._open(self._url + path, timeout=_QUICK_S) as reply:
            content: bytes = reply.read()
            return content

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with self._open(request, timeout=self._timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise DemoError(f"{self.replica} refused {path} with {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"{self.replica} did not answer {path}: {error}") from None
