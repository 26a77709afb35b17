"""Holding a tenant to a share for as long as something stands: an order, or the time of day.

There is no value to be steered by, so nothing is learnt and nothing probed: the share is what it is.
"""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.config import Backpressure
from gpuagent.decide.merge import lives_at, protected_paths
from gpuagent.decide.origins import WINDOW_SECONDS, Origins, measure, watched_seconds
from gpuagent.decide.pull import CPU_UNKNOWN, Pull
from gpuagent.model.inventory import Tenant
from gpuagent.model.plan import Blocked, Cause, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import CPU_MAX


def held_to(
    share: float,
    tenant: Tenant,
    *,
    cause: Cause,
    state: NodeState,
    origins: Origins,
    law: Backpressure,
) -> Iterator[Setting]:
    """A setting of cpu.max for each cgroup of the tenant, once what it uses is known well enough."""
    pull = Pull(CPU_MAX, tenant, share, measure(state, tenant, origins), cause, cause.why)
    protected = protected_paths(state)
    for setting in pull.settings((), law):
        place = (setting.subject.cgroup, setting.subject.inode)
        name = lives_at(protected, setting.subject.cgroup)
        shared = None if name is None else Blocked("refused", f"{name} (L1) lives there")
        blocked = setting.blocked or shared
        if blocked is None and place not in origins:
            watched = watched_seconds(state, setting.subject)
            if watched is None:
                blocked = CPU_UNKNOWN
            elif watched < WINDOW_SECONDS:
                continue  # a share of its first seconds would be held for as long as this stands
        yield msgspec.structs.replace(setting, blocked=blocked)


def used_before(origins: Origins, settings: Iterable[Setting], state: NodeState) -> Origins:
    """With what the settings rely on: once they act, the CPU use shows it no more."""
    found = dict(origins)
    for setting in settings if state.acts else ():
        if setting.knob is not CPU_MAX or setting.blocked is not None:
            continue
        place = (setting.subject.cgroup, setting.subject.inode)
        tenant = state.inventory.tenant(setting.subject.tenant)
        if place not in found and tenant is not None:
            measured = measure(state, tenant, origins)[place]
            found[place] = msgspec.structs.replace(measured, used_at=state.now.mono)
    return found
