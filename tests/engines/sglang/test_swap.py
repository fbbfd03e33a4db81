"""Two real servers whose weights change while requests run: what each mode does, and which version made which token."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ..models import Checkpoints
from .server import LONG, PROMPTS, Served, Servers, Stream, stream
from .world import MANY, QUEUED, References, World, common, references, spans, until, world

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def both(servers: Servers, checkpoints: Checkpoints) -> Iterator[World]:
    """Start a server of two ranks that is told, and one that follows and fetches versions while it serves the old."""
    with world(servers, checkpoints, ranks=(2, 1), staged=True) as found:
        yield found


@pytest.fixture(scope="module")
def known(both: World) -> References:
    """Return the answers of both sets of weights."""
    return references(both)


def test_two_engines_started_at_once_are_two_replicas(both: World) -> None:
    one, other = both.told.version(), both.follower.version()
    assert one["replica"] != other["replica"]
    for body, shards in ((one, 2), (other, 1)):
        assert (body["state"], body["version"], body["error"], body["model"]) == ("serving", 1, None, "policy")
        assert [shard["shard"] for shard in body["shards"]] == list(range(shards))
        assert all(shard["digest"] and shard["version"] == 1 for shard in body["shards"])
        assert body["last_swap"] is None
    holders = {row for info in both.trainer.worker.versions() for row in info.replicas}
    assert holders == {"trainer", one["replica"], other["replica"]}
    for server in (both.told, both.follower):
        assert server.answers() == both.fresh(1)
        assert server.generate(LONG, 4)["meta_info"]["weight_version"] == "1"


def test_the_follower_swaps_by_itself(both: World) -> None:
    version = both.publish(2)
    body = both.follower.wait(version)
    assert [shard["source"] for shard in body["shards"]] == ["trainer"]
    assert set(body["last_swap"]) == {"mode", "drain_s", "transfer_s", "process_s", "total_s", "stage_s"}
    assert both.follower.answers() == both.fresh(2) != both.fresh(1)
    meta = both.follower.generate(LONG, 4)["meta_info"]
    assert (meta["weight_version"], spans(meta["weight_versions"])) == (str(version), [(version, 0, 4)])
    assert both.told.version()["version"] == 1, "the other one was not told"


def test_an_update_answers_with_proof_and_a_second_one_changes_nothing(both: World) -> None:
    reply = both.told.update(version="latest", mode="wait")
    body = reply.json()
    assert (reply.status_code, body["version"], body["state"]) == (200, both.newest, "serving")
    assert [len(shard["digest"]) for shard in body["shards"]] == [32, 32]
    assert len({shard["digest"] for shard in body["shards"]}) == 2
    assert {shard["version"] for shard in body["shards"]} == {both.newest}
    assert both.told.answers() == both.fresh(2)
    again = both.told.update(version=both.newest, mode="abort")
    assert (again.status_code, again.json()["last_swap"]) == (200, body["last_swap"]), "nothing was stopped for it"


@dataclass
class Flight:
    """A swap under a running request and one that came during it."""

    running: Stream
    queued: Stream
    held: bool
    """The second one came when the first was being waited for."""
    body: dict[str, Any]
    old: tuple[int, int]
    new: tuple[int, int]
    """Versions before and after, and whose weights they are."""

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return which version made which tokens of the running request."""
        return spans(self.running.versions)


def swap_in_flight(both: World, mode: str) -> Flight:
    """Swap to the other weights while a request runs; tries again if the request ended too early for that."""
    for _ in range(8):
        old, seed = (int(both.told.version()["version"]), both.seed), 3 - both.seed
        version = both.publish(seed)
        running = stream(both.told, LONG, MANY)
        running.started(8)
        replies: list[Any] = []
        asking = threading.Thread(
            target=lambda replies=replies, version=version: replies.append(both.told.update(version=version, mode=mode))
        )
        asking.start()
        until(lambda asking=asking: both.told.version()["state"] == "swapping" or not asking.is_alive())
        held = asking.is_alive()
        queued = stream(both.told, QUEUED, 16)
        asking.join()
        both.seed = seed
        assert replies[0].status_code == 200, replies[0].text
        running.join()
        queued.join()
        flight = Flight(running, queued, held, replies[0].json(), old, (version, seed))
        whole = running.finish == "length" and [span[0] for span in flight.spans] == [old[0]]
        if not whole or (mode == "wait" and flight.body["last_swap"]["drain_s"] > 0.1):
            return flight
    raise AssertionError("the request was never in flight during the swap")


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_in_flight(both: World, known: References, mode: str) -> None:
    flight = swap_in_flight(both, mode)
    running, (old_version, old_seed), (new_version, new_seed) = flight.running, flight.old, flight.new
    old = known.tokens[old_seed]
    assert flight.body["version"] == new_version
    assert flight.body["last_swap"]["mode"] == mode
    if mode == "wait":
        assert (running.tokens, running.finish) == (old, "length"), "it ran to its end on the old weights"
        assert flight.spans == [(old_version, 0, MANY)]
    elif mode == "keep":
        assert (len(running.tokens), running.finish) == (MANY, "length"), "it went on after the swap"
        assert [version for version, _, _ in flight.spans] == [old_version, new_version]
        cut = flight.spans[1][1]
        assert 0 < cut < MANY
        assert running.tokens[:cut] == old[:cut], "up to the swap it is the old weights' answer"
        rest = both.told.generate([*LONG, *running.tokens[:cut]], MANY - cut)["output_ids"]
        assert common(running.tokens[cut:], rest) >= min(8, MANY - cut), "from there it is the new weights' answer"
    else:
        assert running.finish == "abort"
        assert len(running.tokens) < MANY
        assert running.tokens == old[: len(running.tokens)]
        assert [version for version, _, _ in flight.spans] == [old_version]
    versions = spans(flight.queued.versions)
    assert len(versions) == 1
    if mode == "wait" and flight.held:
        assert versions[0][0] == new_version, "what comes while the old requests end waits for the new weights"
    seed = new_seed if versions[0][0] == new_version else old_seed
    if flight.queued.finish != "abort":
        assert flight.queued.tokens == known.queued[seed]


