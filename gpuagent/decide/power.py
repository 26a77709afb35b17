"""The policy that keeps the sum of all power limits within the node's budget (DESIGN 5, Power).

The limits of all cards are decided together (`division`) and then stand for `power.dwell` and until a
change is worth it; a change of the budget or of the cards is answered at once. Who is served first
`claims` says, how much a card asks for `demand`. What cannot be limited counts with the most it may
draw. Where the lowest legal limits alone are over the budget, clocks may help (`clocks`).
"""

from collections.abc import Sequence

import msgspec

from gpuagent.config import Config
from gpuagent.decide import powersaid
from gpuagent.decide.allocate import Claim
from gpuagent.decide.claims import Rank, beyond_control, claim, holds_anyhow
from gpuagent.decide.clocks import Clocks
from gpuagent.decide.demand import Appetite, seen
from gpuagent.decide.division import ROUNDING_WATTS, Division
from gpuagent.decide.powersaid import Told
from gpuagent.model.declare import BUDGET_RULE
from gpuagent.model.inventory import NODE, Gpu, on_gpu
from gpuagent.model.plan import Cause, Decision, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS, GPU_POWER_WATTS, POWER_LIMIT

_PATIENCE_SECONDS = 10.0


class Memory(msgspec.Struct, frozen=True):
    """The limits in force by card, what the cards asked for, and what has been said."""

    division: Division = Division()
    appetites: dict[str, Appetite] = {}
    clocks: Clocks = Clocks()
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
        self._config = config

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        budget, gpus = self._budget, state.inventory.gpus
        news = []
        if memory.begun and memory.budget != budget:
            news.append(powersaid.changed(state, budget, memory.budget))
        if budget is None or not gpus:
            if budget is None and state.acts and memory.acts:
                news += [powersaid.freed(state, card) for card in memory.told]
            return Memory(budget=budget, begun=True), Decision(events=tuple(news))
        memory = msgspec.structs.replace(memory, budget=budget, begun=True)
        memory = _heard(memory, state)
        if not memory.ready:
            return memory, Decision(complete=False, events=tuple(news))
        memory, decision = self._decide(memory, state, gpus, budget)
        return memory, msgspec.structs.replace(decision, events=(*news, *decision.events))

    def _decide(
        self, memory: Memory, state: NodeState, gpus: Sequence[Gpu], budget: float
    ) -> tuple[Memory, Decision]:
        before, now = memory.division.limits, state.now.mono
        appetites = {g.uuid: self._appetite(memory, state, g) for g in gpus}
        asked = (
            claim(state, g, limit=before.get(g.uuid), appetite=appetites[g.uuid]) for g in gpus
        )
        claims = [c for c in asked if c is not None]
        fixed, unknown = beyond_control(state, gpus, claims)
        usable = budget - fixed
        memory = msgspec.structs.replace(
            memory,
            appetites=appetites,
            division=memory.division.after(
                claims, usable, budget=budget, dwell=self._dwell, now=now
            ),
        )
        limits = memory.division.limits
        settings: tuple[Setting, ...] = ()
        if not holds_anyhow(claims, usable):
            settings = tuple(_setting(state, c, limits[c.card], budget) for c in claims)
        floors = sum(c.floor for c in claims)
        assert floors > usable or sum(s.value for s in settings) <= usable + ROUNDING_WATTS
        alerts = list(
            powersaid.alerts(state, claims, limits, budget=budget, fixed=fixed, unknown=unknown)
        )
        memory, locks, locked = self._locks(memory, state, claims, usable)
        memory, events = _told(memory, state, claims, alerts, budget)
        memory, causes = _short(memory, alerts, now, budget)
        return memory, Decision(
            settings=(*settings, *locks), causes=causes, events=(*events, *locked)
        )

    def _locks(
        self, memory: Memory, state: NodeState, claims: Sequence[Claim], usable: float
    ) -> tuple[Memory, tuple[Setting, ...], tuple[Event, ...]]:
        """Clocks where no limits keep the budget."""
        before, budget = memory.clocks, self._budget or 0.0
        clocks = before.after(
            state, claims, usable=usable, dwell=self._dwell, allowed=self._unlocked
        )
        said = powersaid.l1_locked(state, claims, before.locks, clocks.locks)
        return (
            msgspec.structs.replace(memory, clocks=clocks),
            tuple(clocks.settings(state, claims, budget)),
            tuple(said),
        )

    def _unlocked(self, uuid: str) -> bool:
        """Whether the operator has declared that the card's clocks are unlocked."""
        card = self._config.card(uuid)
        return card is not None and card.clock_unlocked

    def _appetite(self, memory: Memory, state: NodeState, gpu: Gpu) -> Appetite:
        limit = memory.division.limits.get(gpu.uuid, gpu.power_max_watts)
        return seen(
            memory.appetites.get(gpu.uuid, Appetite()),
            state,
            on_gpu(gpu.uuid),
            limit=float("inf") if limit is None else limit,
            dwell=self._dwell,
            headroom=self._headroom,
        )


