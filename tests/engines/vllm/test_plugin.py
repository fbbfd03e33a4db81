"""What the plugin adds to vLLM's command line and processes, and what it refuses; no engine runs here."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub_core import ConfigError
from tensorhub_vllm import compat, plugin
from tensorhub_vllm.memory import Slot, keep_addresses, slots_of

from ..models import Checkpoints

pytestmark = pytest.mark.timeout(120)
SOURCE = ["--weight-source", "tensorhub"]
CONFIG = ["--weight-source-config", '{"server": "tcp://10.0.0.1:7077", "follow": false}']


@pytest.fixture(autouse=True)
def no_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def parse(*arguments: str) -> Namespace:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", "m", *arguments])


def test_without_the_flag_nothing_changes() -> None:
    args = parse()
    assert (args.weight_source, args.load_format, args.worker_extension_cls) == ("disk", "auto", "")
    assert "VLLM_PLUGINS" not in os.environ


@pytest.mark.parametrize("arguments", [[*SOURCE, *CONFIG], [*CONFIG, *SOURCE]])
def test_the_flag_sets_vllms_own_fields_in_any_order(arguments: list[str], checkpoints: Checkpoints) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = str(checkpoints.bare("dense-untied"))
    engine = AsyncEngineArgs.from_cli_args(parse(*arguments, "--model", model))
    assert engine.load_format == "tensorhub"
    assert engine.worker_extension_cls == "tensorhub_vllm.worker_ext.TensorHubWorkerExtension"
    assert engine.weight_transfer_config is not None
    assert engine.weight_transfer_config.backend == "tensorhub"


def test_the_config_reaches_the_loader() -> None:
    args = parse(*SOURCE, *CONFIG)
    given = args.model_loader_extra_config["weight_source"]
    assert given == {"server": "tcp://10.0.0.1:7077", "follow": False}
    assert json.loads(json.dumps(given)) == given, "it crosses process borders"


@pytest.mark.parametrize(
    ("config", "word"),
    [('{"sever": "x"}', "Did you mean 'server'"), ("[]", "JSON object"), ('{"mode": "drain"}', "wait")],
)
def test_a_wrong_config_is_a_usage_error(config: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*SOURCE, "--weight-source-config", config)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_our_routes_are_allowed_and_no_other_plugin_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [SimpleNamespace(name="lora_resolver"), SimpleNamespace(name="tensorhub")]
    monkeypatch.setattr(compat, "entry_points", lambda group: others if group == "vllm.general_plugins" else [])
    parse(*SOURCE)
    assert os.environ["VLLM_PLUGINS"] == "lora_resolver,tensorhub"
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    parse(*SOURCE)
    parse(*SOURCE)
    assert os.environ["VLLM_PLUGINS"] == "mine,tensorhub"


def test_registering_again_changes_nothing() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    plugin.register()
    before = [EngineArgs.add_cli_args, Worker.update_weights, Worker.shutdown_weight_transfer_engine]
    plugin.register()
    assert [EngineArgs.add_cli_args, Worker.update_weights, Worker.shutdown_weight_transfer_engine] == before


def settings(model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"quantization": None, "enable_sleep_mode": False, **(model or {})}),
        parallel_config=SimpleNamespace(**{"data_parallel_size": 1, "enable_eplb": False, **(parallel or {})}),
    )


def test_what_would_be_wrong_or_unsafe_is_refused_all_at_once() -> None:
    compat.check_supported(settings())
    everything = settings(
        {"quantization": "fp8", "enable_sleep_mode": True}, {"data_parallel_size": 2, "enable_eplb": True}
    )
    with pytest.raises(ConfigError) as caught:
        compat.check_supported(everything)
    for word in ("quantization=fp8", "enable_sleep_mode", "data_parallel_size", "enable_eplb"):
        assert word in str(caught.value)


def test_addresses_that_graphs_hold_are_kept() -> None:
    module = torch.nn.Linear(4, 3)
    live = list(slots_of(module))
    address = module.weight.data_ptr()
    module.weight = torch.nn.Parameter(torch.full((3, 4), 7.0), requires_grad=False)
    module.bias = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    keep_addresses(live)
    assert module.weight.data_ptr() == address
    assert (module.weight == 7.0).all()
    assert module.bias.shape == (5,), "another shape cannot be kept"


def test_slots_put_back_what_was_exchanged() -> None:
    module = torch.nn.Linear(4, 3)
    slots: list[Slot] = list(slots_of(module))
    weight, data = module.weight, module.weight.data
    module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    weight.data = torch.empty(0)
    for slot in slots:
        slot.put_back()
    assert module.weight is weight
    assert weight.data_ptr() == data.data_ptr()
