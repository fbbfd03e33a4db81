"""What a folder says of its model beside the tensors is compared, and nothing in it is run."""

from __future__ import annotations

import argparse
import enum
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_core.checkpoint.formats import OpenOptions, open_folder
from tensorhub_core.errors import LayoutMismatch
from tensorhub_megatron.saved_settings import saved_settings
from tests.unit.checkpoint.dcp_samples import assembled

from .test_checkpoint import CONFIG, GROUPS, HEAD, HEADS, model, saved, truth

NAMES = ("apply_layernorm_1p", "num_attention_heads", "num_query_groups", "kv_channels", "rotary_interleaved")


class Backend(enum.Enum):
    """One of the classes that arguments are of; a reader has no such class."""

    AUTO = 1


class Hostile:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was run')",)


def arguments(**how: Any) -> dict[str, Any]:
    """Return what Megatron saves in common.pt."""
    own = {"num_layers": 2, "attention_backend": Backend.AUTO, "params_dtype": torch.bfloat16, "lr": 0.1}
    args = argparse.Namespace(**own, **how, data_path=["apply_layernorm_1p", "x"], rank=0, world=1 << 40)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7, "rng": [torch.ones(2)]}


@pytest.mark.parametrize("protocol", [2, 4])
def test_settings_are_found_among_arguments_of_any_class(tmp_path: Path, protocol: int) -> None:
    how = {"apply_layernorm_1p": True, "num_attention_heads": 300, "num_query_groups": 2, "kv_channels": None}
    common = {"first": ["kv_channels", "num_query_groups", True], **arguments(hostile=Hostile(), **how)}
    torch.save(common, tmp_path / "common.pt", pickle_protocol=protocol)
    found = saved_settings(tmp_path, NAMES)
    assert {name: found[name] for name in how if name != "num_query_groups"} == {
        name: value for name, value in how.items() if name != "num_query_groups"
    }


def test_a_folder_without_settings_says_nothing(tmp_path: Path) -> None:
    assert saved_settings(tmp_path, NAMES) == {}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_settings_that_cannot_be_read_are_no_reason_to_refuse_weights(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    state = model()
    saved(tmp_path, state)
    (tmp_path / "common.pt").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert assembled(open_folder(tmp_path, OpenOptions(hf_config=CONFIG))) == truth(state)
    assert f"the settings in {tmp_path / 'common.pt'} cannot be read" in caplog.text


@pytest.mark.parametrize("in_yaml", [False, True])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"apply_layernorm_1p": True}, "norms are smaller by one"),
        ({"layernorm_zero_centered_gamma": True}, "norms are smaller by one"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        (
            {"num_attention_heads": 2, "num_query_groups": 3},
            "num_attention_heads: the Hugging Face configuration has 4",
        ),
        (
            {"num_attention_heads": 2, "num_query_groups": 3},
            "num_key_value_heads: the Hugging Face configuration has 2",
        ),
        ({"kv_channels": 6}, "head_dim: the Hugging Face configuration has 3, the trainer 6"),
        ({"attention_output_gate": True}, "attention_output_gate"),
        ({"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size = 32"),
    ],
)
def test_what_shapes_do_not_tell_is_compared(
    tmp_path: Path, settings: dict[str, Any], said: str, in_yaml: bool
) -> None:
    folder = saved(tmp_path, model())
    if in_yaml:  # of Megatron-Bridge
        lines = [f"  {name}: {json.dumps(value)}" for name, value in settings.items()]
        (folder / "run_config.yaml").write_text("\n".join(["model:", "  _target_: some.Provider", *lines, "train:"]))
    else:
        torch.save(arguments(**settings), folder / "common.pt")
    with pytest.raises(LayoutMismatch) as caught:
        open_folder(folder, OpenOptions(hf_config=CONFIG))
    assert said in str(caught.value)


@pytest.mark.parametrize("grouped", [True, False])
def test_the_same_model_is_served(tmp_path: Path, grouped: bool) -> None:
    """Without groups Megatron's arguments have a number of them nevertheless: 1."""
    heads = HEADS if grouped else 2
    state = model()
    config = CONFIG
    how = {"num_attention_heads": heads, "group_query_attention": grouped, "num_query_groups": GROUPS if grouped else 1}
    if not grouped:
        rows = 3 * heads * HEAD
        state["decoder.layers.self_attention.linear_qkv.weight"] = torch.rand(2, rows, 8).to(torch.bfloat16)
        state["decoder.layers.self_attention.linear_proj.weight"] = torch.rand(2, 8, heads * HEAD).to(torch.bfloat16)
        config = {**CONFIG, "num_attention_heads": heads, "num_key_value_heads": heads}
    folder = saved(tmp_path, state)
    torch.save(arguments(kv_channels=HEAD, apply_layernorm_1p=False, **how), folder / "common.pt")
    assert assembled(open_folder(folder, OpenOptions(hf_config=config))).keys() == truth(model()).keys()
