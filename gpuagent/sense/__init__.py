"""What is read: one file a sensor, and the list of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpuagent.clock import Clock
from gpuagent.config import Config
from gpuagent.ports import (
    Cgroups,
    Freezer,
    Gpus,
    KernelLog,
    Latencies,
    Mps,
    Node,
    Processes,
    ProcessEvents,
    Runs,
    Sensor,
    Units,
)
from gpuagent.sense.cgroups import CgroupUse
from gpuagent.sense.freezes import Freezes
from gpuagent.sense.gpus import GpuReadings
from gpuagent.sense.latency import ServiceLatency, SourceStates
from gpuagent.sense.mail import LatencyMail
from gpuagent.sense.mps import MpsWatch
from gpuagent.sense.node import Host
from gpuagent.sense.process_events import Hearing
from gpuagent.sense.runs import NoRuns, RunEnds
from gpuagent.sense.sources import LatencySources
from gpuagent.sense.tenants import Tenants
from gpuagent.sense.xids import KernelXids, XidCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What sensors are made of."""

    config: Config
    gpus: Gpus
    cgroups: Cgroups
    units: Units
    processes: Processes
    events: ProcessEvents
    node: Node
    kernel_log: KernelLog
    mps: Mps
    freezer: Freezer
    clock: Clock
    agent_pid: int
    latencies: Latencies = field(default_factory=LatencyMail)
    sources: LatencySources | None = None
    """None where no page of a tenant is read."""
    runs: Runs = field(default_factory=NoRuns)
    xids: XidCounts = field(default_factory=XidCounts)
    """Shared: NVML and the kernel log tell of the same errors."""


SENSORS: tuple[Callable[[Means], Sensor], ...] = (
    lambda m: GpuReadings(m.gpus, m.xids),
    lambda m: KernelXids(m.kernel_log, m.xids),
    lambda m: Tenants(
        processes=m.processes,
        cgroups=m.cgroups,
        config=m.config,
        agent_pid=m.agent_pid,
        events=m.events,
        runs=m.runs,
    ),
    lambda m: RunEnds(m.runs, processes=m.processes, cgroups=m.cgroups),
    lambda m: CgroupUse(m.cgroups, m.clock, m.units),
    lambda m: Host(m.node),
    lambda m: MpsWatch(m.mps),
    lambda m: Freezes(m.freezer),
    lambda m: Hearing(m.events),
    lambda m: ServiceLatency(m.latencies),
    lambda m: SourceStates(m.sources),
)
"""Every sensor there is. To add one, add it here."""


def sensors(means: Means) -> tuple[Sensor, ...]:
    """One of each."""
    return tuple(make(means) for make in SENSORS)


def configure(these: Iterable[Sensor], config: Config) -> None:
    """Give a new configuration to those that have one."""
    for sensor in these:
        if isinstance(sensor, Tenants):
            sensor.configure(config)
