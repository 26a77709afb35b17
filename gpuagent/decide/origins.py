"""What a tenant had before it was first held back: every share is a share of this."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.model.inventory import Seat, Subject, Tenant, on_cgroup, on_tenant
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    CGROUP_CPU_CORES,
    CGROUP_CPU_WEIGHT,
    CPU_MAX,
    CPU_WEIGHT,
    RUNNING,
    TENANT_CPU_CORES,
)

WINDOW_SECONDS = 10.0
"""A cgroup has to have been watched for so long before what it used says anything."""
USED_SECONDS = 300.0
"""What it used is the most of so long: a checkpoint or an evaluation is not what it usually does."""
KEPT_SECONDS = 60.0
"""For so long after a hold its samples may still be in some window, and are not to be trusted."""

Place = tuple[str, int]
"""Path and inode of a cgroup: whoever lives there, under whatever name, had this before."""


class Origin(msgspec.Struct, frozen=True):
    """What one cgroup had."""

    cores: float | None
    """The most CPU it used within `USED_SECONDS`; None where that is not known."""
    weight: float | None
    """Its cpu.weight; None where it has none."""
    used_at: float = float("-inf")
    """Monotonic seconds at which a hold last relied on it."""


Origins = dict[Place, Origin]


class Before(msgspec.Struct, frozen=True):
    """What was so at a decision."""

    at: float = float("-inf")
    """Monotonic seconds."""
    held: tuple[Place, ...] = ()
    """The cgroups whose cpu.max, or freezer, was ours, whoever wished it."""

    @classmethod
    def of(cls, state: NodeState) -> "Before":
        """What the next decision has to know of this one."""
        return cls(state.now.mono, tuple((s.cgroup, s.inode) for s in _held(state)))


def with_those_held(known: Origins, last: Before, state: NodeState) -> Origins:
    """With what those used that are held since the `last` decision: from now on it cannot be read.

    One policy may have to do with a tenant that another one holds: its share is of the same CPU.
    """
    found = dict(known)
    for subject in _held(state):
        place = (subject.cgroup, subject.inode)
        if place not in found and place not in last.held:
            window = state.history.window(CGROUP_CPU_CORES, subject, last.at - USED_SECONDS)
            used = [cores for at, cores in window if at <= last.at]
            if used:
                found[place] = Origin(max(used), None, state.now.mono)
    return found


def _held(state: NodeState) -> Iterator[Subject]:
    return (
        o.subject
        for o in state.outcomes.values()
        if o.knob in {CPU_MAX, RUNNING} and o.original is not None
    )


def measure(state: NodeState, tenant: Tenant, known: Origins) -> Origins:
    """Origins of all the tenant's cgroups and their ancestors: those `known`, the others as read.

    What a cgroup uses while we hold it back says nothing of what it would use, so without a known
    origin it is not known.
    """
    held = {(s.cgroup, s.inode) for s in _held(state)}
    found: Origins = {}
    for seat in tenant.seats:
        for place in (seat, *seat.above):
            key = (place.path, place.inode)
            if key in known:
                found[key] = known[key]
                continue
            cores = _cores(state, tenant, place) if place is seat and key not in held else None
            found[key] = Origin(cores, _weight(state, tenant, place))
    return found


def _cores(state: NodeState, tenant: Tenant, seat: Seat) -> float | None:
    subject = on_cgroup(tenant.name, seat.path, seat.inode)
    if state.fresh(CGROUP_CPU_CORES, subject) is None:
        alone = len(tenant.seats) == 1
        return state.fresh(TENANT_CPU_CORES, on_tenant(tenant.name)) if alone else None
    return cores_seen(state, subject)


def watched_seconds(state: NodeState, cgroup: Subject) -> float | None:
    """For how long the CPU use of a cgroup has been seen; None if it is not. The first says little.

    What was seen long ago, before it went and came again, does not count.
    """
    seen = state.history.window(CGROUP_CPU_CORES, cgroup, state.now.mono - KEPT_SECONDS)
    return state.now.mono - seen[0][0] if seen else None


def cores_seen(state: NodeState, cgroup: Subject) -> float | None:
    """The most CPU that a cgroup is seen to have used in the last minutes; None if nothing is."""
    window = state.history.window(CGROUP_CPU_CORES, cgroup, state.now.mono - USED_SECONDS)
    return max((v for _, v in window), default=None)


def _weight(state: NodeState, tenant: Tenant, place: Seat) -> float | None:
    subject = on_cgroup(tenant.name, place.path, place.inode)
    outcome = state.outcomes.get((CPU_WEIGHT, subject))
    if outcome is not None and outcome.original is not None:
        return outcome.original
    return state.fresh(CGROUP_CPU_WEIGHT, subject)


def relied_on(origins: Origins, places: Iterable[Place], now: float) -> Origins:
    """With those in use marked so, and without those that have not been for long."""
    marked = {p: msgspec.structs.replace(origins[p], used_at=now) for p in places if p in origins}
    kept = {p: o for p, o in origins.items() if now - o.used_at <= KEPT_SECONDS}
    return {**kept, **marked}
