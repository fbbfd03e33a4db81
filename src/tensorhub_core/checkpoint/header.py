"""Parse and build the header of a safetensors file: 8 bytes of length, a JSON object, then the tensors' bytes.

Nothing in a header is trusted: each entry is checked against the file before anything is mapped. Pure; no IO.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorhub_core.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""

METADATA_KEY = "__metadata__"
_LENGTH = struct.Struct("<Q")
PREFIX_BYTES = _LENGTH.size
_LFS_POINTER = b"version https://git-lfs"
_MAX_COUNT = 1 << 62
_MAX_AXES = 64
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Dtype:
    """Name one element type in safetensors' words (`code`) and ours (`name`, torch's); `order` sorts files.

    `packed` elements lie together in one byte; then our last axis counts bytes and the file's counts elements.
    """

    code: str
    name: str
    bits: int
    order: int
    packed: int = 1


_TABLE = (
    ("BOOL", "bool", 8, 1),
    ("F4", "float4_e2m1fn_x2", 4, 2),
    ("U8", "uint8", 8, 1),
    ("I8", "int8", 8, 1),
    ("F8_E5M2", "float8_e5m2", 8, 1),
    ("F8_E4M3", "float8_e4m3fn", 8, 1),
    ("F8_E8M0", "float8_e8m0fnu", 8, 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, 1),
    ("I16", "int16", 16, 1),
    ("U16", "uint16", 16, 1),
    ("F16", "float16", 16, 1),
    ("BF16", "bfloat16", 16, 1),
    ("I32", "int32", 32, 1),
    ("U32", "uint32", 32, 1),
    ("F32", "float32", 32, 1),
    ("C64", "complex64", 64, 1),
    ("F64", "float64", 64, 1),
    ("I64", "int64", 64, 1),
    ("U64", "uint64", 64, 1),
)
_DTYPES = tuple(Dtype(code, name, bits, order, packed) for order, (code, name, bits, packed) in enumerate(_TABLE))
BY_CODE = {dtype.code: dtype for dtype in _DTYPES}
BY_NAME = {dtype.name: dtype for dtype in _DTYPES}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `dtype` and `shape` in our words, `offset_bytes` from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


def header_length(prefix: bytes, file_bytes: int, file: str) -> int:
    """Return the header's length in bytes from the file's first bytes; raises ConfigError naming `file`."""
    if prefix.startswith(_LFS_POINTER):
        raise ConfigError(f"{file} is a Git LFS pointer, not the weights themselves: fetch them with `git lfs pull`")
    if len(prefix) < PREFIX_BYTES:
        raise ConfigError(
            f"{file} is no safetensors file: it has {file_bytes} bytes, fewer than the header's length takes"
        )
    length = int(_LENGTH.unpack(prefix[:PREFIX_BYTES])[0])
    if length > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{file} is no safetensors file: its first 8 bytes say that the header has {length:,} bytes, "
            f"more than the {MAX_HEADER_BYTES:,} that are allowed"
        )
    if PREFIX_BYTES + length > file_bytes:
        raise ConfigError(
            f"{file} is cut off inside its header: {PREFIX_BYTES + length:,} bytes are needed, it has {file_bytes:,}"
        )
    return length


def parse_header(header: bytes, file_bytes: int, file: str) -> tuple[Entry, ...]:
    """Return the file's tensors in the order of their bytes; raises ConfigError naming `file` and the tensor.

    The tensors must cover the rest of the file exactly: no holes, no overlaps, nothing after the last one.
    """
    fields = parse_json_object(header, file)
    metadata = fields.pop(METADATA_KEY, None)
    if metadata is not None and not _is_text_map(metadata):
        raise ConfigError(f"{file}: {METADATA_KEY} must map text to text")
    start = PREFIX_BYTES + len(header)
    entries = [_entry(name, value, start, file) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.length_bytes))
    end = start
    for entry in entries:
        if entry.offset_bytes != end:
            what = "overlaps the tensor before it" if entry.offset_bytes < end else "leaves a hole before it"
            raise ConfigError(
                f"{file}: tensor {shown(entry.name)} {what} (byte {entry.offset_bytes:,}, expected {end:,})"
            )
        end += entry.length_bytes
        if end > file_bytes:
            raise ConfigError(
                f"{file} is cut off: tensor {shown(entry.name)} ends at byte {end:,}, the file has {file_bytes:,}"
            )
    if end != file_bytes:
        raise ConfigError(f"{file}: {file_bytes - end:,} bytes after the last tensor belong to none")
    return tuple(entries)


def build_header(tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    """Build length and header for tensors (name, our dtype, our shape, length_bytes) whose bytes follow in this order.

    Raises ConfigError for a dtype that the format does not know. Padded so that the bytes start 8-aligned.
    """
    fields: dict[str, Any] = {METADATA_KEY: metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, length_bytes in tensors:
        kind = known_dtype(dtype, name)
        fields[name] = {
            "dtype": kind.code,
            "shape": _file_shape(kind, shape),
            "data_offsets": [offset, offset + length_bytes],
        }
        offset += length_bytes
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(f"{len(tensors):,} tensors need a header of {len(text):,} bytes: use smaller files")
    return _LENGTH.pack(len(text)) + text


def known_dtype(dtype: str, tensor: str) -> Dtype:
    """Return the format's entry for our dtype name; raises ConfigError naming `tensor`."""
    kind = BY_NAME.get(dtype)
    if kind is None:
        raise ConfigError(f"tensor {shown(tensor)}: safetensors cannot store dtype {dtype}")
    return kind


