"""One simulated card: who runs on it, and its memory, clocks, power, heat and energy.

Theory of operation. In each step every job gets its turn (`sharing`), and what they used makes the
card's mean dynamic power. The power limit and the temperature set the clock of the next step
(`curve`); a new limit acts after its delay. Die and heat sink are one mass: the temperature runs
towards ambient plus power times the thermal resistance. At the slowdown temperature the clock is
taken down step by step, and given back below it.
"""

from collections import deque
from collections.abc import Collection
from random import Random

import msgspec

from gpuagent.sim.curve import Curve, Shape
from gpuagent.sim.jobs import Job, Turn
from gpuagent.sim.mps import SimMps
from gpuagent.sim.profiles import CardProfile, MpsProfile
from gpuagent.sim.sharing import NOBODY, SideBySide, TimeSlices, Used

_AVERAGE_SECONDS = 1.0
"""FACTS 2, for cards whose power is an average."""


class Window:
    """Mean of the last so many values."""

    def __init__(self, size: int, first: float = 0.0) -> None:
        self._values = deque([first] * size, maxlen=size)
        self._sum = first * size

    def add(self, value: float) -> None:
        self._sum += value - self._values[0]
        self._values.append(value)

    @property
    def mean(self) -> float:
        return self._sum / len(self._values)


class _Parked(msgspec.Struct, frozen=True):
    """What a suspended process has on the card again once it is resumed."""

    job: Job
    memory: float
    used_seconds: float


