"""From a snapshot to what is told: pure functions, one for each view."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from gpuagent.expose.access import Access
from gpuagent.expose.auth import Peer
from gpuagent.expose.paging import mark
from gpuagent.expose.views import (
    ActionView,
    BlindView,
    EventView,
    GpuView,
    HealthView,
    HoldView,
    LoopView,
    NodeView,
    Number,
    ReadingView,
    SensorView,
    TenantRow,
)
from gpuagent.model import vocab
from gpuagent.model.audit import Action
from gpuagent.model.declare import On, Signal
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    Level,
    Subject,
    Tenant,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Hold, Posture, Snapshot
from gpuagent.model.state import Event, Health, Reading
from gpuagent.model.text import quantile_text, wire

OPTIONAL_SENSORS = frozenset({"process_events", "kernel_log", "freezes"})
"""Many hosts lack them, and others take their place: the process table, and NVML's own XIDs; without
its guard the agent freezes nobody. Whatever else is down keeps the agent from what it is for."""
_DECIMALS = 6
_UNMET = frozenset({"refused", "contested", "ineffective", "gone"})
_TO_ACT = frozenset({"cgroups"})
"""Those without which the agent can still observe, as `gpuagent check` has it."""


def number(value: float | None) -> Number:
    """`value` as JSON can say it, to six decimals: what is beyond is noise. NaN is unknown."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return round(value, _DECIMALS)


def since(at: float, now: float) -> float:
    """Seconds from `at` to `now`. A sensor may have read while the tick was already on its way."""
    return round(max(0.0, now - at), _DECIMALS)


def numbers(pairs: Iterable[tuple[str, float]]) -> dict[str, Number]:
    return {name: number(value) for name, value in pairs}


def passive_why(posture: Posture) -> str:
    """Why nothing on the host is changed now; empty while the agent acts."""
    if posture.paused:
        return "the agent is paused; `gpuagent unpause` lets it act again"
    if posture.demoted:
        return posture.demoted
    return "" if posture.mode == "enforce" else 'the configuration says mode = "observe"'


# -- the node ------------------------------------------------------------------------------------------


def node(snapshot: Snapshot, version: str) -> NodeView:
    state, posture = snapshot.state, snapshot.posture
    gpus, tenants = state.inventory.gpus, state.inventory.tenants

    def read(signal: Signal) -> Number:
        return number(state.fresh(signal, NODE))

    return NodeView(
        version=version,
        simulated=posture.simulated,
        mode=posture.mode,
        acts=posture.acts,
        paused=posture.paused,
        released=posture.released,
        taken_at=state.now.wall,
        gpus=None if gpus is None else len(gpus),
        gpus_blind=None if gpus is None else sum(1 for g in gpus if g.blind),
        tenants=None if tenants is None else len(tenants),
        tenants_held_back=len(_held(snapshot, On.TENANT)),
        tenants_would_be_held_back=len(_would_hold(snapshot, On.TENANT)),
        gpus_limited=len(_held(snapshot, On.GPU)),
        gpus_would_be_limited=len(_would_hold(snapshot, On.GPU)),
        active_causes=len(snapshot.causes),
        gpu_power_watts=read(vocab.NODE_POWER_WATTS),
        cpus=read(vocab.NODE_CPU_COUNT),
        cpu_busy_ratio=read(vocab.NODE_CPU_BUSY_RATIO),
        cpu_pressure_ratio=read(vocab.NODE_CPU_PRESSURE_RATIO),
        memory_total_bytes=read(vocab.NODE_MEMORY_TOTAL_BYTES),
        memory_available_bytes=read(vocab.NODE_MEMORY_AVAILABLE_BYTES),
    )


def _held(snapshot: Snapshot, on: On) -> set[Subject]:
    return {h.subject for h in tight(snapshot) if h.subject.on is on and h.in_force}


def _would_hold(snapshot: Snapshot, on: On) -> set[Subject]:
    would = {h.subject for h in tight(snapshot) if h.subject.on is on and h.effect == "would"}
    return would - _held(snapshot, on)


