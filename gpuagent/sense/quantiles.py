"""What buckets that only ever count up say of the requests of a window: a quantile. Pure.

Series are taken one by one, as `sum(increase(...)) by (le)` does in Prometheus: a counter that has
fallen began anew, so all it has counted is news; a series not seen before only begins to be counted.
"""

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from gpuagent.sense.exposition import Histogram, Key, Summary

_MOST_PARTS = 30
"""Into which a window is divided: how far it may reach back too long, in shares of it."""


class Estimate(msgspec.Struct, frozen=True):
    """A quantile from buckets: somewhere between two bounds, interpolated."""

    value: float
    beyond: bool = False
    """Whether it is above the last finite bound, which `value` then is: at least so much."""


class _Part(msgspec.Struct):
    """What was counted between two scrapes, or a few: requests by upper bound."""

    begins: float
    ends: float
    counts: dict[float, float]


class Window:
    """Requests of the last so many seconds, by bucket. Bounded, whatever is added."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._parts: deque[_Part] = deque()
        self._series: Mapping[Key, Mapping[float, float]] = {}
        self._at = -math.inf

    def add(self, at: float, series: Mapping[Key, Mapping[float, float]]) -> None:
        """Take in a scrape: cumulative counts of each series by bound; `at` in monotonic seconds.

        The bounds are in ascending order. What was counted over a gap longer than the window is
        left out: it may be older than that.
        """
        gap = at - self._at
        if 0 < gap <= 1.5 * self._seconds:
            self._append(_Part(self._at, at, self._news(series)))
        else:
            self._parts.clear()
        self._series, self._at = series, at
        # A part that began before the window is kept for as long as most of it lies within.
        while self._parts and self._middle() < at - self._seconds:
            self._parts.popleft()

    def counts(self) -> dict[float, float]:
        """Requests within the window by the bound they are below, not cumulative; 0 where none."""
        found: dict[float, float] = {b: 0.0 for counts in self._series.values() for b in counts}
        for part in self._parts:
            for bound, count in part.counts.items():
                found[bound] = found.get(bound, 0.0) + count
        return dict(sorted(found.items()))

    def _middle(self) -> float:
        return (self._parts[0].begins + self._parts[0].ends) / 2

    def _append(self, part: _Part) -> None:
        last = self._parts[-1] if self._parts else None
        if last is None or part.ends - last.begins > self._seconds / _MOST_PARTS:
            self._parts.append(part)
            return
        last.ends = part.ends
        for bound, count in part.counts.items():
            last.counts[bound] = last.counts.get(bound, 0.0) + count

    def _news(self, series: Mapping[Key, Mapping[float, float]]) -> dict[float, float]:
        found: dict[float, float] = {}
        for key, counts in series.items():
            before = self._series.get(key)
            if before is None or before.keys() != counts.keys():
                continue
            began_anew = any(counts[b] < before[b] for b in counts)
            highest = 0.0
            for bound, count in counts.items():
                grown = count if began_anew else count - before[bound]
                # Not every client counts all buckets of a request at once.
                if grown > highest:
                    found[bound] = found.get(bound, 0.0) + grown - highest
                    highest = grown
        return found


def quantile(wanted: float, counts: Mapping[float, float]) -> Estimate | None:
    """Of requests by the bound they are below, smallest first; None where there are none.

    As `histogram_quantile` of Prometheus: linear within a bucket, the lowest of which begins at 0,
    and the last finite bound for what is above it (prometheus.io/docs/prometheus/latest/querying/
    functions, and `BucketQuantile` in its promql/quantile.go).
    """
    rank = wanted * sum(counts.values())
    if rank <= 0:
        return None
    lower, below = 0.0, 0.0
    for upper, count in counts.items():
        if upper == math.inf:
            break
        if count and below + count >= rank:
            start = min(lower, upper)
            return Estimate(start + (upper - start) * (rank - below) / count)
        lower, below = upper, below + count
    return Estimate(lower, beyond=True)


class Measured(msgspec.Struct, frozen=True):
    """What a scrape says of a tenant's latency."""

    seconds: float | None
    """None where nothing follows from it."""
    exact: bool = False
    why: str = ""
    """Why nothing does."""


class Meter:
    """From one scrape after the other to a latency in seconds."""

    def __init__(
        self, *, quantile: float, unit_seconds: float, window: float, objective: float | None
    ) -> None:
        """`unit_seconds` is what the page counts in, `objective` the latency promised, if any."""
        self._quantile = quantile
        self._unit = unit_seconds
        self._seconds = window
        self._objective = objective
        self.begin()

    def begin(self) -> None:
        """Forget all scrapes: what comes now may be of another process."""
        self._window = Window(self._seconds)
        self._first = True
        self._counts: Mapping[Key, float] = {}
        self._busy_at = -math.inf

    def after(self, at: float, found: Histogram | Summary) -> Measured:
        """The latency after a scrape at this time, monotonic seconds."""
        if isinstance(found, Summary):
            return self._summarised(at, found)
        self._window.add(at, found.series)
        estimate = quantile(self._quantile, self._window.counts())
        first, self._first = self._first, False
        if estimate is None:
            return self._unknown("counted since this scrape only" if first else self._no_requests())
        seconds = estimate.value * self._unit
        if estimate.beyond and self._objective is not None and seconds < self._objective:
            return self._unknown(
                f"above its highest bucket ({seconds:g} s), which is below the objective "
                f"({self._objective:g} s): have the service count in higher ones"
            )
        return Measured(seconds)

    def _summarised(self, at: float, found: Summary) -> Measured:
        """The service's own quantile; of several series the worst, which that of all cannot exceed.

        A summary may go on telling of requests long past: without new ones it says nothing.
        """
        if found.counts != self._counts or not found.counts:
            self._busy_at, self._counts = at, found.counts
        if not found.values or at - self._busy_at > self._seconds:
            return self._unknown(self._no_requests())
        return Measured(max(found.values.values()) * self._unit, exact=len(found.values) == 1)

    def _no_requests(self) -> str:
        return f"not known: no request within {self._seconds:g} s"

    def _unknown(self, why: str) -> Measured:
        return Measured(None, why=f"p{100 * self._quantile:g} is {why}")
