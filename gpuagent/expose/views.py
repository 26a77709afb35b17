"""The shape of every response of the API. Unknown is null, never 0; names end in their base unit."""

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

import msgspec

from gpuagent.model.inventory import Limits, Link, MigInstance, Place, Seat

Number = float | Literal["+Inf", "-Inf"] | None
"""JSON has no infinity: "+Inf" is no limit, null is unknown."""


class View(msgspec.Struct, frozen=True):
    """A part of a response."""


class ReadingView(View, frozen=True):
    """One measured value."""

    name: str
    labels: Mapping[str, str]
    """GPU, MIG instance, cgroup, and the dimensions of the signal."""
    value: Number
    age_seconds: float
    estimated: bool
    simulated: bool
    """Whether a simulated host made it up."""


class KnobView(View, frozen=True):
    """One knob on one target: what is wished for it and what became of that."""

    knob: str
    unit: str
    gpu: str | None
    mps: str | None
    """Name of the MPS control daemon, of a knob on one."""
    tenant: str | None
    cgroup: str | None
    wanted: Number
    """Null where nothing is wished, or where the original is being put back."""
    real: Number
    original: Number
    """What it was before the agent's first write; null while it is not the agent's."""
    result: str | None
    """Null where nothing is wished."""
    why: str
    """The reason for the setting, or for there being none."""
    outcome_why: str
    """What hindered or qualified it."""
    rule: str
    numbers: Mapping[str, Number]
    takes_effect: str
    age_seconds: float | None
    """Since the outcome came about."""


class CauseView(View, frozen=True):
    """A condition that calls for relief."""

    kind: str
    gpu: str | None
    tenant: str | None
    held_seconds: float
    why: str
    numbers: Mapping[str, Number]


class HoldView(View, frozen=True):
    """How far a tenant or a whole card is to be held back, through what, and what became of it."""

    gpu: str | None
    tenant: str | None
    share_ratio: float
    """As decided; it is so only where `in_force`."""
    rung: str
    cause: str
    why: str
    effect: str | None
    """The most that its settings have reached, such as "applied" or "would"; null if not known yet."""
    effect_why: str
    """What hindered or qualified that."""
    in_force: bool
    """Whether the host is as decided, or is being made so."""


class NodeView(View, frozen=True):
    """Totals: nothing here names a tenant."""

    version: str
    simulated: bool
    """Whether all that is told here is of a simulated host."""
    mode: str
    acts: bool
    """Whether anything on the host may be changed now."""
    paused: bool
    released: bool
    taken_at: float
    """Wall clock of the picture, seconds since the epoch."""
    gpus: int | None
    gpus_blind: int | None
    tenants: int | None
    tenants_held_back: int
    """Those that are; nobody is while the agent only observes."""
    tenants_would_be_held_back: int
    """Those that would be if the agent acted."""
    gpus_limited: int
    """Whole cards that are held back."""
    gpus_would_be_limited: int
    active_causes: int
    gpu_power_watts: Number
    cpus: Number
    cpu_busy_ratio: Number
    cpu_pressure_ratio: Number
    memory_total_bytes: Number
    memory_available_bytes: Number


class GpuView(View, frozen=True):
    """A card and what was read from it."""

    uuid: str
    index: int
    name: str
    simulated: bool
    pci_bus_id: str
    driver: str
    memory_bytes: int | None
    power_min_watts: float | None
    power_max_watts: float | None
    power_default_watts: float | None
    numa_node: int | None
    mig_enabled: bool | None
    mig: tuple[MigInstance, ...]
    links: tuple[Link, ...]
    blind: str
    """Why nothing can be read from it; empty while it answers."""
    tenants: tuple[str, ...]
    """Those on this card that the reader may see."""
    readings: tuple[ReadingView, ...]


class TenantRow(View, frozen=True):
    """A tenant in a list."""

    name: str
    simulated: bool
    level: str
    kind: str
    """As declared; empty where it is not."""
    rule: str
    """Empty for one that was found."""
    may_be_held_back: bool
    share_ratio: float
    """What it is left of its usual activity: 1 unless it is being held back in fact."""
    would_share_ratio: float | None
    """What it would be left if the agent acted; null unless that is what became of the decision."""
    held_back: HoldView | None
    """The decision that weighs most; whether it is in force is told there."""
    processes: int
    gpus: tuple[int, ...]
    """Indices of its cards; the UUIDs are in the tenant's own view."""
    gpu_memory_bytes: Number
    """Over all its cards; null unless all are known."""
    cpu_cores: Number
    latency_seconds: Number
    """As it reports it itself, at `latency_quantile`; null while it does not."""
    latency_objective_seconds: float | None
    """Null where none is declared. Others are held back for it if the tenant is L1."""
    latency_quantile: float | None
    """Of both; null where neither is known."""
    latency_estimated: bool
    """Whether the latency is an estimate: of the buckets of a histogram, or the worst of several series."""


