"""The rungs: which levers can relieve which cause, in which order, and whom they may be pulled on."""

from collections.abc import Iterable

from gpuagent.config import Backpressure
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Level, Seat, Tenant
from gpuagent.model.plan import Blocked
from gpuagent.model.vocab import (
    CPU_MAX,
    CPU_WEIGHT,
    IO_WEIGHT,
    RUNNING,
    SUSPENDED,
    TERMINATED,
)

RUNGS: dict[str, tuple[Knob, ...]] = {
    "cpu": (CPU_WEIGHT, CPU_MAX, TERMINATED),
    "memory": (CPU_MAX, SUSPENDED, TERMINATED),
    "reserved": (CPU_MAX, SUSPENDED, TERMINATED),
    "temperature": (CPU_MAX, RUNNING),
    "latency": (CPU_WEIGHT, IO_WEIGHT, CPU_MAX, RUNNING, SUSPENDED, TERMINATED),
}
"""Levers on a tenant by the cause they can relieve, the gentlest first (DESIGN 5).

Two more are pulled beside whichever is in use: the notice, and the MPS thread percentage, which acts
at the next launch only. Nothing is ended because of heat: the limit of the card relieves that.
"""

AT_ONCE = frozenset({SUSPENDED.name, TERMINATED.name})
"""Levers that are pulled or not: no share lies between."""

_SIBLINGS_ONLY = frozenset({CPU_WEIGHT, IO_WEIGHT})


def rungs(tenant: Tenant, kind: str) -> tuple[Knob, ...]:
    """Those that may be pulled on a tenant for such a cause."""
    return tuple(
        k for k in RUNGS[kind] if k.family in tenant.levers and k.family not in tenant.observed
    )


def is_last_rung(tenant: Tenant, knob: str, kind: str) -> bool:
    """Whether no lever on the tenant is left after this one for such a cause."""
    left = rungs(tenant, kind)
    return not left or left[-1].name == knob


def unfit(
    knob: Knob, kind: str, law: Backpressure, *, busy: float | None, waits: float | None
) -> Blocked | None:
    """Why a lever cannot relieve this kind of cause now, wherever it is pulled.

    `busy` is the share of all CPU time in use, `waits` that of time in which tasks wait for disks. A
    weight decides something only while CPUs, or disks, are contended: they are where they are the
    cause, and for a latency they may be. Where that is not known the weight is left out too: waiting
    for it would cost a time box, and cpu.max acts anyway.
    """
    if knob not in _SIBLINGS_ONLY or kind != "latency":
        return None
    what, value, mark = (
        ("CPUs are busy", busy, law.cpu_busy)
        if knob is CPU_WEIGHT
        else ("disks are waited for", waits, law.io_pressure_high)
    )
    if value is None:
        return Blocked("ineffective", f"how much {what} is not known")
    if value >= mark:
        return None
    return Blocked(
        "ineffective",
        f"the {what} in {value:.0%} of the time, and a weight acts only while they are contended "
        f"({mark:.0%})",
    )


def below_common(seat: Seat, other: Seat) -> Seat | None:
    """The seat or ancestor of it that is a sibling of the other's branch; None if there is none.

    cpu.weight is compared among the children of one cgroup only, so this is the one place where
    it decides between the two.
    """
    branch = (seat, *seat.above)
    theirs = {other.path, *(s.path for s in other.above)}
    if seat.path in theirs or other.path in {s.path for s in branch}:
        return None
    outside = [s for s in branch if s.path not in theirs]
    return outside[-1]


def protected_from(tenant: Tenant, tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
    """Those that are more important."""
    return tuple(t for t in tenants if t.level < tenant.level)


def may_be_held(tenant: Tenant) -> bool:
    """L1's own knobs are never touched; others only where the operator allows it."""
    return tenant.enforce and tenant.level is not Level.L1