def test_in_place_is_had_only_while_nothing_runs(both: World, known: References) -> None:
    before, seed = int(both.told.version()["version"]), both.seed
    version = both.publish(3 - seed)
    running = stream(both.told, LONG, MANY)
    running.started(8)
    reply = both.told.post("/update_weights_from_tensorhub", version=version, mode="in_place")
    running.join()
    assert (reply.status_code, reply.json()["success"]) == (409, False)
    assert "in_place" in reply.json()["message"]
    assert (running.tokens, running.finish) == (known.tokens[seed], "length"), "it was not touched"
    assert spans(running.versions) == [(before, 0, MANY)]
    body = both.told.version()
    assert (body["state"], body["version"]) == ("serving", before)
    reply = both.told.post("/update_weights_from_tensorhub", version=version, mode="in_place")
    both.seed = 3 - seed
    assert (reply.status_code, reply.json()["success"]) == (200, True), reply.text
    assert both.told.answers() == both.fresh(both.seed)


class Load:
    """Clients that ask one server the same without a pause, and keep every answer."""

    def __init__(self, server: Served, clients: int = 2, tokens: int = 12) -> None:
        self.completions: list[dict[str, Any]] = []
        self._server, self._tokens = server, tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(k,), daemon=True) for k in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request never came back"

    def _ask(self, client: int) -> None:
        number = client
        while not self._stop.is_set():
            number += 1
            prompt = number % len(PROMPTS)
            found = self._server.generate(PROMPTS[prompt], self._tokens)
            self.completions.append({**found, "prompt": prompt})


@pytest.mark.parametrize("mode", ["wait", "retract", "abort"])
def test_under_load_every_completion_names_the_version_that_made_it(both: World, mode: str) -> None:
    fresh = {seed: both.fresh(seed) for seed in (1, 2)}
    with Load(both.told) as told, Load(both.follower) as followed:
        for _ in range(3):
            time.sleep(0.2)
            version = both.publish(3 - both.seed)
            reply = both.told.post("/update_weights_from_tensorhub", version=version, mode=mode)
            assert (reply.status_code, reply.json()["success"]) == (200, True), reply.text
            both.seed = 3 - both.seed
            both.follower.wait(version)
        time.sleep(0.2)
    for load in (told, followed):
        judge(load, both, fresh)


def test_requests_whose_grammar_is_being_compiled_do_not_keep_the_engine_stopped(both: World) -> None:
    """A paused scheduler does not look at them any more, and does not flush its cache while there are any."""
    stop, ends, number = threading.Event(), [], itertools.count()

    def ask() -> None:
        while not stop.is_set():
            regex = f"[a-z]{{1,{next(number) + 3}}}"  # a new one each time, or it would be in a cache
            found = both.told.post(
                "/generate",
                input_ids=PROMPTS[0],
                sampling_params={"max_new_tokens": 8, "temperature": 0, "regex": regex},
            )
            ends.append((found.status_code, found.text))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for mode in ("keep", "abort", "wait", "keep", "abort", "wait"):
        time.sleep(0.1)
        version = both.publish(3 - both.seed)
        reply = both.told.update(version=version, mode=mode)
        assert reply.status_code == 200, reply.text
        both.seed = 3 - both.seed
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a request never came back"
    assert {status for status, _ in ends} <= {200, 400}
    assert all("Aborted" in text for status, text in ends if status == 400), "as SGLang answers whom it aborts there"
    assert both.told.answers() == both.fresh(both.seed)


def judge(load: Load, both: World, fresh: dict[int, Any]) -> None:
    """Compare every completion with what a fresh engine on the version that it names answers."""
    served = set()
    for completion in load.completions:
        meta, tokens = completion["meta_info"], completion["output_ids"]
        made = spans(meta["weight_versions"])
        assert str(made[-1][0]) == meta["weight_version"]
        assert [made[0][1], made[-1][2]] == [0, len(tokens)]
        version, start, end = made[0]
        assert start == 0
        reference = fresh[both.seeds[version]][completion["prompt"]]
        assert tokens[:end] == reference[:end], (made, completion["prompt"])
        served |= {span[0] for span in made}
    assert len(served) >= 3, "requests came between the swaps"


def test_the_memory_is_what_a_fresh_engine_has(both: World) -> None:
    version = both.tell(2)
    both.follower.wait(version)
    for server, ranks in ((both.told, 2), (both.follower, 1)):
        stock = both.servers.fresh(both.checkpoints("tied-float32", 2), "--dtype", "float32", ranks=ranks)
        assert server.answers() == stock.answers
        for rank in range(ranks):
            assert server.memory(rank) == stock.memory[rank]


def test_the_log_is_readable(both: World) -> None:
    for server in (both.told, both.follower):
        text = server.text()
        assert "swapped to version" in text
        assert not [part for part in text.split("Traceback")[1:] if "tensorhub_" in part.split("\n[20")[0]]
    assert until(lambda: "serves version 1 from" in both.follower.text())