class ProcessView(View, frozen=True):
    """A process of a tenant."""

    pid: int
    user: str
    name: str
    exe: str
    cgroup: str


class LimitView(View, frozen=True):
    """One limit or promise that was declared for a tenant, and what became of it."""

    limit: str
    """As its key in the configuration: memory_limit, latency_slo."""
    unit: str
    gpu: str | None
    """UUID, where it holds for each of its cards; null also while it is on none."""
    declared: Number
    used: Number
    """What counts against it now; null where that is not known."""
    enforced: Number
    """What is in force now, as read back; null where nothing is."""
    by: str
    """By what it is enforced, and when."""
    why: str
    """What stands against that now; empty for nothing, and for who sees its own tenants only."""


class TenantView(View, frozen=True):
    """A tenant in full."""

    row: TenantRow
    gpu_uuids: tuple[str, ...]
    users: tuple[str, ...]
    known_seconds: float
    limits: Limits
    limit_rows: tuple[LimitView, ...]
    """Those that are declared: of each what is used, and what is enforced."""
    places: tuple[Place, ...]
    seats: tuple[Seat, ...]
    processes: tuple[ProcessView, ...]
    readings: tuple[ReadingView, ...]


class OverrideView(View, frozen=True):
    """How somebody wants a tenant or a card to be treated for a while, and what became of that."""

    name: str
    """This, `by` and `why` are empty for who sees its own tenants only."""
    tenant: str | None
    gpu: str | None
    share_ratio: float | None
    """Null of a card; 1 leaves the tenant alone."""
    power_limit_watts: float | None
    """Null of a tenant."""
    remaining_seconds: float
    ttl_seconds: float
    """How long it was asked for."""
    created_at: Number
    """Wall clock, seconds since the epoch."""
    by: str
    why: str
    effect: str | None
    """As the result of a setting, such as "applied" or "would"; null if nothing has come of it yet."""
    effect_why: str


class RunView(View, frozen=True):
    """A tenant that `gpuagent run` has started."""

    name: str
    level: str
    by: str
    gpus: tuple[str, ...]
    """UUIDs."""
    memory_bytes: int | None
    """Reserved for it on each of its cards; null for none."""
    share_ratio: float | None
    """Part of the multiprocessors that it may use; null where it did not ask for one."""
    began_at: Number
    """Wall clock, seconds since the epoch."""
    scope: str | None
    """Its unit; null where it has none, and is known by its process and the children of that only."""
    notes: tuple[str, ...]
    """What it has not got of what it should have."""


class RefusalView(View, frozen=True):
    """Why a run was not started, as things stood then."""

    id: str
    """Names it among all refusals of this run of the agent."""
    wall: float
    """Seconds since the epoch."""
    by: str
    asked: str
    kind: str
    """forbidden, refused, or unavailable, where asking again may help."""
    why: str
    remedy: str
    numbers: Mapping[str, Number]
    """What was compared."""


class SourceView(View, frozen=True):
    """The tenant's own metrics, from which its latency is read."""

    url: str
    metric: str
    up: bool | None
    """Null while none has been read since the tenant is there."""
    why: str
    """Why it cannot be read, or why no latency follows from it although it can."""
    last_success_seconds: float | None
    """Ago; null if never."""


class ExplanationView(View, frozen=True):
    """Why a tenant is treated as it is."""

    row: TenantRow
    level_means: str
    mode: str
    acts: bool
    passive_why: str
    """Why nothing is changed now; empty while the agent acts."""
    overrides: tuple[OverrideView, ...]
    """Those on it and on its cards."""
    run: RunView | None
    """Null for a tenant that `gpuagent run` has not started."""
    hours: tuple[str, ...]
    """Local times in which it may use all it gets; empty for always."""
    within_hours: bool
    hours_why: str
    """Why it is not held outside of its hours, as it then should be; empty where nothing hinders that."""
    latency_source: SourceView | None
    """Null where its latency is read from nowhere; it may report it."""
    causes: tuple[CauseView, ...]
    """Those on its cards, on the node, of its own, and those of others for which it is held."""
    cards_held: tuple[HoldView, ...]
    """Cards of the tenant that are limited as a whole, and so everybody on them."""
    knobs: tuple[KnobView, ...]
    """Every knob that could reach it, turned or not."""
    limits: Limits
    limit_rows: tuple[LimitView, ...]
    """Those that are declared: of each what is used, and what is enforced."""
    seats: tuple[Seat, ...]
    readings: tuple[ReadingView, ...]


