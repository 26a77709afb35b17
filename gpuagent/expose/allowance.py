"""How often something may happen: so many at once, then so many a second."""


class Allowance:
    """Counts by time, so that nothing runs beside it. `now` is monotonic seconds throughout."""

    def __init__(self, *, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._rate = per_second
        self._left = self._burst
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Whether it may happen once more, now."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def whole(self, now: float) -> bool:
        """Whether it is as if nothing had happened: then nobody needs to remember it."""
        self._refill(now)
        return self._left >= self._burst

    def _refill(self, now: float) -> None:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._left = min(self._burst, self._left + passed * self._rate)
