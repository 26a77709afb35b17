"""The most that the cards of a simulated host come to: heat, memory, and power against a budget."""

import msgspec

from gpuagent.sim.host import SimHost

FULL_RATIO = 0.98
"""A card is full from here on: on what is left no process can even begin."""


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Over the ticks of a window."""

    celsius: float
    """Of the hottest card."""
    memory_bytes: float
    """In use on the card where most is, at its fullest."""
    memory_end_bytes: float
    """Likewise at the end of the window."""
    memory_full_seconds: float
    """For so long some card had next to nothing left, so that somebody would be refused memory."""
    watts: float
    """Of all cards together."""
    over_budget_watts: float | None
    """By which they drew most more than the budget at that time; 0 for never, None without one."""
    over_budget_seconds: float | None


class PeakMeter:
    """`see` every tick, `read` at the end."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._celsius = self._memory = self._watts = self._end = 0.0
        self._over: float | None = None
        self._over_seconds = self._full_seconds = 0.0

    def see(self, budget_watts: float | None, seconds: float) -> None:
        """The host as it is now, for a tick of so many seconds."""
        cards = self._host.cards
        watts = sum(card.watts for card in cards)
        self._celsius = max(self._celsius, *(c.celsius for c in cards))
        self._end = max(c.used_bytes for c in cards)
        if any(c.used_bytes >= FULL_RATIO * c.memory_bytes for c in cards):
            self._full_seconds += seconds
        self._memory = max(self._memory, self._end)
        self._watts = max(self._watts, watts)
        if budget_watts is not None:
            self._over = max(self._over or 0.0, watts - budget_watts)
            self._over_seconds += seconds if watts > budget_watts else 0.0

    def read(self) -> Peaks:
        return Peaks(
            celsius=self._celsius,
            memory_bytes=self._memory,
            memory_end_bytes=self._end,
            memory_full_seconds=self._full_seconds,
            watts=self._watts,
            over_budget_watts=self._over,
            over_budget_seconds=None if self._over is None else self._over_seconds,
        )
