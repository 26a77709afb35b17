"""Real processes, real /proc, real cgroups and real events through the sensor `tenants`."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuagent.clock import SystemClock
from gpuagent.config import Config, Match, TenantRule
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.netlink import ProcessEvents
from gpuagent.host.procfs import ProcTable
from gpuagent.model.inventory import GpuProcess, Inventory, Level, Process, Tenant
from gpuagent.model.state import NodeState, Sensed
from gpuagent.sense.tenants import Tenants


@contextlib.contextmanager
def sleeping(folder: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process; with `folder`, a shell that moves itself there and then becomes it."""
    move = f'echo $$ > "{folder}/cgroup.procs"; ' if folder is not None else ""
    child = subprocess.Popen(["sh", "-c", f"{move}exec sleep 60"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def cgroup() -> Iterator[tuple[str, Path]]:
    """Mount point and folder of a real cgroup that looks like a service's."""
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        found = [line.split()[1] for line in mounts if line.split()[2] == "cgroup2"]
    if not found:
        pytest.skip("no cgroup v2 is mounted")
    folder = Path(found[0]) / f"gpuagent-test-{os.getpid()}.service"
    try:
        folder.mkdir()
    except OSError as broken:
        pytest.skip(f"cgroups cannot be made here: {broken.strerror}")
    try:
        yield found[0], folder
    finally:
        deadline = time.monotonic() + 10
        while folder.exists():  # a killed process leaves its cgroup a moment after its parent knows
            with contextlib.suppress(OSError):
                folder.rmdir()
            assert time.monotonic() < deadline, "the cgroup could not be removed"


class Loop:
    """Reads the sensor as the loop would, and keeps what it says."""

    def __init__(self, sensor: Tenants) -> None:
        self.sensor = sensor
        self.listed: tuple[GpuProcess, ...] | None = None
        self.tenants: dict[str, Tenant] = {}
        self._clock = SystemClock()

    async def read(self) -> Sensed:
        now = self._clock.now()
        inventory = Inventory(gpu_processes=self.listed)
        sensed = await self.sensor.read(now, NodeState(now, inventory=inventory))
        if sensed.tenants is not None:
            self.tenants = {t.name: t for t in sensed.tenants}
        return sensed


def sensor(root: str, unit: str, events: ProcessEvents | None = None) -> Tenants:
    rules = (TenantRule("train", Level.L3, Match(unit=unit)),)
    return Tenants(
        processes=ProcTable(),
        cgroups=CgroupTree(root),
        config=Config(tenants=rules),
        agent_pid=2**22 + 1,  # nobody: this process and its children are tenants here
        events=events,
    )


async def test_a_real_process_in_a_real_cgroup_has_a_seat_of_its_own(
    cgroup: tuple[str, Path],
) -> None:
    root, folder = cgroup
    loop = Loop(sensor(root, folder.name))
    with sleeping() as child:
        (folder / "cgroup.procs").write_text(str(child.pid))
        loop.listed = (GpuProcess(child.pid, "GPU-a", "compute", 5),)
        await loop.read()
        tenant = loop.tenants["train"]
        assert [p.pid for p in tenant.processes] == [child.pid]
        (seat,) = tenant.seats
        assert (seat.path, seat.inode) == (f"/{folder.name}", folder.stat().st_ino)
        assert seat.refusal == ""
        assert tenant.gpus == ("GPU-a",)


async def test_start_and_exit_are_known_within_moments(cgroup: tuple[str, Path]) -> None:
    root, folder = cgroup
    woken = asyncio.Event()
    events = ProcessEvents(wake=lambda _: woken.set(), clock=SystemClock())
    listening = asyncio.ensure_future(events.run())
    try:
        async with asyncio.timeout(30):
            while events.health.up is None:  # noqa: ASYNC110 - a property, which no event announces
                await asyncio.sleep(0.01)
            if not events.health.up:
                pytest.skip(events.health.why)
            loop = Loop(sensor(root, folder.name, events))
            await loop.read()
            assert loop.tenants == {}
            with sleeping(folder) as child:
                while "train" not in loop.tenants:
                    await woken.wait()
                    woken.clear()
                    await loop.read()
                assert [p.pid for p in loop.tenants["train"].processes] == [child.pid]
            while "train" in loop.tenants:
                await woken.wait()
                woken.clear()
                await loop.read()
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


async def test_a_tenant_that_exits_between_the_drivers_list_and_us() -> None:
    loop = Loop(sensor("/nowhere", "none.service"))
    with sleeping() as child:
        loop.listed = (GpuProcess(child.pid, "GPU-a", "compute", 5),)
    sensed = await loop.read()
    assert child.pid not in {p.pid for t in loop.tenants.values() for p in t.processes}
    assert sensed.events == ()


async def test_a_process_without_a_cgroup_of_its_own_is_refused_a_seat() -> None:
    with sleeping() as child:
        loop = Loop(sensor("/nowhere", "none.service"))
        loop.listed = (GpuProcess(child.pid, "GPU-a", "compute", 5),)
        await loop.read()
        (tenant,) = loop.tenants.values()
        assert tenant.gpus == ("GPU-a",)
        assert all(seat.refusal for seat in tenant.seats)
        assert tenant.seats


class Crowd:
    """Two thousand processes, one of which comes or goes with every table."""

    def __init__(self) -> None:
        self._all = [_somebody(pid) for pid in range(10, 2010)]

    def read(self, pid: int) -> Process:
        return _somebody(pid)

    def again(self, known: Process) -> Process:
        return known

    def cgroup(self, pid: int) -> str:
        return _somebody(pid).cgroup

    def table(self) -> tuple[Process, ...]:
        self._all.append(_somebody(2010 + len(self._all)))
        return tuple(self._all)


def _somebody(pid: int) -> Process:
    return Process(
        pid=pid,
        started=pid,
        ppid=1,
        uid=pid % 5,
        user=f"u{pid % 5}",
        name="python3",
        exe=sys.executable,
        cgroup=f"/system.slice/s{pid % 200}.service",
    )


async def test_a_crowd_is_sorted_out_in_little_time() -> None:
    rules = tuple(
        TenantRule(f"t{i}", Level.L3, Match(unit=f"s{i}.service", exe="/*")) for i in range(50)
    )
    tenants = Tenants(
        processes=Crowd(),
        cgroups=CgroupTree("/nowhere"),
        config=Config(tenants=rules),
        agent_pid=1,
    )
    loop = Loop(tenants)
    loop.listed = tuple(GpuProcess(pid, "GPU-a", "compute", 1) for pid in range(100, 164))
    await loop.read()
    assert len(loop.tenants) == 50 + 64
    before = time.process_time()
    for _ in range(5):
        tenants.configure(Config(tenants=rules))
        await loop.read()
    # A look at everybody costs about 30 ms when all rules are new: generous, to fail on a square.
    assert (time.process_time() - before) / 5 < 1
