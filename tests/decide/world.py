"""States for the policies, made by folding frames as the loop does, under a clock of the test's."""

from collections.abc import Iterable, Sequence
from typing import Any

from gpuagent.model.declare import Signal
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    GpuProcess,
    Level,
    Limits,
    MpsDaemon,
    Seat,
    Subject,
    Tenant,
    on_cgroup,
    on_gpu,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Decision
from gpuagent.model.state import (
    Frame,
    Instant,
    Key,
    NodeState,
    Outcome,
    Reading,
    Result,
    Sensed,
    fold,
)
from gpuagent.model.vocab import (
    CGROUP_CPU_CORES,
    CGROUP_CPU_WEIGHT,
    GPU_MEMORY_TOTAL_BYTES,
    GPU_MEMORY_USED_BYTES,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_TEMPERATURE_CELSIUS,
    NODE_CPU_BUSY_RATIO,
    NODE_CPU_PRESSURE_RATIO,
    TENANT_CPU_CORES,
    TENANT_GPU_MEMORY_BYTES,
    TENANT_GPU_UTILIZATION_RATIO,
    TENANT_LATENCY_SECONDS,
)
from gpuagent.ports import Policy

GIB = 1024**3
CARD = "GPU-aaaaaaaa-0000-0000-0000-000000000001"


def gpu(uuid: str = CARD, index: int = 0, low: float = 200, high: float = 700) -> Gpu:
    return Gpu(
        uuid,
        index,
        "H100",
        memory_bytes=80 * GIB,
        power_min_watts=low,
        power_max_watts=high,
        power_default_watts=high,
    )


def seat(path: str, refusal: str = "") -> Seat:
    parts = path.strip("/").split("/")[:-1]
    above = tuple(
        Seat("/" + "/".join(parts[: n + 1]), 1000 + n, "managed by systemd")
        for n in reversed(range(len(parts)))
    )
    return Seat(path, sum(path.encode()), refusal, above)


def tenant(
    name: str,
    level: Level = Level.L3,
    *,
    gpus: Sequence[str] = (CARD,),
    enforce: bool = True,
    refusal: str = "",
    path: str = "",
    floor: float = 0.2,
    memory_limit: int | None = None,
    slo: float | None = None,
) -> Tenant:
    return Tenant(
        name,
        level,
        rule=name,
        enforce=enforce,
        gpus=tuple(gpus),
        seats=(seat(path or f"/system.slice/{name}.service", refusal),),
        limits=Limits(
            memory_limit_bytes=memory_limit, min_share_ratio=floor, latency_slo_seconds=slo
        ),
    )


