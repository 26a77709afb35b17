"""The policy of the clock on the wall: tenants that may use all they get at some hours only.

Outside of its hours a tenant is held to its share for them, or to its floor, as by an override; there
is no cause and nothing to relieve. The hour is the local one of the host, so that a night in which the
clocks are changed needs no rule of its own.
"""

import msgspec

from gpuagent.config import Config
from gpuagent.decide.ladder import may_be_held
from gpuagent.decide.levers import OBSERVED
from gpuagent.decide.origins import Before, Origins, relied_on, with_those_held
from gpuagent.decide.standing import held_to, used_before
from gpuagent.model.hours import within
from gpuagent.model.inventory import Tenant, on_tenant
from gpuagent.model.lease import overridden
from gpuagent.model.plan import Cause, Decision, Hold, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import CPU_MAX

RULE = "hours/off"


class Memory(msgspec.Struct, frozen=True):
    """What tenants used before they were held, and of whom it has been told."""

    before: Before = Before()
    origins: Origins = {}
    told: tuple[str, ...] = ()


class Hours:
    """See the module."""

    name = "hours"

    def __init__(self, config: Config) -> None:
        self._law = config.backpressure

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        now = Before.of(state)
        origins = with_those_held(memory.origins, memory.before, state)
        off = [t for t in state.inventory.tenants or () if state.tenants_known and _off(t, state)]
        wishes = {t.name: self._wishes(t, state, origins) for t in off}
        settings = tuple(s for wished in wishes.values() for s in wished)
        if not state.tenants_known:
            return msgspec.structs.replace(memory, before=now, origins=origins), Decision()
        names = tuple(sorted(t.name for t in off if CPU_MAX.family not in t.observed))
        known = relied_on(used_before(origins, settings, state), now.held, state.now.mono)
        return (
            Memory(before=now, origins=known, told=names),
            Decision(
                settings=settings,
                holds=tuple(_hold(t, wishes[t.name]) for t in off if wishes[t.name]),
                events=(*_told(memory.told, names, state),),
            ),
        )

    def _wishes(self, tenant: Tenant, state: NodeState, origins: Origins) -> tuple[Setting, ...]:
        share, why = share_off(tenant), _why(tenant)
        cause = Cause("hours", on_tenant(tenant.name), state.now.mono, why)
        only = OBSERVED if CPU_MAX.family in tenant.observed else None
        return tuple(
            msgspec.structs.replace(setting, rule=RULE, blocked=setting.blocked or only)
            for setting in held_to(
                share, tenant, cause=cause, state=state, origins=origins, law=self._law
            )
        )


def share_off(tenant: Tenant) -> float:
    """What it may have outside of its hours, never less than its floor."""
    limits = tenant.limits
    return max(limits.off_hours_share_ratio or 0.0, limits.min_share_ratio)


def _off(tenant: Tenant, state: NodeState) -> bool:
    """Whether it is to be held now: not what somebody has decided otherwise for a while."""
    now = state.now
    return (
        bool(tenant.hours)
        and may_be_held(tenant)
        and CPU_MAX.family in tenant.levers
        and tenant.name not in overridden(state.leases)
        and share_off(tenant) < 1.0
        and not within(tenant.hours, now.wall, now.utc_offset)
    )


def _why(tenant: Tenant) -> str:
    return f"it is outside of the hours of {tenant.name} ({', '.join(tenant.hours)})"


def _hold(tenant: Tenant, wishes: tuple[Setting, ...]) -> Hold:
    return Hold(
        subject=on_tenant(tenant.name),
        share=share_off(tenant),
        rung=CPU_MAX.family,
        cause="hours",
        why=_why(tenant),
        settings=tuple(s.key for s in wishes),
    )


def _told(before: tuple[str, ...], names: tuple[str, ...], state: NodeState) -> list[Event]:
    now = state.now.mono
    begun = [(n, "off-hours-began", "its hours are over") for n in names if n not in before]
    present = {t.name for t in state.inventory.tenants or ()}
    ended = [
        (n, "off-hours-ended", "its hours have begun, or nobody asks for them any more")
        for n in before
        if n not in names and n in present
    ]
    return [Event(kind, now, f"{n}: {text}", on_tenant(n)) for n, kind, text in (*begun, *ended)]
