"""Many runs of many policies on one scenario: what each came to, in a pool of processes.

A run is named by policy, seed and variation, and is the same wherever and whenever it is made. Runs
with the same seed and variation see the same arrivals, whatever the policy.
"""

import asyncio
import bisect
import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Self

import msgspec

from gpuagent import log
from gpuagent.config import Config
from gpuagent.errors import AgentError, ConfigError
from gpuagent.lab.outcome import WARM_UP_SECONDS, Did, Meter, Outcome, levels_of, load_begins
from gpuagent.lab.policies import Member
from gpuagent.lab.scenarios import configuration as read
from gpuagent.lab.trial import Trial
from gpuagent.model.inventory import Level
from gpuagent.model.plan import Snapshot
from gpuagent.sim.host import SimHost
from gpuagent.sim.scenario import Scenario

POINTS = 90
"""Points in which the shares over a run are kept."""
EDGES = tuple(0.001 * 10 ** (n / 20) for n in range(101))
"""Upper bounds in seconds of the buckets in which latencies are counted: 20 a decade, 1 ms to 100 s."""
LEAST_SECONDS = 30.0
"""A shorter window says nothing."""
_P99 = 0.99
_STEP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class Failed(AgentError):
    """A run broke; the text says which."""


class Job(msgspec.Struct, frozen=True):
    """One run to make."""

    member: Member
    scenario: Scenario
    """Already varied; the member's configuration is laid over it."""
    variation: str
    seed: int
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.member.name}, seed {self.seed}, {self.variation}"


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant in the window of one run."""

    name: str
    level: Level | None
    work: float
    """Iterations, requests or tokens."""
    mean_share: float
    requests: int = 0
    missed: int = 0
    """Those that took longer than the objective."""
    p99_seconds: float | None = None
    objective_seconds: float | None = None
    """None where it has none."""

    @property
    def judged(self) -> bool:
        """Whether it is one for whose objective others are held back."""
        return self.level is Level.L1 and self.objective_seconds is not None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one."""

    policy: str
    variation: str
    seed: int
    seconds: float
    """Length of the window."""
    joules: float
    """Of all cards, in the window."""
    tenants: tuple[Tally, ...]
    shares: Mapping[str, tuple[float | None, ...]] = {}
    """Over the whole run, in `POINTS` equal parts, by tenant; None where it was not there."""
    latencies: Mapping[str, tuple[int, ...]] = {}
    """Requests in the window by bucket: up to each of `EDGES`, and beyond the last; by service."""
    let_go: int = 0
    """How often a lever was let go because it did not help."""
    held_at_end: tuple[str, ...] = ()
    """Who was still held back at the end, before the agent was stopped."""
    left: tuple[str, ...] = ()
    """What was not put back when it was."""

    @property
    def missed_ratio(self) -> float | None:
        """Requests of all L1 services over their objective, of all that they had."""
        judged = [t for t in self.tenants if t.judged]
        asked = sum(t.requests for t in judged)
        return sum(t.missed for t in judged) / asked if asked else None

    @property
    def p99_ratio(self) -> float | None:
        """p99 as a part of the objective: mean over the L1 services; None where one is unknown."""
        parts = [_part(t) for t in self.tenants if t.judged]
        known = [p for p in parts if p is not None]
        return sum(known) / len(known) if known and len(known) == len(parts) else None

    def work(self) -> dict[str, float]:
        return {t.name: t.work for t in self.tenants}


def _part(tally: Tally) -> float | None:
    if tally.p99_seconds is None or tally.objective_seconds is None:
        return None
    return tally.p99_seconds / tally.objective_seconds


# -- one run --------------------------------------------------------------------------------------------


def configuration(job: Job) -> Config:
    """The agent's at the beginning of a run. Raises ConfigError."""
    scenario = job.member.scenario(job.scenario)
    return read(scenario.agent_table(), source=f"{scenario.name} under {job.member.name}")


def measured_from(scenario: Scenario, seconds: float) -> float:
    """Seconds at which the window begins. Raises ConfigError where a run is too short for one."""
    begins = load_begins(scenario) + WARM_UP_SECONDS
    least = begins + LEAST_SECONDS
    if seconds < least:
        raise ConfigError(
            [f"{scenario.name}: {seconds:g} s are too few; its load needs {least:g} s at least"]
        )
    return begins


def play(job: Job) -> Run:
    """Make the run. Raises Failed."""
    try:
        if job.member.control == "none":
            return _alone(job)
        with tempfile.TemporaryDirectory(prefix="run-") as folder:
            return asyncio.run(_played(job, folder))
    except AgentError as error:
        raise Failed(f"{job.label}: {error}") from error


def _alone(job: Job) -> Run:
    """The host without an agent."""
    host = SimHost(job.scenario, job.seed)
    levels = levels_of(configuration(job))
    shares = _Shares(job, levels)
    host.advance(measured_from(job.scenario, job.seconds))
    meter = Meter(host, levels)
    while host.elapsed < job.seconds:
        host.advance(min(_STEP_SECONDS, job.seconds - host.elapsed))
    return _run(job, meter.read(), shares)


async def _played(job: Job, folder: str) -> Run:
    scenario = job.member.scenario(job.scenario)
    begins = measured_from(scenario, job.seconds)
    meter: Meter | None = None
    snapshot: Snapshot | None = None
    let_go = 0
    async with Trial(
        scenario, seed=job.seed, folder=folder, policies=job.member.policies()
    ) as trial:
        levels = levels_of(trial.config)
        shares = _Shares(job, levels)
        async for snapshot in trial.follow(job.seconds):
            elapsed = trial.host.elapsed
            shares.see(snapshot, elapsed, measured=meter is not None)
            let_go += sum(1 for e in snapshot.events if e.kind == "lever-let-go")
            if meter is None and elapsed >= begins:
                meter = Meter(trial.host, levels)
        assert meter is not None  # `measured_from` has seen to it
        outcome = meter.read()
        left = await trial.stop()
    held = () if snapshot is None else tuple(sorted(held_back(snapshot)))
    return _run(job, outcome, shares, let_go=let_go, held=held, left=left)


