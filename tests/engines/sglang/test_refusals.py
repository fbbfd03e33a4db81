"""What cannot be served as asked ends the start, and says why: no engine serves weights that nobody manages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorhub_core import serve

from ..models import Checkpoints, training
from .server import FLOAT32, Served, Servers, ending

pytestmark = pytest.mark.timeout(300)
KIND = "tied-float32"


@dataclass(frozen=True)
class Refusal:
    """A start that is refused: how it differs from one that works, and what it says."""

    said: tuple[str, ...]
    options: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    model: str = "other"
    """The name of the stream of versions that it asks for."""


REFUSALS = {
    "the plug-in is not loaded": Refusal(
        ("unrecognized arguments: --weight-source",), environment={"SGLANG_PLUGINS": "another"}
    ),
    "an unknown key": Refusal(("unknown key 'servr'", "Did you mean 'server'?"), config={"servr": "x"}),
    "an impossible value": Refusal(("mode must be one of wait, keep, abort",), config={"mode": "drain"}),
    "another load format": Refusal(("contradicts weight_source",), options=("--load-format", "dummy")),
    "options that do not work": Refusal(
        ("does not work with:", "--cpu-offload-gb 1", "--enable-streaming-session True"),
        options=("--cpu-offload-gb", "1", "--enable-streaming-session"),
    ),
    "no version": Refusal(("no version of model 'other'", "within 1 s"), config={"timeout_s": 1}),
    "a version of another model": Refusal(("self_attn.q_norm",), model="policy"),
}


@pytest.fixture(scope="module")
def refused(servers: Servers, checkpoints: Checkpoints) -> Iterator[dict[str, Served]]:
    """Start them all at once, beside a trainer that holds another architecture."""
    bare = checkpoints.bare(KIND)
    with (
        serve("tcp://127.0.0.1:0", lease_s=10.0, heartbeat_s=1.0) as hub,
        training(hub.address, checkpoints("float32", 1)),
    ):
        started = {}
        for name, refusal in REFUSALS.items():
            config = {"server": hub.address, "model": refusal.model, "timeout_s": 60, **refusal.config}
            options = (*FLOAT32, *refusal.options)
            started[name] = servers.start(bare, *options, config=config, environment=refusal.environment)
        with ending(*started.values()):
            yield started


@pytest.mark.parametrize("name", REFUSALS)
def test_a_start_that_cannot_be_served_as_asked_ends_and_says_why(name: str, refused: dict[str, Served]) -> None:
    server = refused[name]
    assert server.ended(120) != 0
    for text in REFUSALS[name].said:
        assert text in server.text(), server.text()[-6000:]