def _told(
    memory: Memory,
    state: NodeState,
    claims: Sequence[Claim],
    alerts: Sequence[Event],
    budget: float,
) -> tuple[Memory, tuple[Event, ...]]:
    """What is news of the alerts that hold and of the limits of L1 tenants' cards."""
    said, alarms = powersaid.news(memory.said, alerts, state.now.mono)
    told, limited = powersaid.l1_limits(
        state,
        memory.told if memory.acts == state.acts else {},
        claims,
        memory.division.limits,
        budget=budget,
        alarmed={str(a.subject) for a in alarms},
    )
    memory = msgspec.structs.replace(memory, said=said, told=told, acts=state.acts)
    return memory, (*alarms, *limited)


def _short(
    memory: Memory, alerts: Sequence[Event], now: float, budget: float
) -> tuple[Memory, tuple[Cause, ...]]:
    """That the floors alone are over the budget is a cause, for as long as it is so."""
    short = [a for a in alerts if a.kind == "power-budget-unreachable"]
    since = None if not short else memory.short_since or now
    causes = tuple(
        Cause("power", NODE, since or a.at, a.text, (("budget_watts", budget),)) for a in short
    )
    return msgspec.structs.replace(memory, short_since=since), causes


def _setting(state: NodeState, claim: Claim, watts: float, budget: float) -> Setting:
    """Cuts and raises are stages of one plan: the lanes raise nothing before all cuts are verified."""
    card = on_gpu(claim.card)
    draw = state.fresh(GPU_POWER_WATTS, card)
    drawn = "unknown" if draw is None else f"{draw:.0f} W"
    stage, order = 0.0, ""
    as_set = state.fresh(GPU_POWER_LIMIT_WATTS, card)
    if as_set is not None and watts <= as_set - POWER_LIMIT.deadband:
        stage, order = 1.0, f"; first stage, a cut from {as_set:.0f} W"
    elif as_set is not None and watts >= as_set + POWER_LIMIT.deadband:
        stage, order = 2.0, f"; second stage, raised from {as_set:.0f} W once cuts are verified"
    return Setting(
        POWER_LIMIT,
        card,
        watts,
        why=f"{watts:.0f} W of the {budget:.0f} W node budget; {Rank(claim.rank).words}, "
        f"draws {drawn}, asks for {claim.demand:.0f} W, may have {claim.floor:.0f} to "
        f"{claim.cap:.0f} W{order}",
        rule=BUDGET_RULE,
        numbers=(
            ("budget_watts", budget),
            ("demand_watts", claim.demand),
            ("floor_watts", claim.floor),
            ("cap_watts", claim.cap),
            ("stage", stage),
        ),
    )


def _heard(memory: Memory, state: NodeState) -> Memory:
    """Ready once the tenants were read after the processes on the cards; or after a while."""
    if memory.ready:
        return memory
    now = state.now.mono
    seen_at = now if memory.seen_at is None else memory.seen_at
    listed = memory.listed_at
    if listed is None and state.inventory.gpu_processes is not None:
        listed = now
    known = listed is not None and state.inventory.tenants_at > listed
    return msgspec.structs.replace(
        memory,
        seen_at=seen_at,
        listed_at=listed,
        ready=known or now - seen_at >= _PATIENCE_SECONDS,
    )
