"""Tenants at work on a card: repeated steps, as training, decoding, growing and notebooks make them.

Theory of operation. A step of work submits kernels (CPU), runs them (card), and has a part in which
the card waits for the host. Submission and running overlap, so that the longer of the two counts.
With `cpu` the share of its CPU demand that the job was given, `clock` the card's relative clock and
`stretch` how much longer its kernels take because others have kernels waiting too,

    seconds = step_seconds * (max(gpu(clock) * stretch, launch / cpu) + wait(cpu))

where the wait for the host is `host` at full CPU, and grows by the part of it that is CPU work. So a
CPU quota slows a job that submits many small kernels in proportion, and one of CUDA graphs (`launch`
near 0) hardly. Cards slice time among processes: `stretch` is 1 and the chances that each of the
others has kernels waiting. The form is assumed (mean-field processor sharing).

A job whose process is frozen submits nothing more. While its kernels take longer than submitting them
it is ahead of the card by up to `queued` seconds of work, though not past the end of its step, at
which it looks at the result; this much still runs. One that waits for its own submission, or for the
host, has nothing queued and stops at once.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from gpuagent.sim.curve import Shape
from gpuagent.sim.work import Decode, Grower, Idle, Notebook, Training

Take = Callable[[float], bool]
"""Asks for so many bytes of the card in all; False where it has not that much left."""
_LEAST_CPU = 1e-3
"""A thread that is held gets a little even so: the kernel's least quota is 1 ms of each second."""


class Progress(msgspec.Struct, frozen=True):
    """What a tenant has done since the beginning, over all its lives."""

    running: bool = False
    iterations: int = 0
    requests: int = 0
    tokens: int = 0
    refused_allocations: int = 0
    turned_away: int = 0
    """Requests that found the queue full."""

    def after(self, past: "Progress") -> "Progress":
        """With what was done before."""
        return Progress(
            running=self.running,
            iterations=past.iterations + self.iterations,
            requests=past.requests + self.requests,
            tokens=past.tokens + self.tokens,
            refused_allocations=past.refused_allocations + self.refused_allocations,
            turned_away=past.turned_away + self.turned_away,
        )


class Turn:
    """What one job gets in one step of the simulation. Used again for the next job."""

    __slots__ = ("at", "clock", "cpu", "frozen", "others", "seconds", "stretch")

    def __init__(self) -> None:
        self.at = 0.0
        """Monotonic seconds at the beginning of the step."""
        self.seconds = 0.0
        self.cpu = 1.0
        """Share of its CPU demand that it was given."""
        self.clock = 1.0
        self.stretch = 1.0
        self.others = 0.0
        """How many other jobs have kernels waiting, on average."""
        self.frozen = False
        """Whether its process is frozen: what it has submitted runs, and no more."""


class Job(Protocol):
    """One workload while it runs."""

    ended: str
    """Why it is over; empty while it is not."""

    @property
    def shape(self) -> Shape: ...
    @property
    def cores(self) -> float:
        """CPU demand now."""

    @property
    def pending(self) -> float:
        """Chance that it has kernels waiting or running."""

    @property
    def gpu_share(self) -> float:
        """Share of the last step in which its kernels ran."""

    def step(self, turn: Turn) -> None: ...
    def progress(self) -> Progress:
        """What it has done so far."""


