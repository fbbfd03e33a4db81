"""What the server knows of where a worker runs."""

from __future__ import annotations

from tests.sim.hub import Hub


def test_every_shard_says_its_own_machine_and_rail() -> None:
    hub = Hub()
    peers = [hub.hello("big", k, 2, zone="east", host=f"node-{k}", rail=f"mlx5_{k}") for k in range(2)]
    workers = [hub.state.workers[hub.state.sessions[p.session]] for p in peers]
    assert [(w.host, w.rail) for w in workers] == [("node-0", "mlx5_0"), ("node-1", "mlx5_1")]


def test_a_worker_that_says_nothing_has_no_place() -> None:
    hub = Hub()
    peer = hub.hello("somewhere")
    worker = hub.state.workers[hub.state.sessions[peer.session]]
    assert (worker.host, worker.rail) == ("", "")
