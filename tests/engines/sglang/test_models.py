"""Every kind of model that SGLang loads in its own way: its memory is what loading from disk would leave there."""

from __future__ import annotations

import pytest

from tensorhub_core import Server

from ..models import Checkpoints, training
from .server import FLOAT32, Servers

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("kind", "options", "derived"),
    [
        pytest.param("dense-untied", (), (), id="llama"),
        pytest.param("moe-float32", FLOAT32, ("w13_weight", "w2_weight"), id="qwen3-moe"),
        pytest.param("mla-yarn", (), ("w_kc", "w_vc"), id="mla"),
    ],
)
def test_first_fill_and_swap_leave_what_a_fresh_engine_holds(
    kind: str,
    options: tuple[str, ...],
    derived: tuple[str, ...],
    servers: Servers,
    checkpoints: Checkpoints,
    hub: Server,
) -> None:
    computes = kind != "mla-yarn"  # what the kernels would compute with is there, the kernels are not
    fresh = [servers.fresh(checkpoints(kind, seed), *options, ask=computes) for seed in (1, 2)]
    for name in derived:
        held = [{key: text for key, text in each.memory[0].items() if key.endswith(f".{name}")} for each in fresh]
        assert held[0], f"this SGLang keeps no {name}"
        assert all(held[0][key] != held[1][key] for key in held[0]), "the test needs tensors that differ"
    config = {"server": hub.address, "follow": False, "timeout_s": 60}
    with (
        training(hub.address, checkpoints(kind, 1)) as trainer,
        servers.running(checkpoints.bare(kind), *options, config=config) as server,
    ):
        assert server.memory() == fresh[0].memory[0]
        assert not computes or server.answers() == fresh[0].answers
        trainer.publish(checkpoints(kind, 2), 2)
        reply = server.update(version=2)
        assert reply.status_code == 200, reply.text
        assert server.memory() == fresh[1].memory[0]
        assert not computes or server.answers() == fresh[1].answers != fresh[0].answers
