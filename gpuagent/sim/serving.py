"""An inference service on a card: requests arrive, queue up, are served in batches, and take time.

A batch takes its CPU time, waits until the card comes round to it (a time slice of each neighbour
that has kernels waiting), and then runs on the card, slower by the clock and by its neighbours' turns
(`jobs`). Batches are served one after the other, requests first come, first served.

While the process is frozen requests go on arriving and wait. A batch whose kernels were submitted
runs to its end, but is answered only when the process runs again.
"""

import math
from collections import deque
from collections.abc import Iterator
from random import Random

from gpuagent.sim.curve import Shape
from gpuagent.sim.jobs import Progress, Take, Turn
from gpuagent.sim.work import Inference

KEPT_REQUESTS = 100_000
"""Latencies that are remembered for each tenant; the oldest are lost."""
_MOST_WAITING = 10_000
"""Requests that wait; more are turned away, as a server's queue would."""
_REMEMBERED_SECONDS = 0.5
"""Its neighbours feel how busy it has been for so long; assumed."""
_LEAST_CPU = 1e-3


class Served:
    """Finished requests, oldest first: when, and how long each took."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[tuple[float, float]] = deque(maxlen=KEPT_REQUESTS)

    def add(self, finished_at: float, seconds: float) -> None:
        self.count += 1
        self._kept.append((finished_at, seconds))

    def since(self, start: float) -> list[tuple[float, float]]:
        """(monotonic seconds, latency in seconds) of those that finished at or after `start`."""
        found = []
        for one in reversed(self._kept):
            if one[0] < start:
                break
            found.append(one)
        found.reverse()
        return found


class ServingJob:
    """Implements `jobs.Job`."""

    def __init__(
        self,
        work: Inference,
        shape: Shape,
        *,
        take: Take,
        random: Random,
        at: float,
        time_slice: float,
    ) -> None:
        self.shape = shape
        self.cores = work.idle_cores
        self.pending = 0.0
        self.gpu_share = 0.0
        self.ended = "" if take(work.memory_bytes) else "CUDA out of memory"
        self.refused = 1 if self.ended else 0
        self.turned_away = 0
        self.served = Served()
        self.rate = work.rate
        """Requests a second; may be changed while it runs."""
        self._work = work
        self._random = random
        self._slice = time_slice
        self._trace = _repeated(work, at) if work.trace else None
        self._waiting: deque[float] = deque()
        self._batch: list[float] = []
        self._host_left = 0.0
        self._wait_left = 0.0
        self._card_left = 0.0
        self._next = self._arrival(at)
        self._busy = 0.0
        self._host_busy = 0.0
        self._ahead = -1.0
        """As in `jobs.Cycle`."""

    def _arrival(self, after: float) -> float:
        if self._trace is not None:
            return next(self._trace, math.inf)
        if self.rate <= 0:
            return math.inf
        return after + self._random.expovariate(self.rate)

    def change_rate(self, rate: float, at: float) -> None:
        """Requests come at another rate from now on."""
        self.rate = rate
        if self._trace is None:
            self._next = self._arrival(at)

    def progress(self) -> Progress:
        return Progress(
            running=True,
            requests=self.served.count,
            refused_allocations=self.refused,
            turned_away=self.turned_away,
        )

    def step(self, turn: Turn) -> None:
        if turn.frozen:
            self._drain(turn)
            return
        self._ahead = -1.0
        at, end = turn.at, turn.at + turn.seconds
        slower = self.shape.gpu_share(turn.clock) * turn.stretch
        cpu = max(turn.cpu, _LEAST_CPU)
        self._busy = self._host_busy = 0.0
        while at < end:
            if not self._batch and not self._begin(at, turn.others):
                if self._next >= end:
                    break
                at = max(at, self._next)
                self._arrive(at)
                continue
            at = self._work_on(at, end, slower, cpu)
        self._arrive(end)
        self._remember(turn.seconds, turn.stretch)

    def _drain(self, turn: Turn) -> None:
        """One step of the simulation while the process is frozen."""
        if self._ahead < 0.0:
            submitted = bool(self._batch) and self._host_left <= 0.0
            self._ahead = min(self._work.queued_seconds, self._card_left) if submitted else 0.0
        slower = self.shape.gpu_share(turn.clock) * turn.stretch
        waited = min(self._wait_left, turn.seconds) if self._ahead > 0 else 0.0
        ran = min((turn.seconds - waited) / slower, self._ahead)
        self._wait_left -= waited
        self._card_left -= ran
        self._ahead -= ran
        self._arrive(turn.at + turn.seconds)
        self.pending = min(ran * slower / turn.seconds, 1.0)
        self.gpu_share = self.pending / turn.stretch

    def _arrive(self, until: float) -> None:
        """Queue what has come until now."""
        while self._next <= until:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(self._next)
            else:
                self.turned_away += 1
            self._next = self._arrival(self._next)

    def _begin(self, at: float, others: float) -> bool:
        """Take a batch of those that wait; False where none does."""
        self._arrive(at)
        if not self._waiting:
            return False
        work = self._work
        size = min(len(self._waiting), work.max_batch)
        self._batch = [self._waiting.popleft() for _ in range(size)]
        vary = math.exp(self._random.gauss(0.0, work.jitter))
        self._host_left = work.host_seconds * size
        self._wait_left = others * self._slice * self._random.random()
        self._card_left = (work.base_seconds + work.item_seconds * size) * vary
        return True

    def _work_on(self, at: float, end: float, slower: float, cpu: float) -> float:
        """Bring the batch forward until it is done or the step ends; the time then."""
        room = end - at
        need = self._host_left / cpu
        if need > room:
            self._host_left -= room * cpu
            self._host_busy += room
            return end
        self._host_busy += need
        self._host_left = 0.0
        room -= need
        if self._wait_left > room:
            self._wait_left -= room
            return end
        room -= self._wait_left
        self._wait_left = 0.0
        need = self._card_left * slower
        if need > room:
            self._card_left -= room / slower
            self._busy += room
            return end
        self._busy += need
        done = end - room + need
        for arrived in self._batch:
            self.served.add(done, done - arrived)
        self._batch = []
        return done

    def _remember(self, seconds: float, stretch: float) -> None:
        """How busy it was: for its neighbours, for the card's counters, and for the CPUs."""
        weight = min(seconds / _REMEMBERED_SECONDS, 1.0)
        busy = min(self._busy / seconds, 1.0)
        self.pending += (busy - self.pending) * weight
        self.gpu_share = busy / stretch
        active = min((self._busy + self._host_busy) / seconds, 1.0)
        idle = self._work.idle_cores
        wanted = idle + max(self._work.cores - idle, 0.0) * active
        self.cores += (wanted - self.cores) * weight


def _repeated(work: Inference, began: float) -> Iterator[float]:
    while True:
        for offset in work.trace:
            yield began + offset
        if work.trace_seconds <= 0:
            return
        began += work.trace_seconds
