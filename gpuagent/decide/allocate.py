"""Sharing a power budget out over cards: floors first, then demand by level, then what is left."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """What one card asks for, in watts."""

    card: str
    rank: int
    """Who is on it (`claims.Rank`): the lower is served first and cut last."""
    floor: float
    cap: float
    demand: float
    """Draw plus headroom; its cap where the limit hides how much it would draw."""
    frozen: bool = False
    """Cannot be read just now: it stays where it is."""
    top: float = 0.0
    """The highest legal limit, where a declared cap is below it: the card has that once it is let go."""


def allocate(claims: Sequence[Claim], budget: float) -> dict[str, float]:
    """Limit in watts for each card; their sum is at most `budget`, or the floors if these exceed it.

    Every card gets its floor. What is left goes to demand, rank by rank, then to headroom up to
    the caps, rank by rank; within a rank all are raised to one common level (max-min fairness).
    """
    limits = {c.card: c.floor for c in claims}
    left = budget - sum(limits.values())
    for goal in ("demand", "cap"):
        for rank in sorted({c.rank for c in claims}):
            peers = [c for c in claims if c.rank == rank]
            goals = {
                c.card: min(max(c.demand if goal == "demand" else c.cap, limits[c.card]), c.cap)
                for c in peers
            }
            left -= _fill(limits, goals, left)
    return limits


_ROUNDING = 1e-9


def _fill(limits: dict[str, float], goals: dict[str, float], amount: float) -> float:
    """Raise `limits` towards `goals` to one common level with at most `amount`; what it took."""
    if amount <= 0:
        return 0.0
    edges = sorted({limits[c] for c in goals} | set(goals.values()))
    spent = 0.0
    for low, high in pairwise(edges):
        # A goal may lie within a rounding error of the level that its card has reached.
        rising = [c for c in goals if limits[c] <= low + _ROUNDING and goals[c] > low]
        if not rising:
            continue
        step = min(high - low, (amount - spent) / len(rising))
        for card in rising:
            limits[card] += step
        spent += step * len(rising)
        if step < high - low:
            break
    return spent
