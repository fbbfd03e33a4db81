"""Tracing toy engines: filling by boxes equals running the loader; what cannot be expressed is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

torch = pytest.importorskip("torch")

from tensorhub_core.engine.logical import LogicalTensor, logical_tensors  # noqa: E402
from tensorhub_core.engine.trace import Trace, trace  # noqa: E402
from tensorhub_core.errors import LayoutMismatch  # noqa: E402
from tensorhub_core.layout.casting import Cast  # noqa: E402
from tensorhub_core.layout.types import Box, Layout, TensorSpec  # noqa: E402

Loader = Callable[[dict[str, "torch.Tensor"], Iterable[tuple[str, "torch.Tensor"]]], object]


def fuse(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    """Two fused projections, the second rank's half of a column-sharded tensor, a padded vocabulary."""
    for name, weight in weights:
        if name in ("q", "k"):
            rows = slice(0, 4) if name == "q" else slice(4, 6)
            params["qk"][rows].copy_(weight)
        elif name == "o":
            params["o"].copy_(weight.narrow(1, 3, 3))
        elif name == "vocab":
            params["vocab"][:5].data.copy_(weight)
            params["vocab"][5:].data.fill_(0)
    return {"qk", "o", "vocab"}


def experts(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for name, weight in weights:
        expert, part = name.split(".")
        index = int(expert)
        if part == "down":
            params["w2"].data[index].copy_(weight)
        else:
            params["w13"].data[index].narrow(0, 0 if part == "gate" else 4, 4).copy_(weight)


def transpose(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(weight.t())


def interleave(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        heads = weight.view(2, 3, 4, 5).permute(1, 0, 2, 3).reshape(24, 5)
        params["w"].copy_(heads.to("cpu").contiguous())


CASES: dict[str, tuple[Loader, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "fused, sharded, padded": (
        fuse,
        {"qk": (6, 6), "o": (4, 3), "vocab": (8, 2)},
        {"q": (4, 6), "k": (2, 6), "o": (4, 6), "vocab": (5, 2)},
    ),
    "experts": (
        experts,
        {"w13": (3, 8, 5), "w2": (3, 5, 4)},
        {
            f"{e}.{part}": shape
            for e in range(3)
            for part, shape in (("gate", (4, 5)), ("up", (4, 5)), ("down", (5, 4)))
        },
    ),
    "transposed": (transpose, {"w": (4, 3)}, {"w": (3, 4)}),
    "interleaved heads": (interleave, {"w": (24, 5)}, {"w": (24, 5)}),
}


def sources_of(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> list[LogicalTensor]:
    return [LogicalTensor(name, dtype, shape) for name, shape in shapes.items()]


def run(load: Loader, shapes: dict[str, tuple[int, ...]], sources: dict[str, tuple[int, ...]]) -> Trace:
    params = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
    result = trace(lambda weights: load(params, weights), params, sources_of(sources))
    assert all((param == 7.0).all() for param in params.values()), "tracing must not write"
    return result


@pytest.mark.parametrize("case", CASES)
def test_filling_by_boxes_equals_loading(case: str) -> None:
    load, shapes, sources = CASES[case]
    real = {name: torch.randn(shape) for name, shape in sources.items()}
    expected = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
    load(expected, real.items())
    filled = {name: torch.full(shape, 9.0) for name, shape in shapes.items()}
    result = trace(lambda weights: load(filled, weights), filled, sources_of(sources))
    assert result.obstacles == ()
    assert result.differences == ()
    for view, value in result.padding:
        view.fill_(value)
    for name, tensor in result.tensors.items():
        for box in result.boxes[name]:
            part = real[box.logical][tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))]
            shape = (1,) * (tensor.dim() - part.dim()) + tuple(part.shape)
            window = tuple(slice(at, at + n) for at, n in zip(box.local_offset, shape, strict=True))
            tensor[window].copy_(part.reshape(shape))
    for name, tensor in expected.items():
        assert torch.equal(filled[name], tensor), name


def test_experts_are_boxes_of_one_physical_tensor() -> None:
    load, shapes, sources = CASES["experts"]
    result = run(load, shapes, sources)
    assert sorted(result.tensors) == ["w13", "w2"]
    assert Box("1.up", (0, 0), (4, 5), (1, 4, 0)) in result.boxes["w13"]


def test_what_lies_along_other_axes_is_split_and_permuted() -> None:
    def load(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            params["w"].data[int(name)].copy_(weight.t())

    params = {"w": torch.zeros(2, 4, 3)}
    result = trace(lambda weights: load(params, weights), params, sources_of({"0": (3, 4), "1": (3, 4)}))
    assert {name: tuple(tensor.shape) for name, tensor in result.tensors.items()} == {"w[0]": (3, 4), "w[1]": (3, 4)}
    result.tensors["w[1]"].fill_(3.0)
    assert (params["w"][1] == 3.0).all()
    assert (params["w"][0] == 0.0).all()


def test_tied_parameters_are_described_once() -> None:
    shared = torch.zeros(4, 2)
    params = {"embed": shared, "head": shared}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed":
                params["embed"].copy_(weight)

    result = trace(load, params, sources_of({"embed": (4, 2), "head": (4, 2)}))
    assert list(result.tensors) == ["embed"]


def test_what_the_loader_leaves_alone_is_named() -> None:
    load, shapes, sources = CASES["fused, sharded, padded"]
    result = run(load, {**shapes, "scale": (2,)}, sources)
    assert result.untouched == ("scale",)


def compute(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(weight * 2)


def multiply_in_place(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(weight)
        params["w"].mul_(2)


def read(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].fill_(weight.sum().item())


def leave_a_hole(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"][1:].copy_(weight[1:])


def exchange(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].data = torch.empty_like(weight)


def exchange_for_real(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].data = torch.zeros(weight.shape)


def overlap_twice(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"][:3].copy_(weight[:3])
        params["w"][2:].copy_(weight[:2])


def through_numpy(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(torch.from_numpy(weight.cpu().numpy()))


def through_a_list(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(torch.tensor(weight.tolist()))


def negate_lazily(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> object:
    for _, weight in weights:
        params["w"].copy_(torch._neg_view(weight))


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (through_numpy, "meta device"),
        (through_a_list, "unallocated storage"),
        (negate_lazily, "negated"),
        (compute, "computes what it copies"),
        (multiply_in_place, "writes it with aten.mul_"),
        (read, "meta tensor"),
        (leave_a_hole, "nothing is written to \\[0:1, 0:3\\]"),
        (exchange, "set_data"),
        (exchange_for_real, "exchanges the parameter's memory"),
        (overlap_twice, "writes a part of it twice"),
    ],
)
def test_what_boxes_cannot_express_is_an_obstacle(load: Loader, reason: str) -> None:
    result = run(load, {"w": (4, 3)}, {"w": (4, 3)})
    assert not result.differences
    assert any(re.search(reason, text) for text in result.obstacles), result.obstacles


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "scaled": lambda weight: weight.mul_(2),
    "given as the result": lambda weight: torch.add(weight, 1, out=weight),
    "one of a list": lambda weight: torch._foreach_mul_([weight], 2.0),
    "a row of it": lambda weight: weight[0].zero_(),
    "rows exchanged": lambda weight: weight[:2].copy_(weight[2:].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_that_the_loader_changes_before_it_copies_is_computed(
    change: Callable[[torch.Tensor], object],
) -> None:
    def before(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            change(weight)
            params["w"].copy_(weight)

    def of_a_copy(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            copy = weight.clone()
            change(copy)
            params["w"].copy_(copy)

    def afterwards(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            params["w"].copy_(weight)
            change(weight)

    shapes = {"w": (4, 3)}
    for load in (before, of_a_copy):
        result = run(load, shapes, shapes)
        assert any("computes what it copies" in text for text in result.obstacles), result
    assert run(afterwards, shapes, shapes).boxes == run(overwrite, shapes, shapes).boxes != {}


def overwrite(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _, weight in weights:
        params["w"].copy_(weight.unsqueeze_(0).squeeze_(0))


def test_a_later_whole_copy_replaces_an_earlier_one() -> None:
    def load(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            params["w"].copy_(weight)

    result = run(load, {"w": (2, 2)}, {"first": (2, 2), "second": (2, 2)})
    assert result.obstacles == ()
    assert [box.logical for box in result.boxes["w"]] == ["second"]


def test_all_tensors_that_do_not_fit_are_listed() -> None:
    def load(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            assert params[name].shape == weight.shape, f"expected {tuple(params[name].shape)}"
            params[name].copy_(weight)

    shapes = {f"w{i}": (4, 3) for i in range(6)}
    sources = {**shapes, "w1": (4, 4), "w4": (2, 3), "extra": (1,)}
    result = run(load, shapes, sources)
    assert [text.split(" ")[0] for text in result.differences] == ["w1", "w4", "extra"]
    assert "expected (4, 3)" in result.differences[0]


def test_a_source_that_is_too_large_is_a_difference_and_one_that_would_be_repeated_an_obstacle() -> None:
    def load(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            params["w"].copy_(weight)

    assert run(load, {"w": (4, 3)}, {"w": (4, 6)}).differences
    assert run(load, {"w": (1, 3)}, {"w": (4, 3)}).differences
    repeated = run(load, {"w": (4, 3)}, {"w": (1, 3)})
    assert not repeated.differences
    assert repeated.obstacles


def test_other_dtypes_are_differences_with_or_without_other_ones() -> None:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            assert weight.shape == params[name].shape, "another shape"
            params[name].copy_(weight)

    params = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}
    sources = [LogicalTensor("a", "float32", (2,)), LogicalTensor("b", "bfloat16", (2,))]
    only_dtype = trace(load, params, sources)
    assert only_dtype.differences == (
        "dtype of 'a': the engine has bfloat16, the version has float32, which `\"cast\": true` would convert",
    )
    both = trace(load, params, [sources[0], LogicalTensor("b", "bfloat16", (3,))])
    assert len(both.differences) == 2


def traced(load: Loader, source: str, param: str, cast: Cast) -> Trace:
    params = {"w": torch.zeros(4, 3, dtype=getattr(torch, param))}
    return trace(lambda weights: load(params, weights), params, [LogicalTensor("w", source, (8, 3))], cast)


def plainly(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in weights:
        params[name].copy_(weight[4:])


def by_itself(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in weights:
        params[name].copy_(weight.to(params[name].dtype)[4:])


@pytest.mark.parametrize("load", [plainly, by_itself])
def test_floats_are_converted_only_where_that_is_wanted(load: Loader) -> None:
    expected = traced(plainly, "bfloat16", "bfloat16", False)
    for source in ("float16", "float32", "float64"):
        for cast in (True, "bfloat16"):
            result = traced(load, source, "bfloat16", cast)
            assert (result.differences, result.obstacles) == ((), ())
            assert (result.boxes, result.padding) == (expected.boxes, expected.padding), "boxes have no dtype"
        for cast in (False, "float16", "float32"):
            assert len(traced(load, source, "bfloat16", cast).differences) == 1


@pytest.mark.parametrize(("source", "param"), [("int32", "int64"), ("int32", "float32"), ("bool", "bfloat16")])
def test_nothing_but_floats_is_converted(source: str, param: str) -> None:
    assert traced(plainly, source, param, True).differences
    assert traced(by_itself, source, param, True).obstacles


def test_what_changes_values_on_the_way_is_an_obstacle_whatever_is_wanted() -> None:
    def back_and_forth(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            params[name].copy_(weight.to(torch.float16)[4:])

    def reinterprets(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            params[name].copy_(weight.view(torch.float16)[4:])

    def writes_bytes(params: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            params[name].view(torch.int16).copy_(weight.view(torch.int16)[4:])

    for cast in (False, True):
        for source, param in (("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")):
            assert traced(back_and_forth, source, param, cast).obstacles, (source, param)
        assert traced(reinterprets, "bfloat16", "float16", cast).obstacles
        assert traced(writes_bytes, "bfloat16", "bfloat16", cast).obstacles


def layout(shard: int, *specs: TensorSpec, tag: str = "") -> Layout:
    return Layout(shard, 2, specs, tuple((i,) for i in range(len(specs))), tag)


def test_logical_tensors_reach_as_far_as_the_boxes() -> None:
    halves = [
        layout(rank, TensorSpec("qkv", "bfloat16", (4, 6), (Box("q", (rank * 4, 0), (4, 6), (0, 0)),)))
        for rank in (0, 1)
    ]
    whole = layout(0, TensorSpec("norm", "float32", (6,)))
    assert logical_tensors([*halves, whole]) == [
        LogicalTensor("norm", "float32", (6,)),
        LogicalTensor("q", "bfloat16", (8, 6)),
    ]


def test_disagreeing_or_processed_shards_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="float32 in one shard, bfloat16 in another"):
        logical_tensors([layout(0, TensorSpec("w", "float32", (2,))), layout(1, TensorSpec("w", "bfloat16", (2,)))])
    with pytest.raises(LayoutMismatch, match="processed form"):
        logical_tensors([layout(0, TensorSpec("w", "float32", (2,)), tag="packed")])
