"""Freezing and ending on a host of values."""

from collections.abc import Sequence

from gpuagent.errors import AgentError, Gone
from gpuagent.ports import Cgroups, Ender, Freezer, FreezeState
from tests.sense.fakes import FakeCgroups, FakeProcesses


class FakeFreezer:
    """Ratios by inode; `foreign` are frozen by another, `left` by nobody knows whom."""

    least_ratio = 0.04

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self.ratios: dict[int, float] = {}
        self.foreign: set[int] = set()
        self.left: set[int] = set()
        self.fails: AgentError | None = None

    async def state(self, path: str, inode: int) -> FreezeState:
        if self._cgroups.inode(path) != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        if self.fails is not None:
            raise self.fails
        if inode in self.foreign:
            return FreezeState(0.0, "another")
        if inode in self.left:
            return FreezeState(0.0, "unknown")
        if inode in self.ratios:
            return FreezeState(self.ratios[inode], "us")
        return FreezeState(1.0, "nobody")

    async def set(self, path: str, inode: int, ratio: float) -> None:
        if self._cgroups.inode(path) != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        if self.fails is not None:
            raise self.fails
        self.left.discard(inode)
        self.ratios.pop(inode, None)
        if ratio < 1:
            self.ratios[inode] = ratio


class FakeEnder:
    """Processes that end by SIGTERM unless they are `deaf`, by SIGKILL unless `stuck`."""

    def __init__(self, processes: FakeProcesses) -> None:
        self._processes = processes
        self.catching: dict[int, set[int]] = {}
        """Signals that a process has a handler for."""
        self.deaf: set[int] = set()
        self.stuck: set[int] = set()
        self.sent: list[tuple[int, int]] = []
        self.run: list[tuple[int, tuple[str, ...], str]] = []
        """Commands: user, words, cgroup."""
        self.fails: AgentError | None = None
        """What a command comes to."""

    async def alive(self, pid: int, started: int) -> bool:
        known = self._processes.all.get(pid)
        return known is not None and known.started == started

    async def catches(self, pid: int, started: int, signal: int) -> bool:
        await self._see(pid, started)
        return signal in self.catching.get(pid, ())

    async def send(self, pid: int, started: int, signal: int) -> None:
        await self._see(pid, started)
        self.sent.append((pid, signal))
        lives_on = pid in (self.stuck if signal == 9 else self.deaf)
        if not lives_on and signal not in self.catching.get(pid, ()):
            del self._processes.all[pid]

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
        self.run.append((uid, tuple(command), cgroup))
        if self.fails is not None:
            raise self.fails

    async def _see(self, pid: int, started: int) -> None:
        if not await self.alive(pid, started):
            raise Gone(f"process {pid} has ended")


_fits: tuple[Freezer, Ender] = (FakeFreezer(FakeCgroups()), FakeEnder(FakeProcesses()))
"""The fakes are what the protocols ask for: mypy looks."""
