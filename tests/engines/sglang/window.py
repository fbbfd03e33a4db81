"""Look into the memory of a running engine: each rank tells the digests of its model's tensors over a socket."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

_TIMEOUT_S = 30.0


def look(folder: Path, rank: int = 0) -> dict[str, str]:
    """Return by name what every tensor of a rank's model is: dtype, shape, digest of the bytes."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(_TIMEOUT_S)
        channel.connect(str(folder / f"{rank}.window"))
        with channel.makefile("rb") as reply:
            return dict(json.load(reply))


def open_in_every_rank(folder: Path) -> None:
    """Have every scheduler of this engine answer, from the moment when its model is loaded."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.__init__

    @functools.wraps(original)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        from sglang.srt.runtime_context import get_parallel

        path = folder / f"{get_parallel().tp_rank}.window"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        model = self.tp_worker.model_runner.model
        threading.Thread(target=_answer, args=(listener, model), name="window", daemon=True).start()

    Scheduler.__init__ = init


def _answer(listener: socket.socket, model: torch.nn.Module) -> None:
    while True:
        channel, _ = listener.accept()
        with channel:
            channel.sendall(json.dumps(dict(digests(model))).encode())


def digests(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and description of parameters, buffers, and what modules hold beside them (MLA's derived weights)."""
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers}
        held.update({name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)})
        for name, tensor in held.items():
            if tensor is not None:
                plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                text = f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(plain.tobytes())}"
                yield f"{prefix}.{name}", text
