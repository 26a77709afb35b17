"""Locked clocks, modes and time slices of the simulated cards, and the suspension of processes there.

A lock of clocks slows the card, and a suspension frees memory. Modes and time slices are kept, and change
nothing that is simulated.
"""

from collections.abc import Mapping
from typing import Protocol

from gpuagent.errors import Gone, NoRoom, Refused, Unavailable
from gpuagent.ports import CudaState, Freed, Keep
from gpuagent.sim.card import Card
from gpuagent.sim.clock import VirtualClock
from gpuagent.sim.cpu import Group
from gpuagent.sim.gpus import SimGpus
from gpuagent.sim.surroundings import SimProcesses

_COMPUTE_MODES = (0, 2, 3)
_TIME_SLICES = range(4)


class SimSettings:
    """Implements `ports.CardSettings`."""

    def __init__(self, gpus: SimGpus, clock: VirtualClock) -> None:
        self._gpus = gpus
        self._clock = clock
        self._modes: dict[str, int] = {}
        self._persistent: dict[str, bool] = {}

    async def set_clock_limit(self, uuid: str, hertz: float | None) -> None:
        self._gpus.card(uuid).lock_clocks(hertz, self._clock.mono)

    async def compute_mode(self, uuid: str) -> int:
        self._gpus.card(uuid)
        return self._modes.get(uuid, 0)

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        card = self._gpus.card(uuid)
        if mode not in _COMPUTE_MODES:
            raise Refused(f"GPU {card.index}: the driver takes no compute mode of {mode}")
        self._modes[uuid] = mode

    async def persistence_mode(self, uuid: str) -> bool:
        self._gpus.card(uuid)
        return self._persistent.get(uuid, True)

    async def set_persistence_mode(self, uuid: str, on: bool) -> None:
        self._gpus.card(uuid)
        self._persistent[uuid] = on


class SimTimeSlices:
    """Implements `ports.TimeSlices`."""

    def __init__(self, gpus: SimGpus) -> None:
        self._gpus = gpus
        self._slices: dict[str, int] = {}

    async def get(self, uuid: str) -> int:
        self._gpus.card(uuid)
        return self._slices.get(uuid, 0)

    async def set(self, uuid: str, slice_: int) -> None:
        card = self._gpus.card(uuid)
        if slice_ not in _TIME_SLICES:
            raise Refused(f"GPU {card.index}: there is no time slice {slice_}")
        self._slices[uuid] = slice_


class Running(Protocol):
    """A tenant's process, as far as it can be suspended."""

    pid: int
    group: Group
    card: Card
    on_card: bool
    """Whether it works there: False also while it is suspended."""


class SimCheckpoint:
    """Implements `ports.Checkpoint`. What takes a real host seconds happens at once."""

    def __init__(self, processes: SimProcesses, running: Mapping[str, Running]) -> None:
        """`running` are the processes of tenants."""
        self._processes = processes
        self._running = running

    async def state(self, pid: int, started: int) -> CudaState:
        return "suspended" if self._one(pid, started).card.is_parked(pid) else "runs"

    async def suspend(self, pid: int, started: int, keep: Keep) -> None:
        one = self._ready(pid, started)
        if one.card.is_parked(pid):
            return
        if one.card.side_by_side is not None or not one.on_card:
            raise Refused(f"process {pid} works through MPS: a client cannot be suspended")
        await keep({one.card.uuid: round(one.card.memory[pid])})
        one.card.park(pid)
        one.on_card = False

    async def resume(self, pid: int, started: int, freed: Freed | None) -> None:
        one = self._ready(pid, started)
        if not one.card.is_parked(pid):
            return
        if not one.card.unpark(pid):
            raise NoRoom(f"process {pid} waits for device memory")
        one.on_card = True

    def _ready(self, pid: int, started: int) -> Running:
        one = self._one(pid, started)
        if one.group.frozen:
            raise Unavailable(f"process {pid} is frozen, and waits until it is thawed")
        return one

    def _one(self, pid: int, started: int) -> Running:
        one = next((r for r in self._running.values() if r.pid == pid), None)
        if one is None or self._processes.read(pid).started != started:
            raise Gone(f"process {pid} has ended")
        return one
