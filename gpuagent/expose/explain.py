"""From a snapshot to what is told about knobs: the plan, a tenant, and why that is treated as it is."""

from collections.abc import Iterable, Mapping

from gpuagent.expose import limits, overrides, runs
from gpuagent.expose.picture import (
    hold,
    number,
    numbers,
    passive_why,
    readings,
    row,
    since,
    tight,
)
from gpuagent.expose.views import (
    CauseView,
    ExplanationView,
    KnobView,
    PlanView,
    ProcessView,
    SourceView,
    TenantView,
)
from gpuagent.model.declare import Knob, On
from gpuagent.model.hours import within
from gpuagent.model.inventory import Level, Subject, Tenant, on_cgroup, on_gpu, on_tenant
from gpuagent.model.lease import overridden
from gpuagent.model.plan import Cause, Hold, Setting, Snapshot
from gpuagent.model.state import KnobKey, NodeState, Outcome
from gpuagent.model.vocab import CPU_MAX, KNOBS, POWER_LIMIT, SIGNAL

LEVEL_MEANS: Mapping[Level, str] = {
    Level.L1: "latency-critical: its own knobs are never turned",
    Level.L2: "batch: held back once the best-effort tenants are at their floor",
    Level.L3: "best effort: held back first",
}


def explanation(snapshot: Snapshot, who: Tenant) -> ExplanationView:
    posture, now = snapshot.posture, snapshot.state.now
    made = snapshot.runs.of_tenant(who.name)
    keys = {**dict.fromkeys(_reach(who)), **dict.fromkeys(_turned(snapshot, who))}
    settings = snapshot.plan.by_key()
    held = [h for h in tight(snapshot) if h.subject == on_tenant(who.name)]
    return ExplanationView(
        row=row(snapshot, who),
        level_means=LEVEL_MEANS[who.level],
        mode=posture.mode,
        acts=posture.acts,
        passive_why=passive_why(posture),
        overrides=overrides.views_of(snapshot, who),
        run=None if made is None else runs.run_view(made),
        hours=who.hours,
        within_hours=within(who.hours, now.wall, now.utc_offset),
        hours_why=_hours_why(snapshot, who),
        latency_source=_source(snapshot.state, who.name),
        causes=tuple(_cause(c, snapshot) for c in snapshot.causes if _concerns(c, who, held)),
        cards_held=tuple(hold(snapshot, h) for h in tight(snapshot) if h.subject.gpu in who.gpus),
        knobs=tuple(_knob(snapshot, key, settings.get(key), who) for key in keys),
        limits=who.limits,
        limit_rows=limits.rows(snapshot, who),
        seats=who.seats,
        readings=readings(snapshot, lambda s: s.tenant == who.name),
    )


def tenant(snapshot: Snapshot, who: Tenant) -> TenantView:
    state = snapshot.state
    return TenantView(
        row=row(snapshot, who),
        gpu_uuids=who.gpus,
        users=who.users,
        known_seconds=since(who.since, state.now.mono),
        limits=who.limits,
        limit_rows=limits.rows(snapshot, who),
        places=who.places,
        seats=who.seats,
        processes=tuple(
            ProcessView(pid=p.pid, user=p.user, name=p.name, exe=p.exe, cgroup=p.cgroup)
            for p in who.processes
        ),
        readings=readings(snapshot, lambda s: s.tenant == who.name),
    )


def _source(state: NodeState, tenant: str) -> SourceView | None:
    said = next((s for s in state.sources if s.tenant == tenant), None)
    if said is None:
        return None
    last = said.last_success
    return SourceView(
        url=said.url,
        metric=said.metric,
        up=said.up,
        why=said.why,
        last_success_seconds=None if last is None else since(last, state.now.mono),
    )


def _reach(who: Tenant) -> Iterable[KnobKey]:
    """Every knob that may be turned to hold the tenant back: on its own cgroups and on its cards."""
    for knob in KNOBS:
        if knob.on is On.CGROUP and knob.family in who.levers:
            yield from ((knob, on_cgroup(who.name, s.path, s.inode)) for s in who.seats)
    yield from ((POWER_LIMIT, on_gpu(uuid)) for uuid in who.gpus)


def _turned(snapshot: Snapshot, who: Tenant) -> Iterable[KnobKey]:
    """Knobs of the tenant that a policy turned elsewhere, such as at an ancestor of a seat."""
    keys = (*snapshot.plan.by_key(), *snapshot.outcomes)
    return (key for key in keys if key[1].tenant == who.name)


