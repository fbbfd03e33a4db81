"""Say how staged bytes are copied out, worked out when somebody asks: a plan may have a million such reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import sub

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.exact import Choices
from tensorhub_core.layout.pieces import Piece, part_of
from tensorhub_core.layout.regions import align
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import grid_of
from tensorhub_core.layout.types import Layout

_Ints = NDArray[np.int64]


class Placing(Mapping[int, tuple[Scatter, ...]]):
    """The scatters of every staged read of a plan. Any thread."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        sources: Sequence[Layout],
        choices: Choices,
        reads: _Ints,
        piece_of: _Ints,
        within: _Ints,
        choice: _Ints,
    ) -> None:
        """Take the landings of all staged reads, ordered by read.

        `reads`, `piece_of` and `within` are i64 [landings]: the read, the number of the piece, and the number of the
        segment in its storage. `choice` i64 [reads of the plan] says what each read takes of its segment.
        """
        used, piece_of = np.unique(piece_of, return_inverse=True)
        self._pieces = [pieces[piece] for piece in used.tolist()]
        """Those that are asked for: a plan that is kept should not keep all."""
        self._choices = choices
        self._segment_bytes = [layout.segment_bytes for layout in sources]
        self._landings, self._piece_of, self._within, self._choice = reads, piece_of.reshape(-1), within, choice
        self._reads: _Ints = np.unique(reads)

    def __getitem__(self, read: int) -> tuple[Scatter, ...]:
        begin, end = np.searchsorted(self._landings, (read, read + 1)).tolist()
        if begin == end:
            raise KeyError(read)
        choice = self._choices[int(self._choice[read])]
        origin = None if choice is None else choice.start
        landings = zip(self._piece_of[begin:end].tolist(), self._within[begin:end].tolist(), strict=True)
        return tuple(self._scatter(self._pieces[piece], within, origin) for piece, within in landings)

    def __iter__(self) -> Iterator[int]:
        return iter(self._reads.tolist())

    def __len__(self) -> int:
        return len(self._reads)

    def _scatter(self, piece: Piece, within: int, origin: tuple[int, ...] | None) -> Scatter:
        """Return the part of a piece in one segment, counted from where the bytes begin that are read of it."""
        spec = piece.src_spec
        grid = grid_of(spec.shape, dtype_bytes(spec.dtype), self._segment_bytes[piece.source])
        part = part_of(piece, grid, within)
        return Scatter(
            storage=piece.dst_storage,
            dst_start=part.dst_start,
            src_start=part.start if origin is None else tuple(map(sub, part.start, origin)),
            shape=align(part.length, len(piece.shape), 1),
        )