def health(snapshot: Snapshot, reader: Peer, now: float, access: Access) -> HealthView:
    """`now` is monotonic seconds of the request, from which the picture's age follows."""
    posture, state = snapshot.posture, snapshot.state
    # The problems of a file quote it, tenants and all.
    for_others = (
        "the file has problems, which administrators are told" if posture.config_error else ""
    )
    sensors = tuple(
        _sensor(state.health[k], state.now.mono, enforce=posture.mode == "enforce")
        for k in sorted(state.health)
    )
    blind = tuple(
        BlindView(index=g.index, why=g.blind)
        for g in sorted(state.inventory.gpus or (), key=lambda g: (g.index, g.uuid))
        if g.blind
    )
    down = [s for s in sensors if s.up is False]
    silent = [s for s in state.sources if s.up is False]
    unsound = blind or posture.config_error or posture.demoted
    return HealthView(
        ok=not unsound and not any(s.essential for s in down),
        degraded=any(not s.essential for s in down)
        or bool(silent)
        or bool(access.tokens_why or access.unsaved_why)
        or any(one.why for one in access.listeners)
        or bool(unstarted(snapshot)),
        mode=posture.mode,
        acts=posture.acts,
        paused=posture.paused,
        released=posture.released,
        demoted=posture.demoted,
        passive_why=passive_why(posture),
        config_path=posture.config_path,
        config_error=posture.config_error if reader.sees_all else for_others,
        config_loaded_wall=posture.config_loaded_wall,
        sensors=sensors,
        blind=blind,
        loop=LoopView(
            ticks=snapshot.stats.ticks,
            tick_seconds=snapshot.stats.tick_seconds,
            lag_seconds=snapshot.stats.lag_seconds,
            age_seconds=since(state.now.mono, now),
        ),
        latency_sources=len(state.sources),
        latency_sources_down=len(silent),
        mps_why=wire(_mps_why(snapshot, reader)),
        listeners=access.listeners,
        tokens_why=access.tokens_why,
        unsaved_why=access.unsaved_why,
    )


def unstarted(snapshot: Snapshot) -> dict[str, str]:
    """MPS control daemons of the agent's own that are not as wished, and why, by name."""
    return {
        subject.gpu: outcome.why or outcome.result
        for (knob, subject), outcome in snapshot.outcomes.items()
        if knob is vocab.MPS_DAEMON and outcome.result in _UNMET
    }


def _mps_why(snapshot: Snapshot, reader: Peer) -> str:
    """The same in one sentence; the reasons, which quote the host, are for those who see everything."""
    found = sorted(unstarted(snapshot).items())
    if not found or reader.sees_all:
        return "; ".join(f"the MPS daemon {name} is not as wished: {why}" for name, why in found)
    return "an MPS daemon is not as wished, which administrators are told of"


def _sensor(said: Health, now: float, *, enforce: bool) -> SensorView:
    optional = OPTIONAL_SENSORS if enforce else OPTIONAL_SENSORS | _TO_ACT
    return SensorView(
        name=said.name,
        essential=said.name not in optional,
        up=said.up,
        why=said.why,
        last_success_seconds=_age(said.last_success, now),
        duration_seconds=said.seconds,
        failures=said.failures,
    )


def _age(at: float | None, now: float) -> float | None:
    """Seconds since `at`; None where that never was."""
    return None if at is None else since(at, now)


def event(snapshot: Snapshot, of: Event) -> EventView:
    """One of the snapshot's events."""
    now, subject = snapshot.state.now, of.subject or NODE
    return EventView(
        id=mark(snapshot.run, of.number),
        kind=of.kind,
        wall=now.wall - now.mono + of.at,
        text=of.text,
        gpu=subject.gpu or None,
        tenant=subject.tenant or None,
        numbers=numbers(of.numbers),
    )


def action(snapshot: Snapshot, of: Action) -> ActionView:
    """One line of the audit log."""
    return ActionView(
        id=mark(snapshot.run, of.number),
        wall=of.wall,
        knob=of.knob,
        gpu=of.subject.gpu or None,
        tenant=of.subject.tenant or None,
        cgroup=of.subject.cgroup or None,
        did=of.did,
        result=of.result,
        why=of.why,
        rule=of.rule,
        before=of.before,
        wrote=of.wrote,
        after=of.after,
        original=of.original,
        numbers=numbers(of.numbers),
    )


# -- readings ------------------------------------------------------------------------------------------


def readings(snapshot: Snapshot, wanted: Callable[[Subject], bool]) -> tuple[ReadingView, ...]:
    state, simulated = snapshot.state, snapshot.posture.simulated
    now = state.now.mono
    found = [r for r in state.live() if wanted(r.subject)]
    found.sort(key=lambda r: (r.signal.name, r.subject, r.dims))
    return tuple(_reading(r, now, simulated=simulated) for r in found)


def _reading(reading: Reading, now: float, *, simulated: bool) -> ReadingView:
    subject = reading.subject
    labels = {
        **({"gpu": subject.gpu} if subject.gpu else {}),
        **({"cgroup": subject.cgroup} if subject.cgroup else {}),
        **dict(zip(reading.signal.dims, reading.dims, strict=False)),
    }
    return ReadingView(
        name=reading.signal.name,
        labels=labels,
        value=number(reading.value),
        age_seconds=since(reading.at, now),
        estimated=not reading.exact,
        simulated=simulated,
    )


# -- cards ---------------------------------------------------------------------------------------------


def gpus(snapshot: Snapshot, reader: Peer) -> tuple[Gpu, ...]:
    """Cards that the reader may see: those of its tenants; by index, then UUID."""
    inventory = snapshot.state.inventory
    shared = {u for t in inventory.tenants or () if reader.may_see(t.name) for u in t.gpus}
    shown = (g for g in inventory.gpus or () if reader.sees_all or g.uuid in shared)
    return tuple(sorted(shown, key=lambda g: (g.index, g.uuid)))