class Cycle:
    """The repeated step of a job: how far it gets, and how it uses the card meanwhile."""

    def __init__(
        self,
        shape: Shape,
        *,
        seconds: float,
        launch: float,
        jitter: float,
        queued: float,
        host_cpu: float,
        random: Random,
    ) -> None:
        self.pending = 0.0
        self.gpu_share = 0.0
        self.done = 0
        self._shape = shape
        self._seconds = seconds
        self._launch = launch * (1.0 - shape.host)
        self._host_cpu = host_cpu
        self._queued = queued
        self._card_bound = False
        """Whether it submits faster than the card works."""
        self._ahead = -1.0
        """What is left of the work it had submitted when it was frozen; below 0 while it is not."""
        self._jitter = jitter
        self._random = random
        self._left = self._draw()

    def _draw(self) -> float:
        return self._seconds * math.exp(self._random.gauss(0.0, self._jitter))

    def rest(self) -> None:
        """Nothing on the card in this step."""
        self.pending = self.gpu_share = 0.0
        self._card_bound = False
        self._ahead = -1.0

    def drain(self, turn: Turn) -> None:
        """One step of the simulation while the process is frozen."""
        if self._ahead < 0.0:
            self._ahead = min(self._queued, self._left) if self._card_bound else 0.0
        gpu = self._shape.gpu_share(turn.clock)
        on_card = gpu * turn.stretch
        ran = min(turn.seconds / on_card, self._ahead)
        self._ahead -= ran
        self._left -= ran
        self.gpu_share = gpu * ran / turn.seconds
        self.pending = min(on_card * ran / turn.seconds, 1.0)

    def step(self, turn: Turn) -> int:
        """Work for one step of the simulation; how many steps of the job were completed."""
        shape = self._shape
        cpu = max(turn.cpu, _LEAST_CPU)
        gpu = shape.gpu_share(turn.clock)
        on_card = gpu * turn.stretch
        launching = self._launch / cpu
        self._card_bound = on_card >= launching
        self._ahead = -1.0
        longer = on_card if self._card_bound else launching
        took = longer + shape.host * _wait(self._host_cpu, cpu)
        self.gpu_share = gpu / took
        self.pending = min(on_card / took, 1.0)
        left = self._left - turn.seconds / took
        completed = 0
        while left <= 0.0:
            completed += 1
            left += self._draw()
        self._left = left
        self.done += completed
        return completed


def _steady(work: Grower | Notebook, shape: Shape, random: Random) -> Cycle:
    """Steps that all take the same time."""
    return Cycle(
        shape,
        seconds=work.step_seconds,
        launch=work.launch,
        jitter=0.0,
        queued=work.queued_seconds,
        host_cpu=work.host_cpu,
        random=random,
    )


def _wait(part: float, cpu: float) -> float:
    """How much longer a wait takes with so much CPU, of which this part is CPU work."""
    return 1.0 - part + part / cpu


class _Life:
    """What all jobs have: memory that is taken, an end, a count of what was refused."""

    def __init__(self, shape: Shape, take: Take) -> None:
        self.shape = shape
        self.cores = 0.0
        self.pending = 0.0
        self.gpu_share = 0.0
        self.ended = ""
        self.refused = 0
        self._take = take

    def progress(self) -> Progress:
        return Progress(running=True, refused_allocations=self.refused)

    def _grow(self, total: float, *, dies: bool) -> bool:
        """Have so much memory in all; whether there was room for it."""
        if self._take(total):
            return True
        self.refused += 1
        if dies:
            self.ended = "CUDA out of memory"
        return False

    def _drain(self, cycle: Cycle, turn: Turn) -> None:
        cycle.drain(turn)
        self._show(cycle)

    def _show(self, cycle: Cycle) -> None:
        self.pending, self.gpu_share = cycle.pending, cycle.gpu_share


class TrainingJob(_Life):
    """Iterations, with a pause of the card at checkpoints and lighter work in evaluations."""

    def __init__(self, work: Training, shape: Shape, *, take: Take, random: Random) -> None:
        super().__init__(shape, take)
        self._work = work
        self._cycle = Cycle(
            shape,
            seconds=work.iteration_seconds,
            launch=work.launch,
            jitter=work.jitter,
            queued=work.queued_seconds,
            host_cpu=work.host_cpu,
            random=random,
        )
        self._age = 0.0
        self._memory = -1.0
        self._evaluating = 0.0
        """Seconds left at full speed ..."""
        self._checkpointing = 0.0
        """... and seconds left."""
        self.cores = work.cores

    def progress(self) -> Progress:
        return msgspec.structs.replace(super().progress(), iterations=self._cycle.done)

    def step(self, turn: Turn) -> None:
        if turn.frozen:
            self._drain(self._cycle, turn)
            return
        self._ramp(turn.seconds)
        self.cores = self._work.cores
        if self._checkpointing > 0:
            # One thread writes; the card waits.
            self._checkpointing -= turn.seconds
            self.cores = min(self._work.cores, 1.0)
            self._cycle.rest()
            self._show(self._cycle)
        elif self._evaluating > 0:
            self._cycle.rest()
            self._evaluate(turn)
        else:
            if self._cycle.step(turn):
                self._plan()
            self._show(self._cycle)

    def _ramp(self, seconds: float) -> None:
        work = self._work
        if self._memory >= work.memory_bytes:
            return
        self._age += seconds
        done = min(self._age / work.ramp_seconds, 1.0) if work.ramp_seconds > 0 else 1.0
        self._memory = work.memory_bytes * done
        self._grow(self._memory, dies=True)

    def _plan(self) -> None:
        """What comes after the iteration that has just ended."""
        work, done = self._work, self._cycle.done
        if done % work.evaluate_every == 0:
            self._evaluating = work.evaluate_seconds
        if done % work.checkpoint_every == 0:
            self._checkpointing = work.checkpoint_seconds

    def _evaluate(self, turn: Turn) -> None:
        share = self._work.evaluate_share
        gpu = share * self.shape.gpu_share(turn.clock)
        host = (1.0 - share) * _wait(self._work.host_cpu, max(turn.cpu, _LEAST_CPU))
        took = gpu * turn.stretch + host
        self._evaluating -= turn.seconds / took
        self.gpu_share = gpu / took
        self.pending = min(gpu * turn.stretch / took, 1.0)


