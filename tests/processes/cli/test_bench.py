"""`tensorhub bench` as a user runs it, and what it says of a transport that fails or brings wrong bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensorhub_core.cli import bench
from tensorhub_core.cli.bench_worker import change, digest_of, make_tensors
from tensorhub_core.errors import TensorHubError
from tests.processes.cli.commands import tensorhub

SHORT = ("bench", "--megabytes", "4", "--tensors", "7", "--versions", "3", "--readers", "2")


@pytest.mark.timeout(240)
def test_every_transport_that_was_asked_for_is_measured() -> None:
    done = tensorhub(*SHORT, "--transport", "tcp", "--transport", "auto", "--json", timeout_s=200)
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out)
    assert [(each["transport"], each["readers"], each["error"]) for each in found] == [("tcp", 2, ""), ("auto", 2, "")]
    for each in found:
        assert each["total_bytes"] == 7 * (4_000_000 // 7)
        times = ("first_gb_per_s", "gb_per_s", "of_a_copy", "publish_s", "unpublish_s")
        assert all(each[name] > 0 for name in times), each


def test_what_cannot_be_measured_is_refused() -> None:
    done = tensorhub("bench", "--transport", "pigeon")
    assert done.code == 2
    assert "'pigeon' is not one of" in done.err
    done = tensorhub("bench", "--megabytes", str(1 << 20), "--readers", "64")
    assert done.code == 2
    assert "give a smaller --megabytes or --readers" in done.err


def test_a_transport_that_fails_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(publisher: bench.Peer, *_: object) -> Any:
        raise TensorHubError(f"{publisher.name}: TransportError: no such card")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "_run", run)
        figures = bench.measure("tcp", 1, 2, 1, 16)
    assert figures.error == "publisher: TransportError: no such card"
    assert figures.gb_per_s is None


def test_wrong_bytes_are_no_figure() -> None:
    class Fake:
        def __init__(self, name: str, digest: str) -> None:
            self.name, self.digest = name, digest

        def ask(self, what: str, version: int) -> dict[str, Any]:
            return {"digest": self.digest}

    right: Any = Fake("publisher", "aa")
    bench._compare(right, [right])
    wrong: Any = Fake("reader-2", "ab")
    with pytest.raises(TensorHubError, match="reader-2 got WRONG BYTES"):
        bench._compare(right, [right, wrong])


def test_versions_differ() -> None:
    tensors = make_tensors(2, 5000, 20)
    seen = {digest_of(tensors)}
    for version in range(2, 12):
        change(tensors, version)
        seen.add(digest_of(tensors))
    assert len(seen) == 11
    assert digest_of(make_tensors(2, 5000, 20)) in seen
