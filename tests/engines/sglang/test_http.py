"""What a real server answers: refusals with their reasons, callers that pause it, faults, sleep, and its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tensorhub_core import connect

from ..mirror import mirroring
from ..models import Checkpoints, Trainer
from .server import LONG, Served, Servers, stream
from .world import MANY, World, spans, until, world

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def both(servers: Servers, checkpoints: Checkpoints) -> Iterator[World]:
    """Start a server that is told, and one that follows."""
    with world(servers, checkpoints, ranks=(1, 2), timeout_s=DEADLINE_S) as found:
        yield found


def serving(server: Served) -> tuple[str, Any]:
    """Return the state and the version that a server says."""
    body = server.version()
    return body["state"], body["version"]


def rank_of(server: Served) -> psutil.Process:
    """Return the process of a server's only rank."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "scheduler" in " ".join(child.cmdline()) or "scheduler" in child.name())


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_had_or_does_not_fit_is_refused_and_nothing_stops(both: World) -> None:
    served, expected = serving(both.told), both.told.answers()
    assert both.told.update(version=9999).status_code == 404
    assert both.told.update(version="newest").status_code == 400
    assert both.told.update(mode="retract").status_code == 400
    assert both.told.update(versio=1).status_code == 400
    assert httpx.post(f"{both.told.url}/tensorhub/update", content=b"{", timeout=20).status_code == 400
    for body, status in (({"version": 9999}, 404), ({"mode": "keep"}, 400), ({"weight_version": "1"}, 400)):
        reply = both.told.post("/update_weights_from_tensorhub", **body)
        assert (reply.status_code, reply.json()["success"]) == (status, False)
        assert set(reply.json()) == {"success", "message"}
    with connect(both.hub.address, model="policy", replica="other") as worker:
        both.newest += 1
        Trainer(worker, both.checkpoints("float32", 1), both.newest)
        reply = both.told.update(version=both.newest)
        assert reply.status_code == 409
        assert "q_norm" in reply.json()["error"]
    assert serving(both.told) == served
    assert both.told.answers() == expected


def test_sglangs_own_updates_are_refused_and_change_nothing(both: World) -> None:
    expected = both.told.answers()
    path = str(both.checkpoints("tied-float32", 2))
    for route, body in (
        ("update_weights_from_disk", {"model_path": path}),
        ("begin_weight_update", {}),
        ("end_weight_update", {}),
        ("update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("update_weight_version", {"new_version": "99"}),
        ("weights_checker", {"action": "reset_tensors"}),
    ):
        reply = both.told.post(f"/{route}", **body)
        assert reply.status_code == 400, (route, reply.text)
        assert reply.json()["success"] is False
        assert "publish a version there" in reply.json()["message"], route
    assert both.told.answers() == expected
    assert both.told.generate(LONG, 2)["meta_info"]["weight_version"] == str(both.told.version()["version"])


def test_an_update_between_a_callers_pause_and_its_end(both: World) -> None:
    """As RL frameworks do it with SGLang's own updates: the engine stays paused until it is told to go on."""
    old = int(both.told.version()["version"])
    running = stream(both.told, LONG, MANY)
    running.started(8)
    assert both.told.post("/pause_generation", mode="retract").status_code == 200
    version = both.publish(3 - both.seed)
    reply = both.told.post("/update_weights_from_tensorhub", version=version)
    both.seed = 3 - both.seed
    assert reply.status_code == 200, reply.text
    cut = len(running.tokens)
    time.sleep(0.5)
    assert len(running.tokens) == cut, "nothing runs before the caller lets it"
    assert both.told.post("/continue_generation").status_code == 200
    running.join()
    assert [span[0] for span in spans(running.versions)] == [old, version]
    assert both.told.answers() == both.fresh(both.seed)


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_swap_that_breaks_serves_nothing_until_it_is_healed(both: World) -> None:
    both.tell(1)
    with mirroring(both.hub.address, both.told.version()["replica"]) as mirror:
        both.newest += 1
        mirror.publish(both.newest, broken=0)
        reply = both.told.update(version=both.newest)
        assert reply.status_code in (404, 502), reply.text
        body = both.told.version()
        assert (body["state"], body["version"]) == ("paused", None)
        assert body["error"]
        waiting = stream(both.told, LONG, 12)
        reply = both.told.post("/continue_generation")
        assert reply.status_code == 409, "nobody lets it run with that in its memory"
        assert reply.json()["success"] is False
        time.sleep(0.5)
        assert waiting.tokens == [], "a paused engine answers nothing"
    version = both.publish(2)
    reply = both.told.update(version="latest")
    both.seed = 2
    assert (reply.status_code, reply.json()["version"], reply.json()["state"]) == (200, version, "serving")
    waiting.join()
    assert waiting.tokens == both.fresh(2)[2], "it was not lost, nor mixed"
    assert spans(waiting.versions) == [(version, 0, 12)]


def test_the_follower_heals_by_itself_when_a_source_appears(both: World) -> None:
    replica = both.follower.wait(both.newest)["replica"]
    with mirroring(both.hub.address, replica) as mirror:
        both.newest += 1
        mirror.publish(both.newest, broken=1)
        body = until(lambda: (found := both.follower.version())["state"] == "paused" and found)
        assert body["version"] is None
        assert body["shards"][1]["version"] is None
        assert body["shards"][0]["version"] != both.newest, "rank 0 could read it, and must not have gone on alone"
    version = both.publish(2)
    body = both.follower.wait(version)
    assert body["error"] is None
    assert both.follower.answers() == both.fresh(2)


def test_two_swaps_at_once_and_a_client_that_hangs_up(both: World) -> None:
    seed = 3 - both.seed
    version = both.publish(seed)
    running = stream(both.told, LONG, MANY)
    running.started(8)
    with pytest.raises(httpx.ReadTimeout):  # it has to wait for the request, and its client does not
        httpx.post(f"{both.told.url}/tensorhub/update", json={"version": version, "mode": "wait"}, timeout=0.05)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda mode: both.told.update(version="latest", mode=mode), ("keep", "abort")))
    both.seed = seed
    assert [reply.status_code for reply in replies] == [200, 200]
    running.join()
    assert running.finish == "length", "the first one's mode counts: the others came to what was there already"
    assert both.told.version()["last_swap"]["mode"] == "wait"
    assert both.told.answers() == both.fresh(seed)


