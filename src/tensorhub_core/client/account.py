"""Keep account of what a job has verified: how much, how far from the start, what was wrong and whose it was; pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.backlog import Backlog
from tensorhub_core.client.lanes import Lane, Lanes, SourceFailed
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.verifier import Checked

_MOST_WRONG = 3
"""Wrong segments of one of several sources before it is left."""


class Account:
    """What one run of a job has verified; it writes `job.verified`."""

    def __init__(self, job: ReadJob, lanes: Lanes, backlog: Backlog) -> None:
        self._job, self._schedule, self._lanes, self._backlog = job, job.schedule, lanes, backlog
        self.checking = 0
        """How many batches wait for the verifier."""
        self.unverified_bytes = 0
        self.rereads = 0
        self.corrupt: set[str] = set()
        self.done_bytes = int(job.plan.length_bytes[job.verified].sum())
        self._unchecked: NDArray[np.bool_] = np.zeros(len(job.plan), np.bool_)
        """Reads that were taken without a comparison: they fall with the first wrong one."""
        self._distrusted = False
        self._prefix = 0

    def checked(self, checked: Checked) -> None:
        """Count what the verifier found in a batch."""
        landed, backlog = checked.landed, self._backlog
        self.checking -= 1
        self.unverified_bytes -= self._schedule.bytes_of(landed.begin, landed.end)
        reads, right = self._schedule.read[landed.begin : landed.end], checked.right
        chosen = self._job.checker.chosen
        if chosen is not None:
            compared = chosen[landed.begin : landed.end]
            self._unchecked[reads] = ~compared
            right = right & compared if self._distrusted else right
        if right.all():
            self._job.verified[reads] = True
            self.done_bytes += self._schedule.bytes_of(landed.begin, landed.end)
        else:
            self._job.verified[reads[right]] = True
            self.done_bytes += int(self._schedule.length_bytes[landed.begin : landed.end][right].sum())
        if backlog.wrong and checked.right[0]:  # a read that was wrong comes again alone
            blamed = backlog.wrong.get(landed.begin, [])
            self.corrupt.update(self._lanes.all[source].lease for source in blamed if source != landed.source)

    def wrong(self, lane: Lane, index: int) -> None:
        """Have a segment read again whose checksum did not match: from another source, or once more.

        Raises SourceFailed if that is used up.
        """
        segment = int(self._schedule.segment[index])
        lane.wrong += 1
        if self._job.checker.chosen is not None:
            self._distrust()
            text = f"segment {segment} does not match its checksum, nor may those that were not compared"
            raise SourceFailed(lane.source, "corrupt", text)
        if not self._backlog.again(index, lane.source, self._lanes.working):
            text = f"segment {segment} does not match its checksum, also read again"
            raise SourceFailed(lane.source, "corrupt", text)
        self.rereads += 1
        if self._lanes.shared and lane.wrong >= _MOST_WRONG:
            text = f"{lane.wrong} segments do not match their checksums, the last was {segment}"
            raise SourceFailed(lane.source, "corrupt", text)

    def report(self, lease: str) -> None:
        """Tell the observer how far the job is; `lease` names the source that gave what came last."""
        verified = self._job.verified
        if self._prefix < len(verified):
            rest = verified[self._prefix :]
            self._prefix += int(rest.argmin()) if not rest.all() else len(rest)
        self._job.observer.on_progress(self._prefix, self.done_bytes, self._job.plan.total_bytes, lease)

    def _distrust(self) -> None:
        """Take back what was not compared."""
        self._distrusted = True
        taken = self._unchecked & self._job.verified
        self._job.verified[taken] = False
        self.done_bytes -= int(self._job.plan.length_bytes[taken].sum())
        self._prefix = 0