class World:
    """A node whose readings the test sets, and one policy that is asked once a step."""

    def __init__(
        self, policy: Policy[Any], *, gpus: Iterable[Gpu] = (), tenants: Iterable[Tenant] = ()
    ) -> None:
        self.policy = policy
        self.gpus = tuple(gpus)
        self.tenants = tuple(tenants)
        self.now = 1000.0
        self.epoch = 1.7e9
        """Wall-clock seconds at monotonic 0."""
        self.state = NodeState(Instant(self.now, self.epoch))
        self.memory = policy.begin()
        self.values: dict[tuple[Signal, Subject], float | None] = {}
        self.by_dims: dict[Key, float] = {}
        """Readings of signals with dimensions."""
        self.latencies: dict[str, float] = {}
        """p99 in seconds by tenant, as it reports it at each step."""
        self.outcomes: list[Outcome] = []
        self.acts = True
        self.says_tenants = True
        self.listed: tuple[GpuProcess, ...] | None = ()
        self.mps: tuple[MpsDaemon, ...] | None = None
        self.frames: list[Frame] = []
        self.decision = Decision()
        self.events: list[str] = []
        self.used = 66.0 * GIB
        self.memory_of: dict[str, float] = {}
        for card in self.gpus:
            self.card(card.uuid, used=10 * GIB, celsius=50, watts=100, limit=card.power_max_watts)
        for one in self.tenants:
            if one.seats:
                self.uses(one.name, cores=2.0)

    def card(
        self,
        uuid: str = CARD,
        *,
        used: float | None = None,
        celsius: float | None = None,
        watts: float | None = None,
        limit: float | None = None,
    ) -> None:
        on = on_gpu(uuid)
        self.values[GPU_MEMORY_TOTAL_BYTES, on] = 80.0 * GIB
        for signal, value in (
            (GPU_MEMORY_USED_BYTES, used),
            (GPU_TEMPERATURE_CELSIUS, celsius),
            (GPU_POWER_WATTS, watts),
            (GPU_POWER_LIMIT_WATTS, limit),
        ):
            if value is not None:
                self.values[signal, on] = float(value)

    def pressure(self, ratio: float, *, busy: float = 1.0) -> None:
        self.values[NODE_CPU_PRESSURE_RATIO, NODE] = ratio
        self.values[NODE_CPU_BUSY_RATIO, NODE] = busy

    def uses(
        self,
        name: str,
        *,
        cores: float | None = None,
        memory: float | None = None,
        utilization: float | None = None,
        weight: float = 100,
        uuid: str = CARD,
    ) -> None:
        place = next(t for t in self.tenants if t.name == name).seats[0]
        if cores is not None:
            self.values[TENANT_CPU_CORES, on_tenant(name)] = cores
            self.values[CGROUP_CPU_CORES, on_cgroup(name, place.path, place.inode)] = cores
        self.values[CGROUP_CPU_WEIGHT, on_cgroup(name, place.path, place.inode)] = weight
        if memory is not None:
            self.values[TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, uuid)] = memory
        if utilization is not None:
            self.values[TENANT_GPU_UTILIZATION_RATIO, on_tenant_gpu(name, uuid)] = utilization

    def step(self, seconds: float = 1.0, *, read: bool = True) -> Decision:
        """Time passes, everything is read anew (or not), the policy is asked."""
        self.now += seconds
        readings = tuple(
            Reading(signal, subject, value, self.now)
            for (signal, subject), value in self.values.items()
            if value is not None and read
        )
        readings += tuple(
            Reading(TENANT_LATENCY_SECONDS, on_tenant(name), value, self.now, dims=("0.99",))
            for name, value in self.latencies.items()
            if read
        )
        readings += tuple(
            Reading(signal, subject, value, self.now, dims=dims)
            for (signal, subject, dims), value in self.by_dims.items()
            if read
        )
        tenants = self.tenants if self.says_tenants else None
        sensed = Sensed(
            readings,
            gpus=self.gpus,
            gpu_processes=self.listed,
            tenants=tenants,
            mps=self.mps,
        )
        frame = Frame(
            Instant(self.now, self.epoch + self.now),
            (sensed,),
            outcomes=tuple(self.outcomes),
            acts=self.acts,
        )
        self.frames.append(frame)
        self.state = fold(self.state, frame)
        self.memory, self.decision = self.policy.decide(self.memory, self.state)
        self.events += [e.kind for e in self.decision.events]
        return self.decision

    def run(self, seconds: float, *, step: float = 1.0) -> Decision:
        for _ in range(round(seconds / step)):
            self.step(step)
        return self.decision

    def grow(self, seconds: int, *, by: dict[str, float]) -> None:
        """Device memory of these tenants, and so of the card, grows by so many bytes a second."""
        for _ in range(seconds):
            for name, rate in by.items():
                self.memory_of[name] = self.memory_of.get(name, GIB) + rate
                self.uses(name, memory=self.memory_of[name])
            self.used += sum(by.values())
            self.card(used=self.used)
            self.step()

    def answer(self, result: Result, why: str = "") -> None:
        """Every setting of the last decision comes out like this."""
        self.outcomes = [
            Outcome(s.knob, s.subject, s.value, None, None, result, why, self.now)
            for s in self.decision.settings
            if s.blocked is None
        ]

    def share(self, name: str) -> float:
        return next((h.share for h in self.decision.holds if h.subject.tenant == name), 1.0)
