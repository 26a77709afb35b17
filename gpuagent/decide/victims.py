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
    ranked: list[tuple[int, float, str, Tenant]] = []
    for tenant in _near(state, cause):
        part = _part(state, cause, tenant)
        if part is None or part > 0:
            ranked.append((-tenant.level, -(part or 0.0), tenant.name, tenant))
    return [r[-1] for r in sorted(ranked, key=lambda r: r[:3])]


def _near(state: NodeState, cause: Cause) -> Iterator[Tenant]:
    for tenant in state.inventory.tenants or ():
        if may_be_held(tenant) and (cause.subject == NODE or cause.subject.gpu in tenant.gpus):
            yield tenant


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
