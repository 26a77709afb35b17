"""Scenarios in which something that the model assumes is otherwise, for sweeps over it. Pure.

    for variation in VARIATIONS:
        host = SimHost(varied(scenario.named("co-location"), variation), seed=1)

What varies has a name and bounds in `ASSUMPTIONS`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from gpuagent.errors import ConfigError
from gpuagent.sim import profiles
from gpuagent.sim.scenario import Load, Scenario, TenantSpec
from gpuagent.sim.tables import Table
from gpuagent.sim.work import Idle, Inference, Work

_NEVER_SECONDS = 86_400.0
"""A delay longer than any scenario."""


class Assumption(NamedTuple):
    """Something that can be varied, its bounds, and how a scenario has it otherwise."""

    low: float
    high: float
    about: str
    apply: Callable[[Scenario, float, str], Scenario]


class Variation(msgspec.Struct, frozen=True):
    """Other values for some assumptions, by name. Raises ConfigError where one is out of bounds."""

    name: str
    values: Mapping[str, float] = {}
    tenant: str = ""
    """The only tenant whose work is otherwise; empty for all. Cards and MPS are one for all."""

    def __post_init__(self) -> None:
        problems = []
        for name, value in self.values.items():
            known = ASSUMPTIONS.get(name)
            if known is None:
                problems.append(
                    f"{self.name}: {name} is no assumption; there are {', '.join(ASSUMPTIONS)}"
                )
            elif not known.low <= value <= known.high:
                problems.append(
                    f"{self.name}: {name} = {value:g} is not within {known.low:g} to {known.high:g}"
                )
        if problems:
            raise ConfigError(problems)


def varied(scenario: Scenario, variation: Variation) -> Scenario:
    """The scenario with other assumptions. Raises ConfigError where it has no such tenant."""
    if variation.tenant and variation.tenant not in {t.name for t in scenario.tenants}:
        raise ConfigError([f"{variation.name}: {scenario.name} has no tenant {variation.tenant}"])
    for name, value in variation.values.items():
        scenario = ASSUMPTIONS[name].apply(scenario, value, variation.tenant)
    return scenario


# -- work -----------------------------------------------------------------------------------------------


def _cpu_effect(scenario: Scenario, effect: float, tenant: str) -> Scenario:
    """What the CPU did not do the card or the disk does: the time at full speed is the same."""

    def changes(work: Work) -> Table:
        if isinstance(work, Idle):
            return {}
        if isinstance(work, Inference):
            moved = work.host_seconds * (1.0 - effect)
            return {
                "host_seconds": work.host_seconds * effect,
                "item_seconds": work.item_seconds + moved,
            }
        return {"launch": work.launch * effect, "host_cpu": work.host_cpu * effect}

    return _with_work(scenario, tenant, changes)


def _rate_scale(scenario: Scenario, scale: float, tenant: str) -> Scenario:
    """Poisson arrivals, those of the timeline included; a trace stays as it is."""

    def changes(work: Work) -> Table:
        return {"rate": work.rate * scale} if isinstance(work, Inference) else {}

    timeline = tuple(
        msgspec.structs.replace(h, rate=h.rate * scale)
        if isinstance(h, Load) and tenant in {"", h.tenant}
        else h
        for h in scenario.timeline
    )
    changed = _with_work(scenario, tenant, changes)
    return msgspec.structs.replace(changed, timeline=timeline)


def _with_work(scenario: Scenario, tenant: str, changes: Callable[[Work], Table]) -> Scenario:
    def changed(spec: TenantSpec) -> TenantSpec:
        if tenant not in {"", spec.name}:
            return spec
        return msgspec.structs.replace(spec, set={**spec.set, **changes(scenario.work(spec))})

    return msgspec.structs.replace(scenario, tenants=tuple(map(changed, scenario.tenants)))


# -- cards and MPS --------------------------------------------------------------------------------------


def _on_cards(number: str) -> Callable[[Scenario, float, str], Scenario]:
    def apply(scenario: Scenario, value: float, _tenant: str) -> Scenario:
        cards = tuple(
            msgspec.structs.replace(c, set={**c.set, number: value}) for c in scenario.cards
        )
        return msgspec.structs.replace(scenario, cards=cards)

    return apply


def _limit_delay(scenario: Scenario, seconds: float, tenant: str) -> Scenario:
    """Up to so long, and never less than it was at least, as far as that is possible."""
    scenario = _on_cards("limit_delay_max_seconds")(scenario, seconds, tenant)
    cards = []
    for card in scenario.cards:
        least = profiles.card(card.profile, card.set).limit_delay_min_seconds.value
        # A delay that stands for never is not to be drawn from what would be soon.
        least = seconds if seconds == _NEVER_SECONDS else min(least, seconds)
        changes = {**card.set, "limit_delay_min_seconds": least}
        cards.append(msgspec.structs.replace(card, set=changes))
    return msgspec.structs.replace(scenario, cards=tuple(cards))


def _on_mps(number: str) -> Callable[[Scenario, float, str], Scenario]:
    def apply(scenario: Scenario, value: float, _tenant: str) -> Scenario:
        groups = tuple(
            msgspec.structs.replace(g, set={**g.set, number: value}) for g in scenario.mps
        )
        return msgspec.structs.replace(scenario, mps=groups)

    return apply


ASSUMPTIONS: Mapping[str, Assumption] = {
    "cpu_effect": Assumption(
        0.0, 1.0, "of what CPU time does to a tenant: at 0, no quota slows it at all", _cpu_effect
    ),
    "rate_scale": Assumption(0.0, 10.0, "requests, of those in the scenario", _rate_scale),
    "limit_delay_seconds": Assumption(
        0.0, _NEVER_SECONDS, "until a power limit acts, at most; a day is never", _limit_delay
    ),
    "power_noise_ratio": Assumption(
        0.0, 0.5, "standard deviation of the power that is read", _on_cards("power_noise_ratio")
    ),
    "contention_ratio": Assumption(
        0.0, 2.0, "how much tenants on one card feel of each other", _on_cards("contention_ratio")
    ),
    "interference_ratio": Assumption(
        0.0, 2.0, "how much MPS neighbours that fit still feel", _on_mps("interference_ratio")
    ),
    "ceiling_effect": Assumption(
        0.0, 1.0, "how much of a thread percentage is kept to", _on_mps("ceiling_effect")
    ),
}

VARIATIONS: tuple[Variation, ...] = (
    Variation("as modelled"),
    Variation("cpu.max works half as well", {"cpu_effect": 0.5}),
    Variation("cpu.max does not work", {"cpu_effect": 0.0}),
    Variation("power limits act within 5 s", {"limit_delay_seconds": 5.0}),
    Variation("power limits never act", {"limit_delay_seconds": _NEVER_SECONDS}),
    Variation("noisy power readings", {"power_noise_ratio": 0.05}),
    Variation("weak contention", {"contention_ratio": 0.5}),
    Variation("strong contention", {"contention_ratio": 1.5}),
    Variation("fewer requests", {"rate_scale": 0.8}),
    Variation("more requests", {"rate_scale": 1.2}),
    Variation("strong MPS interference", {"interference_ratio": 1.0}),
    Variation("thread percentages do not work", {"ceiling_effect": 0.0}),
)
