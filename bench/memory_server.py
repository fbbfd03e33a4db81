"""How much memory the hub takes with many workers, each of which has registered and published a model.

    python bench/memory_server.py [--json FILE]

The workers are connections that speak the protocol, so that a thousand of them fit into one process.
"""

from __future__ import annotations

import resource
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash
import zmq
from common import Row, hub, limit, main

from tensorhub_core.layout.canonical import build_layout, digest_of, encode_layout
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Placement, TensorSpec
from tensorhub_core.state.messages import (
    PROTOCOL,
    Failure,
    Heartbeat,
    Hello,
    Publish,
    PutBlob,
    Register,
    Reply,
    Request,
)
from tensorhub_core.wire.codec import decode_reply, encode, split

COUNTS = (100, 1000)
LIMIT_MB = 150.0
LAYERS = 36
ANSWER_TIMEOUT_MS = 30_000


class Connection:
    """One worker's connection, without threads."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._number = 0

    def send(self, message: Request) -> int:
        """Send a request and do not wait for its reply; returns its number."""
        self._number += 1
        self._socket.send_multipart(encode(self._number, message))
        return self._number

    def receive_raw(self) -> list[bytes]:
        """Return the frames of the next message."""
        if not self._socket.poll(0) and not self._socket.poll(ANSWER_TIMEOUT_MS):
            raise RuntimeError("no answer")
        return self._socket.recv_multipart()

    def receive(self, kind: type[Reply] | None = None) -> Reply:
        """Return the reply to the last request, or the next message of a kind, whatever it belongs to."""
        while True:
            frames = split(self.receive_raw())
            reply = decode_reply(frames)
            if isinstance(reply, Failure):
                raise RuntimeError(reply.message)
            if frames.request == self._number if kind is None else isinstance(reply, kind):
                return reply

    def ask(self, message: Request) -> Reply:
        """Send a request and return its reply."""
        self.send(message)
        return self.receive()


def model_specs() -> Iterator[TensorSpec]:
    """Describe the tensors of an 8-billion-parameter dense model by their Hugging Face names."""
    hidden, inner, heads = 4096, 12288, 1024
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (heads, hidden),
        "self_attn.v_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            yield TensorSpec(f"model.layers.{layer}.{name}.weight", "bfloat16", shape)
    yield TensorSpec("model.embed_tokens.weight", "bfloat16", (151_936, hidden))


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB (1e6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"process {pid} has no resident memory")


def publish(worker: Connection, number: int, layout: bytes, sums: bytes, storages: int, total_bytes: int) -> None:
    """Say hello as a replica, register the model at made-up addresses and publish version 1."""
    addresses = (np.arange(storages, dtype="<u8") + number * storages) * 4096
    placement = msgspec.msgpack.encode(
        Placement("nixl", secrets.token_bytes(400), addresses.tobytes(), ("cpu",), bytes(storages))
    )
    worker.ask(Hello(PROTOCOL, secrets.token_hex(16), "policy", f"rollout-{number}", host=f"host-{number // 8}"))
    for blob in (layout, placement, sums):
        worker.ask(PutBlob(digest_of(blob), blob))
    worker.ask(Register(digest_of(layout), digest_of(placement), total_bytes, len(sums) // 8))
    worker.ask(Publish(1, digest_of(sums)))


def measure() -> list[Row]:
    """Measure the hub with no worker, and then with ever more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    layout = build_layout(model_specs(), shard=0, num_shards=1)
    blob, table = encode_layout(layout), segment_table(layout)
    sums = b"".join(xxhash.xxh3_64_digest(index.to_bytes(8, "little")) for index in range(len(table)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * max(COUNTS))
    rows = []
    workers: list[Connection] = []
    with hub("--lease-s", "600", "--heartbeat-s", "100", "--grace-s", "600") as (address, pid):
        empty = resident_mb(pid)
        rows.append(Row("hub without workers", empty, "MB"))
        for count in COUNTS:
            while len(workers) < count:
                workers.append(Connection(context, address))
                publish(workers[-1], len(workers), blob, sums, len(layout.storages), table.total_bytes)
            for worker in workers:
                worker.ask(Heartbeat())
            now = resident_mb(pid)
            case = f"hub with {count} workers, {len(layout.tensors)} tensors each"
            rows.append(limit(case, now, "MB", LIMIT_MB) if count == 100 else Row(case, now, "MB"))
            rows.append(Row(f"per worker of {count}", (now - empty) * 1000 / count, "kB"))
    context.destroy(linger=0)
    return rows


if __name__ == "__main__":
    main("memory_server", measure)
