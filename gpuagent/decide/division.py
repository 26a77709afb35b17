"""How the limits of all cards are decided together: when they stand, when they move, and how seldom back."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuagent.decide.allocate import Claim, allocate
from gpuagent.decide.claims import Rank
from gpuagent.decide.powersaid import starved
from gpuagent.model.vocab import POWER_LIMIT

ROUNDING_WATTS = 1e-6
REVERSAL_SECONDS = 60.0
"""A limit that has turned round does not turn again sooner, unless it must or an L1 tenant needs it."""
_WORTH_RATIO = 0.03
"""A limit is not moved by less than this share of its cap: demand is never quite still."""


class Course(msgspec.Struct, frozen=True):
    """Which way a card's limit went last."""

    rising: bool
    turned_at: float
    """Monotonic seconds at which it last went the other way than before."""


class Division(msgspec.Struct, frozen=True):
    """The limits in force by card, in watts, and what they were decided for."""

    limits: dict[str, float] = {}
    decided_at: float = float("-inf")
    basis: tuple[object, ...] = ()
    """Budget, cards and their ranges: if these change, the limits are decided anew at once."""
    courses: dict[str, Course] = {}

    def after(
        self, claims: Sequence[Claim], usable: float, *, budget: float, dwell: float, now: float
    ) -> "Division":
        """The limits that stand now: those of before, unless they must or may change and it is worth it.

        They must at once when the budget or the cards have changed, or when they no longer fit.
        They may once they have stood for the dwell.
        """
        basis = (budget, *((c.card, c.floor, c.cap) for c in claims))
        limits = allocate(claims, usable)
        if basis == self.basis and sum(self.limits.values()) <= usable + ROUNDING_WATTS:
            limits = self._steadied(claims, limits, usable, now)
            if now - self.decided_at < dwell or not self._worth(claims, limits):
                return self
        if limits == self.limits and basis == self.basis:
            return self  # the floors do not fit: there is nothing else to decide
        return Division(limits, now, basis, self._courses(limits, now))

    def _worth(self, claims: Sequence[Claim], limits: Mapping[str, float]) -> bool:
        return any(
            abs(limits[c.card] - self.limits[c.card])
            >= max(POWER_LIMIT.deadband, _WORTH_RATIO * c.cap)
            for c in claims
        )

    def _steadied(
        self, claims: Sequence[Claim], limits: dict[str, float], usable: float, now: float
    ) -> dict[str, float]:
        """The same limits, but that none turns round too soon.

        A card that would stays where it is; the others share what it leaves. What it keeps it had
        before, as had they, so that the sum fits.
        """
        if any(
            Rank(c.rank).is_l1
            and starved(c, self.limits[c.card])
            and limits[c.card] > self.limits[c.card]
            for c in claims
        ):
            return limits
        pinned: set[str] = set()
        while turning := set(self._turning(limits, now)) - pinned:
            pinned |= turning
            limits = allocate([self._pinned(c) if c.card in pinned else c for c in claims], usable)
        return limits

    def _pinned(self, claim: Claim) -> Claim:
        limit = self.limits[claim.card]
        return msgspec.structs.replace(claim, floor=limit, cap=limit, demand=limit)

    def _turning(self, limits: Mapping[str, float], now: float) -> Iterator[str]:
        for card, limit in limits.items():
            course, moved = self.courses.get(card), limit - self.limits[card]
            if course is None or abs(moved) <= ROUNDING_WATTS:
                continue
            if (moved > 0) != course.rising and now - course.turned_at < REVERSAL_SECONDS:
                yield card

    def _courses(self, limits: Mapping[str, float], now: float) -> dict[str, Course]:
        courses: dict[str, Course] = {}
        for card, limit in limits.items():
            before, course = self.limits.get(card), self.courses.get(card)
            moved = 0.0 if before is None else limit - before
            if abs(moved) > ROUNDING_WATTS:
                rising = moved > 0
                turned = course is not None and course.rising != rising
                kept = float("-inf") if course is None else course.turned_at
                courses[card] = Course(rising, now if turned else kept)
            elif course is not None:
                courses[card] = course
        return courses
