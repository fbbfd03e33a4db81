"""Know the size of every dtype whose tensors are nothing but their bytes."""

from __future__ import annotations

from tensorhub_core.errors import RegistrationError

_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **{f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
}


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a torch dtype; raises RegistrationError for an unknown one.

    torch's own quantised dtypes (`qint8`, ...) are unknown: their scales are not in their bytes.
    """
    size = _BYTES.get(dtype)
    if size is None:
        raise RegistrationError(f"dtype {dtype[:40]!r} cannot be transferred: its bytes alone do not hold its values")
    return size
