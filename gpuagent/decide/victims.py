"""Who is held back for a cause: the lowest level first, then whose activity explains it best."""

from collections.abc import Iterator

from gpuagent.decide.causes import growth, objective
from gpuagent.decide.ladder import may_be_held
from gpuagent.model.inventory import NODE, Subject, Tenant, on_tenant, on_tenant_gpu
from gpuagent.model.plan import Cause
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    TENANT_CPU_CORES,
    TENANT_GPU_MEMORY_BYTES,
    TENANT_GPU_UTILIZATION_RATIO,
)

_IDLE_CORES = 0.02
_ACTIVE_SECONDS = 10.0
"""Who has worked within this window is active: one that is held back pauses between its kernels."""


def candidates(state: NodeState, cause: Cause) -> list[Tenant]:
    """Tenants that may be held back for the cause, the first to be cut first.

    A tenant that is known to contribute nothing is left out: holding it back would relieve
    nothing. One whose part is unknown comes last of its level.
    """
    near = list(_near(state, cause))
    parts = {t.name: _part(state, cause, t) for t in near}
    if cause.kind == "memory" and not any(parts.values()):
        # The card grows, yet none of its processes does: the driver does not say whose it is.
        parts = dict.fromkeys(parts)
    return sorted(
        (t for t in near if may_be_held(t) and parts[t.name] != 0),
        key=lambda t: (-t.level, -(parts[t.name] or 0.0), -_held_bytes(state, cause, t), t.name),
    )


def _near(state: NodeState, cause: Cause) -> Iterator[Tenant]:
    return (t for t in state.inventory.tenants or () if near(state, cause.subject, t))


def near(state: NodeState, subject: Subject, tenant: Tenant) -> bool:
    """Whether the tenant is where the cause is: on its card, or, of a latency, beside that tenant.

    For a promise to another it must be less important than that one.
    """
    if subject == NODE:
        return True
    if not subject.tenant:
        return subject.gpu in tenant.gpus
    suffers = state.inventory.tenant(subject.tenant)
    if subject.gpu:  # a reservation on a card
        on_it = subject.gpu in tenant.gpus
        return on_it and suffers is not None and tenant.level > suffers.level
    return (
        suffers is not None
        and objective(suffers) is not None
        and tenant.level > suffers.level
        and not set(suffers.gpus).isdisjoint(tenant.gpus)
    )


def _held_bytes(state: NodeState, cause: Cause, tenant: Tenant) -> float:
    here = on_tenant_gpu(tenant.name, cause.subject.gpu)
    return state.fresh(TENANT_GPU_MEMORY_BYTES, here) or 0.0


def _part(state: NodeState, cause: Cause, tenant: Tenant) -> float | None:
    """The tenant's part in the cause, comparable among tenants; None if unknown."""
    here = on_tenant_gpu(tenant.name, cause.subject.gpu)
    if cause.kind == "memory":
        grown = growth(state, TENANT_GPU_MEMORY_BYTES, here)
        used = state.fresh(TENANT_GPU_MEMORY_BYTES, here)
        limit = tenant.limits.memory_limit_bytes
        if grown and used and limit is not None and used > limit:
            return grown + used  # over its declared limit: before all who keep to theirs
        return grown
    if cause.kind == "reserved":
        return state.fresh(TENANT_GPU_MEMORY_BYTES, here)
    if cause.kind == "temperature":
        return state.fresh(TENANT_GPU_UTILIZATION_RATIO, here)
    cores = state.fresh(TENANT_CPU_CORES, on_tenant(tenant.name))
    busy = None if cores is None else max(cores - _IDLE_CORES, 0.0)
    if cause.kind == "latency":
        return _disturbance(state, cause.subject.tenant, tenant, busy)
    return busy


def _disturbance(
    state: NodeState, suffers: str, tenant: Tenant, cores: float | None
) -> float | None:
    """What it does on the cards of the one that suffers; where the driver is silent, on the CPUs.

    Kernels of another are what makes a service wait, so whoever is known to run some comes before
    whoever only uses CPU: 1 to 2 for the one, 0 to 1 for the other.
    """
    protected = state.inventory.tenant(suffers)
    shared = set(tenant.gpus).intersection(protected.gpus if protected is not None else ())
    found = [_busiest(state, on_tenant_gpu(tenant.name, uuid)) for uuid in sorted(shared)]
    known = [ratio for ratio in found if ratio is not None]
    if any(known):
        return 1.0 + min(max(known), 1.0)
    if known and len(known) == len(found):
        return 0.0
    return None if cores is None else cores / (1.0 + cores)


def _busiest(state: NodeState, here: Subject) -> float | None:
    """The most that its kernels ran lately, as a share of time; None while that is not known."""
    if state.fresh(TENANT_GPU_UTILIZATION_RATIO, here) is None:
        return None
    start = state.now.mono - _ACTIVE_SECONDS
    window = state.history.window(TENANT_GPU_UTILIZATION_RATIO, here, start)
    newest = state.fresh(TENANT_GPU_UTILIZATION_RATIO, here) or 0.0
    return max([newest, *(ratio for _, ratio in window)])
