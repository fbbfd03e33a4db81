"""Run the trainer's ranks: `python -m demo.megatron.trainer SPEC`, with the Megatron environment's Python.

Reads commands from stdin, one a line: `step` trains one, `save FOLDER` writes every rank's parameters there; at the
end of the input the ranks leave. After its start and after each command it prints one line, `report ` and JSON.

There is no GPU: a shim of the tests sends Megatron to the CPU. With one, this would be `torchrun` and no shim.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PATIENCE_S = 120.0
_END_S = 20.0


def main(file: str) -> None:
    """Start the ranks and pass commands on to them; a rank that fails ends the program."""
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    from demo.megatron.training import WORLD, Spec
    from tests.engines.megatron import preload  # once, before the ranks are forked: it takes seconds

    assert preload
    spec = Spec(**json.loads(Path(file).read_text(encoding="utf-8")))
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(WORLD)]
    ranks = [
        context.Process(target=_rank, args=(rank, spec, f"file://{file}.meeting", pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    ours = [pipe for pipe, _ in pipes]
    _say(ours, ranks)
    for line in sys.stdin:
        for pipe in ours:
            pipe.send(line.split())
        _say(ours, ranks)
    for pipe in ours:
        pipe.send([])
    deadline_s = time.monotonic() + _END_S
    for rank in ranks:
        rank.join(max(0.0, deadline_s - time.monotonic()))


def _say(pipes: Sequence[Connection], ranks: Sequence[Any]) -> None:
    """Print what the ranks answer, as one line."""
    deadline_s = time.monotonic() + _PATIENCE_S
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waiting = [number for number in range(len(pipes)) if number not in found]
        events = [each for number in waiting for each in (pipes[number], ranks[number].sentinel)]
        ready = multiprocessing.connection.wait(events, max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise SystemExit(f"ranks {waiting} did not answer in {_PATIENCE_S:.0f} s")
        for number in waiting:
            if pipes[number] in ready:
                found[number] = pipes[number].recv()
            elif ranks[number].sentinel in ready:
                raise SystemExit(f"rank {number} has ended, see above")
    print("report", json.dumps([found[number] for number in sorted(found)]), flush=True)


def _rank(rank: int, spec: Any, meeting: str, pipe: Connection) -> None:
    """Be one rank: do what the pipe says, until it says nothing."""
    code = 1
    try:
        _follow_commands(rank, spec, meeting, pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _follow_commands(rank: int, spec: Any, meeting: str, pipe: Connection) -> None:
    import torch.distributed as dist

    from demo.megatron.training import WORLD, Training

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    training, took_s = Training(spec), 0.0
    while True:
        pipe.send({**training.report(), "took_s": took_s})
        command = pipe.recv()
        if not command:
            break
        if command[0] == "step":
            took_s = training.step()
        elif command[0] == "save":
            training.save(Path(command[1]) / f"rank-{rank}.safetensors")
        else:
            raise ValueError(f"unknown command {command}")
    training.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
