"""Send readers of copies that are being withdrawn to others that hold the same, so that who leaves is not held up."""

from __future__ import annotations

from tensorhub_core.schedule.sources import distance, width_of
from tensorhub_core.state.candidates import candidate_of, reader_of
from tensorhub_core.state.choosing import choose_among
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import SourceSlow
from tensorhub_core.state.records import Copy, CopyState, ModelState, Worker
from tensorhub_core.state.stragglers import only_source, reads_now


def relieve(s: Step, model: ModelState) -> None:
    """Tell one reader of each copy that is being withdrawn to go on elsewhere, where that costs it nothing.

    It keeps what it has verified. Each is told once, and one at a time, so that they do not all go to the same copy.
    """
    for copy_id in sorted(s.state.draining):
        copy = s.state.copies[copy_id]
        if s.holder(copy).model != model.name:
            continue
        for reader in sorted({s.state.leases[lease].reader for lease in copy.leases}):
            if tell_of_another(s, s.state.workers[reader], copy):
                break


def tell_of_another(s: Step, reader: Worker, source: Copy) -> bool:
    """Tell a reader to leave a source that is being withdrawn, if it has much to read yet and there is another."""
    filling, current = reader.filling(), s.group(reader).open_round()
    if filling is None or current is None or current.key != source.key or not reads_now(current, reader):
        return False
    told = current.told_late.setdefault(reader.shard, set())
    left_bytes = filling.memory.total_bytes - filling.done_bytes
    if source.id in told or only_source(s, filling) is not source or left_bytes <= s.state.config.policy.lag_bytes:
        return False
    avoid = current.avoid.get(reader.shard, {})
    other = choose_among(s, reader, source.key, True, {*avoid, source.id})
    if not other or not is_as_good(s, reader, source, other[0]):
        return False
    told.add(source.id)
    holder, instead = s.holder(source), s.holder(other[0])
    text = f"{holder.replica} takes it back, and {instead.replica} has the same"
    s.log("info", f"{reader.replica}/{reader.shard} is sent to another source of version {source.key[1]}: {text}")
    s.push(reader, SourceSlow(current.number, next(iter(reader.leases)), text))
    return True


def is_as_good(s: Step, reader: Worker, source: Copy, other: Copy) -> bool:
    """Tell whether another whole copy of the same bytes, which stays, is as near as a source and no busier."""
    same = (other.memory.layout, other.sums) == (source.memory.layout, source.sums)
    if other.state is not CopyState.PUBLISHED or not same:
        return False
    here, now, then = reader_of(s, reader), candidate_of(s, source), candidate_of(s, other)
    if distance(here.place, then.place) > distance(here.place, s.holder(source).seat.place):
        return False
    return width_of(here, then) <= max(1.0, width_of(here, now) - 1.0)
