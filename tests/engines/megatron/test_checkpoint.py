"""Folders that Megatron saved are served from disk as the model that the ranks had, under Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from click.testing import CliRunner

from tensorhub_core import serve
from tensorhub_core.checkpoint.formats import OpenOptions, detect, open_folder
from tensorhub_core.cli.pull import pull
from tensorhub_core.errors import LayoutMismatch
from tensorhub_megatron import publish_from_checkpoint
from tests.unit.checkpoint.dcp_samples import assembled
from tests.unit.checkpoint.samples import bytes_of as bits
from tests.unit.checkpoint.samples import name_of

from .models import Recipe
from .ranks import Ranks
from .reference import Array, hugging_face
from .saved import save

DENSE = Recipe(tp=2, pp=2, qk_norm=True, qkv_bias=True)
RECIPES = {
    "tp2-pp2": DENSE,
    "tp2-pp2-tied-optimizer": Recipe(tp=2, pp=2, tied=True, dist_opt=True, overlap=True),
    "tp4-two-groups": Recipe(tp=4, groups=2, qkv_bias=True, tied=True),
    "tp2-dp2-ep2": Recipe(tp=2, dp=2, ep=2, experts=4, dist_opt=True, qk_norm=True),
    "tp2-all-biases": Recipe(tp=2, biases=True, groups=8),
    "tp2-some-dense-shared": Recipe(tp=2, layers=3, experts=4, moe_layers=(0, 1, 0), shared_expert=32, qkv_bias=True),
    "vpp2": Recipe(pp=2, vpp=2, layers=4, qk_norm=True),
    "ep2": Recipe(dp=2, ep=2, experts=4, qk_norm=True),
    "ep2-grouped": Recipe(dp=2, ep=2, experts=4, experts_as="grouped", qk_norm=True),
    "ep2-te-grouped": Recipe(dp=2, ep=2, experts=4, experts_as="te_grouped", qk_norm=True),
    "tp2-te-grouped": Recipe(tp=2, experts=4, experts_as="te_grouped", fused_norms=True, qk_norm=True),
    "ep2-mixtral": Recipe(dp=2, ep=2, experts=4, mixtral=True),
    "dp2-optimizer": Recipe(dp=2),
    "dp2-float32": Recipe(dp=2, bf16=False),
}
WITH_OPTIMIZER = ("tp2-pp2-tied-optimizer", "dp2-optimizer")


def saved(job: Ranks, recipe: Recipe, folder: Path, with_optimizer: bool = False) -> dict[str, Array]:
    """Save a model, and return it as gathering it from the ranks gives it."""
    folder.mkdir(parents=True)
    shares = job.run(save_on, recipe, str(folder), with_optimizer)
    truth = hugging_face(shares, recipe)
    if recipe.tied:
        truth["lm_head.weight"] = truth["model.embed_tokens.weight"]
    return truth


def save_on(rank: int, recipe: Recipe, folder: str, with_optimizer: bool) -> Any:
    return save(rank, recipe, folder, with_optimizer=with_optimizer)


def bytes_of(arrays: dict[str, Array], recipe: Recipe) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    dtype = "bfloat16" if recipe.bf16 else "float32"
    return {name: (dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_folder_is_the_model_that_was_saved(name: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    recipe = RECIPES[name]
    truth = saved(ranks(recipe.world), recipe, tmp_path / "iter_0000007", name in WITH_OPTIMIZER)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert detect(tmp_path) == (tmp_path / "iter_0000007", "torch_dist")
    checkpoint = open_folder(tmp_path, OpenOptions(hf_config=recipe.hf_config()))
    assert assembled(checkpoint) == bytes_of(truth, recipe)
    copied = open_folder(tmp_path, OpenOptions(hf_config=recipe.hf_config(), copy=True))
    assert assembled(copied) == bytes_of(truth, recipe)
    assert not any("optimizer" in tensor.name for tensor in checkpoint.tensors)
    if name in WITH_OPTIMIZER:
        assert checkpoint.left_out > len(checkpoint.tensors)


@pytest.mark.parametrize("name", ["tp2-pp2", "ep2"])
def test_what_is_published_is_pulled(name: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    recipe = RECIPES[name]
    truth = saved(ranks(recipe.world), recipe, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(recipe.hf_config()))
    with (
        serve() as hub,
        publish_from_checkpoint(tmp_path / "in", server=hub.address, model="m", version=3) as worker,
    ):
        assert worker.version == 3
        arguments = ["--model", "m", "--out", str(tmp_path / "out"), "--server", hub.address]
        result = CliRunner().invoke(pull, arguments)
        assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "out").glob("*.safetensors")
    got = {key: (name_of(t.dtype), tuple(t.shape), bits(t)) for key, t in safetensors.torch.load_file(file).items()}
    assert got == bytes_of(truth, recipe)


def save_with_smaller_norms(rank: int, recipe: Recipe, folder: str) -> Any:
    return save(rank, recipe, folder, zero_centered_norms=True)


def test_norms_that_were_saved_smaller_by_one_are_refused(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    recipe = Recipe(dp=2)
    ranks(2).run(save_with_smaller_norms, recipe, str(tmp_path))
    with pytest.raises(LayoutMismatch, match="norms are smaller by one than the engine's"):
        open_folder(tmp_path, OpenOptions(hf_config=recipe.hf_config()))
