"""How the jobs on one card share it in a step: by time slices, or side by side as clients of MPS.

Theory of operation. Without MPS, one process has the whole card for a time slice, so that a job's
kernels take `1 + others` times as long, with `others` the chances that each of the others has some
waiting. Under MPS kernels of all clients run at the same time. Alone, a job's kernels fill `width` of
the card; a thread percentage is a ceiling on that, `used = min(width, ceiling)`, under which the part
of the work that is bound by the clock takes `width / used` times as long. With `others` the chances
that the others have kernels waiting, each times what it uses, a job is slowed by
`max(1, used + others) * (1 + interference * min(others, 1))`: not at all by lack of room while all of
them fit, in proportion beyond that, and always a little by shared caches and memory bandwidth. With
width 1 and no interference that is the law of time slices. Both forms are assumed (mean-field).
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpuagent.sim.jobs import Job, Turn
from gpuagent.sim.profiles import CardProfile, MpsProfile

NOBODY: frozenset[int] = frozenset()


class Used(NamedTuple):
    """What the kernels of one step took of the card."""

    running: float
    """Share of the step in which some kernel ran."""
    dynamic_watts: float
    """Mean dynamic power of the step at full clock."""


class TimeSlices:
    """One process after the other."""

    def __init__(self, profile: CardProfile, used_seconds: dict[int, float]) -> None:
        self._contention = profile.contention_ratio.value
        self._idle_watts = profile.idle_watts.value
        self._used_seconds = used_seconds

    def step(
        self, jobs: Mapping[int, Job], turn: Turn, cpu: Mapping[int, float], frozen: Collection[int]
    ) -> Used:
        """Give each job its turn. `cpu` is the share of its CPU demand that each pid was given."""
        idle, contention, used_seconds = self._idle_watts, self._contention, self._used_seconds
        waiting = share = dynamic = 0.0
        for job in jobs.values():
            waiting += job.pending
        for pid, job in jobs.items():
            turn.cpu = cpu[pid]
            turn.frozen = pid in frozen
            turn.others = max(waiting - job.pending, 0.0) * contention
            turn.stretch = 1.0 + turn.others
            job.step(turn)
            ran = job.gpu_share
            used_seconds[pid] += ran * turn.seconds
            share += ran
            dynamic += ran * max(job.shape.busy_watts - idle, 0.0)
        # Together they cannot run for more than the whole time.
        running = min(share, 1.0)
        return Used(running, dynamic / share * running if share > 0 else 0.0)


class _Place(NamedTuple):
    """One client on a card."""

    used: float
    """Of the card's multiprocessors, while its kernels run."""
    speed: float
    """Of what they use when there is no ceiling."""


class SideBySide:
    """All clients of one MPS server at once. `server` holds the pids of all of them, on any card."""

    def __init__(
        self,
        profile: CardProfile,
        mps: MpsProfile,
        server: Collection[int],
        used_seconds: dict[int, float],
    ) -> None:
        self.places: dict[int, _Place] = {}
        self._contention = profile.contention_ratio.value
        self._idle_watts = profile.idle_watts.value
        self._mps = mps
        self._interference = mps.interference_ratio.value
        self._server = server
        self._used_seconds = used_seconds
        self.server_pid = 0
        """To which the driver attributes all that runs (FACTS 2); 0 before the first client."""

    def admit(self, pid: int, shape: str, percentage: float) -> None:
        """A client that started with this thread percentage; `shape` is empty where it runs nothing."""
        width = self._mps.width[shape].value if shape else 1.0
        effect = self._mps.ceiling_effect.value
        used = min(width, 1.0 - (1.0 - percentage / 100.0) * effect)
        self.places[pid] = _Place(used, used / width)

    def step(
        self, jobs: Mapping[int, Job], turn: Turn, cpu: Mapping[int, float], frozen: Collection[int]
    ) -> Used:
        """As `TimeSlices.step`."""
        if not jobs:
            return Used(0.0, 0.0)
        idle, clock, places = self._idle_watts, turn.clock, self.places
        stall = self._stall(frozen)
        wanted = dynamic = 0.0
        quiet = 1.0
        for pid, job in jobs.items():
            wanted += job.pending * places[pid].used
        for pid, job in jobs.items():
            used, speed = places[pid]
            turn.cpu = cpu[pid]
            turn.frozen = pid in frozen
            turn.others = max(wanted - job.pending * used, 0.0)
            turn.clock = clock * speed
            slowed = self._slowed(used, turn.others)
            turn.stretch = slowed if turn.frozen else slowed * stall
            job.step(turn)
            quiet *= 1.0 - min(job.gpu_share * slowed, 1.0)
            dynamic += job.gpu_share * speed * max(job.shape.busy_watts - idle, 0.0)
        self._used_seconds[self.server_pid] += (1.0 - quiet) * turn.seconds
        return Used(1.0 - quiet, dynamic)

    def _slowed(self, used: float, others: float) -> float:
        crowd = max(1.0, used + others) * (1.0 + self._interference * min(others, 1.0))
        return 1.0 + self._contention * (crowd - 1.0)

    def _stall(self, frozen: Collection[int]) -> float:
        """How much longer kernels take because a client of the server is frozen."""
        if not any(pid in self._server for pid in frozen):
            return 1.0
        return self._mps.frozen_client_stretch.value
