"""Limits as declared, used and enforced: of each that a tenant's rule declares, what became of it."""

from collections.abc import Iterator

from gpuagent.expose.picture import number
from gpuagent.expose.views import LimitView
from gpuagent.model import vocab
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import (
    Level,
    Subject,
    Tenant,
    on_cgroup,
    on_gpu,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import Snapshot
from gpuagent.model.text import quantile_text, wire

_IN_FORCE = ("applied", "pending")
_NEXT_CLIENT = "given to its next MPS client by the environment that the agent tells its launcher"


def rows(snapshot: Snapshot, who: Tenant) -> tuple[LimitView, ...]:
    """Those that are declared for a tenant."""
    return (
        *_device_memory(snapshot, who),
        *_compute_share(snapshot, who),
        *_contexts(snapshot, who),
        *_power_cap(snapshot, who),
        *_latency(snapshot, who),
        *_host_memory(snapshot, who),
    )


def _cards(who: Tenant) -> tuple[str, ...]:
    """Empty for none, so that what is declared is told of all the same."""
    return who.gpus or ("",)


def _row(
    limit: str,
    unit: str,
    declared: float,
    *,
    used: float | None,
    by: str,
    why: str = "",
    enforced: float | None = None,
    gpu: str = "",
) -> LimitView:
    return LimitView(
        limit=limit,
        unit=unit,
        gpu=gpu or None,
        declared=number(declared),
        used=number(used),
        enforced=number(enforced),
        by=by,
        why=wire(why),
    )


def _device_memory(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    most, least = who.limits.memory_limit_bytes, who.limits.memory_reserved_bytes
    for uuid in _cards(who):
        here = on_tenant_gpu(who.name, uuid)
        used = snapshot.state.fresh(vocab.TENANT_GPU_MEMORY_BYTES, here)
        if most is not None:
            why = "it uses more" if used is not None and used > most else ""
            by = f"nothing on what runs, but it is the first of its level above it; {_NEXT_CLIENT}"
            yield _row("memory_limit", "bytes", most, used=used, by=by, why=why, gpu=uuid)
        if least is not None:
            by = "lower levels, which are held back while it is not met"
            by = by if who.level is not Level.L3 else "nothing: no level is lower than L3"
            why = _unmet(snapshot, who, uuid)
            yield _row("memory_reserved", "bytes", least, used=used, by=by, why=why, gpu=uuid)


def _unmet(snapshot: Snapshot, who: Tenant, uuid: str) -> str:
    """Why a reservation is not met; empty where it is."""
    for cause in snapshot.causes:
        on = cause.subject
        if cause.kind == "reserved" and on.tenant == who.name and on.gpu in ("", uuid):
            return f"not met: {cause.why}"
    return ""


def _compute_share(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    """The multiprocessors that it uses are not measured: utilisation is something else."""
    declared = who.limits.compute_share_ratio
    if declared is None:
        return
    mine = {p.pid for p in who.processes}
    daemons = snapshot.state.inventory.mps or ()
    clients = [c for d in daemons for c in d.clients if c.pid in mine]
    known = [c.threads_ratio for c in clients if c.threads_ratio is not None]
    enforced = max(known) if clients and len(known) == len(clients) else None
    why = ""
    if not clients:
        why = "it is no MPS client"
    elif enforced is None:
        why = "with what its clients have started is not known"
    elif enforced > declared:
        why = "a client has started with more, and no command changes that"
    by = f"CUDA MPS: {_NEXT_CLIENT}"
    yield _row("compute_share", "ratio", declared, used=None, enforced=enforced, by=by, why=why)


def _contexts(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    declared = who.limits.mps_contexts
    if declared is None:
        return
    known = snapshot.state.inventory
    mine = {p.pid for p in who.processes}
    clients = {c.pid for d in known.mps or () for c in d.clients} & mine
    for uuid in _cards(who):
        here = {p.pid for p in known.gpu_processes or () if p.gpu == uuid} & clients
        used = None if known.mps is None or known.gpu_processes is None else len(here)
        by = "nothing: it is reported, counting one context for each client process"
        yield _row("mps_contexts", "", declared, used=used, by=by, gpu=uuid)


def _power_cap(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    declared = who.limits.power_cap_watts
    if declared is None:
        return
    for uuid in _cards(who):
        card = on_gpu(uuid)
        real = _in_force(snapshot, vocab.POWER_LIMIT, card)
        held = real is not None and real <= declared + vocab.POWER_LIMIT.deadband
        yield _row(
            "power_cap",
            "watts",
            declared,
            used=snapshot.state.fresh(vocab.GPU_POWER_WATTS, card),
            enforced=real if held else None,
            by="the power limit of a card that it has to itself",
            why="" if held else _uncapped(snapshot, who, uuid),
            gpu=uuid,
        )


def _uncapped(snapshot: Snapshot, who: Tenant, uuid: str) -> str:
    if not uuid:
        return "it is on no card"
    others = [t.name for t in snapshot.state.inventory.on_card(uuid) if t.name != who.name]
    if others:
        return f"the card is used by {', '.join(others)} too"
    return _why(snapshot, vocab.POWER_LIMIT, on_gpu(uuid))


def _latency(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    declared, quantile = who.limits.latency_slo_seconds, who.limits.latency_quantile
    if declared is None:
        return
    at = (quantile_text(quantile),)
    used = snapshot.state.fresh(vocab.TENANT_LATENCY_SECONDS, on_tenant(who.name), at)
    by = "nothing: only an L1's is protected"
    if who.level is Level.L1:
        by = "its neighbours, which are held back while it is near or over it"
    why = f"its p{100 * quantile:g} is over it" if used is not None and used > declared else ""
    yield _row("latency_slo", "seconds", declared, used=used, by=by, why=why)


def _host_memory(snapshot: Snapshot, who: Tenant) -> Iterator[LimitView]:
    used = snapshot.state.fresh(vocab.TENANT_HOST_MEMORY_BYTES, on_tenant(who.name))
    for limit, file, knob, declared in (
        ("host_memory_high", "memory.high", vocab.MEMORY_HIGH, who.limits.host_memory_high_bytes),
        ("host_memory_max", "memory.max", vocab.MEMORY_MAX, who.limits.host_memory_max_bytes),
    ):
        if declared is None:
            continue
        seat = who.seats[0] if len(who.seats) == 1 else None
        subject = None if seat is None else on_cgroup(who.name, seat.path, seat.inode)
        real = None if subject is None else _in_force(snapshot, knob, subject)
        why = f"it has {len(who.seats)} control groups, and needs one of its own"
        if subject is not None:
            why = "" if real is not None else _why(snapshot, knob, subject)
        by = f"{file} of its control group"
        yield _row(limit, "bytes", declared, used=used, enforced=real, by=by, why=why)


def _in_force(snapshot: Snapshot, knob: Knob, subject: Subject) -> float | None:
    outcome = snapshot.outcomes.get((knob, subject))
    return outcome.real if outcome is not None and outcome.result in _IN_FORCE else None


def _why(snapshot: Snapshot, knob: Knob, subject: Subject) -> str:
    """Why a knob that would enforce it does not."""
    setting = snapshot.plan.by_key().get((knob, subject))
    outcome = snapshot.outcomes.get((knob, subject))
    if outcome is not None and outcome.result not in _IN_FORCE:
        return f"{outcome.result}: {outcome.why}"
    if setting is not None and setting.blocked is not None:
        return f"{setting.blocked.result}: {setting.blocked.why}"
    return "it has not been set yet"
