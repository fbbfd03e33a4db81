"""A vLLM engine for tests of other engines: `python -m tests.engines.vllm.peer MODEL ADDRESS REPLICA`.

It fills from the hub, in float32, says `serving VERSION`, and ends when its standard input does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .engines import following


def main(model: Path, address: str, replica: str) -> None:
    """Serve weights to others until standard input ends."""
    with following(model, address, engine={"dtype": "float32"}, replica=replica) as (_, engine):
        print(f"serving {engine.status.version}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
