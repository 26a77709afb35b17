"""How `memory.high` and `memory.max` of a cgroup are read and encoded (cgroup v2 files)."""

import math
import mmap
from concurrent.futures import Executor

from gpuagent.act.controlfile import ControlFile, FileKnob
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import MEMORY_HIGH, MEMORY_MAX
from gpuagent.ports import Cgroups, Real, Units

_UNLIMITED = "max"


class HostMemory(FileKnob):
    """Bytes, in whole pages, or "max"."""

    def __init__(
        self,
        knob: Knob,
        file: str,
        cgroups: Cgroups,
        executor: Executor | None = None,
        *,
        units: Units | None = None,
    ) -> None:
        super().__init__(ControlFile(cgroups, file, executor, units=units, default=_UNLIMITED))
        self.knob = knob

    def value(self, raw: str) -> float:
        return math.inf if raw == _UNLIMITED else float(int(raw))

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        # Written so that not-a-number, too, asks for nothing.
        if not value < original.value:
            return original
        pages = max(1, math.floor(max(value, 0.0) / mmap.PAGESIZE))
        size = pages * mmap.PAGESIZE
        return Real(float(size), str(size)) if size < original.value else original


def memory_high(
    cgroups: Cgroups, executor: Executor | None = None, *, units: Units | None = None
) -> HostMemory:
    """Above it the tenant is slowed and reclaimed from."""
    return HostMemory(MEMORY_HIGH, "memory.high", cgroups, executor, units=units)


def memory_max(
    cgroups: Cgroups, executor: Executor | None = None, *, units: Units | None = None
) -> HostMemory:
    """Beyond it the kernel ends a process of the tenant."""
    return HostMemory(MEMORY_MAX, "memory.max", cgroups, executor, units=units)
