"""Read versions into registered memory on one thread, verified; the other half of `reading.Executor`."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import DeviceMemory
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.peers import Peers
from tensorhub_core.client.pump import Pump
from tensorhub_core.client.reading import Destination, ReadObserver, SourceAccess
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.staging import Staging
from tensorhub_core.client.transfers import Schedule
from tensorhub_core.client.verifier import Checker, Verifier, choose_checks
from tensorhub_core.clock import Clock, SystemClock
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import StateError, TransportError
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.limits import start_thread
from tensorhub_core.transport.base import Transport

_CLOSE_S = 30.0
STAGING_LIMIT_BYTES = 64 << 20


class ReadExecutor:
    """Own the transport's reading side, one thread that runs one read job at a time, and one that verifies.

    Both threads are started by the first job. Peers stay attached from job to job, staging memory stays registered.
    """

    def __init__(
        self,
        transport: Transport,
        config: ClientConfig | None = None,
        *,
        flow: FlowSettings | None = None,
        staging_limit_bytes: int = STAGING_LIMIT_BYTES,
        devices: DeviceMemory | None = None,
        clock: Clock | None = None,
        chance: np.random.Generator | None = None,
    ) -> None:
        """Take over a transport's reading side.

        `config` gives the window, the stall timeout and what is verified (`chance` draws the samples), `flow` all
        bounds of a source. `staging_limit_bytes` bounds the
        memory for segments of other layouts, unless one segment is larger. `devices` works on memory that the CPU
        cannot see; without it a job that fills such memory is refused.
        """
        config = ClientConfig() if config is None else config
        self._flow = FlowSettings(window=config.window, stall_timeout_s=config.stall_s) if flow is None else flow
        self._transport = transport
        self._clock: Clock = SystemClock() if clock is None else clock
        self._devices = devices
        self._verify = config.verify
        self._chance = np.random.default_rng() if chance is None else chance
        self._staging = Staging(transport, staging_limit_bytes, 2 * self._flow.window)
        self._peers = Peers(transport)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._job: ReadJob | None = None
        self._broken: Exception | None = None
        self._closed = False
        self._jobs: queue.Queue[ReadJob | None] = queue.Queue(2)
        self._thread: threading.Thread | None = None

    def start(
        self,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_] | None,
        observer: ReadObserver,
    ) -> ReadJob:
        """Begin a job; any thread.

        Raises StateError if one runs or the executor is closed, TransportError if the memory cannot be verified, the
        reading side cannot be used any more or no thread can be started.
        """
        done = np.zeros(len(plan), np.bool_) if verified is None else verified.copy()
        through_host = not self._transport.fills_devices and set[str]().union(*(s.devices for s in sources)) <= {"cpu"}
        schedule = Schedule(plan, sources, destination, done, through_host)
        chosen = choose_checks(self._verify, len(schedule), self._chance)
        checker = Checker(plan, schedule, sources, destination, self._devices, chosen)
        job = ReadJob(plan, sources, destination, done, observer, schedule, checker)
        if os.getpid() != self._pid:
            raise TransportError("the process was forked after the executor was made: connect again in the child")
        with self._lock:
            if self._closed:
                raise StateError("the executor is closed")
            if self._broken is not None:
                raise TransportError(f"the reading side is out of use: {self._broken}")
            if self._job is not None:
                raise StateError("a read job runs already: wait for its end")
            if self._thread is None:
                self._thread = self._start_threads()
            self._job = job
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """Cancel a running job and end the threads; idempotent, any thread.

        Raises TransportError if they have not ended after 30 s: what they write to must then not be freed.
        """
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if self._job is not None:
                self._job.cancel()
        if thread is not None and os.getpid() == self._pid:
            self._jobs.put(None)
            thread.join(_CLOSE_S)
            if thread.is_alive():
                raise TransportError("the reading thread does not end: it may still write, so end this process")

    def _start_threads(self) -> threading.Thread:
        """Start the thread that reads and those that verify: all of them, or none and TransportError."""
        verifier = Verifier(4 * self._flow.window)
        thread = threading.Thread(target=self._run, args=(verifier,), name="tensorhub-executor", daemon=True)
        try:
            start_thread(thread)
        except TransportError:
            verifier.close(_CLOSE_S)
            raise
        return thread

    def _run(self, verifier: Verifier) -> None:
        while (job := self._jobs.get()) is not None:
            pump = Pump(job, self._transport, self._peers, self._staging, verifier, self._flow, self._clock)
            try:
                outcome, error = pump.run(), None
            except Exception as caught:  # neither a source's nor the worker's fault: the job ends with it
                outcome, error = None, caught
            with self._lock:
                self._job = None
                self._broken = self._broken or pump.poisoned
            job.finish(outcome, error)
            del job, pump, outcome, error  # or the last job's memory would live until the next one
        verifier.close(_CLOSE_S)
        if self._broken is None:
            self._staging.release()