def gpu_views(snapshot: Snapshot, cards: Sequence[Gpu], reader: Peer) -> tuple[GpuView, ...]:
    """The cards in full, in the order given: one pass over the readings for all of them."""
    owner = {uuid: c.uuid for c in cards for uuid in (c.uuid, *(m.uuid for m in c.mig))}
    read: dict[str, list[ReadingView]] = {c.uuid: [] for c in cards}
    for reading in readings(snapshot, lambda s: s.on in {On.GPU, On.MIG} and s.gpu in owner):
        read[owner[reading.labels["gpu"]]].append(reading)
    return tuple(_gpu(snapshot, card, reader, tuple(read[card.uuid])) for card in cards)


def _gpu(snapshot: Snapshot, card: Gpu, reader: Peer, found: tuple[ReadingView, ...]) -> GpuView:
    on_it = snapshot.state.inventory.on_card(card.uuid)
    return GpuView(
        uuid=card.uuid,
        index=card.index,
        name=card.name,
        simulated=snapshot.posture.simulated,
        pci_bus_id=card.pci_bus_id,
        driver=card.driver,
        memory_bytes=card.memory_bytes,
        power_min_watts=card.power_min_watts,
        power_max_watts=card.power_max_watts,
        power_default_watts=card.power_default_watts,
        numa_node=card.numa_node,
        mig_enabled=card.mig_enabled,
        mig=card.mig,
        links=card.links,
        blind=card.blind,
        tenants=tuple(sorted(t.name for t in on_it if reader.may_see(t.name))),
        readings=found,
    )


# -- tenants -------------------------------------------------------------------------------------------


def tenants(snapshot: Snapshot, reader: Peer) -> tuple[Tenant, ...]:
    """Tenants that the reader may see, by name as it is sent."""
    shown = (t for t in snapshot.state.inventory.tenants or () if reader.may_see(t.name))
    return tuple(sorted(shown, key=lambda t: wire(t.name)))


def row(snapshot: Snapshot, tenant: Tenant) -> TenantRow:
    state = snapshot.state
    holds = [h for h in tight(snapshot) if h.subject == on_tenant(tenant.name)]
    index = {g.uuid: g.index for g in state.inventory.gpus or ()}
    used = [
        state.fresh(vocab.TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(tenant.name, u))
        for u in tenant.gpus
    ]
    limits = tenant.limits
    quantile = (quantile_text(limits.latency_quantile),)
    read = state.reading(vocab.TENANT_LATENCY_SECONDS, on_tenant(tenant.name), quantile)
    unknown = read is None and limits.latency_slo_seconds is None
    return TenantRow(
        name=tenant.name,
        simulated=snapshot.posture.simulated,
        level=tenant.level.name,
        kind=tenant.kind,
        rule=tenant.rule,
        may_be_held_back=tenant.enforce and tenant.level is not Level.L1,
        share_ratio=share_left(holds),
        would_share_ratio=min(
            (round(h.share, _DECIMALS) for h in holds if h.effect == "would"), default=None
        ),
        held_back=hold(snapshot, _weightiest(holds)) if holds else None,
        processes=tenant.process_count,
        gpus=tuple(sorted(index[u] for u in tenant.gpus if u in index)),
        gpu_memory_bytes=_total(used),
        cpu_cores=number(state.fresh(vocab.TENANT_CPU_CORES, on_tenant(tenant.name))),
        latency_seconds=number(None if read is None else read.value),
        latency_objective_seconds=limits.latency_slo_seconds,
        latency_quantile=None if unknown else limits.latency_quantile,
        latency_estimated=read is not None and not read.exact,
    )


def _total(values: Sequence[float | None]) -> Number:
    """The sum, or None unless every part is known: a part of it would pass for the whole."""
    known = [v for v in values if v is not None]
    return number(sum(known)) if values and len(known) == len(values) else None


def tight(snapshot: Snapshot) -> tuple[Hold, ...]:
    """Decisions to hold something back, whatever became of them."""
    return tuple(h for h in snapshot.holds if h.share < 1)


def share_left(holds: Iterable[Hold]) -> float:
    """What the subject of these is left: what has no effect on the host leaves it everything."""
    return round(min((h.share for h in holds if h.in_force), default=1.0), _DECIMALS)


def _weightiest(holds: Collection[Hold]) -> Hold:
    return min(holds, key=lambda h: (not h.in_force, h.share))


def hold(snapshot: Snapshot, of: Hold) -> HoldView:
    found = (snapshot.outcomes[k] for k in of.settings if k in snapshot.outcomes)
    return HoldView(
        gpu=of.subject.gpu or None,
        tenant=of.subject.tenant or None,
        share_ratio=round(of.share, _DECIMALS),
        rung=of.rung,
        cause=of.cause,
        why=of.why,
        effect=of.effect,
        effect_why=next((o.why for o in found if o.result == of.effect and o.why), ""),
        in_force=of.in_force,
    )
