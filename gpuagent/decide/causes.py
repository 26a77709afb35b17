"""The conditions that call for relief: memory, reservations, temperature, CPU pressure, latency."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.config import Backpressure
from gpuagent.decide.sustained import Sustained, Verdict
from gpuagent.model.declare import Signal
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    Level,
    Subject,
    Tenant,
    on_gpu,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Cause
from gpuagent.model.state import NodeState
from gpuagent.model.text import quantile_text
from gpuagent.model.vocab import (
    GPU_MEMORY_FREE_BYTES,
    GPU_MEMORY_TOTAL_BYTES,
    GPU_MEMORY_USED_BYTES,
    GPU_TEMPERATURE_CELSIUS,
    NODE_CPU_BUSY_RATIO,
    NODE_CPU_PRESSURE_RATIO,
    TENANT_GPU_MEMORY_BYTES,
    TENANT_LATENCY_SECONDS,
)

GROWTH_SECONDS = 10.0
"""Window over which growth of memory is measured."""

_RESERVED_BAND = 0.02
"""Part of a reservation by which it must be over-fulfilled before the cause ends."""
_SHOWS_SECONDS = {"temperature": 180.0}
_PLAIN_RATIO = {"temperature": 0.02}

CauseKey = tuple[str, Subject]


class Sample(msgspec.Struct, frozen=True):
    """One look at a condition."""

    kind: str
    subject: Subject
    at: float
    verdict: Verdict
    why: str
    numbers: tuple[tuple[str, float], ...]
    error: float
    """How far the value is above the middle of its two marks, as a share of that middle.

    Never more than at the mark while the verdict is CLEAR: a card that is full and does not grow
    asks for no less of anybody.
    """

    band: float
    """How far its marks are apart, in the same terms as the error."""
    growth: float | None = None
    """Where it is growth that a lever slows: how far that is above its mark, as a share of the mark."""

    @property
    def key(self) -> CauseKey:
        return (self.kind, self.subject)

    @property
    def effect(self) -> float:
        """What a lever that helps makes smaller: the error, or the growth, which lifts it all the same."""
        return self.error if self.growth is None else self.growth

    @property
    def plain_ratio(self) -> float:
        """By which part of itself the value does not fall by chance: a quantile moves, a die does not."""
        return _PLAIN_RATIO.get(self.kind, 0.15)

    @property
    def shows(self) -> float:
        """Seconds within which what was done shows: readings look back ten, and heat lags longer."""
        return _SHOWS_SECONDS.get(self.kind, 15.0)

    @property
    def ample(self) -> bool:
        """Whether the value is under its marks by as much again as they are apart."""
        return self.verdict is Verdict.CLEAR and self.error <= -1.5 * self.band


def _band(high: float, clear: float) -> float:
    return 2 * (high - clear) / (high + clear)


def _error(value: float, high: float, clear: float, verdict: Verdict) -> float:
    middle = (high + clear) / 2
    if verdict is Verdict.CLEAR:
        value = min(value, clear)
    return (value - middle) / middle


def growth(state: NodeState, signal: Signal, subject: Subject) -> float | None:
    """Newest minus lowest value of the last ten seconds; None with fewer than two values."""
    window = state.history.window(signal, subject, state.now.mono - GROWTH_SECONDS)
    return window[-1][1] - min(v for _, v in window) if len(window) > 1 else None


def label(gpu: Gpu) -> str:
    """As people call it; the subject beside the text has the UUID."""
    return f"GPU {gpu.index}"


def look(state: NodeState, law: Backpressure) -> Iterator[Sample]:
    """Every condition that can be judged now; what is unknown is left out."""
    for gpu in state.inventory.gpus or ():
        yield from _memory(state, law, gpu)
        yield from _temperature(state, law, gpu)
    yield from _cpu(state, law)
    for tenant in state.inventory.tenants or ():
        yield from _latency(state, law, tenant)
        for uuid in tenant.gpus:
            yield from _reserved(state, tenant, uuid)


def _memory(state: NodeState, law: Backpressure, gpu: Gpu) -> Iterator[Sample]:
    """Over the mark *and* growing: a steady 90 % is how serving engines work."""
    subject = on_gpu(gpu.uuid)
    used = state.reading(GPU_MEMORY_USED_BYTES, subject)
    total = state.fresh(GPU_MEMORY_TOTAL_BYTES, subject)
    grown = growth(state, GPU_MEMORY_USED_BYTES, subject)
    if used is None or not total or grown is None:
        return
    ratio = used.value / total
    growing = grown >= law.memory_growth
    if ratio >= law.memory_high and growing:
        verdict = Verdict.HIGH
    elif ratio <= law.memory_clear or not growing:
        verdict = Verdict.CLEAR
    else:
        verdict = Verdict.BETWEEN
    yield Sample(
        "memory",
        subject,
        used.at,
        verdict,
        f"memory of {label(gpu)} at {ratio:.0%} (mark {law.memory_high:.0%}), "
        f"{grown / 2**20:.0f} MiB more than within the last {GROWTH_SECONDS:.0f} s",
        (
            ("memory_used_bytes", used.value),
            ("memory_total_bytes", total),
            ("memory_growth_bytes", grown),
        ),
        _error(ratio, law.memory_high, law.memory_clear, verdict),
        _band(law.memory_high, law.memory_clear),
        grown / law.memory_growth - 1.0,
    )


def _reserved(state: NodeState, tenant: Tenant, uuid: str) -> Iterator[Sample]:
    """Whether what is free, and what it has already, make up what it was promised on this card.

    A card that is too small for the promise, or that others of its level or above have filled, is no
    matter for levers: the promise is then told as not kept, and nobody is held for it.
    """
    promised = tenant.limits.memory_reserved_bytes
    gpu = state.inventory.gpu(uuid)
    used = state.reading(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(tenant.name, uuid))
    free = state.fresh(GPU_MEMORY_FREE_BYTES, on_gpu(uuid))
    if promised is None or gpu is None or used is None or free is None:
        return
    could = min(promised, used.value + free + _of_those_below(state, tenant, uuid))
    has = used.value + free
    if has < could:
        verdict = Verdict.HIGH
    else:
        verdict = Verdict.CLEAR if has >= could * (1 + _RESERVED_BAND) else Verdict.BETWEEN
    yield Sample(
        "reserved",
        on_tenant_gpu(tenant.name, uuid),
        used.at,
        verdict,
        f"{tenant.name} was promised {promised / 2**30:.3g} GiB of {label(gpu)}; it uses "
        f"{used.value / 2**30:.3g} GiB and {free / 2**30:.3g} GiB are free",
        (
            ("memory_reserved_bytes", float(promised)),
            ("memory_used_bytes", used.value),
            ("memory_free_bytes", free),
        ),
        (could * (1 + _RESERVED_BAND / 2) - has) / (could * (1 + _RESERVED_BAND / 2)),
        _RESERVED_BAND,
    )


def _of_those_below(state: NodeState, tenant: Tenant, uuid: str) -> float:
    """Device memory on a card of the tenants that are less important."""
    return sum(
        state.fresh(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(other.name, uuid)) or 0.0
        for other in state.inventory.on_card(uuid)
        if other.level > tenant.level
    )


def _temperature(state: NodeState, law: Backpressure, gpu: Gpu) -> Iterator[Sample]:
    subject = on_gpu(gpu.uuid)
    read = state.reading(GPU_TEMPERATURE_CELSIUS, subject)
    if read is not None:
        high, clear = law.temperature_high, law.temperature_clear
        verdict = _between(read.value, high, clear)
        yield Sample(
            "temperature",
            subject,
            read.at,
            verdict,
            f"{label(gpu)} at {read.value:.0f} °C (mark {high:.0f} °C, clears at {clear:.0f} °C)",
            (("temperature_celsius", read.value),),
            _error(read.value, high, clear, verdict),
            _band(high, clear),
        )


def _cpu(state: NodeState, law: Backpressure) -> Iterator[Sample]:
    """Tasks wait *and* the CPUs are busy.

    Pressure alone will not do: PSI counts a task that cpu.max holds back as waiting, also on an idle
    host, so that a quota of ours, or of any container, would be a cause.
    """
    read = state.reading(NODE_CPU_PRESSURE_RATIO, NODE)
    busy = state.fresh(NODE_CPU_BUSY_RATIO, NODE)
    if read is None or busy is None:
        return
    if read.value >= law.cpu_pressure_high and busy >= law.cpu_busy:
        verdict = Verdict.HIGH
    elif read.value <= law.cpu_pressure_clear or busy < law.cpu_busy:
        verdict = Verdict.CLEAR
    else:
        verdict = Verdict.BETWEEN
    yield Sample(
        "cpu",
        NODE,
        read.at,
        verdict,
        f"CPUs are busy in {busy:.0%} of the time and tasks waited for one in {read.value:.0%} "
        f"(mark {law.cpu_pressure_high:.0%}, clears at {law.cpu_pressure_clear:.0%})",
        (("cpu_pressure_ratio", read.value), ("cpu_busy_ratio", busy)),
        _error(read.value, law.cpu_pressure_high, law.cpu_pressure_clear, verdict),
        _band(law.cpu_pressure_high, law.cpu_pressure_clear),
    )


def objective(tenant: Tenant) -> float | None:
    """The latency in seconds that others are held back for; None where it has none, or is not L1."""
    return tenant.limits.latency_slo_seconds if tenant.level is Level.L1 else None


def _latency(state: NodeState, law: Backpressure, tenant: Tenant) -> Iterator[Sample]:
    """As the tenant reports it, at the quantile of its objective and at no other."""
    slo = objective(tenant)
    if slo is None:
        return
    subject, quantile = on_tenant(tenant.name), tenant.limits.latency_quantile
    read = state.reading(TENANT_LATENCY_SECONDS, subject, (quantile_text(quantile),))
    if read is None:
        return
    high, clear = law.latency_high * slo, law.latency_clear * slo
    verdict = _between(read.value, high, clear)
    yield Sample(
        "latency",
        subject,
        read.at,
        verdict,
        f"p{100 * quantile:g} of {tenant.name} at {_duration(read.value)} "
        f"(objective {_duration(slo)}, mark {_duration(high)})",
        (("latency_seconds", read.value), ("objective_seconds", slo)),
        _error(read.value, high, clear, verdict),
        _band(high, clear),
    )


def _duration(seconds: float) -> str:
    """With three digits: "93 ms", "1.25 s"."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _between(value: float, high: float, clear: float) -> Verdict:
    if value >= high:
        return Verdict.HIGH
    return Verdict.CLEAR if value <= clear else Verdict.BETWEEN


class Watch(msgspec.Struct, frozen=True):
    """What is remembered of every condition."""

    seen: dict[CauseKey, Sustained] = {}

    def after(
        self, samples: Iterable[Sample], now: float, law: Backpressure
    ) -> tuple["Watch", tuple[Cause, ...], float | None]:
        """The next memory, the causes that hold, and when to look again.

        A condition that cannot be judged any more is forgotten: unknown is no cause.
        """
        span = {"hold": law.hold, "within": law.within}
        seen: dict[CauseKey, Sustained] = {}
        causes: list[Cause] = []
        due: list[float] = []
        for sample in samples:
            key = sample.key
            held = self.seen.get(key, Sustained()).seen(now, sample.at, sample.verdict, **span)
            seen[key] = held
            if held.on:
                causes.append(Cause(*key, held.since, sample.why, sample.numbers))
            at = held.complete_at(now, **span)
            if at is not None:
                due.append(at)
        return Watch(seen), tuple(causes), min(due, default=None)
