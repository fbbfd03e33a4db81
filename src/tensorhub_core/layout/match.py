"""Match a destination's tensors with what the sources hold: the pieces that fill it, or every reason why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.agree import conflicts, same_bytes, same_places
from tensorhub_core.layout.casting import Cast, hint, may_cast
from tensorhub_core.layout.checks import quote
from tensorhub_core.layout.cover import Cover
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.holdings import Holding, holdings_of, index_sources, is_plain
from tensorhub_core.layout.pieces import Piece, SourceTables, piece_of
from tensorhub_core.layout.regions import Region
from tensorhub_core.layout.types import Layout

MAX_MESSAGE_CHARS = 64 << 10

Wanted = tuple[str, Holding]
"""A logical name with the destination's region of it (`source` is meaningless there)."""


def match(
    destination: Layout, sources: Sequence[Layout], tables: SourceTables, casts: Sequence[Cast] = ()
) -> list[Piece]:
    """Return the pieces that fill the destination; raises LayoutMismatch listing all differences.

    `casts`: by source, which dtypes may be converted; () = none.
    """
    matcher = _Matcher(destination, sources, tables, casts)
    pieces = matcher.match()
    if matcher.differences:
        raise mismatch(matcher.differences, matcher.hints)
    return pieces


def mismatch(differences: Sequence[str], hints: Iterable[str] = ()) -> LayoutMismatch:
    """Build the error that lists all differences; `hints` say what the caller can do about some of them."""
    head = f"{len(differences)} difference{'s' * (len(differences) != 1)} between registered tensors and the version"
    return listing("; ".join((head, *hints)), differences)


def listing(head: str, differences: Sequence[str]) -> LayoutMismatch:
    """Build the error that lists differences under a head; its text stops at a size that logs and messages can bear."""
    lines: list[str] = []
    room = MAX_MESSAGE_CHARS
    for line in differences:
        room -= len(line)
        if room < 0:
            lines.append(f"... and {len(differences) - len(lines)} more, all in `differences`")
            break
        lines.append(line)
    return LayoutMismatch("\n- ".join((f"{head}:", *lines)), tuple(differences))