def _file_shape(kind: Dtype, shape: Sequence[int]) -> list[int]:
    axes = [int(n) for n in shape]
    if kind.packed > 1 and axes:
        axes[-1] *= kind.packed
    return axes


def parse_json_object(text: bytes, file: str) -> dict[str, Any]:
    """Parse JSON that must be an object without repeated keys; raises ConfigError naming `file`."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                raise ConfigError(f"{file}: {shown(name)} appears twice")
            fields[name] = value
        return fields

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not valid: a JSON object was expected, not {shown(value)}")
    return value


def is_name(name: str) -> bool:
    """Tell whether a tensor can have this name: any valid unicode, not empty, not the format's own key."""
    return name not in ("", METADATA_KEY) and not any("\ud800" <= letter <= "\udfff" for letter in name)


def shown(value: object) -> str:
    """Return `repr(value)` cut to a length that fits on a line."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


def _entry(name: str, value: object, start: int, file: str) -> Entry:
    where = f"{file}: tensor {shown(name)}"
    if not is_name(name):
        raise ConfigError(f"{where}: a name must be valid unicode and not empty")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{where} must have exactly dtype, shape and data_offsets")
    kind = BY_CODE.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if kind is None:
        raise ConfigError(f"{where} has dtype {shown(value['dtype'])}, which cannot be served")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(_is_count(axis) for axis in shape):
        raise ConfigError(f"{where} has the impossible shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ConfigError(f"{where} has the impossible data_offsets {shown(offsets)}")
    begin, end = offsets
    if begin > end:
        raise ConfigError(f"{where} ends before it begins (data_offsets {shown(offsets)})")
    return Entry(name, kind.name, _our_shape(kind, shape, end - begin, where), start + begin, end - begin)


def _our_shape(kind: Dtype, shape: list[int], length_bytes: int, where: str) -> tuple[int, ...]:
    bits = kind.bits
    for axis in shape:
        bits *= axis
    if bits != 8 * length_bytes:
        raise ConfigError(
            f"{where} of {kind.code} {shape} takes {bits / 8:,g} bytes, its data_offsets hold {length_bytes:,}"
        )
    if kind.packed == 1:
        return tuple(shape)
    if not shape or shape[-1] % kind.packed:
        raise ConfigError(f"{where} of {kind.code} {shape} does not fill whole bytes along its last axis")
    return (*shape[:-1], shape[-1] // kind.packed)
