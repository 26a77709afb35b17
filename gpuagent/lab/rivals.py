"""Policies to compare the agent's own with: fixed shares, and rate control as TGS has it. Pure.

Both run in the agent's core, on the same sensors, and hold tenants by the same lever: `cpu.max` at a
share of the CPU that a tenant used in its first ten seconds, before it was first cut. So what
differs is only how a share is chosen.

TGS (Wu et al., NSDI 2023) counts the kernels of the production job and lets the opportunistic one
launch as many as leave that rate within a tolerance of what it was alone. No rate of kernels is known
here, so the mapping is: the production jobs are the L1 tenants with an objective; how far one is *off*
is how far the latency that it reports is over its objective, as a part of it; the opportunistic jobs
are the L3 tenants on its card, and their rate is one share for all of them. Of its source are: a look
every 5 s, tolerance 3 %, a cut by 8 %, a restart at 9 % off (FACTS 7), growth by half while it
starts, a tenth of the rate to start again from. Assumed: the step upwards, 1 % of the whole, because
its own is in kernels; and that it keeps to the floor that an operator has set under a share.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide.causes import objective
from gpuagent.decide.ladder import may_be_held
from gpuagent.decide.origins import WINDOW_SECONDS, Origins, Place, measure, relied_on
from gpuagent.decide.pull import Pull
from gpuagent.model.inventory import Level, Tenant, on_cgroup, on_tenant
from gpuagent.model.plan import Cause, Decision, Hold, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.text import quantile_text
from gpuagent.model.vocab import CGROUP_CPU_CORES, CPU_MAX, TENANT_LATENCY_SECONDS

LOOP_SECONDS = 5.0
TOLERANCE = 0.03
CUT = 0.08
RESTART = 0.09
GROWTH = 1.5
RESTART_FROM = 0.1
STEP = 0.01
"""All of TGS; see the module."""
_SLACK_SECONDS = 1e-6


class Before(msgspec.Struct, frozen=True):
    """What tenants used before they were first held, and since when that is being measured."""

    seen: Mapping[Place, float] = {}
    """Monotonic seconds of the first reading of a cgroup."""
    origins: Origins = {}

    def after(self, state: NodeState, tenants: Iterable[Tenant]) -> "Before":
        """With what this state says. A tenant is measured once, when it has run for long enough."""
        seen: dict[Place, float] = {}
        origins = dict(self.origins)
        for tenant in tenants:
            for seat in tenant.seats:
                key = (seat.path, seat.inode)
                on = on_cgroup(tenant.name, *key)
                if key in self.seen or state.fresh(CGROUP_CPU_CORES, on) is not None:
                    seen[key] = self.seen.get(key, state.now.mono)
            if self._measured(tenant, seen, state.now.mono):
                origins.update(measure(state, tenant, origins))
        used = [place for place in seen if place in origins]
        return Before(seen, relied_on(origins, used, state.now.mono))

    @staticmethod
    def _measured(tenant: Tenant, seen: Mapping[Place, float], now: float) -> bool:
        known = [seen.get((s.path, s.inode)) for s in tenant.seats]
        return bool(known) and all(
            at is not None and now - at >= WINDOW_SECONDS - _SLACK_SECONDS for at in known
        )

    def knows(self, tenant: Tenant) -> bool:
        """Whether it has been measured."""
        return bool(tenant.seats) and all((s.path, s.inode) in self.origins for s in tenant.seats)


def _held(state: NodeState, levels: Iterable[Level]) -> list[Tenant]:
    """Tenants of these levels that may be held at all, while it is known who they are."""
    if not state.tenants_known:
        return []
    wanted = frozenset(levels)
    return [
        t for t in state.inventory.tenants or () if t.level in wanted and may_be_held(t) and t.seats
    ]


def _decision(
    state: NodeState, before: Before, shares: Mapping[str, float], *, law: Law, why: str
) -> Decision:
    """Each tenant at its share; one at 1, or not measured yet, is left alone."""
    settings: list[Setting] = []
    holds: list[Hold] = []
    for tenant in state.inventory.tenants or ():
        share = shares.get(tenant.name, 1.0)
        if share >= 1.0 or not before.knows(tenant):
            continue
        cause = Cause("share", on_tenant(tenant.name), state.now.mono, why)
        made = Pull(CPU_MAX, tenant, share, before.origins, cause, why).settings((), law)
        settings += made
        keys = tuple(s.key for s in made)
        holds.append(Hold(on_tenant(tenant.name), share, CPU_MAX.family, cause.kind, why, keys))
    return Decision(settings=tuple(settings), holds=tuple(holds))


class Static:
    """One share for all tenants of a level, from when they have been measured until the end."""

    name = "static"

    def __init__(self, config: Config, shares: Mapping[Level, float]) -> None:
        self._law = config.backpressure
        self._shares = dict(shares)

    def begin(self) -> Before:
        return Before()

    def decide(self, memory: Before, state: NodeState) -> tuple[Before, Decision]:
        tenants = _held(state, self._shares)
        before = memory.after(state, tenants)
        shares = {t.name: self._shares[t.level] for t in tenants}
        return before, _decision(state, before, shares, law=self._law, why="a fixed share")


class Rate(msgspec.Struct, frozen=True):
    """TGS's state: the one share of all whom it holds."""

    before: Before = Before()
    share: float = 0.0
    """Raised to the floor of each tenant where it is used."""
    starting: bool = True
    """Growing by half each time, as long as nobody suffers."""
    stepped_at: float = float("-inf")


