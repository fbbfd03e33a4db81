"""Settings: who wins, what is refused, and that every setting is documented."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from tensorhub_core.config import ClientConfig, ServerConfig
from tensorhub_core.errors import ConfigError
from tensorhub_core.settings import FILE_VARIABLE, Settings, keys, load_settings

MOST_SETTINGS = 33
LAYERS = ("file", "environment", "cli", "argument")
KEYS = keys()
SAMPLES = {str: "text", int: 12_345, float: 12.5}


def sample(name: str, rank: int = 0) -> object:
    """Return an allowed value of a setting, another one for every rank."""
    key = KEYS[name]
    if key.choices:
        return key.choices[rank % len(key.choices)]
    value = SAMPLES[key.kind]
    return f"{value}{rank}" if isinstance(value, str) else value + rank  # type: ignore[operator]


def load(tmp_path: Path, **layers: dict[str, object]) -> Settings:
    """Load settings with the given layers and nothing of the machine's own."""
    environ = {f"TENSORHUB_{name.upper()}": str(value) for name, value in layers.get("environment", {}).items()}
    file = None
    if "file" in layers:
        file = tmp_path / "config.toml"
        lines = (f'{n} = "{v}"' if isinstance(v, str) else f"{n} = {v}" for n, v in layers["file"].items())
        file.write_text("\n".join(lines))
    return load_settings(layers.get("argument"), cli=layers.get("cli"), environ=environ, file=file)


def value_of(settings: Settings, name: str) -> object:
    record = settings.client if KEYS[name].record is ClientConfig else settings.server
    return getattr(record, name)


def with_peers(name: str, value: object) -> dict[str, object]:
    """Add what has to fit the setting."""
    peers = {"heartbeat_s": {"lease_s": 100.0}, "grace_s": {"lease_s": 2.5}}
    return {**peers.get(name, {}), name: value}


def test_there_are_few_settings_and_each_is_documented_under_one_name() -> None:
    fields = [*dataclasses.fields(ClientConfig), *dataclasses.fields(ServerConfig)]
    assert len(KEYS) == len(fields) <= MOST_SETTINGS, "a name is used twice, or there are too many"
    for key in KEYS.values():
        assert key.doc
        assert key.kind in SAMPLES
        if key.kind in (int, float):
            assert key.least is not None, f"{key.name} may be negative"
            assert key.name.endswith(("_s", "_bytes")) or key.kind is int, f"{key.name} has no unit"


def test_without_anything_the_defaults_stand(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert (settings.client, settings.server) == (ClientConfig(), ServerConfig())
    assert settings.origins == {}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_setting_can_be_given_in_every_layer(name: str, layer: str, tmp_path: Path) -> None:
    value = sample(name)
    settings = load(tmp_path, **{layer: with_peers(name, value)})
    assert value_of(settings, name) == value
    assert type(value_of(settings, name)) is KEYS[name].kind
    assert settings.origins[name]


@pytest.mark.parametrize(("weak", "strong"), list(itertools.combinations(LAYERS, 2)))
@pytest.mark.parametrize("name", ["zone", "window", "stall_s", "bind", "transport"])
def test_the_later_layer_wins(weak: str, strong: str, name: str, tmp_path: Path) -> None:
    settings = load(tmp_path, **{weak: {name: sample(name, 0)}, strong: {name: sample(name, 1)}})
    assert value_of(settings, name) == sample(name, 1)


def test_layers_add_up(tmp_path: Path) -> None:
    settings = load(
        tmp_path, file={"zone": "a"}, environment={"host": "b"}, cli={"bind": "tcp://*:1"}, argument={"window": 2}
    )
    assert (settings.client.zone, settings.client.host, settings.client.window) == ("a", "b", 2)
    assert settings.server.bind == "tcp://*:1"
    assert "config.toml" in settings.origins["zone"]
    assert "TENSORHUB_HOST" in settings.origins["host"]
    assert "--bind" in settings.origins["bind"]
    assert "window" in settings.origins["window"]


def test_none_means_not_given(tmp_path: Path) -> None:
    settings = load(tmp_path, environment={"zone": "a"}, cli={"zone": None}, argument={"zone": None, "server": None})
    assert settings.client.zone == "a"


def test_an_empty_variable_means_not_given() -> None:
    assert load_settings(environ={"TENSORHUB_SERVER": "", "TENSORHUB_LEASE_S": ""}).client.server is None


@pytest.mark.parametrize("layer", LAYERS)
def test_an_unknown_key_is_refused_with_a_suggestion_and_the_list(layer: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **{layer: {"heartbeats_s": 3}})
    text = str(caught.value)
    assert "'heartbeats_s'" in text
    assert "Did you mean 'heartbeat_s'?" in text
    assert all(name in text for name in KEYS)


def test_an_unknown_key_without_a_neighbour_gets_no_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, argument={"qqqq": 3})
    assert "Did you mean" not in str(caught.value)


