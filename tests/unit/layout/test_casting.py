"""Which dtypes may be converted, and how that is asked for."""

from __future__ import annotations

import pytest

from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.casting import CASTABLE, check_cast, may_cast


@pytest.mark.parametrize(("given", "meant"), [("bf16", "bfloat16"), ("fp32", "float32"), ("float16", "float16")])
def test_a_dtype_may_be_named_in_short(given: str, meant: str) -> None:
    assert check_cast(given) == meant
    assert [may_cast(check_cast(given), "float64", each) for each in CASTABLE] == [each == meant for each in CASTABLE]


@pytest.mark.parametrize("value", ["int8", "float8_e4m3fn", "", "BF16", 1, None, 16.0])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="bf16"):
        check_cast(value)


def test_yes_means_any_floating_dtype_and_nothing_else() -> None:
    assert check_cast(True) is True
    assert check_cast(False) is False
    for other in ("int32", "bool", "float8_e4m3fn", "complex64"):
        assert not may_cast(True, other, "bfloat16")
        assert not may_cast(True, "bfloat16", other)
    assert may_cast(True, "float32", "bfloat16")
    assert not may_cast(False, "float32", "bfloat16")