def _hours_why(snapshot: Snapshot, who: Tenant) -> str:
    """Why a tenant outside of its hours is not held for that; empty for nothing, and within them."""
    now = snapshot.state.now
    if within(who.hours, now.wall, now.utc_offset):
        return ""
    if who.level is Level.L1:
        return "hours cannot be enforced: it is L1"
    if not who.enforce:
        return "hours cannot be enforced: hold_back is false for it"
    if CPU_MAX.family not in who.levers:
        return "hours cannot be enforced: cpu_max is not among its levers"
    if who.name in overridden(snapshot.state.leases):
        return "an override decides instead"
    return ""


def _concerns(cause: Cause, who: Tenant, held: Iterable[Hold]) -> bool:
    """Whether it is on the tenant's cards or the node, is its own, or is a neighbour's that holds it."""
    subject = cause.subject
    if subject.tenant:
        mine = any(h.cause == cause.kind and cause.why in h.why for h in held)
        return mine or subject.tenant == who.name
    return subject.on is On.NODE or subject.gpu in who.gpus


def _cause(cause: Cause, snapshot: Snapshot) -> CauseView:
    return CauseView(
        kind=cause.kind,
        gpu=cause.subject.gpu or None,
        tenant=cause.subject.tenant or None,
        held_seconds=since(cause.since, snapshot.state.now.mono),
        why=cause.why,
        numbers=numbers(cause.numbers),
    )


# -- knobs ---------------------------------------------------------------------------------------------


def plan(snapshot: Snapshot) -> PlanView:
    settings = snapshot.plan.by_key()
    keys = {**dict.fromkeys(settings), **dict.fromkeys(snapshot.outcomes)}
    order = sorted(keys, key=lambda k: (k[0].name, k[1]))
    inventory = snapshot.state.inventory
    return PlanView(
        acts=snapshot.posture.acts,
        passive_why=passive_why(snapshot.posture),
        knobs=tuple(
            _knob(snapshot, k, settings.get(k), inventory.tenant(k[1].tenant)) for k in order
        ),
        causes=tuple(_cause(c, snapshot) for c in snapshot.causes),
        held_back=tuple(hold(snapshot, h) for h in tight(snapshot)),
    )


def _knob(
    snapshot: Snapshot, key: KnobKey, setting: Setting | None, who: Tenant | None
) -> KnobView:
    knob, subject = key
    outcome = snapshot.outcomes.get(key)
    return KnobView(
        knob=knob.name,
        unit=knob.unit,
        gpu=None if subject.on is On.MPS else subject.gpu or None,
        mps=subject.gpu if subject.on is On.MPS else None,
        tenant=subject.tenant or None,
        cgroup=subject.cgroup or None,
        wanted=number(_wanted(setting, outcome)),
        real=number(_real(snapshot.state, knob, subject, outcome)),
        original=number(None if outcome is None else outcome.original),
        result=_result(setting, outcome),
        why=setting.why if setting else _no_setting(subject, outcome, who),
        outcome_why=_hindered(setting, outcome),
        rule=setting.rule if setting else "",
        numbers=numbers(setting.numbers if setting else ()),
        takes_effect=knob.takes_effect,
        age_seconds=None if outcome is None else since(outcome.at, snapshot.state.now.mono),
    )


def _wanted(setting: Setting | None, outcome: Outcome | None) -> float | None:
    if setting is not None:
        return setting.value
    return None if outcome is None else outcome.wanted


def _real(state: NodeState, knob: Knob, subject: Subject, outcome: Outcome | None) -> float | None:
    """As read back by the actuator, else as a sensor read it."""
    if outcome is not None and outcome.real is not None:
        return outcome.real
    signal = SIGNAL.get(knob.real_name)
    return None if signal is None else state.fresh(signal, subject)


def _result(setting: Setting | None, outcome: Outcome | None) -> str | None:
    if outcome is not None:
        return outcome.result
    return setting.blocked.result if setting is not None and setting.blocked else None


def _hindered(setting: Setting | None, outcome: Outcome | None) -> str:
    if outcome is not None and outcome.why:
        return outcome.why
    return setting.blocked.why if setting is not None and setting.blocked else ""


def _no_setting(subject: Subject, outcome: Outcome | None, who: Tenant | None) -> str:
    """Why nothing is wished for a knob."""
    if outcome is not None and outcome.original is not None:
        return "nothing calls for it any more: the original value is put back"
    if who is not None and subject.on is On.CGROUP:
        if who.level is Level.L1:
            return "the tenant is L1, which is never held back"
        if not who.enforce:
            return "the tenant is only observed, as configured"
        refusal = next((s.refusal for s in who.seats if s.path == subject.cgroup), "")
        if refusal:
            return f"cannot be used here: {refusal}"
    return "nothing calls for it"