def stepped(rate: Rate, off: float, now: float, floor: float) -> Rate:
    """One look, with the one who suffers most `off` by so much (0 for nobody)."""
    share, starting = max(rate.share, floor), rate.starting
    if starting and off <= TOLERANCE:
        share *= GROWTH
    elif starting:
        share, starting = share / GROWTH, False
    elif off <= TOLERANCE:
        share += STEP
    else:
        share *= 1.0 - CUT
        if off >= RESTART:
            share, starting = share * RESTART_FROM, True
    share = min(max(share, floor), 1.0)
    return Rate(rate.before, share, starting, now)


class TgsLike:
    """See the module."""

    name = "tgs"

    def __init__(self, config: Config) -> None:
        self._law = config.backpressure

    def begin(self) -> Rate:
        return Rate()

    def decide(self, memory: Rate, state: NodeState) -> tuple[Rate, Decision]:
        protected = [t for t in state.inventory.tenants or () if objective(t) is not None]
        cards = {uuid for t in protected for uuid in t.gpus}
        held = [t for t in _held(state, [Level.L3]) if not cards.isdisjoint(t.gpus)]
        rate = msgspec.structs.replace(memory, before=memory.before.after(state, held))
        known = list(_off(state, protected))
        now, due = state.now.mono, memory.stepped_at + LOOP_SECONDS - _SLACK_SECONDS
        if known and any(map(rate.before.knows, held)) and now >= due:
            floor = min(t.limits.min_share_ratio for t in held)
            rate = stepped(rate, max(known), now, floor)
        shares = {t.name: max(rate.share, t.limits.min_share_ratio) for t in held}
        why = f"rate control at {rate.share:.0%}"
        return rate, _decision(state, rate.before, shares, law=self._law, why=why)


def _off(state: NodeState, protected: Iterable[Tenant]) -> Iterator[float]:
    """How far over its objective each is that reports; 0 for one that keeps it."""
    for tenant in protected:
        seconds = objective(tenant)
        dims = (quantile_text(tenant.limits.latency_quantile),)
        read = state.fresh(TENANT_LATENCY_SECONDS, on_tenant(tenant.name), dims)
        if read is not None and seconds is not None:
            yield max(read / seconds - 1.0, 0.0)
