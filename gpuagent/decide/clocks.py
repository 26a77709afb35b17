"""Locked clocks, for a budget that power limits alone cannot keep.

A power limit has a lowest legal value. Where the sum of these is over the budget no limits keep it, and
a card that draws less than its lowest limit is not slowed by any (an H200 in LLM decode draws 137 to
300 W of 700 W, and only a clock lock bites: arXiv 2605.11999, FACTS 7). Its clocks can be lowered
instead, where the operator has declared that they are unlocked (`cards.clock_unlocked`): no call reads
a lock back, so nobody can know what it was before.

One card is changed at a time, those that `claims` cuts first, and then the draw is measured for a dwell.
A cut assumes that draw falls with the clock at least in proportion to it, a raise that it grows with the
third power at most: both err towards small steps. A lock that has not lowered the draw is let go. What
a lock achieves is measured, never promised: the budget is a limit on draw here, not a bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from gpuagent.decide.allocate import Claim
from gpuagent.decide.claims import Rank
from gpuagent.model.inventory import on_gpu
from gpuagent.model.plan import Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import CLOCK_LIMIT, GPU_CLOCK_HERTZ, GPU_POWER_WATTS

CLOCK_RULE = "power/clock"
LOWEST_RATIO = 0.4
"""Of the highest clock seen: below that little power is left to save."""
_DEEPEST_STEP = 0.1
_RAISE = 1.05
_USEFUL_RATIO = 0.3
"""A step has been of use if it saved this part of what was hoped for."""
_FUTILE_SECONDS = 600.0


class Step(msgspec.Struct, frozen=True):
    """The last cut, until it has been judged."""

    card: str
    before_watts: float
    """Draw of the card before it."""
    hoped_watts: float
    """What it was to save."""


class Clocks(msgspec.Struct, frozen=True):
    """Locks by card, as shares of the highest clock seen there while it was not locked."""

    locks: dict[str, float] = {}
    tops: dict[str, float] = {}
    """Hertz."""
    changed_at: float = float("-inf")
    step: Step | None = None
    futile: dict[str, float] = {}
    """Cards whose lock did not lower their draw, and until when that is remembered."""

    def after(
        self,
        state: NodeState,
        claims: Sequence[Claim],
        *,
        usable: float,
        dwell: float,
        allowed: Callable[[str], bool],
    ) -> "Clocks":
        """The locks that stand now. `usable` is the budget without what is beyond control."""
        now = state.now.mono
        known = self._seen(state, claims)
        if sum(c.floor for c in claims) <= usable:
            return Clocks(tops=known.tops)  # limits keep the budget
        draws = {c.card: _draw(state, c.card, dwell) for c in claims}
        if None in draws.values() or now - known.changed_at < dwell:
            return known
        drawn = {card: watts or 0.0 for card, watts in draws.items()}
        known, over = _judged(known, drawn, now), sum(drawn.values()) - usable
        if over > 0:
            return _cut(known, [c for c in claims if allowed(c.card)], drawn, over, now)
        return _raised(known, claims, drawn, -over, now)

    def _seen(self, state: NodeState, claims: Sequence[Claim]) -> "Clocks":
        here = {c.card for c in claims}
        tops = {card: top for card, top in self.tops.items() if card in here}
        for card in here - set(self.locks):
            clock = state.fresh(GPU_CLOCK_HERTZ, on_gpu(card), ("sm",))
            if clock:
                tops[card] = max(clock, tops.get(card, 0.0))
        futile = {c: until for c, until in self.futile.items() if state.now.mono < until}
        locks = {card: ratio for card, ratio in self.locks.items() if card in here}
        return msgspec.structs.replace(self, locks=locks, tops=tops, futile=futile)

    def settings(
        self, state: NodeState, claims: Sequence[Claim], budget: float
    ) -> Iterator[Setting]:
        for claim in claims:
            ratio, top = self.locks.get(claim.card), self.tops.get(claim.card)
            if ratio is None or top is None:
                continue
            draw = state.fresh(GPU_POWER_WATTS, on_gpu(claim.card))
            drawn = () if draw is None else (("draw_watts", draw),)
            hertz = ratio * top
            yield Setting(
                CLOCK_LIMIT,
                on_gpu(claim.card),
                hertz,
                why=f"clocks up to {hertz / 1e6:.0f} MHz, {ratio:.0%} of the highest seen, as the "
                f"lowest power limits alone are over the {budget:.0f} W node budget; "
                f"{Rank(claim.rank).words}",
                rule=CLOCK_RULE,
                numbers=(("budget_watts", budget), ("ratio", ratio), *drawn),
            )


def _judged(known: Clocks, drawn: Mapping[str, float], now: float) -> Clocks:
    """A lock that has not done what it was made for is let go."""
    step = known.step
    if step is None:
        return known
    saved = step.before_watts - drawn.get(step.card, 0.0)
    if saved >= _USEFUL_RATIO * step.hoped_watts:
        return msgspec.structs.replace(known, step=None)
    locks = {card: ratio for card, ratio in known.locks.items() if card != step.card}
    futile = {**known.futile, step.card: now + _FUTILE_SECONDS}
    return msgspec.structs.replace(known, locks=locks, step=None, futile=futile)


def _cut(
    known: Clocks, claims: Sequence[Claim], drawn: Mapping[str, float], over: float, now: float
) -> Clocks:
    """One more step down, on the card that is cut first among those where it can help."""
    fit = [
        c
        for c in claims
        if c.card in known.tops
        and c.card not in known.futile
        and not c.frozen
        and known.locks.get(c.card, 1.0) > LOWEST_RATIO
        and drawn[c.card] > 0
    ]
    if not fit:
        return known
    card = max(fit, key=lambda c: (c.rank, drawn[c.card])).card
    ratio = known.locks.get(card, 1.0)
    lower = max(ratio * (1 - min(over / drawn[card], _DEEPEST_STEP)), LOWEST_RATIO)
    return msgspec.structs.replace(
        known,
        locks={**known.locks, card: lower},
        changed_at=now,
        step=Step(card, drawn[card], drawn[card] * (1 - lower / ratio)),
    )


def _raised(
    known: Clocks, claims: Sequence[Claim], drawn: Mapping[str, float], spare: float, now: float
) -> Clocks:
    """One step up, on the card that is served first, if what it may draw then still fits."""
    held = [c for c in claims if c.card in known.locks]
    if not held:
        return known
    card = min(held, key=lambda c: (c.rank, drawn[c.card])).card
    if drawn[card] * (_RAISE**3 - 1) > spare:
        return known
    locks = {**known.locks, card: known.locks[card] * _RAISE}
    locks = {c: r for c, r in locks.items() if r < 1}
    return msgspec.structs.replace(known, locks=locks, changed_at=now)


def _draw(state: NodeState, card: str, dwell: float) -> float | None:
    """Mean of the last half of a dwell: a change has acted by then."""
    if state.fresh(GPU_POWER_WATTS, on_gpu(card)) is None:
        return None
    start = state.now.mono - dwell / 2
    window = [v for _, v in state.history.window(GPU_POWER_WATTS, on_gpu(card), start)]
    return sum(window) / len(window) if window else None
