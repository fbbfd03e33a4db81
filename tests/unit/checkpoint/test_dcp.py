"""Folders of `torch.distributed.checkpoint` are served as the tensors that were saved, or refused saying why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.checkpoint.dcp import choose_weights, open_dcp
from tensorhub_core.checkpoint.dcp_index import StoredChunk, StoredTensor, fault_of
from tensorhub_core.errors import ConfigError
from tests.unit.checkpoint.dcp_samples import assembled, divided, save_dcp, save_on_two_ranks, weights
from tests.unit.checkpoint.samples import TORCH_DTYPES, bytes_of, name_of, random_tensor


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what two ranks saved."""
    folder = tmp_path_factory.mktemp("two_ranks")
    save_on_two_ranks(folder)
    return folder


def truth(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (name_of(t.dtype), tuple(t.shape), bytes_of(t)) for name, t in tensors.items()}


@pytest.mark.parametrize("copy", [False, True])
def test_what_two_ranks_saved(two_ranks: Path, copy: bool) -> None:
    heard: list[tuple[int, int]] = []
    model = open_dcp(two_ranks / "model", copy=copy, progress=lambda done, total: heard.append((done, total)))
    assert assembled(model) == truth(weights())
    assert model.total_bytes == sum(len(bytes_of(t)) for t in weights().values())
    assert heard[-1] == (model.total_bytes, model.total_bytes)
    assert heard == sorted(heard)
    # three states of every parameter; the groups of parameters and the step are numbers
    assert model.left_out > 3 * len(weights())
    parts = open_dcp(two_ranks / "divided", copy=copy)
    assert assembled(parts) == truth(divided())
    assert parts.left_out == 0
    assert any(len(boxes) == 1 for boxes in parts.boxes.values())


def test_every_dtype_and_odd_tensors_of_one_process(tmp_path: Path) -> None:
    base = random_tensor(torch.bfloat16, (6, 8), 1)
    tensors = {
        **{name_of(dtype): random_tensor(dtype, (3, 5), n) for n, dtype in enumerate(TORCH_DTYPES)},
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(4, 8),
        "parameter": torch.nn.Parameter(base.float()),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "naïve/層 1\n": torch.arange(5),
    }
    tensors.pop("float4_e2m1fn_x2")  # torch cannot copy it
    checkpoint = open_dcp(save_dcp(tmp_path, dict(tensors)))
    assert assembled(checkpoint) == truth({name: t.detach() for name, t in tensors.items()})
    assert not checkpoint.boxes


def test_bytes_are_mapped_unless_they_are_copied(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"a": torch.zeros(1000, dtype=torch.uint8)})
    mapped, kept = open_dcp(tmp_path), open_dcp(tmp_path, copy=True)
    (file,) = mapped.files
    data = file.read_bytes()
    file.write_bytes(data.replace(bytes(1000), b"\1" * 1000))
    assert mapped.tensors[0].buffer.sum() == 1000
    assert kept.tensors[0].buffer.sum() == 0
    assert not mapped.tensors[0].buffer.flags.writeable


def names_of(tmp_path: Path, state: dict[str, Any], **options: Any) -> list[str]:
    return [tensor.name for tensor in open_dcp(save_dcp(tmp_path, state), **options).tensors]


ONE = torch.ones(1)
HF = {"model.layers.0.w": ONE, "lm_head.w": ONE}


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (HF, sorted(HF)),
        ({"model.layers.0.w": ONE}, ["model.layers.0.w"]),  # tied: nothing but the model's own `model.`
        ({"model": HF, "optimizer": {"state": {"a": {"exp_avg": ONE}}}, "step": 3}, sorted(HF)),
        ({"state_dict": HF, "optimizer_0": {"a": ONE}, "lr_schedulers": {"b": ONE}}, sorted(HF)),
        ({"app": {"model": HF, "optim": {"a": {"exp_avg": ONE}}}}, sorted(HF)),
        ({**HF, "optimizer": {"a": ONE}, "train_state": {"loss": ONE}, "rng_states": {"cpu": ONE}}, sorted(HF)),
        ({**HF, "optimizer.state.model.layers.0.w.exp_avg": ONE}, sorted(HF)),
        ({f"module.{name}": ONE for name in HF}, sorted(HF)),
        ({"model": {f"model.{name}": ONE for name in HF}}, sorted(HF)),
        ({"_orig_mod.model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w": ONE}, ["model.layers.0.w"]),
        ({"model": {"layers": {"0": {"w": ONE}}, "head": {"w": ONE}}}, ["head.w", "layers.0.w"]),
    ],
)
def test_names_are_those_of_the_models_own_state_dict(tmp_path: Path, state: dict[str, Any], wanted: list[str]) -> None:
    assert names_of(tmp_path, state) == wanted


