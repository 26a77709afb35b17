"""Changes the host, remembers what it was, and puts it back: the knobs there are, in one list."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuagent.act.cards import ClockLimit, ComputeMode, PersistenceMode, TimeSlice
from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.act.freeze import Running
from gpuagent.act.hostmemory import memory_high, memory_max
from gpuagent.act.io import IoWeight
from gpuagent.act.mps import MpsDefaultThreads, MpsOwnDaemon, MpsThreads
from gpuagent.act.notice import Noticed
from gpuagent.act.power import PowerLimit
from gpuagent.act.protects import Seen
from gpuagent.act.record import Target
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Suspensions
from gpuagent.act.terminate import Terminated
from gpuagent.ports import (
    Actuator,
    CardSettings,
    Cgroups,
    Ender,
    Freezer,
    Gpus,
    Mps,
    TimeSlices,
    Units,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What actuators are made of."""

    cgroups: Cgroups
    units: Units
    gpus: Gpus
    cpu_period_seconds: float
    """`backpressure.cpu_period`."""
    freezer: Freezer
    ender: Ender
    grace_seconds: Callable[[], float]
    """`terminate.grace` as it is now."""
    seen: Seen
    """Who and what there is, as far as is known now."""
    mps: Mps
    suspensions: Suspensions
    card_settings: CardSettings
    time_slices: TimeSlices
    clock_unlocked: Callable[[str], bool]
    """Whether the clocks of a card, by UUID, are declared unlocked now."""
    held: Callable[[Target], bool]
    """Whether the ledger has an entry for a target."""


ACTUATORS: tuple[Callable[[Means], Actuator], ...] = (
    lambda means: CpuWeight(means.cgroups, units=means.units),
    lambda means: CpuMax(means.cgroups, period_seconds=means.cpu_period_seconds, units=means.units),
    lambda means: IoWeight(means.cgroups, units=means.units),
    lambda means: memory_high(means.cgroups, units=means.units),
    lambda means: memory_max(means.cgroups, units=means.units),
    lambda means: Running(
        means.freezer, means.cgroups, seen=means.seen, suspensions=means.suspensions
    ),
    lambda _means: MpsThreads(),
    lambda means: MpsDefaultThreads(means.mps),
    lambda means: MpsOwnDaemon(means.mps),
    lambda means: Suspend(means.suspensions, ender=means.ender, seen=means.seen),
    lambda means: Terminated(
        means.ender,
        means.mps,
        suspensions=means.suspensions,
        held=means.held,
        grace_seconds=means.grace_seconds,
        seen=means.seen,
    ),
    lambda means: Noticed(means.ender, seen=means.seen),
    lambda means: PowerLimit(means.gpus),
    lambda means: ClockLimit(means.card_settings, unlocked=means.clock_unlocked, held=means.held),
    lambda means: ComputeMode(means.card_settings),
    lambda means: PersistenceMode(means.card_settings),
    lambda means: TimeSlice(means.time_slices),
)


def actuators(means: Means) -> tuple[Actuator, ...]:
    """One of each."""
    return tuple(make(means) for make in ACTUATORS)
