"""Hysteresis in seconds: a condition counts once it has held long enough, and until it has gone."""

from enum import IntEnum

import msgspec


class Verdict(IntEnum):
    """What one sample says of a condition."""

    CLEAR = -1
    BETWEEN = 0
    HIGH = 1


_VALID_SECONDS = 2.5
"""How long a sample speaks for the time after it; a gap beyond that is unknown, not held."""


class Sustained(msgspec.Struct, frozen=True):
    """On once HIGH has held `hold` seconds of the last `within`; off once CLEAR has.

    A sample speaks for the time until the next one. Samples are told apart by when they were
    taken, so that looking more often changes nothing.
    """

    on: bool = False
    since: float = 0.0
    """When it last switched, monotonic seconds."""
    samples: tuple[tuple[float, Verdict], ...] = ()
    """(taken at, verdict), oldest first, only as many as `within` needs."""

    def seen(
        self, now: float, at: float, verdict: Verdict, *, hold: float, within: float
    ) -> "Sustained":
        """After a sample taken at `at` was looked at `now`."""
        samples = self.samples
        if not samples or at > samples[-1][0]:
            samples = (*samples, (at, verdict))
        # The newest sample from before the window still speaks for its beginning.
        start = now - within
        keep = next((i for i, (t, _) in enumerate(samples[1:]) if t > start), len(samples) - 1)
        samples = samples[keep:]
        goal = Verdict.CLEAR if self.on else Verdict.HIGH
        switch = (
            samples[-1][1] is goal
            and len(samples) > 1
            and _held(samples, goal, start, now) >= hold - 1e-3
        )
        return Sustained(self.on != switch, now if switch else self.since, samples)

    def complete_at(self, now: float, *, hold: float, within: float) -> float | None:
        """When it will switch if nothing changes; None if only a newer sample can bring that about."""
        goal = Verdict.CLEAR if self.on else Verdict.HIGH
        if not self.samples or self.samples[-1][1] is not goal:
            return None
        left = hold - _held(self.samples, goal, now - within, now)
        return now + left if left > 0 else None


def _held(
    samples: tuple[tuple[float, Verdict], ...], goal: Verdict, start: float, now: float
) -> float:
    """Seconds since `start` for which samples say `goal`."""
    ends = [t for t, _ in samples[1:]] + [now]
    return sum(
        max(min(end, t + _VALID_SECONDS) - max(t, start), 0.0)
        for (t, verdict), end in zip(samples, ends, strict=True)
        if verdict is goal
    )
