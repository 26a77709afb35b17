"""A whole host of values: cards, tenants with their control files, a clock that tests move."""

import asyncio

from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Unavailable
from gpuagent.model.inventory import GpuProcess, on_gpu
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    GPU_MEMORY_TOTAL_BYTES,
    GPU_MEMORY_USED_BYTES,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_TEMPERATURE_CELSIUS,
)
from gpuagent.ports import Gpus, KernelLog, KernelXid, Node, NodeFacts, Sensor
from tests.act.host import Clock as OwnClock
from tests.act.settings import Cards, Checkpoints, Slices
from tests.act.units import FakeUnits
from tests.decide.world import CARD, GIB, gpu
from tests.fakes.levers import FakeEnder, FakeFreezer
from tests.fakes.mps.values import FakeMps
from tests.sense.fakes import FakeCgroups, FakeEvents, FakeProcesses, process


class FakeGpus:
    """Cards as the test sets them, sampled when they are drained, once a second at most."""

    def __init__(self, clock: Clock, *uuids: str) -> None:
        self.cards = tuple(gpu(uuid, index) for index, uuid in enumerate(uuids))
        self.limits = dict.fromkeys(uuids, 700.0)
        self.used = dict.fromkeys(uuids, 10.0 * GIB)
        self.celsius = dict.fromkeys(uuids, 50.0)
        self.watts = dict.fromkeys(uuids, 100.0)
        self.processes: dict[int, GpuProcess] = {}
        self.down: AgentError | None = None
        self.fails: AgentError | None = None
        """What `release` and `resume` raise."""
        self.released = False
        self._clock = clock
        self._sampled = float("-inf")

    def drain(self) -> Sensed:
        if self.down is not None:
            raise self.down
        if self.released:
            raise Unavailable("the GPUs were released on request")
        now = self._clock.now().mono
        if now - self._sampled < 1.0:
            return Sensed()
        self._sampled = now
        readings = [
            Reading(signal, on_gpu(card.uuid), value, now)
            for card in self.cards
            for signal, value in (
                (GPU_MEMORY_TOTAL_BYTES, 80.0 * GIB),
                (GPU_MEMORY_USED_BYTES, self.used[card.uuid]),
                (GPU_TEMPERATURE_CELSIUS, self.celsius[card.uuid]),
                (GPU_POWER_WATTS, self.watts[card.uuid]),
                (GPU_POWER_LIMIT_WATTS, self.limits[card.uuid]),
            )
        ]
        listed = tuple(self.processes.values())
        return Sensed(tuple(readings), gpus=self.cards, gpu_processes=listed)

    def watch(self, marks: object) -> None:
        pass

    async def power_limit(self, uuid: str) -> float:
        return self.limits[uuid]

    async def set_power_limit(self, uuid: str, watts: float) -> None:
        self.limits[uuid] = watts

    async def release(self) -> None:
        self.released = True
        if self.fails is not None:
            raise self.fails

    async def resume(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.released = False


class FakeNode:
    """Four CPUs, as busy as the test says."""

    def __init__(self) -> None:
        self.pressure = 0.0
        self.busy = 1.0

    def read(self) -> NodeFacts:
        return NodeFacts(4, self.busy, 64 * GIB, 32 * GIB, self.pressure, 0.0, 0.0)


class FakeKernelLog:
    """Tells what the test has put in."""

    def __init__(self) -> None:
        self.lines: list[KernelXid] = []

    def take(self) -> list[KernelXid]:
        told, self.lines = self.lines, []
        return told


class Host:
    """Everything below the agent. Time passes in `advance` only, unless the clock is a real one."""

    def __init__(self, *cards: str, clock: Clock | None = None) -> None:
        self.own_clock = OwnClock()
        self.clock = clock or self.own_clock
        self.gpus = FakeGpus(self.clock, *(cards or (CARD,)))
        self.processes = FakeProcesses(process(1, "/init.scope", ppid=0, uid=0, user="root"))
        self.cgroups = FakeCgroups()
        self.events = FakeEvents()
        self.node = FakeNode()
        self.kernel_log = FakeKernelLog()
        self.mps = FakeMps()
        self.units = FakeUnits()
        self.freezer = FakeFreezer(self.cgroups)
        self.ender = FakeEnder(self.processes)
        self.card_settings = Cards(*(cards or (CARD,)))
        self.time_slices = Slices(*(cards or (CARD,)))
        self.checkpoint = Checkpoints()
        self.cores: dict[int, float] = {}
        """CPU use of a tenant, by its process."""
        self._used_usec: dict[int, float] = {}

    def arrive(self, name: str, pid: int, *, card: str = CARD, cores: float = 2.0) -> str:
        """A service begins, with one process on a card; its cgroup."""
        path = f"/system.slice/{name}.service"
        self.cgroups.make(path, cpu_max="max 100000", cpu_weight="100", memory_current="1000")
        self.processes.put(process(pid, path))
        self.gpus.processes[pid] = GpuProcess(pid, card, "compute", GIB)
        self.cores[pid], self._used_usec[pid] = cores, 0.0
        self._count(pid)
        return path

    def leave(self, pid: int) -> None:
        """It ends, and systemd removes its cgroup."""
        self.cgroups.remove(self.processes.all.pop(pid).cgroup)
        self.gpus.processes.pop(pid, None)
        del self.cores[pid], self._used_usec[pid]
        self.events.queue.append((pid, "exit"))

    def grow(self, pid: int, by: float) -> None:
        """Its memory on its card grows."""
        listed = self.gpus.processes[pid]
        memory = int((listed.memory_bytes or 0) + by)
        self.gpus.processes[pid] = GpuProcess(pid, listed.gpu, listed.kind, memory)
        self.gpus.used[listed.gpu] += by

    def advance(self, seconds: float) -> None:
        self.own_clock.mono += seconds
        for pid, cores in self.cores.items():
            self._used_usec[pid] += cores * seconds * 1e6
            self._count(pid)

    def cpu_max(self, name: str) -> str:
        return self.cgroups.read(f"/system.slice/{name}.service", "cpu.max")

    def _count(self, pid: int) -> None:
        files = self.cgroups.files[self.processes.all[pid].cgroup]
        files["cpu.stat"] = f"usage_usec {self._used_usec[pid]:.0f}"


class Scripted:
    """A sensor that says or raises what the test wants, and waits where it wants."""

    def __init__(self, name: str = "scripted", interval: float = 0.0) -> None:
        self.name = name
        self.interval = interval
        self.says: Sensed | BaseException = Sensed()
        self.gate: asyncio.Event | None = None
        self.asked_at: list[float] = []
        self.cancelled = False

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        self.asked_at.append(now.mono)
        says = self.says
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if isinstance(says, BaseException):
            raise says
        return says


_fits: tuple[Gpus, Node, KernelLog, Sensor] = (
    FakeGpus(OwnClock()),
    FakeNode(),
    FakeKernelLog(),
    Scripted(),
)
"""The fakes are what the protocols ask for: mypy looks."""
