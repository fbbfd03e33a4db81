"""`tensorhub doctor` says what is so on this machine."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner

from tensorhub_core.cli import doctor
from tensorhub_core.transport.host import rdma_devices
from tests.processes.cli.commands import tensorhub
from tests.transport.lab import HAS_NIXL


def test_json_says_what_works(hub: str) -> None:
    options = ("--json", "--probe-bytes", 8 << 20, "--server", hub, "--zone", "east")
    ended = tensorhub("doctor", *options, TENSORHUB_HOST="node-7", TENSORHUB_RAIL="")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["place"]["zone"] == {"value": "east", "origin": "option --zone"}
    assert found["place"]["host"] == {"value": "node-7", "origin": "environment variable TENSORHUB_HOST"}
    assert set(found["place"]) == {"zone", "host", "rail"}
    assert found["data_plane"]["reason"]
    assert set(found["data_plane"]["interfaces"]) <= {
        *(card["name"] for card in found["network_cards"]),
        *(device["name"] for device in found["rdma_devices"]),
    }
    lo = next(card for card in found["network_cards"] if card["name"] == "lo")
    assert "127.0.0.1" in lo["addresses"]
    transports = {transport.pop("name"): transport for transport in found["transports"]}
    assert set(transports) == {"nixl", "tcp", "cma"}
    for name in transports if HAS_NIXL else ("tcp", "cma"):
        rate = transports[name].pop("gb_per_s")
        assert rate > 0, name
        assert transports[name] == {"loads": True, "works": True, "reason": "", "probe_bytes": 8 << 20}, name
    assert {where: choice["transport"] for where, choice in found["auto"].items()} == {
        "within_machine": "cma",
        "between_machines": "nixl" if rdma_devices() and HAS_NIXL else "tcp",
        "devices": "nixl" if HAS_NIXL else "nothing",
    }
    assert {card["name"] for card in found["network_cards"]} == {name for _, name in socket.if_nameindex()}
    assert not HAS_NIXL or "tcp/lo" in found["ucx"]["devices"]
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
    found = json.loads(ended.stdout)
    assert all(t["reason"] == "not installed" for t in found["transports"])
    assert {choice["transport"] for choice in found["auto"].values()} == {"nothing"}
    assert "no transport works here" in ended.stderr


def test_a_machine_without_nixl_is_fine_and_told_what_it_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_unavailable", lambda name: "pip install nixl" if name == "nixl" else "")
    arguments = ["--probe-bytes", str(1 << 20), "--server", "tcp://127.0.0.1:9"]
    ended = CliRunner(env={"TENSORHUB_CONNECT_TIMEOUT_S": "0.3"}).invoke(doctor.doctor, arguments)
    assert ended.exit_code == 0, ended.output
    text = " ".join(ended.stdout.split())
    assert "nixl does not load pip install nixl" in text
    assert "auto cma within this machine: both processes are on this machine" in text
    assert "auto tcp between machines: not both sides have RDMA" in text
    assert "auto nothing GPU memory: memory of a GPU needs NIXL" in text
