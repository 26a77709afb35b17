"""The GPUs as the daemon would have them, over the fake driver, with everything they said kept."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest

from gpuagent import config
from gpuagent.clock import SystemClock
from gpuagent.errors import AgentError
from gpuagent.host.nvml import NvmlGpus
from gpuagent.model.inventory import Gpu, GpuProcess
from gpuagent.model.state import Event, Reading
from tests.fakes.nvml import FakeNvml, Profile

QUICK: dict[str, Any] = {
    "sample_interval": 0.05,
    "process_interval": 0.5,
    "slow_interval": 1.0,
    "call_deadline": 0.4,
    "retry_max": 1.0,
}
SECONDS = 20.0
"""Far more than anything takes: only a failure waits so long."""


class Driver(Protocol):
    """Makes a fake driver with these cards that children of this process will find."""

    def __call__(self, *profiles: Profile, **options: Any) -> FakeNvml: ...


class Rig:
    def __init__(self, fake: FakeNvml, **settings: Any) -> None:
        self.fake = fake
        self.listing = fake.path.parent / "gpus"
        """Stands for the kernel module's folder of cards."""
        self.wakes: list[str] = []
        self.settings = config.Nvml(**{**QUICK, **settings})
        self.gpus = NvmlGpus(
            settings=self.settings,
            library=str(fake.library),
            clock=SystemClock(),
            wake=self.wakes.append,
            listing=str(self.listing),
        )
        self.cards: tuple[Gpu, ...] | None = None
        self.processes: tuple[GpuProcess, ...] | None = None
        self.readings: list[Reading] = []
        self.events: list[Event] = []
        self.error: AgentError | None = None

    def look(self) -> None:
        """Drain once, as a tick would."""
        try:
            said = self.gpus.drain()
        except AgentError as error:
            self.error = error
            return
        self.error = None
        self.cards = said.gpus if said.gpus is not None else self.cards
        if said.gpu_processes is not None:
            self.processes = said.gpu_processes
        self.readings += said.readings
        self.events += said.events

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Look again and again until it is so."""

        def looked() -> object:
            self.look()
            return condition()

        try:
            await until(looked)
        except TimeoutError:
            pytest.fail(f"{what}: never; {self.cards}, {self.error}, {self.events}")

    async def known(self) -> tuple[Gpu, ...]:
        """The cards, once all have been heard of."""
        await self.until(lambda: self.cards is not None, "cards are known")
        assert self.cards is not None
        return self.cards

    def card(self, index: int) -> Gpu:
        assert self.cards is not None
        return next(c for c in self.cards if c.index == index)

    def newest(self, name: str, uuid: str, *dims: str) -> float | None:
        found = [
            r.value
            for r in self.readings
            if (r.signal.name, r.subject.gpu, r.dims) == (name, uuid, dims)
        ]
        return found[-1] if found else None

    def since(self, at: float, uuid: str) -> list[Reading]:
        """Readings of a card taken after this moment."""
        return [r for r in self.readings if r.at > at and r.subject.gpu == uuid]


@contextlib.asynccontextmanager
async def running(fake: FakeNvml, **settings: Any) -> AsyncIterator[Rig]:
    """A rig whose GPUs are read until the block ends."""
    rig = Rig(fake, **settings)
    task = asyncio.create_task(rig.gpus.run())
    try:
        yield rig
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped by init has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children() -> set[int]:
    """PIDs of this process's children, zombies included."""
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
        return {int(pid) for pid in file.read().split()}


async def until(condition: Callable[[], object]) -> None:
    """Wait until it is so. Raises TimeoutError where it never is."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.01)