class _Matcher:
    def __init__(
        self, destination: Layout, sources: Sequence[Layout], tables: SourceTables, casts: Sequence[Cast]
    ) -> None:
        self._destination = destination
        self._casts = list(casts) or [False] * len(sources)
        self._sources = sources
        self._tables = tables
        self._cover = Cover(len(sources), destination.shard)
        self._plain = is_plain(destination) and all(map(is_plain, sources))
        self._own = self._own_source()
        self._index: Mapping[str, list[Holding]] = {}
        self.differences: list[str] = []
        self.hints: dict[str, None] = {}

    def match(self) -> list[Piece]:
        """Collect pieces and differences in canonical order."""
        storages = [self._names_of(number) for number in range(len(self._destination.storages))]
        names = {logical for aliases in storages for wanted in aliases for logical, _ in wanted}
        self._index = index_sources(self._sources, names, self._own)
        self._compare_tags()
        pieces: list[Piece] = []
        for aliases in storages:
            pieces.extend(self._match_storage(aliases))
        self._compare_copies()
        self._find_extras()
        return pieces

    def _names_of(self, storage: int) -> list[list[Wanted]]:
        """Return what each of a storage's tensors wants."""
        tensors = self._destination.tensors
        return [holdings_of(tensors[tensor], -1, storage) for tensor in self._destination.storages[storage]]

    def _own_source(self) -> int | None:
        """Return the source that is the destination's own shard, if all sides are cut into plain shards alike."""
        shards = self._destination.num_shards
        if not self._plain or shards == 1 or any(layout.num_shards != shards for layout in self._sources):
            return None
        own = [number for number, layout in enumerate(self._sources) if layout.shard == self._destination.shard]
        return own[0] if len(own) == 1 else None

    def _compare_tags(self) -> None:
        tags = [("the registered tensors are", self._destination.tag)]
        tags += [(f"shard {layout.shard} of the version is", layout.tag) for layout in self._sources]
        for who, tag in dict.fromkeys(tags):
            if tag:
                self.differences.append(f"tag: {who} in the processed form {quote(tag)}, shared by equal layouts only")

    def _match_storage(self, aliases: list[list[Wanted]]) -> list[Piece]:
        """Match one storage through its first name that the sources have, and prove that the others agree with it."""
        aliases = [wanted for wanted in aliases if wanted]
        known = [wanted for wanted in aliases if all(logical in self._index for logical, _ in wanted)]
        if not known:
            for logical in dict.fromkeys(logical for wanted in aliases for logical, _ in wanted):
                if logical not in self._index:
                    self.differences.append(f"missing: the version has no {quote(logical)}")
            # What the version does have of these tensors may differ as well.
            for wanted in aliases:
                self._match_tensor([each for each in wanted if each[0] in self._index])
            return []
        found = [self._match_tensor(wanted) for wanted in known]
        for wanted, pieces in zip(known[1:], found[1:], strict=True):
            if pieces is not None and found[0] is not None and not self._agree(found[0], wanted, pieces):
                self.differences.append(
                    f"tied: {_names(known[0])} and {_names(wanted)} share memory here, but the version does not "
                    "prove that their bytes are equal"
                )
        return found[0] or []

    def _agree(self, pieces: list[Piece], wanted: list[Wanted], others: list[Piece]) -> bool:
        """Tell whether pieces bring what another name of the memory wants, which `others` would bring as well."""
        index = [self._index[logical] for logical, _ in wanted]
        # Checksums come last: a plan that compared any is kept only as long as they agree.
        return same_places(pieces, [region for _, region in wanted], index) or same_bytes(pieces, others, self._tables)

    def _match_tensor(self, wanted: list[Wanted]) -> list[Piece] | None:
        """Return the pieces of one tensor, or None after noting why there are none."""
        if len(wanted) == 1 and self._is_whole(*wanted[0]):
            return self._take_whole(*wanted[0])
        before = len(self.differences)
        pieces: list[Piece] = []
        for logical, region in wanted:
            held = self._index[logical]
            reason = self._compare_kinds(region, held)
            if reason:
                self.differences.append(f"{reason[0]} of {quote(logical)}: {reason[1]}")
                continue
            need = (region.lo, region.hi)
            parts, gaps = self._cover.find(need, held, dtype_bytes(region.spec.dtype))
            if gaps:
                self.differences.append(f"gap in {quote(logical)}: the version does not hold {_regions(gaps)}")
            pieces.extend(piece_of(holding, part, region) for holding, part in parts)
        return pieces if len(self.differences) == before else None

    def _is_whole(self, logical: str, region: Holding) -> bool:
        """Tell whether a tensor is wanted exactly as every source that has it holds it."""
        spec, held = region.spec, self._index[logical]
        dtype = held[0].spec.dtype
        return (
            spec.boxes is None
            and all(
                each.spec.boxes is None and each.spec.shape == spec.shape and each.spec.dtype == dtype for each in held
            )
            and (dtype == spec.dtype or self._differs(spec.dtype, held) is None)
        )

    def _take_whole(self, logical: str, region: Holding) -> list[Piece]:
        spec, origin = region.spec, region.lo
        size_bytes = prod(spec.shape) * dtype_bytes(spec.dtype)
        if not size_bytes:
            return []
        held = self._cover.pick(self._index[logical], size_bytes)
        return [Piece(held.source, held.storage, held.spec, origin, region.storage, spec, origin, spec.shape)]

    def _compare_kinds(self, region: Holding, held: list[Holding]) -> tuple[str, str] | None:
        """Return what differs in dtype or shape, or None."""
        spec = region.spec
        if (differs := self._differs(spec.dtype, held)) is not None:
            return "dtype", differs
        rank = len(region.lo)
        others = {len(holding.lo) for holding in held} - {rank}
        if others:
            full = sorted({holding.hi for holding in held if len(holding.lo) != rank})
            return "shape", f"registered with {rank} axes, the version has {', '.join(map(str, full[:4]))}"
        whole = {holding.spec.shape for holding in held if holding.spec.boxes is None}
        if len(whole) > 1:
            return "shape", f"shards of the version disagree: {', '.join(map(str, sorted(whole)[:4]))}"
        have = whole.pop() if whole else None
        if spec.boxes is not None:
            fits = have is None or all(want <= full for want, full in zip(region.hi, have, strict=True))
            return None if fits else ("shape", f"registered up to {region.hi}, the version has {have}")
        if have is None:
            # What is too short is a gap; what is too long would be left out without a word.
            end = tuple(max(corner) for corner in zip(*(holding.hi for holding in held), strict=True))
            have = tuple(map(max, end, spec.shape))
        return None if have == spec.shape else ("shape", f"registered {spec.shape}, the version has {have}")

    def _differs(self, dtype: str, held: list[Holding]) -> str | None:
        """Return why what is held cannot fill a tensor of a dtype, or None if it can, as it is or converted.

        Sources of several dtypes hold different values: which of them come must not depend on who is asked.
        """
        kinds = sorted({holding.spec.dtype for holding in held})
        if kinds == [dtype]:
            return None
        text = f"registered {dtype}, the version has {' and '.join(kinds)}"
        if len(kinds) > 1:
            return text
        if all(may_cast(self._casts[holding.source], kinds[0], dtype) for holding in held):
            return None
        if may_cast(True, kinds[0], dtype):
            self.hints[hint(self._casts[held[0].source])] = None
        return text

    def _compare_copies(self) -> None:
        """Refuse a version whose sources hold different bytes for one region of a logical tensor."""
        for logical, one, other in sorted(conflicts(self._index, self._tables)):
            shards = [self._sources[number].shard for number in (one, other)]
            self.differences.append(
                f"copies of {quote(logical)}: shards {shards[0]} and {shards[1]} of the version hold different bytes "
                "for one region; parts of a tensor must be registered with boxes"
            )

    def _find_extras(self) -> None:
        """Between plain layouts, note tensors of the version that the destination does not take."""
        if not self._plain:
            return
        shards = self._destination.num_shards
        if shards == 1:
            sources = list(self._sources)
        elif self._own is not None:
            sources = [self._sources[self._own]]
        else:
            return
        registered = {spec.name for spec in self._destination.tensors}
        extras: dict[str, None] = {}
        for layout in sources:
            for group in layout.storages:
                names = [layout.tensors[tensor].name for tensor in group]
                # Another name of bytes that the destination takes is not missed.
                if not any(name in registered for name in names):
                    extras.update(dict.fromkeys(names))
        self.differences.extend(f"extra: the version has {quote(name)}, not registered here" for name in sorted(extras))


def _names(wanted: list[Wanted]) -> str:
    return " + ".join(dict.fromkeys(quote(logical) for logical, _ in wanted[:4]))


def _regions(regions: list[Region]) -> str:
    text = ", ".join(f"{lo} to {hi}" for lo, hi in regions[:4])
    return text if len(regions) <= 4 else f"{text} and {len(regions) - 4} more regions"
