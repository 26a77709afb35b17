"""The policy that does what people have ordered for a while: overrides as leases (DESIGN 5, Merge).

A share is a share of the CPU that the tenant used before anybody of us held it back, as in
`backpressure`, and is held by the same knob, cpu.max; a share of 1 wishes nothing, and `merge` sees to
it that nobody else's wish counts. The floor of a tenant, the legal range of a card and the protection
of L1 hold here as everywhere; an override that the host no longer allows waits until it does.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuagent.config import Config
from gpuagent.decide.card import operators_limit
from gpuagent.decide.causes import label
from gpuagent.decide.origins import (
    Before,
    Origin,
    Origins,
    cores_seen,
    measure,
    relied_on,
    with_those_held,
)
from gpuagent.decide.standing import held_to, used_before
from gpuagent.model.inventory import Gpu, Level, Tenant, on_cgroup
from gpuagent.model.lease import USED_CORES, Lease, objection
from gpuagent.model.plan import Cause, Decision, Hold, Setting
from gpuagent.model.state import Event, KnobKey, NodeState, Outcome
from gpuagent.model.vocab import POWER_LIMIT

_PATIENCE_SECONDS = 10.0
"""An override that cannot be carried out is told of after so long: after a start it takes a moment
until the CPU use of a tenant is known."""
_NO_SEAT = "no cgroup of it is known"


class Memory(msgspec.Struct, frozen=True):
    """What tells a new override from a known one, and what tenants used before they were held."""

    before: Before = Before()
    origins: Origins = {}
    leases: tuple[Lease, ...] = ()
    hindered: dict[str, float] = {}
    """By name, since when an override cannot be carried out."""
    said: tuple[str, ...] = ()
    """Overrides of which that has been told."""
    limited: tuple[tuple[Lease, str], ...] = ()
    """Overrides of cards, each with an L1 tenant there of which that has been told."""


class Overrides:
    """See the module."""

    name = "overrides"

    def __init__(self, config: Config) -> None:
        self._law = config.backpressure

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        now, last = state.now.mono, Before.of(state)
        origins = _remembered(with_those_held(memory.origins, memory.before, state), state)
        wishes = {x.id: self._wishes(x, state, origins) for x in state.leases}
        settings = tuple(s for wished in wishes.values() for s in wished)
        hindrances = {
            x.id: why for x in state.leases if (why := _hindrance(x, state, wishes[x.id]))
        }
        since = {name: memory.hindered.get(name, now) for name in hindrances}
        due = {n for n, at in since.items() if now - at >= _PATIENCE_SECONDS}
        limited = _limited(state)
        events = (
            *_changes(memory, state),
            *_limits_told([pair for pair in limited if pair not in memory.limited], state),
            *_told(due - {*memory.said}, hindrances, state),
        )
        return (
            Memory(
                before=last,
                origins=relied_on(used_before(origins, settings, state), last.held, now),
                leases=state.leases,
                hindered=since,
                said=tuple(sorted(due)),
                limited=tuple(
                    dict.fromkeys((*(p for p in memory.limited if p[0] in state.leases), *limited))
                ),
            ),
            Decision(
                settings=settings,
                holds=tuple(h for x in state.leases if (h := _hold(x, state, wishes[x.id]))),
                events=events,
                look_again=min((x.until for x in state.leases), default=None),
            ),
        )

    def _wishes(self, lease: Lease, state: NodeState, origins: Origins) -> tuple[Setting, ...]:
        against = objection(lease, state.inventory)
        if against is not None and against.kind != "range":
            return ()
        if lease.on_tenant:
            tenant = state.inventory.tenant(lease.subject.tenant)
            # Without knowing who is where, nobody is held back.
            if tenant is None or not state.tenants_known or share_of(lease, tenant) >= 1.0:
                return ()
            return tuple(self._share(lease, tenant, state, origins))
        gpu = state.inventory.gpu(lease.subject.gpu)
        return () if gpu is None else (_limit(lease, gpu),)

    def _share(
        self, lease: Lease, tenant: Tenant, state: NodeState, origins: Origins
    ) -> Iterator[Setting]:
        cause = Cause("override", lease.subject, state.now.mono, lease.words)
        known = measure(state, tenant, origins)
        share = share_of(lease, tenant)
        for setting in held_to(
            share, tenant, cause=cause, state=state, origins=origins, law=self._law
        ):
            used = known[setting.subject.cgroup, setting.subject.inode].cores
            yield msgspec.structs.replace(
                setting,
                rule=lease.rule,
                numbers=(*setting.numbers, *(() if used is None else ((USED_CORES, used),))),
            )


def share_of(lease: Lease, tenant: Tenant) -> float:
    """The share it is held to: as ordered, but never below its floor, which a reload may have raised."""
    return max(lease.value, tenant.limits.min_share_ratio)


def _limit(lease: Lease, gpu: Gpu) -> Setting:
    """As ordered; the legal range and everybody else's wishes are `merge`'s business."""
    return Setting(
        POWER_LIMIT,
        lease.subject,
        lease.value,
        why=f"{lease.value:.0f} W for {label(gpu)}: {lease.words}",
        rule=lease.rule,
        numbers=(("override_watts", lease.value),),
    )


# -- what was used before ------------------------------------------------------------------------------


def _remembered(origins: Origins, state: NodeState) -> Origins:
    """With what an earlier run has kept of those that are not known, or what is seen, if it is more."""
    found = dict(origins)
    for lease in state.leases:
        for used in lease.used:
            place = (used.cgroup, used.inode)
            if place not in found:
                subject = on_cgroup(lease.subject.tenant, *place)
                seen = cores_seen(state, subject)
                found[place] = Origin(max(used.cores, seen or 0.0), None, state.now.mono)
    return found


# -- what comes of it ----------------------------------------------------------------------------------


def _hold(lease: Lease, state: NodeState, wishes: tuple[Setting, ...]) -> Hold | None:
    """How far it holds back, if it does."""
    if not wishes:
        return None
    if lease.on_tenant:
        tenant = state.inventory.tenant(lease.subject.tenant)
        share = 1.0 if tenant is None else share_of(lease, tenant)
    else:
        top = operators_limit(state, lease.subject)
        share = 1.0 if not top else min(lease.value / top, 1.0)
    return Hold(
        subject=lease.subject,
        share=share,
        rung=wishes[0].knob.family,
        cause="override",
        why=lease.words,
        settings=tuple(s.key for s in wishes),
    )


def _hindrance(lease: Lease, state: NodeState, wishes: tuple[Setting, ...]) -> str:
    """Why it cannot be carried out; empty where it can, or where its subject is not here."""
    against = objection(lease, state.inventory)
    if against is not None and against.kind == "refused":
        return against.why
    if not wishes:
        tenant = state.inventory.tenant(lease.subject.tenant)
        free = tenant is None or share_of(lease, tenant) >= 1.0 or tenant.seats
        return "" if free else _NO_SEAT
    reasons = [_reason(s, state.outcomes) for s in wishes]
    return reasons[0] if all(reasons) else ""


def _reason(setting: Setting, outcomes: Mapping[KnobKey, Outcome]) -> str:
    if setting.blocked is not None:
        return setting.blocked.why
    outcome = outcomes.get(setting.key)
    if outcome is None or outcome.result not in ("refused", "contested"):
        return ""
    return outcome.why or outcome.result


def _told(names: Iterable[str], why: Mapping[str, str], state: NodeState) -> Iterator[Event]:
    by_name = {x.id: x for x in state.leases}
    for name in sorted(names):
        lease = by_name[name]
        text = f"{lease.words} cannot be carried out: {why[name]}"
        yield Event("override-refused", state.now.mono, text, lease.subject, alert=True)


def _changes(memory: Memory, state: NodeState) -> Iterator[Event]:
    """What has come and gone since the last decision, each once."""
    now = state.now.mono
    known = {x.id: x for x in memory.leases}
    for lease in state.leases:
        if known.pop(lease.id, None) != lease and not lease.resumed:
            yield _begun(lease, state)
    for lease in known.values():
        over = lease.until <= now
        kind, became = ("expired", "has ended") if over else ("dropped", "has been dropped")
        yield Event(f"override-{kind}", now, f"{lease.words} {became}", lease.subject)


def _begun(lease: Lease, state: NodeState) -> Event:
    now, what = state.now.mono, _what(lease)
    numbers = (("share_ratio" if lease.on_tenant else "power_limit_watts", lease.value),)
    passive = "" if state.acts else "; the agent only observes now"
    return Event(
        "override-set", now, f"{what}: {lease.words}{passive}", lease.subject, numbers=numbers
    )


def _limited(state: NodeState) -> list[tuple[Lease, str]]:
    """Which override lowers the limit of a card that which L1 tenant is on."""
    found = []
    for lease in state.leases if state.acts else ():
        top = None if lease.on_tenant else operators_limit(state, lease.subject)
        if top is not None and lease.value < top and objection(lease, state.inventory) is None:
            on_it = state.inventory.on_card(lease.subject.gpu)
            found += [(lease, t.name) for t in on_it if t.level is Level.L1]
    return found


def _limits_told(pairs: Iterable[tuple[Lease, str]], state: NodeState) -> Iterator[Event]:
    for lease, name in pairs:
        text = f"the power limit of a card of {name} (L1) is lowered: {lease.words}"
        numbers = (("power_limit_watts", lease.value),)
        yield Event("l1-card-limited", state.now.mono, text, lease.subject, numbers, alert=True)


def _what(lease: Lease) -> str:
    if not lease.on_tenant:
        return f"{lease.subject.gpu} gets {lease.value:.0f} W at most"
    if lease.value >= 1.0:
        return f"{lease.subject.tenant} is left alone"
    return f"{lease.subject.tenant} is held to {lease.value:.0%}"
