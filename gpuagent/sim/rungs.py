"""Freezing in pulses and ending processes on the simulated host."""

from collections.abc import Callable, Sequence

from gpuagent.errors import Gone, Refused
from gpuagent.ports import FreezeState
from gpuagent.sim.cgroups import SimCgroups
from gpuagent.sim.surroundings import SimProcesses

PULSE_SECONDS = 0.5
"""`freeze.pulse` by default."""
_RUNNING_LEAST_SECONDS = 0.05
"""A step of the simulation."""
_SLACK_SECONDS = 1e-6


class _Pulse:
    """One cgroup's turns. `due` is when the next was meant to be, so that steps do not add up."""

    def __init__(self, path: str, ratio: float, due: float) -> None:
        self.path = path
        self.ratio = ratio
        self.due = due
        self.frozen = False
        self.pulses = 0
        self.seconds = 0.0


class SimFreezer:
    """Implements `ports.Freezer`. `step` is called once in each step of the simulation."""

    least_ratio = _RUNNING_LEAST_SECONDS / (_RUNNING_LEAST_SECONDS + PULSE_SECONDS)

    def __init__(self, cgroups: SimCgroups) -> None:
        self._cgroups = cgroups
        self._pulses: dict[int, _Pulse] = {}
        self._at = float("-inf")

    async def state(self, path: str, inode: int) -> FreezeState:
        self._see(path, inode)
        pulse = self._pulses.get(inode)
        if pulse is not None:
            return FreezeState(pulse.ratio, "us", pulse.pulses, pulse.seconds)
        frozen = self._cgroups.read(path, "cgroup.freeze") == "1"
        return FreezeState(0.0, "unknown") if frozen else FreezeState(1.0, "nobody")

    async def set(self, path: str, inode: int, ratio: float) -> None:
        self._see(path, inode)
        if ratio >= 1:
            self._pulses.pop(inode, None)
            self._cgroups.write(path, inode, "cgroup.freeze", "0")
        elif not ratio >= self.least_ratio * (1 - 1e-9):
            raise Refused(f"{ratio:g} is less than the {self.least_ratio:.3f} that must be left")
        elif inode in self._pulses:
            self._pulses[inode].ratio = ratio
        else:
            self._pulses[inode] = _Pulse(path, ratio, self._at)

    def step(self, at: float) -> None:
        """Freeze and thaw what is due at this time, in monotonic seconds."""
        self._at = at
        for inode, pulse in list(self._pulses.items()):
            try:
                self._turn(inode, pulse, at)
            except Gone:
                del self._pulses[inode]

    def _turn(self, inode: int, pulse: _Pulse, at: float) -> None:
        if at + _SLACK_SECONDS < pulse.due:
            return
        frozen = min(PULSE_SECONDS, 2.0 * (1 - pulse.ratio) / pulse.ratio)
        pulse.frozen = not pulse.frozen
        if pulse.frozen:
            pulse.pulses += 1
            pulse.seconds += frozen
        length = frozen if pulse.frozen else frozen * pulse.ratio / (1 - pulse.ratio)
        pulse.due = max(pulse.due, at - _RUNNING_LEAST_SECONDS) + length
        self._cgroups.write(pulse.path, inode, "cgroup.freeze", str(int(pulse.frozen)))

    def _see(self, path: str, inode: int) -> None:
        if self._cgroups.inode(path) != inode:
            raise Gone(f"{path}: another cgroup has taken this path")


class SimEnder:
    """Implements `ports.Ender`. Tenants' processes catch nothing, and end at once."""

    def __init__(self, processes: SimProcesses, end: Callable[[int, str], bool]) -> None:
        """`end` ends a tenant's process and says why; False where it is no tenant's."""
        self._processes = processes
        self._end = end

    async def alive(self, pid: int, started: int) -> bool:
        try:
            return self._processes.read(pid).started == started
        except Gone:
            return False

    async def catches(self, pid: int, started: int, signal: int) -> bool:
        await self._see(pid, started)
        return False

    async def send(self, pid: int, started: int, signal: int) -> None:
        await self._see(pid, started)
        if not self._end(pid, f"signal {signal}"):
            raise Refused(f"process {pid} is not for us to signal")

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        return not await self.alive(pid, started)

    async def run_as(
        self,
        uid: int,
        command: Sequence[str],
        seconds: float,
        *,
        cgroup: str = "",
        inode: int = 0,
    ) -> None:
        pass  # nothing that a command could do there is simulated

    async def _see(self, pid: int, started: int) -> None:
        if not await self.alive(pid, started):
            raise Gone(f"process {pid} has ended")
