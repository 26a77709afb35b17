"""How a power limit acts on a card: clocks, speed and power of one kind of work. Pure.

Theory of operation. While kernels run, a card draws its idle power and a dynamic part that depends
on the work and on the clock `f`, relative to the highest: `dynamic(f) = (1 - knee) f + knee f^order`.
At low clocks the voltage is at its least and power follows the clock; near the top it rises steeply.
The limit bounds the power *while kernels run*; the card takes the highest clock that keeps to it.
Of the time that a step of work takes at full clock, the part `host` has no kernel on the card, the
part `memory` has one that waits for memory, and the rest shortens with the clock. The form is
assumed; the coefficients are fitted to the Zeus traces (`fit`), and so are the figures of `fit.score`.
"""

import msgspec

_TABLE = 512


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of work on one kind of card."""

    busy_watts: float
    """Board power while kernels run at full clock."""
    host: float
    """Share of the time at full clock in which no kernel runs."""
    memory: float
    """Share of the time at full clock in which kernels wait for memory, whatever the clock."""
    source: str
    """Where the three numbers come from."""

    def gpu_share(self, clock: float) -> float:
        """Time with a kernel on the card, of what the whole step takes at full clock."""
        return self.memory + (1.0 - self.host - self.memory) / clock


class Curve:
    """The clock that a power limit leaves, for one kind of card."""

    LOWEST_CLOCK = 0.05
    """Of the highest; assumed, and far below what any legal limit asks for."""

    def __init__(self, *, idle_watts: float, knee: float, order: float) -> None:
        self.idle_watts = idle_watts
        self._knee = knee
        self._order = order
        self._dynamic = [self.dynamic(i / _TABLE) for i in range(_TABLE + 1)]
        self._clocks = self._inverse()

    def dynamic(self, clock: float) -> float:
        """Dynamic power at this clock, of that at full clock."""
        knee: float = self._knee
        power: float = clock**self._order
        return (1.0 - knee) * clock + knee * power

    def _inverse(self) -> list[float]:
        """Clocks at evenly spaced dynamic powers: between them, straight lines are exact enough."""
        clocks, at = [0.0], 0
        for i in range(1, _TABLE + 1):
            wanted = i / _TABLE
            while at < _TABLE - 1 and self._dynamic[at + 1] < wanted:
                at += 1
            low, high = self._dynamic[at], self._dynamic[at + 1]
            clocks.append((at + min((wanted - low) / (high - low), 1.0)) / _TABLE)
        return clocks

    def clock(self, limit_watts: float, busy_watts: float) -> float:
        """The highest relative clock at which work of `busy_watts` keeps to the limit."""
        span = busy_watts - self.idle_watts
        if limit_watts >= busy_watts or span <= 0:
            return 1.0
        place = max(limit_watts - self.idle_watts, 0.0) / span * _TABLE
        at = int(place)
        clock = self._clocks[at] + (place - at) * (self._clocks[at + 1] - self._clocks[at])
        return max(clock, self.LOWEST_CLOCK)

    def busy_watts(self, clock: float, full_watts: float) -> float:
        """Power while kernels run at this clock, of work that draws `full_watts` at full clock."""
        return self.idle_watts + max(full_watts - self.idle_watts, 0.0) * self.dynamic(clock)

    def predict(self, limit_watts: float, shape: Shape) -> tuple[float, float]:
        """Time per step relative to full clock, and average power in watts, of work that is alone."""
        idle, full = self.idle_watts, shape.busy_watts
        if limit_watts >= full:
            return 1.0, idle + (1.0 - shape.host) * (full - idle)
        gpu = shape.gpu_share(self.clock(limit_watts, full))
        seconds = shape.host + gpu
        return seconds, idle + gpu / seconds * (max(limit_watts, idle) - idle)
