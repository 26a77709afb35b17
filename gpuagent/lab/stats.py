"""How sure a figure is: means and ratios over a few seeds, each with its 95 % interval. Pure.

Runs of two policies with the same seed see the same arrivals, so they are compared pair by pair. With
few seeds a percentile bootstrap is too narrow (of five values it can only ever draw those five), so
the intervals are Student's: for a mean the usual one, for a ratio of sums the one of the classical
ratio estimator, whose error is that of the residuals `a - R b` (Cochran, Sampling Techniques, 3rd
ed., 6.4). A ratio of sums, unlike a mean of ratios or of logarithms, bears runs in which nothing was
missed. Nothing is drawn by chance: the same values give the same interval.
"""

import math
from collections.abc import Sequence
from functools import cache

import msgspec

CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A figure and where it is with 95 % confidence."""

    value: float
    low: float | None
    """None, as `high`, where one run only, or none that tells, says nothing of how sure it is."""
    high: float | None
    count: int
    """Seeds."""

    def shifted(self, by: float) -> "Interval":
        """The same plus a constant."""
        low = None if self.low is None else self.low + by
        high = None if self.high is None else self.high + by
        return Interval(self.value + by, low, high, self.count)


def mean(values: Sequence[float | None]) -> Interval | None:
    """Mean over the seeds for which it is known; None where that is none."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    centre = math.fsum(known) / len(known)
    return _around(centre, [v - centre for v in known], 1.0)


def ratio(these: Sequence[float | None], those: Sequence[float | None]) -> Interval | None:
    """Sum of these by sum of those, pair by pair; None where those are nothing in all.

    Raises ValueError where they are not as many.
    """
    pairs = [(a, b) for a, b in zip(these, those, strict=True) if a is not None and b is not None]
    below = math.fsum(b for _, b in pairs)
    if not pairs or below == 0.0:
        return None
    found = math.fsum(a for a, _ in pairs) / below
    return _around(found, [a - found * b for a, b in pairs], below / len(pairs))


def _around(value: float, residuals: Sequence[float], scale: float) -> Interval:
    count = len(residuals)
    if count < 2:
        return Interval(value, None, None, count)
    spread = math.fsum(r * r for r in residuals) / (count - 1)
    wide = student(count - 1) * math.sqrt(spread / count) / abs(scale)
    return Interval(value, value - wide, value + wide, count)


@cache
def student(degrees: int) -> float:
    """Half the width of the central 95 % of Student's t, in standard errors, by bisection."""
    low, high = 1.0, 13.0  # 12.71 with one degree of freedom, 1.96 with very many
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _central(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _central(t: float, degrees: int) -> float:
    """Chance of at most `t` in size (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 1.0)
    if odd and degrees > 1:
        total = term
    for k in range(2 + odd, degrees, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
