"""`tensorhub doctor` says what is so on this machine."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner

from tensorhub_core.cli import doctor
from tests.processes.cli.commands import tensorhub


def test_json_says_what_works(hub: str) -> None:
    pytest.importorskip("nixl")
    ended = tensorhub("doctor", "--json", "--probe-bytes", 8 << 20, "--server", hub)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    (nixl,) = [transport for transport in found["transports"] if transport["name"] == "nixl"]
    assert (nixl["loads"], nixl["works"], nixl["reason"], nixl["probe_bytes"]) == (True, True, "", 8 << 20)
    assert nixl["gb_per_s"] > 0
    assert {card["name"] for card in found["network_cards"]} == {name for _, name in socket.if_nameindex()}
    assert "tcp/lo" in found["ucx"]["devices"]
    assert found["server"]["address"] == hub
    assert found["server"]["reachable"] is True


def test_text_without_a_hub_is_no_failure() -> None:
    ended = tensorhub(
        "doctor", "--probe-bytes", 1 << 20, "--server", "tcp://127.0.0.1:9", TENSORHUB_CONNECT_TIMEOUT_S="0.5"
    )
    assert ended.code == 0, ended.err
    assert "nixl" in ended.out
    assert "no answer from tcp://127.0.0.1:9" in " ".join(ended.out.split())


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_unavailable", lambda name: "not installed")
    ended = CliRunner().invoke(doctor.doctor, ["--json"])
    assert ended.exit_code == 1
    assert all(t["reason"] == "not installed" for t in json.loads(ended.stdout)["transports"])
    assert "no transport works here" in ended.stderr