BAD = {
    "lease_s": ["five", "", "nan", "inf", -1, 0, True, [5], "5 s"],
    "window": ["many", 0, -3, 2.5, "2.5", True, "1e400"],
    "transport": ["rdma", "NIXL", 3],
    "zone": [3, True, ["a"]],
    "retain": [-1],
    "segment_bytes": [0, 100],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_an_impossible_value_is_refused_by_name_with_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value}, environ={})
    text = str(caught.value)
    assert name in text
    assert repr(value) in text
    assert "must be" in text


@pytest.mark.parametrize("text", ["12", "12.0", " 12 ", "1_2", "1.2e1"])
def test_numbers_may_be_written_as_text(text: str) -> None:
    assert load_settings(environ={"TENSORHUB_LEASE_S": text}).server.lease_s == 12.0


def test_a_whole_number_keeps_all_its_digits() -> None:
    exact = (1 << 60) + 1
    assert load_settings({"segment_bytes": exact}, environ={}).client.segment_bytes == exact
    assert load_settings(environ={"TENSORHUB_SEGMENT_BYTES": str(exact)}).client.segment_bytes == exact


@pytest.mark.parametrize(
    "given", [{"lease_s": 1.0, "heartbeat_s": 0.6}, {"lease_s": 4.0, "grace_s": 3.9}, {"heartbeat_s": 3.0}]
)
def test_values_that_do_not_fit_each_other_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(given, environ={})
    assert all(name in str(caught.value) for name in given)


def test_variables_that_kubernetes_sets_are_not_ours() -> None:
    environ = {
        "TENSORHUB_SERVICE_HOST": "10.0.0.1",
        "TENSORHUB_SERVICE_PORT": "7077",
        "TENSORHUB_SERVICE_PORT_ZMQ": "7077",
        "TENSORHUB_PORT": "tcp://10.0.0.1:7077",
        "TENSORHUB_PORT_7077_TCP": "tcp://10.0.0.1:7077",
        "TENSORHUB_PORT_7077_TCP_ADDR": "10.0.0.1",
        "TENSORHUB_HUB_SERVICE_HOST": "10.0.0.1",
        "OTHER_LEASE_S": "x",
        "tensorhub_lease_s": "x",
    }
    assert load_settings(environ=environ).origins == {}


def test_the_file_is_found_where_users_keep_settings(tmp_path: Path) -> None:
    file = tmp_path / "tensorhub" / "config.toml"
    file.parent.mkdir()
    file.write_text('zone = "here"\n')
    assert load_settings(environ={"XDG_CONFIG_HOME": str(tmp_path)}).client.zone == "here"
    assert load_settings(environ={"HOME": str(tmp_path)}).client.zone == ""
    named = tmp_path / "named.toml"
    named.write_text('zone = "named"\n')
    both = {"XDG_CONFIG_HOME": str(tmp_path), FILE_VARIABLE: str(named)}
    assert load_settings(environ=both).client.zone == "named"


def test_a_home_that_cannot_be_looked_into_has_no_file(tmp_path: Path) -> None:
    """As of a user whose HOME is another one's, which is common in containers."""
    nowhere = str(tmp_path / ("n" * 300))
    for environ in ({"HOME": nowhere}, {"XDG_CONFIG_HOME": nowhere}):
        assert load_settings(environ=environ).origins == {}
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(environ={"TENSORHUB_CONFIG": nowhere})


def test_a_named_file_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_settings(environ={FILE_VARIABLE: str(tmp_path / "nothing.toml")})


@pytest.mark.parametrize("content", [b"zone = ", b"\xff\xfe", b"= 3", b"zone = 'a'\nzone = 'b'"])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=str(file)):
        load_settings(environ={}, file=file)


def test_a_table_in_the_file_is_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[server]\nlease_s = 5\n")
    with pytest.raises(ConfigError):
        load_settings(environ={}, file=file)


def test_settings_are_passed_through(tmp_path: Path) -> None:
    settings = load(tmp_path, argument={"zone": "z"})
    assert load_settings(settings, environ={"TENSORHUB_ZONE": "other"}) is settings


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().lease_s = 1.0  # type: ignore[misc]
