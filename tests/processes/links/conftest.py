"""One network with a hub for all tests here; each test has processes and a model of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.common import hub
from bench.netns import Network, why_unavailable

from tensorhub_core.transport.registry import why_unavailable as why_unloadable
from tests.processes.links.site import LEASE_S, RATE_MBIT, Links, Site


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Set the network up, with a hub in it."""
    why = why_unavailable()
    if why:
        pytest.skip(why)
    with Network() as network:
        hosts = {name: network.host(name, RATE_MBIT) for name in ("hub", "one", "two", "reader")}
        options = ("--lease-s", str(LEASE_S), "--heartbeat-s", "0.2")
        with hub(*options, prefix=hosts["hub"].command, bind=f"tcp://{hosts['hub'].address}:7077") as (address, _):
            yield Site(hosts, address)


@pytest.fixture
def links(site: Site, request: pytest.FixtureRequest) -> Iterator[Links]:
    """Give a test its links; the parameter is the transport's name."""
    transport = getattr(request, "param", "tcp")
    why = why_unloadable(transport)
    if why:
        pytest.skip(why)
    made = Links(site, transport)
    yield made
    made.close()