class PlanView(View, frozen=True):
    """All that is wished, and what became of it."""

    acts: bool
    passive_why: str
    knobs: tuple[KnobView, ...]
    causes: tuple[CauseView, ...]
    held_back: tuple[HoldView, ...]
    """Tenants and whole cards that are to be held back, in force or not."""


class EventView(View, frozen=True):
    """Something that happened once."""

    id: str
    """Names it among all events of this run of the agent: `after` it come the later ones."""
    kind: str
    wall: float
    """Seconds since the epoch, by the clock as it is now."""
    text: str
    gpu: str | None
    tenant: str | None
    numbers: Mapping[str, Number]


class ActionView(View, frozen=True):
    """One thing done to the host, or the end of an attempt to do it. Values as the host shows them."""

    id: str
    """Names it among all actions that this run of the agent knows of."""
    wall: float
    """Seconds since the epoch, by the clock as it was then."""
    knob: str
    gpu: str | None
    tenant: str | None
    cgroup: str | None
    did: str
    """set, put back, left alone, would set, or not set; of a run: started, or not started."""
    result: str
    why: str
    """The reason for it, or what stood in its way."""
    rule: str
    before: str
    """Empty where it was not read; so are the next three."""
    wrote: str
    after: str
    original: str
    """What is put back one day; empty where there is nothing to put back."""
    numbers: Mapping[str, Number]


class VariableView(View, frozen=True):
    """A variable of a process's environment."""

    name: str
    value: str
    why: str
    takes_effect: str
    """When, and on what, it acts."""


class EnvironmentView(View, frozen=True):
    """What a launcher should set for the next process of a tenant."""

    tenant: str
    present: bool
    """Whether the tenant has a process now; its rule alone is known otherwise."""
    variables: tuple[VariableView, ...]
    drop_in: str
    """The same as the text of a systemd drop-in, as it is now: nobody renews one that is installed."""


class StartedView(View, frozen=True):
    """A run that was admitted, and what its process has to do before it begins."""

    run: RunView
    variables: tuple[VariableView, ...]
    """To set in its environment."""
    numa_nodes: tuple[int, ...]
    """Nodes that its cards are on: there its threads should run and its memory be; empty for any."""


class SensorView(View, frozen=True):
    """How a sensor or an actuator fares."""

    name: str
    essential: bool
    """Whether the agent cannot do what it is for without it."""
    up: bool | None
    why: str
    last_success_seconds: float | None
    """Ago; null if never."""
    duration_seconds: float
    failures: int


class LoopView(View, frozen=True):
    """The loop's own health."""

    ticks: int
    tick_seconds: float
    lag_seconds: float
    age_seconds: float
    """Since the last pass."""


class BlindView(View, frozen=True):
    """A card that cannot be read."""

    index: int
    why: str


class ListenerView(View, frozen=True):
    """Where the agent listens."""

    name: str
    """unix, admin, loopback or network."""
    address: str
    up: bool
    why: str
    """Why it is down, or what is amiss although it is up."""


class HealthView(View, frozen=True):
    """Whether the agent can do what it is for."""

    ok: bool
    """No essential sensor down, no card blind, configuration in force as written, not demoted."""
    degraded: bool
    """Whether it does so less well: something is down that it can do without."""
    mode: str
    acts: bool
    paused: bool
    released: bool
    demoted: str
    """Why it observes although configured to enforce; empty otherwise."""
    passive_why: str
    config_path: str
    config_error: str
    config_loaded_wall: float
    sensors: tuple[SensorView, ...]
    blind: tuple[BlindView, ...]
    loop: LoopView
    latency_sources: int
    """Tenants whose latency is to be read from their own metrics."""
    latency_sources_down: int
    """Those of whom it cannot be; `gpuagent explain TENANT` says why."""
    mps_why: str
    """Why an MPS control daemon of the agent's own is not as wished; empty while all are."""
    listeners: tuple[ListenerView, ...]
    tokens_why: str
    """Why no token is valid; empty while their file is as it should be."""
    unsaved_why: str
    """Why a restart would find other tokens or overrides in force; empty while all is on the disk."""


Item = TypeVar("Item", bound=View)


class Page(View, Generic[Item], frozen=True):
    """A part of a list in a stable order."""

    items: tuple[Item, ...]
    next: str | None
    """Pass it as `after` for the next part; null at the end."""
    total: int


class Done(View, frozen=True):
    """What a command did."""

    done: str
