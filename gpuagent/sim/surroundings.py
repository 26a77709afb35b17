"""What is around the cards of the simulated host: processes, news of them, the node, the kernel log."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from gpuagent.errors import Gone, Unsupported
from gpuagent.model.inventory import Process
from gpuagent.model.state import Health
from gpuagent.ports import KernelXid, NodeFacts, Wake
from gpuagent.sim.cgroups import SimCgroups
from gpuagent.sim.cpu import Cpus
from gpuagent.sim.profiles import HostProfile

_NEWS_KEPT = 10_000
_NO_SYSTEMD = "the simulated host has no systemd"


class SimProcesses:
    """Implements `ports.Processes`."""

    def __init__(self) -> None:
        self._all: dict[int, Process] = {}

    def put(self, process: Process) -> None:
        self._all[process.pid] = process

    def remove(self, pid: int) -> None:
        del self._all[pid]

    def read(self, pid: int) -> Process:
        process = self._all.get(pid)
        if process is None:
            raise Gone(f"process {pid} has ended")
        return process

    def again(self, known: Process) -> Process:
        return self.read(known.pid)

    def cgroup(self, pid: int) -> str:
        return self.read(pid).cgroup

    def table(self) -> Sequence[Process]:
        return tuple(self._all.values())


class SimEvents:
    """Implements `ports.ProcessEvents`. News that nobody takes is bounded, the oldest is lost."""

    def __init__(self, wake: Wake) -> None:
        self.health = Health("process_events", up=True)
        self._wake = wake
        self._pids: frozenset[int] = frozenset()
        self._matters: Callable[[int], bool] | None = None
        self._news: list[tuple[int, Literal["exec", "exit"]]] = []

    def watch(self, pids: Collection[int], matters: Callable[[int], bool] | None) -> None:
        self._pids, self._matters = frozenset(pids), matters

    def take(self) -> list[tuple[int, Literal["exec", "exit"]]]:
        news, self._news = self._news, []
        return news

    def began(self, pid: int) -> None:
        if self._matters is not None and self._matters(pid):
            self._tell(pid, "exec")

    def ended(self, pid: int) -> None:
        if pid in self._pids:
            self._tell(pid, "exit")

    def _tell(self, pid: int, what: Literal["exec", "exit"]) -> None:
        self._news = [*self._news[1 - _NEWS_KEPT :], (pid, what)]
        self._wake(f"{what} of process {pid}")


class SimUnits:
    """Implements `ports.Units`: no systemd manages anything here."""

    def manages(self, cgroup: str) -> str:
        return ""

    async def before(self, unit: str, cgroup: str, file: str) -> str:
        raise Unsupported(_NO_SYSTEMD)

    async def write(self, unit: str, file: str, text: str) -> None:
        raise Unsupported(_NO_SYSTEMD)

    async def give_back(self, unit: str, file: str, before: str, ours: Sequence[str]) -> None:
        raise Unsupported(_NO_SYSTEMD)


class SimNode:
    """Implements `ports.Node`. Memory and I/O are never short here."""

    def __init__(self, profile: HostProfile, cpus: Cpus, cgroups: SimCgroups) -> None:
        self._cpus = cpus
        self._cgroups = cgroups
        self._memory_bytes = profile.memory_bytes.value
        self._system_bytes = profile.memory_system_bytes.value
        self._before: tuple[float, float] | None = None
        self.elapsed = 0.0
        """Seconds simulated so far."""

    def read(self) -> NodeFacts:
        now = (self.elapsed, self._cpus.busy_seconds)
        before, self._before = self._before, now
        busy = None
        if before is not None and now[0] > before[0]:
            busy = min((now[1] - before[1]) / (now[0] - before[0]) / self._cpus.count, 1.0)
        used = self._system_bytes + float(self._cgroups.read("/", "memory.current"))
        return NodeFacts(
            cpus=self._cpus.count,
            cpu_busy_ratio=busy,
            memory_total_bytes=int(self._memory_bytes),
            memory_available_bytes=int(max(self._memory_bytes - used, 0.0)),
            cpu_pressure_ratio=self._cpus.pressure.averages[0],
            memory_pressure_ratio=0.0,
            io_pressure_ratio=0.0,
        )


class SimKernelLog:
    """Implements `ports.KernelLog`."""

    def __init__(self) -> None:
        self._lines: list[KernelXid] = []

    def xid(self, pci: tuple[int, int, int], xid: int, text: str) -> None:
        domain, bus, device = pci
        line = f"Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {xid}, {text}"
        self._lines = [*self._lines[1 - _NEWS_KEPT :], KernelXid(pci, xid, line)]

    def take(self) -> list[KernelXid]:
        lines, self._lines = self._lines, []
        return lines
