"""Changes the host, remembers what it was, and puts it back: the knobs there are, in one list."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.act.power import PowerLimit
from gpuagent.ports import Actuator, Cgroups, Gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What actuators are made of."""

    cgroups: Cgroups
    gpus: Gpus
    cpu_period_seconds: float
    """`backpressure.cpu_period`."""


ACTUATORS: tuple[Callable[[Means], Actuator], ...] = (
    lambda means: CpuWeight(means.cgroups),
    lambda means: CpuMax(means.cgroups, period_seconds=means.cpu_period_seconds),
    lambda means: PowerLimit(means.gpus),
)


def actuators(means: Means) -> tuple[Actuator, ...]:
    """One of each."""
    return tuple(make(means) for make in ACTUATORS)
