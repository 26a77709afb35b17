"""Who is held back for a cause: the lowest level first, then whose activity explains it best."""

from collections.abc import Iterator

from gpuagent.decide.causes import growth
from gpuagent.decide.ladder import may_be_held
from gpuagent.model.inventory import NODE, Tenant, on_tenant, on_tenant_gpu
from gpuagent.model.plan import Cause
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    TENANT_CPU_CORES,
    TENANT_GPU_MEMORY_BYTES,
    TENANT_GPU_UTILIZATION_RATIO,
)

_IDLE_CORES = 0.02


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
    for tenant in state.inventory.tenants or ():
        if cause.subject == NODE or cause.subject.gpu in tenant.gpus:
            yield tenant


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
    if cause.kind == "temperature":
        return state.fresh(TENANT_GPU_UTILIZATION_RATIO, here)
    cores = state.fresh(TENANT_CPU_CORES, on_tenant(tenant.name))
    return None if cores is None else max(cores - _IDLE_CORES, 0.0)
