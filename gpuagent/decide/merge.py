"""One plan from the wishes of all policies: the safer direction wins, ranges hold, invariants too.

A tenant whose share somebody has overridden is that override's alone: what policies wish for its own
knobs counts for nothing. On a card everybody's wishes compete, so that no override takes the node over
its budget or keeps a card hot.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuagent.errors import AgentError
from gpuagent.model.declare import BUDGET_RULE, On
from gpuagent.model.inventory import Level
from gpuagent.model.lease import overridden
from gpuagent.model.plan import Plan, Setting
from gpuagent.model.state import KnobKey, NodeState
from gpuagent.model.vocab import POWER_LIMIT

DECLARED = "limits/"
"""Rules that begin so carry out what a tenant's own limits declare, an L1's included."""


class Violation(AgentError):
    """A plan breaks an invariant. That is a bug in a policy, and ends the process (DESIGN 9)."""


def merge(wishes: Iterable[Setting], state: NodeState) -> Plan:
    """At most one setting per knob and subject, in a stable order.

    Of several wishes the one in the knob's safer direction wins; a wish that can be tried wins over
    one that is only reported. Raises Violation if the result touches an L1 tenant's own knobs.
    """
    chosen: dict[KnobKey, Setting] = {}
    decides = overridden(state.leases)
    for wish in wishes:
        declared = wish.rule.startswith(DECLARED)
        if not declared and decides.get(wish.subject.tenant, wish.rule) != wish.rule:
            continue
        known = chosen.get(wish.key)
        chosen[wish.key] = wish if known is None else _stronger(known, wish)
    settings = (_in_range(s, state) for s in chosen.values())
    plan = Plan(tuple(sorted(settings, key=lambda s: (s.knob.name, s.subject))))
    check(plan, state)
    return plan


def _stronger(one: Setting, other: Setting) -> Setting:
    if (one.blocked is None) != (other.blocked is None):
        return one if one.blocked is None else other
    if one.blocked is not None:
        return one
    safer = one if one.knob.safest(one.value, other.value) == one.value else other
    outvoted = other if safer is one else one
    also = tuple(sorted({*safer.also, *outvoted.also, outvoted.rule} - {safer.rule}))
    return msgspec.structs.replace(
        safer, also=also, budget_value=None if safer.rule == BUDGET_RULE else _budgets(one, other)
    )


def _budgets(*wishes: Setting) -> float | None:
    """What the budget asks for, where it is among these wishes."""
    values = (w.value if w.rule == BUDGET_RULE else w.budget_value for w in wishes)
    return next((v for v in values if v is not None), None)


def _in_range(setting: Setting, state: NodeState) -> Setting:
    """Both its values within the card's legal range of power limits."""
    if setting.knob is not POWER_LIMIT:
        return setting
    gpu = state.inventory.gpu(setting.subject.gpu)
    if gpu is None:
        return setting
    low = gpu.power_min_watts if gpu.power_min_watts is not None else setting.value
    high = gpu.power_max_watts if gpu.power_max_watts is not None else setting.value
    value, budget = (
        None if v is None else min(max(v, low), high) for v in (setting.value, setting.budget_value)
    )
    if (value, budget) == (setting.value, setting.budget_value):
        return setting
    assert value is not None
    return msgspec.structs.replace(setting, value=value, budget_value=budget)


def check(plan: Plan, state: NodeState) -> None:
    """Raise Violation where the plan would turn a knob that acts on an L1 tenant's processes."""
    protected = protected_paths(state)
    names = {t.name for t in state.inventory.tenants or () if t.level is Level.L1}
    for setting in plan.settings:
        if setting.blocked is not None or setting.rule.startswith(DECLARED):
            continue
        if setting.knob.on is On.CGROUP:
            name = lives_at(protected, setting.subject.cgroup)
        else:
            name = setting.subject.tenant if setting.subject.tenant in names else None
        if name is not None:
            raise Violation(
                f"{setting.rule} would turn {setting.knob.name} of {setting.subject}, "
                f"which is, or is where, {name} (L1) lives"
            )


def protected_paths(state: NodeState) -> dict[str, str]:
    """The cgroups in which L1 tenants live, with their names."""
    return {
        seat.path: t.name
        for t in state.inventory.tenants or ()
        if t.level is Level.L1
        for seat in t.seats
    }


def lives_at(protected: Mapping[str, str], cgroup: str) -> str | None:
    """Which of the `protected` lives in a cgroup or below it; None if none does."""
    below = cgroup.rstrip("/") + "/"
    return next((n for path, n in protected.items() if (path + "/").startswith(below)), None)