def test_one_of_several_models_is_chosen_by_its_prefix(tmp_path: Path) -> None:
    state = {"policy": HF, "value": {"head.w": ONE}}
    with pytest.raises(ConfigError, match=r"'policy' \(2\), 'value' \(1\); give the prefix"):
        names_of(tmp_path, state)
    assert [t.name for t in open_dcp(tmp_path, prefix="policy").tensors] == sorted(HF)
    assert [t.name for t in open_dcp(tmp_path, prefix="value.").tensors] == ["head.w"]
    with pytest.raises(ConfigError, match=r"begins with 'critic\.'"):
        open_dcp(tmp_path, prefix="critic")


def test_other_names_for_keys(tmp_path: Path) -> None:
    assert names_of(tmp_path, {"tok.weight": ONE, "x": ONE}, names={"tok.weight": "embed", "x": None}) == ["embed"]
    with pytest.raises(ConfigError, match="no weights with the keys that names are given for: 'y'"):
        open_dcp(tmp_path, names={"y": "z"})
    with pytest.raises(ConfigError, match="two tensors would be served as 'x'"):
        open_dcp(tmp_path, names={"tok.weight": "x"})
    with pytest.raises(ConfigError, match="has no weights"):
        open_dcp(tmp_path, names={"tok.weight": None, "x": None})


def test_lists_of_tensors_are_numbered(tmp_path: Path) -> None:
    assert choose_weights([StoredTensor("m.0.a", ("m", 0, "a"), "int8", (1,), ())], "here", None, None)
    assert names_of(tmp_path, {"model": {"w": [ONE, ONE], "b": ONE}})[0] == "b"


def test_a_missing_file_and_one_that_is_cut_off(two_ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_ranks / "divided", tmp_path / "copy")
    file = folder / "__1_0.distcp"
    data = file.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 1, 0):
        file.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=r"__1_0\.distcp is cut off: .* ends at byte"):
            open_dcp(folder)
    file.unlink()
    with pytest.raises(ConfigError, match=r"__1_0\.distcp is missing, though .*\.metadata names it"):
        open_dcp(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"\.metadata is missing"):
        open_dcp(folder)


def test_files_of_another_save_are_noticed(tmp_path: Path) -> None:
    one = save_dcp(tmp_path / "one", {"a": torch.zeros(4)})
    for number, other in enumerate((torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32))):
        another = save_dcp(tmp_path / str(number), {"a": other})
        shutil.copy(another / "__0_0.distcp", one)
        with pytest.raises(ConfigError, match="the index says float32"):
            open_dcp(one)


def test_damaged_files_are_refused_or_harmless(two_ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_ranks / "divided", tmp_path / "copy")
    file, rng, refused = folder / "__0_0.distcp", np.random.default_rng(1), 0
    data = file.read_bytes()
    headers = [at for at in range(len(data)) if data[at : at + 4] == b"PK\3\4"]
    for _ in range(60):
        at = int(rng.choice(headers)) + int(rng.integers(0, 160))
        damaged = bytearray(data)
        damaged[at % len(data)] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(damaged)
        try:
            checkpoint = open_dcp(folder)
        except ConfigError as error:
            refused += "__0_0.distcp" in str(error)
        else:
            assert assembled(checkpoint).keys() == divided().keys()
    assert refused > 5


def stored(shape: tuple[int, ...], *parts: tuple[tuple[int, ...], tuple[int, ...]]) -> StoredTensor:
    chunks = tuple(StoredChunk(offset, size, "f", 0, 0) for offset, size in parts)
    return StoredTensor("t", ("t",), "int8", shape, chunks)


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (stored((4,), ((0,), (2,)), ((2,), (2,))), None),
        (stored(()), "0 elements together, it has 1"),
        (stored((0, 3)), None),
        (stored((2, 2), ((0, 0), (2, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 1))), None),  # no grid
        (stored((4,), ((0,), (2,))), "2 elements together, it has 4"),
        (stored((4,), ((0,), (2,)), ((3,), (2,))), "ends outside"),
        (stored((4,), ((0,), (3,)), ((2,), (1,))), "overlap"),
        (stored((4,), ((0,), (2,)), ((0,), (2,))), "overlap"),
        (stored((2, 2), ((0, 0), (2, 1)), ((1, 0), (1, 2))), "overlap"),
    ],
)
def test_parts_have_to_make_up_the_whole(tensor: StoredTensor, fault: str | None) -> None:
    found = fault_of(tensor)
    assert found is None if fault is None else fault in str(found)


def test_parts_have_to_lie_somewhere() -> None:
    chunk = StoredChunk((0,), (4,), None, 0, 0)
    assert "in which file" in str(fault_of(StoredTensor("t", ("t",), "int8", (4,), (chunk,))))