def held_back(snapshot: Snapshot) -> dict[str, float]:
    """Share by tenant (or card) of those that are held back now, as the host really is."""
    found: dict[str, float] = {}
    for hold in snapshot.holds:
        if hold.in_force and hold.share < 1.0:
            name = hold.subject.tenant or hold.subject.gpu
            found[name] = min(found.get(name, 1.0), hold.share)
    return found


class _Shares:
    """Shares over time, by tenant."""

    def __init__(self, job: Job, levels: Mapping[str, Level]) -> None:
        self._seconds = job.seconds / POINTS
        self._sums = {name: [0.0] * POINTS for name in levels}
        self._counts = {name: [0] * POINTS for name in levels}
        self._window = {name: [0.0, 0.0] for name in levels}

    def see(self, snapshot: Snapshot, elapsed: float, *, measured: bool) -> None:
        """Count one tick; `measured` is whether it is in the window."""
        held = held_back(snapshot)
        point = min(int(elapsed / self._seconds), POINTS - 1)
        for tenant in snapshot.state.inventory.tenants or ():
            if tenant.name in self._sums:
                share = held.get(tenant.name, 1.0)
                self._sums[tenant.name][point] += share
                self._counts[tenant.name][point] += 1
                if measured:
                    self._window[tenant.name][0] += share
                    self._window[tenant.name][1] += 1

    def mean(self, name: str) -> float:
        """Over the window; 1 for one that nobody looked at."""
        total, count = self._window.get(name, (0.0, 0))
        return total / count if count else 1.0

    def points(self) -> dict[str, tuple[float | None, ...]]:
        return {
            name: tuple(s / n if n else None for s, n in zip(sums, self._counts[name], strict=True))
            for name, sums in self._sums.items()
        }


def _run(
    job: Job,
    outcome: Outcome,
    shares: _Shares,
    *,
    let_go: int = 0,
    held: tuple[str, ...] = (),
    left: tuple[str, ...] = (),
) -> Run:
    return Run(
        policy=job.member.name,
        variation=job.variation,
        seed=job.seed,
        seconds=outcome.seconds,
        joules=outcome.joules,
        tenants=tuple(_tally(did, shares.mean(did.name)) for did in outcome.tenants),
        shares=shares.points(),
        latencies={d.name: counted(d.latencies) for d in outcome.tenants if d.objective},
        let_go=let_go,
        held_at_end=held,
        left=left,
    )


def _tally(did: Did, mean_share: float) -> Tally:
    bound = None if did.objective is None else did.objective.seconds
    return Tally(
        name=did.name,
        level=did.level,
        work=did.work,
        mean_share=mean_share,
        requests=len(did.latencies),
        missed=0 if bound is None else sum(1 for s in did.latencies if s > bound),
        p99_seconds=did.quantile(_P99),
        objective_seconds=bound,
    )


def counted(latencies: Iterable[float]) -> tuple[int, ...]:
    """How many seconds lie up to each edge and above the one before it, and beyond the last."""
    counts = [0] * (len(EDGES) + 1)
    for seconds in latencies:
        counts[bisect.bisect_left(EDGES, seconds)] += 1
    return tuple(counts)


# -- many -----------------------------------------------------------------------------------------------

Progress = Callable[[int, int], None]
"""Told how many runs are done, of how many."""


class Pool:
    """`with Pool(workers) as pool`: processes that make runs. Leaving it ends them at once."""

    def __init__(self, workers: int | None = None) -> None:
        """As many workers as there are CPUs, unless it is said."""
        # A worker that is ended cannot clean up: all that they write is below this, and goes with it.
        self._folder = tempfile.TemporaryDirectory(
            prefix="gpuagent-evaluate-", ignore_cleanup_errors=True
        )
        self.workers = workers or len(os.sched_getaffinity(0))
        self._before = frozenset(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(self._folder.name, os.getpid()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - self._before:
            child.terminate()
            child.join()
        self._folder.cleanup()

    def play(self, jobs: Sequence[Job], progress: Progress = lambda _done, _all: None) -> list[Run]:
        """All of them, in their own order. Raises Failed for the first that breaks."""
        with _uninterrupted():
            futures = [self._executor.submit(play, job) for job in jobs]
        waiting: set[Future[Run]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for job, future in zip(jobs, futures, strict=True):
                if future in done:
                    _raise(job, future)
            progress(len(jobs) - len(waiting), len(jobs))
        return [future.result() for future in futures]


def _raise(job: Job, future: Future[Run]) -> None:
    error = future.exception()
    if isinstance(error, Failed):
        raise error
    if error is not None:
        raise Failed(f"{job.label}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt waits until all workers have begun: half of one could not be ended.

    They inherit it, so that an interrupt from the terminal is not for them from the start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(folder: str, parent: int) -> None:
    """An interrupt is for whoever started us; he ends us, and removes what is in the folder.

    A worker dies with him, however he ends: nobody else would ever give it work, or end it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # he died before the line above
        os._exit(1)
    tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.setup(level="error")


def jobs_of(
    members: Iterable[Member], scenario: Scenario, variation: str, *, seeds: Iterable[int],
    seconds: float,
) -> Iterator[Job]:  # fmt: skip
    """All combinations."""
    drawn = tuple(seeds)
    for member in members:
        for seed in drawn:
            yield Job(member, scenario, variation, seed, seconds)
