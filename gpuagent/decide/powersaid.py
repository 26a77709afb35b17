"""What is said of the power budget: that it changed or cannot be kept, and what L1 loses to it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuagent.decide.allocate import Claim
from gpuagent.decide.causes import label
from gpuagent.decide.claims import Rank
from gpuagent.model.inventory import NODE, Gpu, on_gpu
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import POWER_LIMIT

_STARVED_RATIO = 0.05
_TOLD_RATIO = 0.05
"""What an L1 tenant's card loses of its cap to the budget is news from this share on, and each step."""
_OVER_SECONDS = 30.0
"""A card is said to be limited no longer once it has not been for so long: demand comes and goes."""
_AGAIN_SECONDS = 300.0
"""An alert is said again only after it has not held for this long."""


class Told(msgspec.Struct, frozen=True):
    """A limit of an L1 tenant's card that has been said."""

    watts: float
    """The lowest that was said."""
    free_since: float | None = None
    """Since when the budget has not limited the card."""


def changed(state: NodeState, budget: float | None, before: float | None) -> Event:
    """That the budget is another than at the last decision."""
    numbers: tuple[tuple[str, float], ...] = ()
    if budget is None:
        text = "there is no power budget any more"
    else:
        text = f"the power budget of the node is now {budget:.0f} W"
        numbers = (("budget_watts", budget),)
    text += "" if before is None else f"; it was {before:.0f} W"
    return Event("power-budget-changed", state.now.mono, text, NODE, numbers)


def l1_limits(
    state: NodeState,
    before: Mapping[str, Told],
    claims: Sequence[Claim],
    limits: Mapping[str, float],
    *,
    budget: float,
    alarmed: Collection[str],
) -> tuple[dict[str, Told], list[Event]]:
    """What is said by now of the limits of L1 tenants' cards, and what is new of it.

    `alarmed` are subjects of which it is said just now that they get less than they ask for.
    """
    told: dict[str, Told] = {}
    events: list[Event] = []
    for claim in (c for c in claims if Rank(c.rank).is_l1):
        card, limit, known = claim.card, limits[claim.card], before.get(claim.card)
        step = max(POWER_LIMIT.deadband, _TOLD_RATIO * claim.cap)
        if known is None and limit > claim.cap - step:
            continue
        if known is None or limit <= known.watts - step:
            told[card] = Told(limit)
            if str(on_gpu(card)) not in alarmed:
                events.append(_limited(state, claim, limit, budget))
            continue
        still = _still(known, limit < claim.cap - POWER_LIMIT.deadband, state.now.mono)
        if still is not None:
            told[card] = still
        elif state.acts:
            events.append(freed(state, card))
    return told, events


def _still(known: Told, limited: bool, now: float) -> Told | None:
    """What stays said; None once the card has not been limited for long enough."""
    if limited:
        return Told(known.watts)
    since = now if known.free_since is None else known.free_since
    return Told(known.watts, since) if now - since < _OVER_SECONDS else None


def _limited(state: NodeState, claim: Claim, limit: float, budget: float) -> Event:
    kind, verb = spoken(state)
    text = (
        f"{called(state, claim.card)}, used by an L1 tenant, {verb} {limit:.0f} W of its "
        f"{claim.cap:.0f} W, as the node has a power budget of {budget:.0f} W"
    )
    numbers = (("limit_watts", limit), ("cap_watts", claim.cap))
    return Event(kind, state.now.mono, text, on_gpu(claim.card), numbers, alert=state.acts)


def l1_locked(
    state: NodeState,
    claims: Sequence[Claim],
    before: Mapping[str, float],
    locks: Mapping[str, float],
) -> Iterator[Event]:
    """Of each L1 tenant's card whose clocks are locked from now on."""
    kind, verb = ("l1-card-limited", "are") if state.acts else ("would-limit-l1-card", "would be")
    for claim in claims:
        if not Rank(claim.rank).is_l1 or claim.card in before or claim.card not in locks:
            continue
        text = (
            f"the clocks of {called(state, claim.card)}, used by an L1 tenant, {verb} lowered: no "
            "legal power limits keep the node's budget"
        )
        yield Event(kind, state.now.mono, text, on_gpu(claim.card), alert=state.acts)


def freed(state: NodeState, card: str) -> Event:
    text = f"{called(state, card)}, used by an L1 tenant, is limited by the power budget no longer"
    return Event("l1-card-limit-ended", state.now.mono, text, on_gpu(card))


def alerts(
    state: NodeState,
    claims: Sequence[Claim],
    limits: Mapping[str, float],
    *,
    budget: float,
    fixed: float,
    unknown: Sequence[Gpu],
) -> Iterator[Event]:
    """What an operator must know, as long as it holds."""
    now = state.now.mono
    floors = sum(c.floor for c in claims)
    if floors + fixed > budget:
        text = (
            f"the power budget of {budget:.0f} W cannot be kept: the lowest legal limits "
            f"of all cards are {floors:.0f} W and {fixed:.0f} W are beyond control; raise the "
            "budget or take cards out of use"
        )
        yield Event("power-budget-unreachable", now, text, NODE, alert=True)
    for gpu in unknown:
        text = (
            f"what {label(gpu)} may draw is not known ({gpu.blind or 'it does not say'}); the "
            "budget counts it like the largest of the others"
        )
        yield Event("power-unknown", now, text, on_gpu(gpu.uuid), alert=True)
    kind, verb = spoken(state)
    for claim in claims:
        limit = limits[claim.card]
        if not Rank(claim.rank).is_l1 or not starved(claim, limit):
            continue
        text = (
            f"{called(state, claim.card)}, used by an L1 tenant, {verb} {limit:.0f} W of the "
            f"{claim.demand:.0f} W it asks for"
        )
        yield Event(kind, now, text, on_gpu(claim.card), alert=state.acts)


def news(
    said: Mapping[str, float], holding: Iterable[Event], now: float
) -> tuple[dict[str, float], tuple[Event, ...]]:
    """When each alert last held, and those that have not held lately: they are said."""
    lately = {name: at for name, at in said.items() if now - at <= _AGAIN_SECONDS}
    named = {f"{a.kind} {a.subject}": a for a in holding}
    events = tuple(a for name, a in named.items() if name not in lately)
    return {**lately, **dict.fromkeys(named, now)}, events


def starved(claim: Claim, limit: float) -> bool:
    """Whether a card gets plainly less than it asks for."""
    return limit < claim.demand - max(POWER_LIMIT.deadband, _STARVED_RATIO * claim.demand)


def spoken(state: NodeState) -> tuple[str, str]:
    """Kind and verb of an event about an L1 tenant's card."""
    return ("l1-card-limited", "gets") if state.acts else ("would-limit-l1-card", "would get")


def called(state: NodeState, card: str) -> str:
    gpu = state.inventory.gpu(card)
    return card if gpu is None else label(gpu)