def test_a_rank_that_hangs_is_a_missed_deadline_and_no_more(both: World) -> None:
    version = both.publish(3 - both.seed)
    rank = rank_of(both.told)
    rank.suspend()
    try:
        began = time.monotonic()
        reply = both.told.update(version=version)
        assert (reply.status_code, reply.json()["error"] is not None) == (504, True)
        assert time.monotonic() - began < 6 * DEADLINE_S
    finally:
        rank.resume()
    reply = both.told.update(version=version)
    both.seed = 3 - both.seed
    assert (reply.status_code, serving(both.told)) == (200, ("serving", version)), reply.text
    assert both.told.answers() == both.fresh(both.seed), "what was asked too late was not carried out after it"


def test_requests_that_do_not_end_in_time_are_not_touched(both: World) -> None:
    before, rank = serving(both.told), rank_of(both.told)
    running = stream(both.told, LONG, MANY)
    running.started(1)
    rank.suspend()
    resumed = threading.Timer(DEADLINE_S + 2.0, rank.resume)
    resumed.start()
    both.publish(both.seed)
    reply = both.told.update(version="latest", mode="wait")
    resumed.join()
    assert reply.status_code == 504, reply.text
    assert serving(both.told) == before
    running.join()
    assert (running.finish, len(running.tokens)) == ("length", MANY)
    assert spans(running.versions) == [(before[1], 0, MANY)]
    assert both.told.update(version="latest").status_code == 200


# --- sleep ----------------------------------------------------------------------------------------------------------


def holders(both: World) -> set[str]:
    """Return which replicas hold a version."""
    return {row for info in both.trainer.worker.versions() for row in info.replicas}


def test_an_engine_that_sleeps_has_left_nobody_to_read_from_it(both: World) -> None:
    name = both.told.version()["replica"]
    assert name in holders(both)
    running = stream(both.told, LONG, MANY)
    running.started(8)
    assert both.told.post("/release_memory_occupation").status_code == 200
    running.join()
    assert running.finish == "abort"
    assert name not in holders(both)
    assert serving(both.told) == ("paused", None)
    assert both.told.update(version="latest").status_code == 409
    assert both.told.post("/continue_generation").status_code == 409
    waiting = stream(both.told, LONG, 12)
    version = both.publish(3 - both.seed)
    both.seed = 3 - both.seed
    assert both.told.post("/resume_memory_occupation", tags=["weights"]).status_code == 200
    assert serving(both.told) == ("serving", version)
    time.sleep(0.3)
    assert waiting.tokens == [], "its cache is still released"
    assert both.told.post("/resume_memory_occupation", tags=["weights"]).status_code == 400, (
        "there is nothing to resume"
    )
    assert both.told.post("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"]).status_code == 200
    waiting.join()
    assert waiting.tokens == both.fresh(both.seed)[2]
    assert spans(waiting.versions) == [(version, 0, 12)]
    assert name in holders(both)


# --- the end --------------------------------------------------------------------------------------------------------


def test_an_engine_that_ends_leaves_the_hub_before(both: World) -> None:
    """It ends the server. The hub's lease is far longer than what is waited here."""
    name = both.told.version()["replica"]
    assert name in holders(both)
    os.kill(both.told.process.pid, signal.SIGTERM)
    until(lambda: name not in holders(both), 30)
    assert both.told.ended(150) == 0


def test_a_paused_engine_ends_too_with_requests_that_it_holds(both: World) -> None:
    """Last: it ends the other server."""
    replica = both.follower.wait(both.newest)["replica"]
    with mirroring(both.hub.address, replica) as mirror:
        both.newest += 1
        mirror.publish(both.newest, broken=1)
        until(lambda: both.follower.version()["state"] == "paused")
    held = stream(both.follower, LONG, 12)
    time.sleep(0.3)
    os.kill(both.follower.process.pid, signal.SIGTERM)
    assert both.follower.ended(150) == 0
    held.thread.join(30)
    assert held.tokens == []
