"""The interface that is named for the data plane is there and usable, or the user hears which ones are."""

from __future__ import annotations

import pytest

from tensorhub_core import ConfigError, connect

NOBODY = "tcp://127.0.0.1:9"


@pytest.mark.parametrize("transport", ["auto", "tcp", "nixl"])
def test_an_interface_that_is_not_there_is_refused_before_anybody_is_asked(transport: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(NOBODY, model="m", transport=transport, settings={"interface": "nosuch0"})
    said = str(refused.value)
    assert "no network interface" in said
    for part in ("'nosuch0'", "lo (127.0.0.1", "--interface", "TENSORHUB_INTERFACE"):
        assert part in said
