"""Which power limit to measure next, and which is best: a search over measured points, pure.

Theory of operation. With a falling limit work slows down, never up, and the energy that a unit of it
costs falls first (high clocks need high voltage) and rises in the end (the idle draw is spread over
less work): one valley. The search walks down from the limit as it was until the work is slower than
allowed or costs plainly more than the best so far, and then halves the gaps around the best until
they are narrower than `RESOLUTION`. It never goes on from a point that is too slow.
"""

from collections.abc import Sequence

import msgspec

STRIDE = 0.08
"""Steps of the walk, as a share of the limit as it was."""
RESOLUTION = 0.02
"""Gaps beside the best that are narrower, as a part of it, are left: the valley is flat there."""
_NOISE = 0.02
"""A cost is plainly higher from this part on."""
_ALIKE = 0.003
"""Costs that differ by less are the same."""
_MARGIN = 0.1
"""This part of the slowdown allowed is left to noise, so that what was measured once will hold ..."""
_MARGIN_MOST = 0.01
"""... but no more than this: noise does not grow with what is allowed, and what is left costs energy."""


class Point(msgspec.Struct, frozen=True):
    """What was measured at one limit."""

    share: float
    """Of the limit as it was."""
    rate: float
    """Progress a second, in whatever it is measured in."""
    watts: float
    peak: float = float("inf")
    """The largest draw seen, as a share of the limit as it was."""

    @property
    def cost(self) -> float:
        """Energy for each unit of progress."""
        return self.watts / self.rate


def feasible(points: Sequence[Point], slowdown: float) -> tuple[Point, ...]:
    """Those that are no slower than allowed. The first point is what all are compared with."""
    least = points[0].rate * (1 - slowdown + min(_MARGIN * slowdown, _MARGIN_MOST))
    return (points[0], *(p for p in points[1:] if p.rate >= least))


def best(points: Sequence[Point], slowdown: float) -> Point:
    """The one of the least cost among those that are fast enough."""
    return min(feasible(points, slowdown), key=lambda p: p.cost)


def following(points: Sequence[Point], *, floor: float, slowdown: float) -> float | None:
    """The share to measure next; None where the best is known well enough. Floor: the least legal."""
    if points[0].peak <= floor:
        return None  # no legal limit is below what it draws
    found = best(points, slowdown)
    lowest = min(points, key=lambda p: p.share)
    fast = lowest in feasible(points, slowdown)
    if fast and lowest.cost <= found.cost * (1 + _NOISE) and lowest.share > floor:
        # Limits above the largest draw change nothing and need not be tried.
        start = min(lowest.share, points[0].peak) if lowest is points[0] else lowest.share
        return max(start - STRIDE, floor)
    # Above the draw all limits cost the same: the valley is at the lower end of that plain.
    alike = (p for p in feasible(points, slowdown) if p.cost <= found.cost * (1 + _ALIKE))
    at = min(p.share for p in alike)
    below = max((p.share for p in points if p.share < at), default=None)
    above = min((p.share for p in points if p.share > at), default=None)
    for other in (below, above):
        if other is not None and abs(at - other) > RESOLUTION * at:
            return (at + other) / 2
    return None
