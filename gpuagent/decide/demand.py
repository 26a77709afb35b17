"""How much power a card asks for, from what it was seen to draw.

Theory of operation. A power limit bounds what a card draws *while kernels run*, so that a card which
computes in bursts needs a limit over its average draw: what counts is the largest momentary draw, or
the average with headroom where that is more. Work has phases (an evaluation, a checkpoint), and a
limit that followed each of them would swing: a demand therefore rises at once and falls only after it
has not been seen for `HOLD_SECONDS`. Other tenants on the card are other work, whose demand begins
anew. A limit that bites hides the demand: then the card asks for all it may have.
"""

import msgspec

from gpuagent.model.inventory import Subject
from gpuagent.model.state import NodeState, Reading
from gpuagent.model.vocab import (
    GPU_POWER_INSTANT_WATTS,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_THROTTLED,
    POWER_LIMIT,
)

HOLD_SECONDS = 60.0
_SATURATED = 0.95
"""A card that draws this share of its limit may well want more than it shows."""
_HIDDEN_SECONDS = 5.0
"""For so long a card that the driver held down for its power limit counts as held down."""
_APART_SECONDS = 2.0
"""A smaller peak so soon after a larger one is not remembered, so that they stay few."""


class Appetite(msgspec.Struct, frozen=True):
    """What was seen of one card."""

    tenants: tuple[str, ...] = ()
    peaks: tuple[tuple[float, float], ...] = ()
    """(monotonic seconds, watts) of what it asked for: each is the largest since then."""
    hidden_at: float = float("-inf")
    """When the driver last held it down for the limit in force."""

    def after(
        self, now: float, asks: float | None, *, tenants: tuple[str, ...], hidden: bool
    ) -> "Appetite":
        """Once it was seen to ask for so many watts; None where that is not known now."""
        anew = tenants != self.tenants
        peaks = () if anew else tuple(p for p in self.peaks if now - p[0] <= HOLD_SECONDS)
        if asks is not None:
            peaks = tuple(p for p in peaks if p[1] > asks)
            if not peaks or now - peaks[-1][0] >= _APART_SECONDS:
                peaks = (*peaks, (now, asks))
        hidden_at = now if hidden else float("-inf") if anew else self.hidden_at
        return Appetite(tenants, peaks, hidden_at)

    def demand(self, now: float, *, cap: float) -> float | None:
        """Watts; its cap where the limit hides it, None where nothing is known."""
        if now - self.hidden_at <= _HIDDEN_SECONDS:
            return cap
        return max((watts for _, watts in self.peaks), default=None)


def seen(
    appetite: Appetite,
    state: NodeState,
    card: Subject,
    *,
    limit: float,
    dwell: float,
    headroom: float,
) -> Appetite:
    """The appetite after this state, of a card that we allow `limit` watts."""
    tenants = tuple(sorted(t.name for t in state.inventory.on_card(card.gpu)))
    read = state.reading(GPU_POWER_WATTS, card)
    if read is None:
        return appetite.after(state.now.mono, None, tenants=tenants, hidden=False)
    now = read.at  # so that looking more often changes nothing
    draw = _draw(state, card, read, dwell)
    hidden = draw >= _SATURATED * limit or _held_down(state, card, limit)
    asks = max(draw * (1 + headroom), state.fresh(GPU_POWER_INSTANT_WATTS, card) or 0.0)
    if hidden:
        asks = max(asks, limit * (1 + headroom))
    return appetite.after(now, asks, tenants=tenants, hidden=hidden)


def _draw(state: NodeState, card: Subject, read: Reading, dwell: float) -> float:
    """Mean of the dwell up to the newest reading."""
    window = state.history.window(GPU_POWER_WATTS, card, read.at - dwell)
    return sum(v for _, v in window) / len(window) if window else read.value


def _held_down(state: NodeState, card: Subject, limit: float) -> bool:
    """Whether the driver says that the power limit holds it down, and the limit is the one we gave.

    A lower one is somebody else's wish, and more from the budget would not change it.
    """
    if not state.fresh(GPU_THROTTLED, card, ("sw_power_cap",)):
        return False
    as_set = state.fresh(GPU_POWER_LIMIT_WATTS, card)
    return as_set is not None and as_set >= limit - POWER_LIMIT.deadband
