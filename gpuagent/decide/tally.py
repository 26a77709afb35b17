"""What is measured of a group of cards at one power limit: samples, and the point they make.

Progress is what a `Measure` says. Where nothing counts the work itself it is utilisation times the
clock of the multiprocessors: a proxy, which takes time that kernels spend waiting for memory for time
that shortens with the clock, so that it shows a slowdown too large, never too small.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from gpuagent.decide.search import Point
from gpuagent.model.inventory import Subject, on_gpu
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_POWER_INSTANT_WATTS,
    GPU_POWER_WATTS,
    GPU_UTILIZATION_RATIO,
)

MOST_SAMPLES = 60
_LEAST_SAMPLES = 12
_CLOSEST_SECONDS = 0.9
"""Samples are not taken closer than this: a tick may come sooner than after a second."""
_LONGEST_GAP_SECONDS = 15.0
_STEADY_RATIO = 0.15
"""How far apart the middle third of the samples may lie."""


class Measure(msgspec.Struct, frozen=True):
    """How progress is seen."""

    name: str
    """For people, with "proxy" in it where it is one."""
    parts: Callable[[NodeState, Subject, float], tuple[float, ...] | None]
    """Of a card, from readings taken since a time: numbers whose product is its progress a second."""


def _by_clock(state: NodeState, card: Subject, since: float) -> tuple[float, ...] | None:
    used = state.reading(GPU_UTILIZATION_RATIO, card)
    clock = state.reading(GPU_CLOCK_HERTZ, card, ("sm",))
    if used is None or clock is None or min(used.at, clock.at) < since:
        return None
    return used.value, clock.value


BY_CLOCK = Measure("utilisation x SM clock, a proxy", _by_clock)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a card."""

    at: float
    joules: float | None
    watts: float
    """Mean draw since the sample before, as the driver gives it."""
    peak: float
    """The largest draw seen since then."""
    parts: tuple[float, ...]


class Tally(msgspec.Struct, frozen=True):
    """The samples taken since a limit is in force, by card."""

    since: float
    """Monotonic seconds from which readings count."""
    samples: tuple[tuple[Sample, ...], ...] = ()
    """At one time each, one of each card."""

    def after(
        self, state: NodeState, cards: Sequence[str], *, measure: Measure, span: float
    ) -> "Tally":
        """With one more sample if it is time for it; begun anew after a gap. `span` in seconds."""
        now = state.now.mono
        last = self.samples[-1][0].at if self.samples else self.since
        if now - last < max(span / MOST_SAMPLES, _CLOSEST_SECONDS):
            return self
        looked = [_look(state, on_gpu(c), self.since, last, measure) for c in cards]
        taken = tuple(s for s in looked if s is not None)
        if len(taken) == len(cards):
            return Tally(self.since, (*self.samples, taken))
        return Tally(now) if self.samples and now - last > _LONGEST_GAP_SECONDS else self

    def complete(self, now: float, span: float) -> bool:
        """Whether it has gone on for so many seconds, and enough was seen."""
        return now - self.since >= span and len(self.samples) >= _LEAST_SAMPLES

    def point(self, share: float, tops: Sequence[float]) -> Point | None:
        """What was measured; None where it was not steady. `tops` are the limits as they were."""
        rate, watts, peaks = 0.0, 0.0, []
        for of_card, top in zip(zip(*self.samples, strict=True), tops, strict=True):
            progress = 1.0
            for part in zip(*(s.parts for s in of_card), strict=True):
                found = _middle(part)
                if found is None:
                    return None
                progress *= found
            drawn = _middle(_drawn(of_card))
            if drawn is None:
                return None
            rate, watts = rate + progress, watts + drawn
            peaks.append(max(s.peak for s in of_card) / top)
        return Point(share, rate, watts, max(peaks)) if rate > 0 and watts > 0 else None


def _look(
    state: NodeState, card: Subject, since: float, last: float, measure: Measure
) -> Sample | None:
    parts = measure.parts(state, card, since)
    draw = state.fresh(GPU_POWER_WATTS, card)
    if parts is None or draw is None:
        return None
    window = [v for _, v in state.history.window(GPU_POWER_WATTS, card, last)] or [draw]
    peak = max((*window, state.fresh(GPU_POWER_INSTANT_WATTS, card) or 0.0))
    energy = state.reading(GPU_ENERGY_JOULES, card)
    return Sample(
        at=state.now.mono if energy is None else energy.at,
        joules=None if energy is None else energy.value,
        watts=statistics.fmean(window),
        peak=peak,
        parts=parts,
    )


def _drawn(samples: Sequence[Sample]) -> list[float]:
    """Watts between samples: by the energy counter where there is one, which misses nothing."""
    drawn = []
    for before, after in pairwise(samples):
        if before.joules is None or after.joules is None or after.at <= before.at:
            drawn.append(after.watts)
        elif after.joules >= before.joules:  # else the driver was loaded anew
            drawn.append((after.joules - before.joules) / (after.at - before.at))
    return drawn


def _middle(values: Sequence[float]) -> float | None:
    """Mean of the middle third: phases that are short (an evaluation) do not count. None if unsteady."""
    ordered = sorted(values)
    third = len(ordered) // 3
    middle = ordered[third : len(ordered) - third]
    if not middle:
        return None
    mean = statistics.fmean(middle)
    return mean if middle[-1] - middle[0] <= _STEADY_RATIO * abs(mean) else None
