from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from demo.engines import Completion, Engine, FirstFill, Request, read_first_fill, read_report
from demo.processes import DemoError

VERSION = {
    "version": 7,
    "epoch": 1,
    "model": "policy",
    "replica": "rollout-1",
    "state": "serving",
    "error": None,
    "shards": [
        {"shard": 0, "version": 7, "source": "trainer", "digest": "aa", "total_bytes": 100},
        {"shard": 1, "version": 7, "source": "trainer", "digest": "bb", "total_bytes": 50},
    ],
    "last_swap": {"mode": "wait", "drain_s": 0.1, "transfer_s": 0.2, "process_s": 0.3, "total_s": 0.6},
}


class Fake:
    """An engine's HTTP side: answers `/tensorhub/version` with the next of `versions`, the last one for ever."""

    def __init__(self, versions: list[dict[str, Any]]) -> None:
        self.versions = versions
        self.code = 200
        self.requests: list[dict[str, Any]] = []

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/health":
            return 200, {}
        return 200, self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    def post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        choices = [
            {
                "message": {"content": f"answer {n}"},
                "finish_reason": "stop" if n % 2 == 0 else "length",
                "token_ids": [n, 2],
                "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            }
            for n in range(body["n"])
        ]
        return self.code, {"prompt_token_ids": [1, 2, 3], "choices": choices}


@contextlib.contextmanager
def served(fake: Fake) -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*fake.get(self.path))

        def do_POST(self) -> None:
            self._send(*fake.post(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, code: int, body: dict[str, Any]) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Engine("rollout-1", server.server_port, timeout_s=10)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


QUESTION = Request("Be brief.", "Why?", 16, count=3, temperature=0.7, seed=5)


def test_read_report() -> None:
    report = read_report(VERSION)
    assert (report.version, report.state, report.sources, report.total_bytes) == (7, "serving", ("trainer",), 150)
    assert (report.drain_s, report.transfer_s, report.process_s, report.total_s) == (0.1, 0.2, 0.3, 0.6)
    assert report.stage_s == 0.0
    staged = read_report({**VERSION, "last_swap": {"mode": "wait", "total_s": 0.6, "stage_s": 0.4}})
    assert staged.stage_s == 0.4


def test_read_the_report_of_a_first_fill() -> None:
    report = read_report({**VERSION, "last_swap": None})
    assert report.total_s == 0.0


def test_answers_carry_the_version_before_and_after() -> None:
    fake = Fake([{**VERSION, "version": 7}, {**VERSION, "version": 8}])
    with served(fake) as engine:
        answers = engine.ask(QUESTION)
    assert [(a.before, a.after, a.engine, a.prompt) for a in answers] == [(7, 8, "rollout-1", "Why?")] * 3
    assert [(a.text, a.finished, a.answer_ids) for a in answers] == [
        ("answer 0", True, (0, 2)),
        ("answer 1", False, (1, 2)),
        ("answer 2", True, (2, 2)),
    ]
    assert answers[0].prompt_ids == (1, 2, 3)
    assert answers[0].logprobs == (-0.5, -0.25)
    (body,) = fake.requests
    assert (body["n"], body["seed"], body["temperature"], body["max_tokens"]) == (3, 5, 0.7, 16)
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "Why?"]


def test_an_engine_without_a_version_is_not_believed() -> None:
    with served(Fake([{**VERSION, "version": None}])) as engine, pytest.raises(DemoError, match="no version"):
        engine.ask(QUESTION)


def test_a_refusal_is_an_error() -> None:
    fake = Fake([VERSION])
    fake.code = 503
    with served(fake) as engine, pytest.raises(DemoError, match="503"):
        engine.ask(QUESTION)


def test_serves() -> None:
    swapping, failed = {**VERSION, "state": "swapping"}, {**VERSION, "state": "failed", "error": "source died"}
    with served(Fake([VERSION, VERSION, swapping, failed])) as engine:
        assert engine.serves(7)
        assert not engine.serves(8)
        assert not engine.serves(7), "while it swaps it serves nothing"
        with pytest.raises(DemoError, match="source died"):
            engine.serves(7)


def test_look() -> None:
    with served(Fake([{**VERSION, "state": "swapping"}, VERSION])) as engine:
        assert engine.look() is None
        assert engine.look() == read_report(VERSION)
    assert engine.look() is None, "nobody listens any more"
    with pytest.raises(DemoError, match="did not answer"):
        engine._post("/v1/chat/completions", {})


LOG = """(APIServer pid=1) INFO 11-29 18:21:40 [api_utils.py:286] non-default args: {'replica': 'rollout-2'}
(Worker pid=2) INFO 11-29 18:21:51 [loader.py:167] shard 0 of 1 of 'rollout-2' serves version 7 from rollout-1 \
(269030016 bytes, digest 46e9eed33e126af4c97c3454837b57a1)
(APIServer pid=1) INFO 11-29 18:22:00 [http.py:91] swapped to version 8 from trainer (drain 0.024 s, total 0.432 s)
"""


def test_an_engine_says_in_its_log_what_it_started_with() -> None:
    assert read_first_fill(LOG, "rollout-2") == FirstFill(7, "rollout-1", 269030016)
    assert read_first_fill(LOG, "rollout-1") is None
    assert read_first_fill(LOG.splitlines()[0], "rollout-2") is None


class Judge(Fake):
    """An engine's `/v1/completions`: thinks -0.5 of every token of a prompt, and -0.25 of the two that follow."""

    def post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [
            {
                "index": index,
                "text": " and so on",
                "token_ids": [8, 9],
                "logprobs": {"token_logprobs": [-0.25, -0.25]},
                "prompt_logprobs": [
                    None,
                    *({str(t): {"logprob": -t / 10}, "77": {"logprob": 0.0}} for t in prompt[1:]),
                ],
            }
            for index, prompt in enumerate(prompts)
        ]
        return self.code, {"choices": choices[::-1]}


def test_how_an_engine_goes_on_is_read() -> None:
    fake = Judge([VERSION])
    with served(fake) as engine:
        assert engine.complete([1, 2, 3], 5) == Completion(" and so on", (8, 9), (-0.25, -0.25))
    assert fake.requests[0]["temperature"] == 0
    assert (fake.requests[0]["prompt"], fake.requests[0]["max_tokens"]) == ([1, 2, 3], 5)


def test_what_an_engine_thinks_of_texts_is_read_in_their_order() -> None:
    with served(Judge([VERSION])) as engine:
        assert engine.judge([[1, 2, 3], [4, 5]]) == [[-0.2, -0.3], [-0.5]]
