"""What the machine decides hangs on its inputs alone, not on hashes of names, which differ from process to process."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from tensorhub_core.state.messages import Published
from tests.sim.hub import Hub
hub = Hub(retain=1, worth_waiting_bytes=0)
peers = [hub.hello(f"r{n}", shard, 2) for n in range(6) for shard in range(2)]
for peer in peers:
    peer.register(b"layout %d" % peer.shard)
for peer in peers[6:]:
    peer.join(0)
for peer in peers[:6]:
    peer.publish(1, b"sums %d" % peer.shard, Published)
peers[0].unpublish()
hub.later(1.0)
for peer in peers:
    print(peer.name, sorted(peer.answers.items()), peer.pushes)
"""


def test_decisions_do_not_hang_on_the_hashes_of_names() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in range(4)
    ]
    assert "Promise" in runs[0]
    assert runs == [runs[0]] * len(runs)
