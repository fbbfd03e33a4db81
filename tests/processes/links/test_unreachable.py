"""Machines that cannot reach each other, or that are reached at another address than the one that is told."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench.content import digest, make
from bench.netns import Host
from bench.remote import Remote, RemoteError

from tests.processes.links.site import Links

pytestmark = pytest.mark.timeout(120)
each_transport = pytest.mark.parametrize("links", ["tcp", "nixl"], indirect=True)
SIZE = {"total_bytes": 2 << 20, "count": 8}
NOWHERE = "02:00:00:00:00:99"


def ip(host: Host, *words: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, *words], check=True, capture_output=True, timeout=20)


def lose_each_other(links: Links, *pair: str) -> None:
    """Let packets between two hosts vanish, both ways and without a sign; both reach everybody else."""
    hosts = [links.site.hosts[name] for name in pair]
    for here, there in (hosts, hosts[::-1]):
        ip(here, "neigh", "replace", there.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")


def find_each_other(links: Links, *pair: str) -> None:
    hosts = [links.site.hosts[name] for name in pair]
    for here, there in (hosts, hosts[::-1]):
        ip(here, "neigh", "del", there.address, "dev", "eth0")


def node(links: Links, name: str, blank: bool, **settings: object) -> Remote:
    started = links.node(name, host=name, **settings)
    started.do("make", **SIZE, seed=1, blank=blank)
    started.do("register")
    return started


@each_transport
def test_a_source_that_cannot_be_reached_is_read_through_another_and_not_tried_again(links: Links) -> None:
    with ThreadPoolExecutor(3) as pool:
        started = [pool.submit(node, links, *what) for what in (("one", False), ("two", True), ("reader", True))]
    trainer, between, reader = (each.result() for each in started)
    lose_each_other(links, "one", "reader")
    try:
        trainer.do("publish", version=1)
        with pytest.raises(RemoteError, match=r"VersionUnavailable.*unreachable"):
            reader.do("replicate", timeout_s=60)  # there is nobody in between yet
        between.do("replicate", timeout_s=60)
        assert set(reader.do("replicate", timeout_s=60)["first_s"]) == {"two"}
        tries = reader.do("counters")["failovers"]
        assert tries == 1
        for version in (2, 3):
            for each in (trainer, between, reader):
                each.do("unpublish", timeout_s=10)
            trainer.do("make", **SIZE, seed=version)
            trainer.do("publish", version=version)
            reading = reader.begin("replicate", version=version, timeout_s=60)  # it may ask first
            between.do("replicate", version=version, timeout_s=60)
            assert set(reading.result(60)["first_s"]) == {"two"}
            assert reader.do("digest") == digest(make(**SIZE, seed=version))
        assert reader.do("counters")["failovers"] == tries, "it was tried again"
    finally:
        find_each_other(links, "one", "reader")


@each_transport
def test_an_address_that_leads_elsewhere_is_named_with_what_to_do(links: Links) -> None:
    """The trainer has a second network, which the reader is not in."""
    ip(links.site.hosts["one"], "link", "add", "eth1", "type", "veth", "peer", "name", "eth1-end")
    try:
        ip(links.site.hosts["one"], "addr", "add", "10.214.0.1/24", "dev", "eth1")
        for each in ("eth1", "eth1-end"):
            ip(links.site.hosts["one"], "link", "set", each, "up")
        trainer = node(links, "one", False, interface="eth1")
        trainer.do("publish", version=1)
        reader = node(links, "reader", True)
        with pytest.raises(RemoteError) as failed:
            reader.do("replicate", timeout_s=30)
        assert failed.value.kind == "VersionUnavailable"
        for part in ("unreachable", "10.214.0.1", "'reader'", "'one'", "--interface"):
            assert part in str(failed.value)
        with pytest.raises(RemoteError, match=r"'eth9'.*eth0 \(10\.213\..*eth1 \(10\.214\.0\.1\)"):
            node(links, "one", False, interface="eth9")
    finally:
        ip(links.site.hosts["one"], "link", "del", "eth1")
