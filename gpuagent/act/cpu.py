"""How `cpu.weight` and `cpu.max` of a cgroup are read and encoded (cgroup v2 files)."""

import math
from concurrent.futures import Executor

from gpuagent.act.controlfile import ControlFile, FileKnob
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT
from gpuagent.ports import Cgroups, Real, Units

# Bounds of the kernel: Documentation/admin-guide/cgroup-v2.rst for the weight,
# kernel/sched/core.c (min_cfs_quota_period, max_cfs_quota_period) for quota and period.
WEIGHT_MIN = 1
QUOTA_MIN_US = 1_000
PERIOD_MIN_US = 1_000
PERIOD_MAX_US = 1_000_000
_PERCENT = 100


def weight_below(value: float, original: Real, form: str = "{}") -> Real:
    """A whole weight of at most `value`, written in this form; the original unless that is more."""
    # Written so that not-a-number, too, asks for nothing.
    if not value < original.value:
        return original
    weight = math.floor(max(value, WEIGHT_MIN))
    return Real(float(weight), form.format(weight)) if weight < original.value else original


class CpuWeight(FileKnob):
    """`cpu.weight`: 1 to 10000, by default 100; 0 is what an idle cgroup shows (`cpu.idle`)."""

    knob: Knob = CPU_WEIGHT

    def __init__(
        self, cgroups: Cgroups, executor: Executor | None = None, *, units: Units | None = None
    ) -> None:
        super().__init__(ControlFile(cgroups, "cpu.weight", executor, units=units, default="100"))

    def value(self, raw: str) -> float:
        return float(int(raw))

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        return weight_below(value, original)


class CpuMax(FileKnob):
    """`cpu.max`: "QUOTA PERIOD" in microseconds, or "max PERIOD"; the value is in cores."""

    knob: Knob = CPU_MAX

    def __init__(
        self,
        cgroups: Cgroups,
        *,
        period_seconds: float,
        executor: Executor | None = None,
        units: Units | None = None,
    ) -> None:
        """`period_seconds` is the period we write: short, so that no thread is parked for long."""
        super().__init__(
            ControlFile(cgroups, "cpu.max", executor, units=units, default="max 100000")
        )
        self._period_us = min(max(round(period_seconds * 1e6), PERIOD_MIN_US), PERIOD_MAX_US)

    def value(self, raw: str) -> float:
        quota, period = raw.split()
        return math.inf if quota == "max" else int(quota) / int(period)

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        if not value < original.value:
            return original
        if self.file.unit(subject):
            quota, period = self._whole_percent(value)
        else:
            quota, period = self._exact(max(value, 0.0))
        cores = quota / period
        return Real(cores, f"{quota} {period}") if cores < original.value else original

    def _exact(self, cores: float) -> tuple[int, int]:
        period = self._period_us
        if cores * period < QUOTA_MIN_US:
            # The kernel wants a quota of 1 ms at least: the same share of a longer period.
            longer = QUOTA_MIN_US / cores if cores > 0 else PERIOD_MAX_US
            period = math.ceil(min(longer, PERIOD_MAX_US))
        return max(QUOTA_MIN_US, math.floor(cores * period)), period

    def _whole_percent(self, cores: float) -> tuple[int, int]:
        """For systemd keeps no less of a quota over a daemon-reload, and no less than one percent."""
        percent = max(1, math.floor(max(cores, 0.0) * _PERCENT + 1e-9))
        longest = math.ceil(QUOTA_MIN_US * _PERCENT / percent)
        # Of a whole number of 100 µs any percentage is whole, too.
        period = math.ceil(max(self._period_us, longest) / _PERCENT) * _PERCENT
        return percent * period // _PERCENT, period