class DecodeJob(_Life):
    """One token of every sequence a step."""

    def __init__(self, work: Decode, shape: Shape, *, take: Take, random: Random) -> None:
        super().__init__(shape, take)
        self._work = work
        self._cycle = Cycle(
            shape,
            seconds=work.step_seconds,
            launch=work.launch,
            jitter=work.jitter,
            queued=work.queued_seconds,
            host_cpu=work.host_cpu,
            random=random,
        )
        self.cores = work.cores
        self._grow(work.memory_bytes, dies=True)

    def progress(self) -> Progress:
        tokens = self._cycle.done * self._work.sequences
        return msgspec.structs.replace(super().progress(), tokens=tokens)

    def step(self, turn: Turn) -> None:
        if turn.frozen:
            self._drain(self._cycle, turn)
            return
        self._cycle.step(turn)
        self._show(self._cycle)


class IdleJob(_Life):
    """Keeps its memory."""

    def __init__(self, work: Idle, shape: Shape, *, take: Take) -> None:
        super().__init__(shape, take)
        self.cores = work.cores
        self._grow(work.memory_bytes, dies=True)

    def step(self, turn: Turn) -> None:
        pass


class GrowerJob(_Life):
    """Takes some more memory with each step, as fast as its steps go."""

    def __init__(self, work: Grower, shape: Shape, *, take: Take, random: Random) -> None:
        super().__init__(shape, take)
        self._work = work
        self._cycle = _steady(work, shape, random)
        self._memory = work.memory_bytes
        self.cores = work.cores
        self._grow(self._memory, dies=True)

    def step(self, turn: Turn) -> None:
        if turn.frozen:
            self._drain(self._cycle, turn)
            return
        steps = self._cycle.step(turn)
        self._show(self._cycle)
        if steps:
            more = steps * self._work.step_seconds * self._work.bytes_per_second
            if self._grow(self._memory + more, dies=self._work.dies):
                self._memory += more


class NotebookJob(_Life):
    """Idle, and at times busy for a while."""

    def __init__(self, work: Notebook, shape: Shape, *, take: Take, random: Random) -> None:
        super().__init__(shape, take)
        self._work = work
        self._random = random
        self._cycle = _steady(work, shape, random)
        self._busy = False
        self._left = random.expovariate(1.0 / work.idle_mean_seconds)
        self.cores = work.idle_cores
        self._grow(work.memory_bytes, dies=True)

    def step(self, turn: Turn) -> None:
        if turn.frozen:
            self._drain(self._cycle, turn)
            return
        work = self._work
        self._left -= turn.seconds
        if self._left <= 0:
            self._busy = not self._busy
            mean = work.burst_mean_seconds if self._busy else work.idle_mean_seconds
            self._left = self._random.expovariate(1.0 / mean)
        if self._busy:
            self._cycle.step(turn)
        else:
            self._cycle.rest()
        self.cores = work.cores if self._busy else work.idle_cores
        self._show(self._cycle)