class Card:
    """Changed by `step` and by the methods that stand for what the driver does."""

    def __init__(
        self,
        profile: CardProfile,
        *,
        index: int,
        ambient_celsius: float,
        step: float,
        random: Random,
    ) -> None:
        self.profile = profile
        self.index = index
        self.uuid = f"GPU-51b00000-0000-4000-8000-{index:012d}"
        self.pci = (0, 0x10 + index, 0)
        self.ambient_celsius = ambient_celsius
        self.lost = False
        self.jobs: dict[int, Job] = {}
        """Running work by pid, in the order in which it came."""
        self.memory: dict[int, float] = {}
        """Bytes by pid."""
        self.limit_watts = profile.power_max_watts.value
        """As set, and below as it acts."""
        self.enforced_watts = self.limit_watts
        self.watts = profile.idle_watts.value
        """Mean over the last step, without noise."""
        self.joules = 0.0
        self.clock = 1.0
        self.too_hot = False
        self.power_capped = False
        self.celsius = ambient_celsius + self.watts * profile.thermal_celsius_per_watt.value
        window = profile.utilization_window_seconds.value
        self.utilization = Window(max(round(window / step), 1))
        self.average_watts = Window(max(round(_AVERAGE_SECONDS / step), 1), self.watts)
        self.used_seconds: dict[int, float] = {}
        """Time in which kernels of each process ran, since it came; of an MPS server, those of any
        client, and none of the clients'."""
        self._sliced = TimeSlices(profile, self.used_seconds)
        self.side_by_side: SideBySide | None = None
        """Set where all that runs here runs through MPS."""
        self._random = random
        self._curve = profile.curve
        self._step = step
        self._changes: list[tuple[float, float]] = []
        """(monotonic seconds, watts) of limits that do not act yet."""
        self.locked_hertz: float | None = None
        """Highest clock as locked; None while it is not. Below, relative and as it acts."""
        self._lock = 1.0
        self._lock_changes: list[tuple[float, float]] = []
        self._parked: dict[int, _Parked] = {}
        self._thermal_clock = 1.0
        self._turn = Turn()
        self._cooling = step / profile.thermal_seconds.value

    # -- what the driver is asked ---------------------------------------------------------------------

    def shape(self, name: str) -> Shape | None:
        """None where nobody has said how such work behaves on this kind of card."""
        return self.profile.shapes.get(name)

    @property
    def memory_bytes(self) -> float:
        return self.profile.memory_bytes.value

    @property
    def used_bytes(self) -> float:
        return sum(self.memory.values())

    def limit(self, watts: float, at: float) -> None:
        """Set the power limit; it acts a while later."""
        self.limit_watts = watts
        self._changes = self._later(self._changes, at, watts)

    def lock_clocks(self, hertz: float | None, at: float) -> None:
        """Let the clocks rise to this only, or freely; it acts as a limit does (assumed)."""
        self.locked_hertz = hertz
        relative = 1.0 if hertz is None else min(hertz / self.profile.clock_hertz.value, 1.0)
        self._lock_changes = self._later(self._lock_changes, at, max(relative, Curve.LOWEST_CLOCK))

    def _later(
        self, changes: list[tuple[float, float]], at: float, value: float
    ) -> list[tuple[float, float]]:
        """The changes to come, with one more."""
        low = self.profile.limit_delay_min_seconds.value
        high = self.profile.limit_delay_max_seconds.value
        acts_at = at + self._random.uniform(low, high)
        return [*(c for c in changes if c[0] < acts_at), (acts_at, value)]

    def noisy(self, watts: float) -> float:
        """As the sensor says."""
        noise = self._random.gauss(1.0, self.profile.power_noise_ratio.value)
        return round(max(watts * noise, 0.0), 3)

    # -- MPS ------------------------------------------------------------------------------------------

    def use_mps(self, profile: MpsProfile, daemon: SimMps) -> None:
        """From now on, every process here is a client of this daemon's server."""
        self.side_by_side = SideBySide(self.profile, profile, daemon.clients, self.used_seconds)

    def serve_mps(self, pid: int, memory: float) -> None:
        """The server of MPS has started; it takes so many bytes."""
        assert self.side_by_side is not None
        self.side_by_side.server_pid = pid
        self.memory[pid] = memory
        self.used_seconds[pid] = 0.0

    # -- who is there ---------------------------------------------------------------------------------

    def enter(self, pid: int) -> bool:
        """A process makes its context; False where there is no memory for one."""
        self.memory[pid] = 0.0
        if self.lost or not self.take(pid, 0.0):
            del self.memory[pid]
            return False
        self.used_seconds[pid] = 0.0
        return True

    def take(self, pid: int, total: float) -> bool:
        """A process wants so many bytes in all, beyond its context; False where there is no room."""
        wanted = total + self.profile.context_bytes.value
        if self.used_bytes - self.memory[pid] + wanted > self.memory_bytes:
            return False
        self.memory[pid] = wanted
        return True

    def park(self, pid: int) -> None:
        """A process's CUDA state is checkpointed: its work stands still, its memory is free."""
        job = self.jobs.pop(pid)
        self._parked[pid] = _Parked(job, self.memory.pop(pid), self.used_seconds.pop(pid))

    def unpark(self, pid: int) -> bool:
        """It is restored; False where there is no room for its memory."""
        parked = self._parked[pid]
        if self.used_bytes + parked.memory > self.memory_bytes:
            return False
        del self._parked[pid]
        self.jobs[pid] = parked.job
        self.memory[pid] = parked.memory
        self.used_seconds[pid] = parked.used_seconds
        return True

    def is_parked(self, pid: int) -> bool:
        return pid in self._parked

    def leave(self, pid: int) -> None:
        self._parked.pop(pid, None)
        for table in (self.jobs, self.memory, self.used_seconds):
            table.pop(pid, None)
        if self.side_by_side is not None:
            self.side_by_side.places.pop(pid, None)

    # -- time -----------------------------------------------------------------------------------------

    def step(self, at: float, cpu: dict[int, float], frozen: Collection[int] = NOBODY) -> None:
        """One step from `at`.

        `cpu` is the share of its CPU demand that each process was given, `frozen` who is frozen.
        """
        if self._changes or self._lock_changes:
            self._take_limits(at)
        turn = self._turn
        turn.at, turn.seconds, turn.clock = at, self._step, self.clock
        sharing = self.side_by_side or self._sliced
        self._power(sharing.step(self.jobs, turn, cpu, frozen))
        self._heat()

    def _take_limits(self, at: float) -> None:
        for acts_at, watts in self._changes:
            if acts_at <= at:
                self.enforced_watts = watts
        for acts_at, clock in self._lock_changes:
            if acts_at <= at:
                self._lock = clock
        self._changes = [c for c in self._changes if c[0] > at]
        self._lock_changes = [c for c in self._lock_changes if c[0] > at]

    def _power(self, used: Used) -> None:
        """Power of this step, and the clock of the next."""
        curve, idle = self._curve, self._curve.idle_watts
        running = used.running
        busy = idle + used.dynamic_watts / running if running > 0 else idle
        # The power controller is far faster than a step: what ran kept to the limit.
        drawn = min(curve.busy_watts(self.clock, busy), max(self.enforced_watts, idle))
        self.watts = idle + running * (drawn - idle)
        self.joules += self.watts * self._step
        self.utilization.add(running)
        self.average_watts.add(self.watts)
        allowed = curve.clock(self.enforced_watts, busy)
        self.power_capped = allowed < self._lock
        self.clock = min(allowed, self._thermal_clock, self._lock)

    def _heat(self) -> None:
        profile = self.profile
        towards = self.ambient_celsius + self.watts * profile.thermal_celsius_per_watt.value
        self.celsius += (towards - self.celsius) * self._cooling
        change = profile.slowdown_clock_per_second.value * self._step
        self.too_hot = self.celsius >= profile.slowdown_celsius.value
        moved = self._thermal_clock + (-change if self.too_hot else change)
        self._thermal_clock = min(max(moved, Curve.LOWEST_CLOCK), 1.0)
