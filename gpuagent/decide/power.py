"""The policy that keeps the sum of all power limits within the node's budget (DESIGN 5, Power).

The limits of all cards are decided together and then stand for `power.dwell` and until a change is
worth it; a change of the budget or of the cards is answered at once. What cannot be limited counts
with the most it may draw.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from gpuagent.config import Config
from gpuagent.decide.allocate import Claim, allocate
from gpuagent.decide.card import legal_range, operators_limit
from gpuagent.decide.causes import label
from gpuagent.model.declare import BUDGET_RULE
from gpuagent.model.inventory import NODE, Gpu, Level, on_gpu
from gpuagent.model.plan import Cause, Decision, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import GPU_POWER_WATTS, POWER_LIMIT

_SATURATED = 0.95
"""A card that draws this share of its limit may well want more than it shows."""
_IDLE_RANK = 4
_WORTH_RATIO = 0.03
"""A limit is not moved by less than this share of its cap: demand is never quite still."""
_STARVED_RATIO = 0.05
_TOLD_RATIO = 0.05
"""What an L1 tenant's card loses of its cap to the budget is news from this share on, and each step."""
_OVER_SECONDS = 30.0
"""A card is said to be limited no longer once it has not been for so long: demand comes and goes."""
_ROUNDING_WATTS = 1e-6
_PATIENCE_SECONDS = 10.0
_AGAIN_SECONDS = 300.0
"""An alert is said again only after it has not held for this long."""


class Told(msgspec.Struct, frozen=True):
    """A limit of an L1 tenant's card that has been said."""

    watts: float
    """The lowest that was said."""
    free_since: float | None = None
    """Since when the budget has not limited the card."""


class Memory(msgspec.Struct, frozen=True):
    """The limits in force by card, and what they were decided for."""

    limits: dict[str, float] = {}
    decided_at: float = float("-inf")
    basis: tuple[object, ...] = ()
    """Budget, cards and their ranges: if these change, the limits are decided anew at once."""
    said: dict[str, float] = {}
    """Alerts by name, and when each last held."""
    short_since: float | None = None
    """Since when the floors alone exceed the budget."""
    seen_at: float | None = None
    """When the cards were first known."""
    listed_at: float | None = None
    """When the processes on them were."""
    ready: bool = False
    """Whether it is known whose cards they are: before that an L1 tenant's would be cut like any."""
    budget: float | None = None
    """As it was at the last decision; below, whether there was one."""
    begun: bool = False
    told: dict[str, Told] = {}
    """L1 tenants' cards that are said to be limited, while `acts` was as below."""
    acts: bool = False


