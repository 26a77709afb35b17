"""How `cpu.weight` and `cpu.max` of a cgroup are read, encoded and written (cgroup v2 files)."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT
from gpuagent.ports import Cgroups, Real

T = TypeVar("T")

# Bounds of the kernel: Documentation/admin-guide/cgroup-v2.rst for the weight,
# kernel/sched/core.c (min_cfs_quota_period, max_cfs_quota_period) for quota and period.
WEIGHT_MIN = 1
QUOTA_MIN_US = 1_000
PERIOD_MIN_US = 1_000
PERIOD_MAX_US = 1_000_000
_THREADS = 16


class ControlFile:
    """One control file in every cgroup. The calls block, so they run in threads of their own:
    a file that hangs must not take the threads that the rest of the agent works with.
    """

    def __init__(self, cgroups: Cgroups, file: str, executor: Executor | None = None) -> None:
        self._cgroups = cgroups
        self._file = file
        self._executor = executor or ThreadPoolExecutor(_THREADS, thread_name_prefix=file)

    async def read(self, subject: Subject) -> str:
        """The file as text. Raises Gone also where another cgroup has taken the path."""
        return await self._call(partial(self._read, subject))

    async def write(self, subject: Subject, text: str) -> None:
        write = partial(self._cgroups.write, subject.cgroup, subject.inode, self._file, text)
        await self._call(write)

    async def identity(self, subject: Subject) -> str:
        return await self._call(partial(self._identity, subject))

    async def verify(self, subject: Subject, identity: str) -> None:
        await self._call(partial(self._verify, subject, identity))

    async def owner(self, subject: Subject) -> int:
        return await self._call(partial(self._owner, subject))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _inode(self, subject: Subject) -> int:
        inode = self._cgroups.inode(subject.cgroup)
        if inode != subject.inode:
            raise Gone(f"another cgroup has taken the place of {subject.cgroup}")
        return inode

    def _identity(self, subject: Subject) -> str:
        """TREE/INODE, since another tree may have the same path and the same inode."""
        return f"{self._cgroups.tree()}/{self._inode(subject)}"

    def _verify(self, subject: Subject, identity: str) -> None:
        tree, _, inode = identity.rpartition("/")
        # Entries of an earlier version name no tree.
        if tree and tree != self._cgroups.tree():
            raise Unavailable(
                f"{subject.cgroup} was held in another cgroup tree than paths.cgroup_root shows now; "
                "set it as it was, so that the original can be put back"
            )
        if str(self._inode(subject)) != inode:
            raise Gone(f"another cgroup has taken the place of {subject.cgroup}")

    def _owner(self, subject: Subject) -> int:
        self._inode(subject)
        return self._cgroups.owner(subject.cgroup, self._file)

    def _read(self, subject: Subject) -> str:
        self._inode(subject)
        return self._cgroups.read(subject.cgroup, self._file).strip()


class CpuWeight:
    """`cpu.weight`: 1 to 10000, by default 100; 0 is what an idle cgroup shows (`cpu.idle`)."""

    knob: Knob = CPU_WEIGHT

    def __init__(self, cgroups: Cgroups, executor: Executor | None = None) -> None:
        self._file = ControlFile(cgroups, "cpu.weight", executor)

    async def get(self, subject: Subject) -> Real:
        raw = await self._file.read(subject)
        try:
            return Real(float(int(raw)), raw)
        except ValueError as error:
            raise _unreadable(subject, "cpu.weight", raw) from error

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        # Written so that not-a-number, too, asks for nothing.
        if not value < original.value:
            return original
        weight = math.floor(max(value, WEIGHT_MIN))
        return Real(float(weight), str(weight)) if weight < original.value else original

    async def set(self, subject: Subject, raw: str) -> None:
        await self._file.write(subject, raw)

    async def identity(self, subject: Subject) -> str:
        return await self._file.identity(subject)

    async def verify(self, subject: Subject, identity: str) -> None:
        await self._file.verify(subject, identity)

    async def owner(self, subject: Subject) -> int:
        return await self._file.owner(subject)


class CpuMax:
    """`cpu.max`: "QUOTA PERIOD" in microseconds, or "max PERIOD"; the value is in cores."""

    knob: Knob = CPU_MAX

    def __init__(
        self, cgroups: Cgroups, *, period_seconds: float, executor: Executor | None = None
    ) -> None:
        """`period_seconds` is the period we write: short, so that no thread is parked for long."""
        self._file = ControlFile(cgroups, "cpu.max", executor)
        self._period_us = min(max(round(period_seconds * 1e6), PERIOD_MIN_US), PERIOD_MAX_US)

    async def get(self, subject: Subject) -> Real:
        raw = await self._file.read(subject)
        try:
            quota, period = raw.split()
            cores = math.inf if quota == "max" else int(quota) / int(period)
        except (ValueError, ZeroDivisionError) as error:
            raise _unreadable(subject, "cpu.max", raw) from error
        return Real(cores, raw)

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        if not value < original.value:
            return original
        period = self._period_us
        value = max(value, 0.0)
        if value * period < QUOTA_MIN_US:
            # The kernel wants a quota of 1 ms at least: the same share of a longer period.
            longer = QUOTA_MIN_US / value if value > 0 else PERIOD_MAX_US
            period = math.ceil(min(longer, PERIOD_MAX_US))
        quota = max(QUOTA_MIN_US, math.floor(value * period))
        cores = quota / period
        return Real(cores, f"{quota} {period}") if cores < original.value else original

    async def set(self, subject: Subject, raw: str) -> None:
        await self._file.write(subject, raw)

    async def identity(self, subject: Subject) -> str:
        return await self._file.identity(subject)

    async def verify(self, subject: Subject, identity: str) -> None:
        await self._file.verify(subject, identity)

    async def owner(self, subject: Subject) -> int:
        return await self._file.owner(subject)


def _unreadable(subject: Subject, file: str, raw: str) -> Refused:
    return Refused(f"{file} of {subject.cgroup} reads {raw[:80]!r}, which is not understood")
