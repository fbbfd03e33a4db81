"""Find the bytes of a tensor inside what `torch.save` made of it: a zip archive of uncompressed records."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.checkpoint.pickled import Names, Record, counts, damaged, is_count, read_pickle
from tensorhub_core.errors import ConfigError, RegistrationError
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.regions import c_strides

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
_MAX_DESCRIPTION_BYTES = 1 << 20
_UNREADABLE = (zipfile.BadZipFile, OSError, EOFError, OverflowError, RuntimeError, ValueError, struct.error)
"""What reading a damaged archive raises."""


class _TensorV2(Record):
    __slots__ = ()


class _TensorV3(Record):
    __slots__ = ()


class _Parameter(Record):
    __slots__ = ()


_UNTYPED = "uint8"
_STORAGES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
DTYPES: Names = {
    ("torch", name): name
    for name in (
        *_STORAGES.values(),
        *("uint16", "uint32", "uint64", "complex32"),
        *(f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
        "float4_e2m1fn_x2",
    )
}
_NAMES: Names = {
    **DTYPES,
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch", "UntypedStorage"): _UNTYPED,
    ("torch._utils", "_rebuild_tensor_v2"): _TensorV2,
    ("torch._utils", "_rebuild_tensor_v3"): _TensorV3,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Where a tensor lies in an archive: elements of `dtype` at `strides` (in elements) from byte `start_bytes` on."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start_bytes: int

    @property
    def length_bytes(self) -> int:
        """Return the bytes of all its elements."""
        return dtype_bytes(self.dtype) * prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Tell whether the elements lie in a row, in C order."""
        pairs = zip(self.shape, self.strides, c_strides(self.shape), strict=True)
        return 0 in self.shape or all(length == 1 or stride == own for length, stride, own in pairs)


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str
    count: int


def locate(archive: NDArray[np.uint8], what: str) -> SavedTensor:
    """Return where the one tensor of an archive, u8 [bytes], lies in it; only its directory and description are read.

    `what` names file and tensor in messages. Raises ConfigError for anything but a plain, uncompressed tensor of this
    machine's byte order that lies within the archive.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Bytes(archive))) as records:
            found = {info.filename: info for info in records.infolist()}
            roots = [name.removesuffix("data.pkl") for name in found if name.endswith("/data.pkl")]
            if len(roots) != 1:
                damaged(what, f"{len(roots)} records describe the tensor")
            (root,) = roots
            for name in (f"{root}data.pkl", f"{root}byteorder"):
                if name in found and found[name].file_size > _MAX_DESCRIPTION_BYTES:
                    damaged(what, f"its record {name!r} has {found[name].file_size:,} bytes")
                if name in found and found[name].compress_type != zipfile.ZIP_STORED:
                    damaged(what, f"its record {name!r} is compressed")
            order = records.read(found[f"{root}byteorder"]) if f"{root}byteorder" in found else b"little"
            description = records.read(found[f"{root}data.pkl"])
    except (
        zipfile.BadZipFile,
        OSError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        damaged(what, str(error))
    if order != b"little":
        damaged(what, f"its byte order is {order[:20]!r}")
    tensor, storage = _described(description, what)
    info = found.get(f"{root}data/{storage.record}")
    if info is None:
        damaged(what, f"its record {storage.record[:40]!r} is missing")
    start, length = _raw_record(archive, info, what)
    if length != storage.count * dtype_bytes(storage.dtype):
        damaged(what, f"{storage.count:,} elements of {storage.dtype} do not take the {length:,} bytes of their record")
    _check_within(tensor, length, what)
    return SavedTensor(tensor.dtype, tensor.shape, tensor.strides, start + tensor.start_bytes)


def gathered(archive: NDArray[np.uint8], saved: SavedTensor) -> NDArray[np.uint8]:
    """Return a copy of the elements in C order, u8 [length_bytes]; raises ConfigError without memory for it."""
    item = dtype_bytes(saved.dtype)
    if 0 in saved.shape:
        return np.empty(0, np.uint8)
    try:
        view = np.lib.stride_tricks.as_strided(
            archive[saved.start_bytes :], (*saved.shape, item), (*(n * item for n in saved.strides), 1), writeable=False
        )
        return np.ascontiguousarray(view).reshape(-1)
    except (MemoryError, ValueError):
        raise ConfigError(f"a tensor of {saved.dtype} {saved.shape} takes more memory than there is") from None


class _Bytes(io.RawIOBase):
    """Read an array of bytes as a file, without a copy of it."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._data.nbytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: part.nbytes] = part.tobytes()
        self._at += part.nbytes
        return part.nbytes


def _raw_record(archive: NDArray[np.uint8], info: zipfile.ZipInfo, what: str) -> tuple[int, int]:
    """Return where the bytes of a record begin, and how many there are."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED or info.file_size != info.compress_size:
        damaged(what, "its record is compressed or encrypted")
    header = archive[info.header_offset : info.header_offset + 30].tobytes() if info.header_offset >= 0 else b""
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        damaged(what, "its record has no header")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if start + info.file_size > archive.nbytes:
        damaged(what, "its record ends outside of the archive")
    return start, info.file_size


def _described(description: bytes, what: str) -> tuple[SavedTensor, _Storage]:
    """Return the tensor, its start counted from that of its storage, and the storage."""
    rebuilt = read_pickle(description, _NAMES, what, lambda key: _storage(key, what))
    if isinstance(rebuilt, _Parameter):
        rebuilt = rebuilt.args[0] if rebuilt.args else None
    if not isinstance(rebuilt, _TensorV2 | _TensorV3) or len(rebuilt.args) < 6:
        damaged(what, "it holds something else than one tensor")
    storage, start, shape, strides = rebuilt.args[:4]
    untyped = isinstance(rebuilt, _TensorV3)
    dtype = rebuilt.args[6] if untyped and len(rebuilt.args) > 6 else getattr(storage, "dtype", None)
    shape, strides = counts(shape), counts(strides)
    if any(rebuilt.args[7 if untyped else 6 :]):
        damaged(what, "its bytes are not its values: a lazily conjugated or negated tensor")
    if not isinstance(storage, _Storage) or not isinstance(dtype, str) or not is_count(start):
        damaged(what, "it does not say where the tensor lies")
    if shape is None or strides is None or len(shape) != len(strides):
        damaged(what, "its shape or its strides are impossible")
    return SavedTensor(dtype, shape, strides, start * _item_bytes(dtype, what)), storage


def _storage(key: object, what: str) -> _Storage:
    """Read the reference to a storage: ("storage", type, record, device, number of elements)."""
    if not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage":
        damaged(what, "it refers to something else than a storage")
    _, dtype, record, _, count = key
    if not isinstance(dtype, str) or not isinstance(record, str) or not is_count(count):
        damaged(what, "its reference to a storage is impossible")
    _item_bytes(dtype, what)
    return _Storage(record, dtype, count)


def _item_bytes(dtype: str, what: str) -> int:
    try:
        return dtype_bytes(dtype)
    except RegistrationError as error:
        damaged(what, str(error))


def _check_within(tensor: SavedTensor, storage_bytes: int, what: str) -> None:
    if 0 in tensor.shape:
        return
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
    end = tensor.start_bytes + (last + 1) * dtype_bytes(tensor.dtype)
    if end > storage_bytes:
        damaged(what, f"the tensor ends at byte {end:,} of a storage of {storage_bytes:,}")