class PowerBudget:
    """See the module."""

    name = "power"

    def __init__(self, config: Config) -> None:
        self._budget = config.power.budget_watts
        self._dwell = config.power.dwell
        self._headroom = config.power.headroom

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        news = list(self._changed(memory, state))
        gpus = state.inventory.gpus
        if self._budget is None or not gpus:
            if self._budget is None and state.acts and memory.acts:
                news += [_freed(state, card) for card in memory.told]
            return Memory(budget=self._budget, begun=True), Decision(events=tuple(news))
        memory = msgspec.structs.replace(memory, budget=self._budget, begun=True)
        memory = _heard(memory, state)
        if not memory.ready:
            return memory, Decision(complete=False, events=tuple(news))
        claims = [c for g in gpus if (c := self._claim(state, memory, g)) is not None]
        fixed, unknown = _beyond_control(state, gpus, claims)
        usable = self._budget - fixed
        memory = self._share_out(memory, claims, usable, state.now.mono)
        alerts = list(self._alerts(state, memory, claims, fixed, unknown))
        said, alarms = _news(memory.said, alerts, state.now.mono)
        told, limited = self._l1_limits(state, memory, claims, {str(a.subject) for a in alarms})
        short = [a for a in alerts if a.kind == "power-budget-unreachable"]
        since = None if not short else memory.short_since or state.now.mono
        causes = tuple(
            Cause("power", NODE, since or a.at, a.text, (("budget_watts", self._budget),))
            for a in short
        )
        settings = () if _holds_anyhow(claims, usable) else self._settings(memory, claims, state)
        floors = sum(c.floor for c in claims)
        assert floors > usable or sum(s.value for s in settings) <= usable + _ROUNDING_WATTS
        return (
            msgspec.structs.replace(
                memory, said=said, short_since=since, told=told, acts=state.acts
            ),
            Decision(settings=settings, causes=causes, events=(*news, *alarms, *limited)),
        )

    def _changed(self, memory: Memory, state: NodeState) -> Iterator[Event]:
        """That the budget is another than at the last decision."""
        if not memory.begun or memory.budget == self._budget:
            return
        numbers: tuple[tuple[str, float], ...] = ()
        if self._budget is None:
            text = "there is no power budget any more"
        else:
            text = f"the power budget of the node is now {self._budget:.0f} W"
            numbers = (("budget_watts", self._budget),)
        before = "" if memory.budget is None else f"; it was {memory.budget:.0f} W"
        yield Event("power-budget-changed", state.now.mono, text + before, NODE, numbers)

    def _l1_limits(
        self,
        state: NodeState,
        memory: Memory,
        claims: Sequence[Claim],
        alarmed: Collection[str],
    ) -> tuple[dict[str, Told], list[Event]]:
        """What is said by now of the limits of L1 tenants' cards, and what is new of it.

        `alarmed` are subjects of which it is said just now that they get less than they ask for.
        """
        now = state.now.mono
        before = memory.told if memory.acts == state.acts else {}
        told: dict[str, Told] = {}
        events: list[Event] = []
        for claim in claims:
            card, limit = claim.card, memory.limits[claim.card]
            known = before.get(card)
            step = max(POWER_LIMIT.deadband, _TOLD_RATIO * claim.cap)
            if claim.rank != Level.L1:
                continue
            if known is None and limit > claim.cap - step:
                continue
            if known is None or limit <= known.watts - step:
                told[card] = Told(limit)
                if str(on_gpu(card)) not in alarmed:
                    events.append(self._limited(state, claim, limit))
            elif limit < claim.cap - POWER_LIMIT.deadband:
                told[card] = Told(known.watts)
            elif now - (since := now if known.free_since is None else known.free_since) < (
                _OVER_SECONDS
            ):
                told[card] = Told(known.watts, since)
            elif state.acts:
                events.append(_freed(state, card))
        return told, events

    def _limited(self, state: NodeState, claim: Claim, limit: float) -> Event:
        kind, verb = _spoken(state)
        text = (
            f"{_called(state, claim.card)}, used by an L1 tenant, {verb} {limit:.0f} W of its "
            f"{claim.cap:.0f} W, as the node has a power budget of {self._budget:.0f} W"
        )
        numbers = (("limit_watts", limit), ("cap_watts", claim.cap))
        return Event(kind, state.now.mono, text, on_gpu(claim.card), numbers)

    def _share_out(
        self, memory: Memory, claims: Sequence[Claim], usable: float, now: float
    ) -> Memory:
        """The limits that stand now: those of before, unless they must or may change and it is worth it.

        They must at once when the budget or the cards have changed, or when they no longer fit.
        They may once they have stood for the dwell.
        """
        basis = (self._budget, *((c.card, c.floor, c.cap) for c in claims))
        limits = allocate(claims, usable)
        if basis == memory.basis and sum(memory.limits.values()) <= usable + _ROUNDING_WATTS:
            old = memory.limits
            worth = any(
                abs(limits[c.card] - old[c.card]) >= max(POWER_LIMIT.deadband, _WORTH_RATIO * c.cap)
                for c in claims
            )
            if now - memory.decided_at < self._dwell or not worth:
                return memory
        if limits == memory.limits and basis == memory.basis:
            return memory  # the floors do not fit: there is nothing else to decide
        return msgspec.structs.replace(memory, limits=limits, decided_at=now, basis=basis)

    def _claim(self, state: NodeState, memory: Memory, gpu: Gpu) -> Claim | None:
        """None where the card cannot be limited."""
        card = on_gpu(gpu.uuid)
        span = legal_range(state, card)
        if span is None:
            return self._remembered(state, memory, gpu)
        floor, cap = span
        draw = self._draw(state, gpu)
        limit = memory.limits.get(gpu.uuid, cap)
        if draw is None:
            demand = limit  # unknown: it keeps what it has
        elif draw >= _SATURATED * limit:
            demand = cap
        else:
            demand = draw * (1 + self._headroom)
        return Claim(gpu.uuid, _rank(state, gpu), floor, cap, min(max(demand, floor), cap))

    def _remembered(self, state: NodeState, memory: Memory, gpu: Gpu) -> Claim | None:
        """A card that cannot be read just now is held where it is."""
        limit = memory.limits.get(gpu.uuid)
        if limit is None:
            return None
        return Claim(gpu.uuid, _rank(state, gpu), limit, limit, limit, frozen=True)

    def _draw(self, state: NodeState, gpu: Gpu) -> float | None:
        """Mean of the last dwell; None if it is not known now."""
        card = on_gpu(gpu.uuid)
        now = state.fresh(GPU_POWER_WATTS, card)
        if now is None:
            return None
        window = state.history.window(GPU_POWER_WATTS, card, state.now.mono - self._dwell)
        return sum(v for _, v in window) / len(window) if window else now

    def _settings(
        self, memory: Memory, claims: Sequence[Claim], state: NodeState
    ) -> tuple[Setting, ...]:
        made = []
        for claim in claims:
            watts = memory.limits[claim.card]
            draw = state.fresh(GPU_POWER_WATTS, on_gpu(claim.card))
            drawn = "unknown" if draw is None else f"{draw:.0f} W"
            level = "no tenant" if claim.rank == _IDLE_RANK else f"L{claim.rank}"
            made.append(
                Setting(
                    POWER_LIMIT,
                    on_gpu(claim.card),
                    watts,
                    why=f"{watts:.0f} W of the {self._budget:.0f} W node budget; {level}, "
                    f"draws {drawn}, may have {claim.floor:.0f} to {claim.cap:.0f} W",
                    rule=BUDGET_RULE,
                    numbers=(
                        ("budget_watts", self._budget or 0.0),
                        ("demand_watts", claim.demand),
                        ("floor_watts", claim.floor),
                        ("cap_watts", claim.cap),
                    ),
                )
            )
        return tuple(made)

    def _alerts(
        self,
        state: NodeState,
        memory: Memory,
        claims: Sequence[Claim],
        fixed: float,
        unknown: Sequence[Gpu],
    ) -> Iterator[Event]:
        """What an operator must know, as long as it holds."""
        now = state.now.mono
        floors = sum(c.floor for c in claims)
        if floors + fixed > (self._budget or 0.0):
            text = (
                f"the power budget of {self._budget:.0f} W cannot be kept: the lowest legal limits "
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
        kind, verb = _spoken(state)
        for claim in claims:
            limit = memory.limits[claim.card]
            if claim.rank != Level.L1 or not _starved(claim, limit):
                continue
            text = (
                f"{_called(state, claim.card)}, used by an L1 tenant, {verb} {limit:.0f} W of the "
                f"{claim.demand:.0f} W it asks for"
            )
            yield Event(kind, now, text, on_gpu(claim.card), alert=state.acts)


def _heard(memory: Memory, state: NodeState) -> Memory:
    """Ready once the tenants were read after the processes on the cards; or after a while."""
    if memory.ready:
        return memory
    now = state.now.mono
    seen = now if memory.seen_at is None else memory.seen_at
    listed = memory.listed_at
    if listed is None and state.inventory.gpu_processes is not None:
        listed = now
    known = listed is not None and state.inventory.tenants_at > listed
    return msgspec.structs.replace(
        memory,
        seen_at=seen,
        listed_at=listed,
        ready=known or now - seen >= _PATIENCE_SECONDS,
    )


def _news(
    said: dict[str, float], alerts: Iterable[Event], now: float
) -> tuple[dict[str, float], tuple[Event, ...]]:
    """When each alert last held, and those that have not held lately: they are said."""
    lately = {name: at for name, at in said.items() if now - at <= _AGAIN_SECONDS}
    holding = {f"{a.kind} {a.subject}": a for a in alerts}
    events = tuple(a for name, a in holding.items() if name not in lately)
    return {**lately, **dict.fromkeys(holding, now)}, events


def _spoken(state: NodeState) -> tuple[str, str]:
    """Kind and verb of an event about an L1 tenant's card."""
    return ("l1-card-limited", "gets") if state.acts else ("would-limit-l1-card", "would get")


def _called(state: NodeState, card: str) -> str:
    gpu = state.inventory.gpu(card)
    return card if gpu is None else label(gpu)


def _freed(state: NodeState, card: str) -> Event:
    text = f"{_called(state, card)}, used by an L1 tenant, is limited by the power budget no longer"
    return Event("l1-card-limit-ended", state.now.mono, text, on_gpu(card))


def _starved(claim: Claim, limit: float) -> bool:
    return limit < claim.demand - max(POWER_LIMIT.deadband, _STARVED_RATIO * claim.demand)


def _holds_anyhow(claims: Sequence[Claim], usable: float) -> bool:
    """Whether the budget holds whatever the cards do, so that nothing need be limited."""
    return sum(c.cap for c in claims) <= usable and not any(c.frozen for c in claims)


def _beyond_control(
    state: NodeState, gpus: Sequence[Gpu], claims: Sequence[Claim]
) -> tuple[float, list[Gpu]]:
    """Watts that cards may draw which we cannot limit, and those of which that is not known.

    Each counts with its limit, else with the most its kind may have; an unknown one counts like the
    largest of the others, for too little would be a budget that is not kept.
    """
    controlled = {c.card for c in claims}
    known: dict[str, float] = {}
    unknown: list[Gpu] = []
    for gpu in gpus:
        if gpu.uuid not in controlled:
            most = operators_limit(state, on_gpu(gpu.uuid)) or gpu.power_max_watts
            if most:
                known[gpu.uuid] = most
            else:
                unknown.append(gpu)
    largest = max((*known.values(), *(c.cap for c in claims)), default=0.0)
    return sum(known.values()) + largest * len(unknown), unknown


def _rank(state: NodeState, gpu: Gpu) -> int:
    return min((t.level.value for t in state.inventory.on_card(gpu.uuid)), default=_IDLE_RANK)
