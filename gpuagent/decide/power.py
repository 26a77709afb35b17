"""The policy that keeps the sum of all power limits within the node's budget (DESIGN 5, Power).

The limits of all cards are decided together and then stand for `power.dwell`; a change of the
budget or of the cards is answered at once. What cannot be limited counts with the most it may draw.
"""

from collections.abc import Sequence

import msgspec

from gpuagent.config import Config
from gpuagent.decide.allocate import Claim, allocate
from gpuagent.decide.card import legal_range, operators_limit
from gpuagent.decide.causes import label
from gpuagent.model.inventory import NODE, Gpu, Level, on_gpu
from gpuagent.model.plan import Cause, Decision, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import GPU_POWER_WATTS, POWER_LIMIT

_SATURATED = 0.95
"""A card that draws this share of its limit may well want more than it shows."""
_IDLE_RANK = 4


class Memory(msgspec.Struct, frozen=True):
    """The limits in force by card, and what they were decided for."""

    limits: dict[str, float] = {}
    decided_at: float = float("-inf")
    basis: tuple[object, ...] = ()
    """Budget, cards and their ranges and ranks: if these change, the limits are decided anew."""
    short: bool = False
    """Whether the floors alone exceed the budget, which is said once."""
    tight: tuple[str, ...] = ()
    """L1 cards that get less than they ask for, said once each."""


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
        gpus = state.inventory.gpus
        if self._budget is None or not gpus:
            return Memory(), Decision()
        claims = [c for g in gpus if (c := self._claim(state, memory, g)) is not None]
        fixed = self._beyond_control(state, gpus, claims)
        usable = self._budget - fixed
        floors = sum(c.floor for c in claims)
        basis = (usable, *((c.card, c.floor, c.cap, c.rank) for c in claims))
        now = state.now.mono
        if basis != memory.basis or now - memory.decided_at >= self._dwell:
            memory = msgspec.structs.replace(
                memory, limits=allocate(claims, usable), decided_at=now, basis=basis
            )
        short, events = self._alerts(memory, state, claims, floors > usable)
        causes = self._causes(floors, fixed, now) if floors > usable else ()
        settings = () if self._idle(claims, usable) else self._settings(memory, claims, state)
        tight = tuple(c.card for c in claims if self._starved(c, memory.limits))
        return (
            msgspec.structs.replace(memory, short=short, tight=tight),
            Decision(settings=settings, causes=causes, events=events),
        )

    def _idle(self, claims: Sequence[Claim], usable: float) -> bool:
        """Whether the budget holds whatever the cards do, so that nothing need be limited."""
        return sum(c.cap for c in claims) <= usable and not any(c.frozen for c in claims)

    def _claim(self, state: NodeState, memory: Memory, gpu: Gpu) -> Claim | None:
        """None where the card cannot be limited."""
        card = on_gpu(gpu.uuid)
        span = legal_range(state, card)
        if span is None:
            return self._remembered(state, memory, gpu)
        floor, cap = span
        draw = state.fresh(GPU_POWER_WATTS, card)
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

    def _beyond_control(
        self, state: NodeState, gpus: Sequence[Gpu], claims: Sequence[Claim]
    ) -> float:
        """Watts that cards may draw which we cannot limit: their limit, else their draw."""
        controlled = {c.card for c in claims}
        watts = 0.0
        for gpu in gpus:
            if gpu.uuid not in controlled:
                card = on_gpu(gpu.uuid)
                most = operators_limit(state, card) or gpu.power_max_watts
                watts += most or state.fresh(GPU_POWER_WATTS, card) or 0.0
        return watts

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
                    rule="power/budget",
                    numbers=(
                        ("budget_watts", self._budget or 0.0),
                        ("demand_watts", claim.demand),
                        ("floor_watts", claim.floor),
                        ("cap_watts", claim.cap),
                    ),
                )
            )
        return tuple(made)

    def _causes(self, floors: float, fixed: float, now: float) -> tuple[Cause, ...]:
        why = (
            f"the lowest legal limits of all cards are {floors:.0f} W and {fixed:.0f} W are beyond "
            f"control: together more than the {self._budget:.0f} W budget"
        )
        numbers = (("budget_watts", self._budget or 0.0), ("floors_watts", floors + fixed))
        return (Cause("power", NODE, now, why, numbers),)

    def _starved(self, claim: Claim, limits: dict[str, float]) -> bool:
        """Whether a card of an L1 tenant gets less than it asks for, beyond the deadband."""
        return claim.rank == Level.L1 and limits[claim.card] < claim.demand - POWER_LIMIT.deadband

    def _alerts(
        self, memory: Memory, state: NodeState, claims: Sequence[Claim], short: bool
    ) -> tuple[bool, tuple[Event, ...]]:
        now, events = state.now.mono, []
        if short and not memory.short:
            text = (
                f"power budget of {self._budget:.0f} W cannot be kept: every card is at its lowest "
                "legal limit; raise the budget or take cards out of use"
            )
            events.append(Event("power-budget-unreachable", now, text, NODE))
        for claim in claims:
            if claim.card not in memory.tight and self._starved(claim, memory.limits):
                gpu = state.inventory.gpu(claim.card)
                text = (
                    f"{label(gpu) if gpu else claim.card}, used by an L1 tenant, gets "
                    f"{memory.limits[claim.card]:.0f} W of the {claim.demand:.0f} W it asks for"
                )
                events.append(Event("l1-card-limited", now, text, on_gpu(claim.card)))
        return short, tuple(events)


def _rank(state: NodeState, gpu: Gpu) -> int:
    return min((t.level.value for t in state.inventory.on_card(gpu.uuid)), default=_IDLE_RANK)
