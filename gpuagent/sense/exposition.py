"""One histogram or summary out of a page of metrics, which a stranger wrote. Pure, and bounded.

Reads Prometheus' text format 0.0.4 and OpenMetrics 1.0 as far as one metric needs it. A page has
thousands of lines that are of no interest, so it is searched for the name and only what bears it is
looked at; nothing of the rest is kept. Grammar: prometheus.io/docs/instrumenting/exposition_formats
and the OpenMetrics specification, section "Text format".
"""

import math
import re
from collections.abc import Mapping

import msgspec

from gpuagent.errors import Refused
from gpuagent.quantities import shown

MOST_LINES = 5000
"""That begin with the name: each costs about 5 µs."""
MOST_LINE_BYTES = 8192
MOST_SERIES = 64
MOST_BOUNDS = 256
"""Of all series together."""
_MOST_COUNT = 2.0**53
"""Up to which a float can count."""
_NO_QUANTILES = frozenset({"counter", "gauge", "gaugehistogram", "info", "stateset"})
_PARTS = ("_bucket", "_count", "_sum")

_LABEL = re.compile(
    r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|(?=\}))'
)
_REST = re.compile(r"[ \t]*(\}?)[ \t]*([^ \t]{1,64})(?=[ \t]|$)")
_ESCAPE = re.compile(r"\\(.)")

Key = tuple[tuple[str, str], ...]
"""The labels of a series, sorted, without `le` and `quantile`."""


class Wanted(msgspec.Struct, frozen=True):
    """What to look for."""

    metric: str
    quantile: float
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values that a series must have."""


class Histogram(msgspec.Struct, frozen=True):
    """Counts of each series up to each bound, as the page has them: cumulative, in its own unit."""

    series: Mapping[Key, Mapping[float, float]]


class Summary(msgspec.Struct, frozen=True):
    """Values at the wanted quantile, in the page's own unit, and how often each series has counted."""

    values: Mapping[Key, float]
    """Without those that are NaN: no request has come lately."""
    counts: Mapping[Key, float]
    """Requests in all; only of the series that tell it."""


class Sieve:
    """Takes in a page piece by piece."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        name = wanted.metric.encode()
        self._name = b"\n" + name
        self._type = b"\n# TYPE " + name + b" "
        self._suffix = re.compile(rb"(_bucket|_count|)(?=[{ \t])")
        self._rest = b"\n"
        """The line that is not whole yet, after the newline before it."""
        self._lines = 0
        self._kind: str | None = None
        self._series: dict[Key, dict[float, float]] = {}
        self._bounds: set[float] = set()
        self._values: dict[Key, float] = {}
        self._counts: dict[Key, float] = {}
        self._quantiles: set[float] = set()
        self._elsewhere = False
        """Whether there are series of it whose labels are not the wanted ones."""
        self._bare = False
        """Whether there are samples of this very name with neither buckets nor quantiles."""

    def feed(self, piece: bytes) -> None:
        """Take in the next piece. Raises Refused for what is no sensible page; the text says why."""
        page = self._rest + piece
        end = page.rfind(b"\n")
        self._look(page, end)
        self._rest = page[end:]
        if len(self._rest) > MOST_LINE_BYTES:
            if self._rest.startswith(self._name):
                raise Refused(f"a line of it is longer than {MOST_LINE_BYTES} bytes")
            self._rest = b"\0"  # of this line nothing more is of interest

    def end(self) -> Histogram | Summary:
        """What the page says. Raises Refused where it does not say what is wanted; the text has the remedy."""
        if self._rest not in {b"\n", b"\0"}:
            self.feed(b"\n")
        name = self._wanted.metric
        if self._kind in _NO_QUANTILES:
            raise Refused(_no_quantiles(name, f"is a {self._kind}"))
        if self._series:
            return Histogram({key: _whole(name, counts) for key, counts in self._series.items()})
        if self._quantiles:
            return self._summary()
        if self._elsewhere:
            wanted = ", ".join(f"{n}={v}" for n, v in self._wanted.labels)
            raise Refused(f"no series of {name} has the labels {shown(wanted)}")
        if self._bare:
            raise Refused(_no_quantiles(name, "has neither buckets nor quantiles"))
        if self._kind == "summary":
            return Summary({}, self._counts)
        if self._kind == "histogram":
            return Histogram({})
        raise Refused(f"the page has no metric {name}; look there for what it is called")

    def _summary(self) -> Summary:
        wanted = self._wanted.quantile
        if wanted not in self._quantiles:
            there = ", ".join(f"{q:g}" for q in sorted(self._quantiles)[:8])
            raise Refused(
                f"{self._wanted.metric} has no quantile {wanted:g}, only {there}: set "
                "latency_quantile to one of these, or have the service publish it"
            )
        return Summary(self._values, self._counts)

    def _look(self, page: bytes, end: int) -> None:
        """At all whole lines of our metric."""
        at = page.find(self._name, 0, end)
        while at >= 0:
            stop = page.find(b"\n", at + 1)
            self._lines += 1
            if self._lines > MOST_LINES:
                raise Refused(f"more than {MOST_LINES} lines begin with {self._wanted.metric}")
            suffix = self._suffix.match(page, at + len(self._name), stop)
            if suffix is not None:
                self._take(suffix[1], page[suffix.end() : stop])
            at = page.find(self._name, stop, end)
        at = page.find(self._type, 0, end)
        if at >= 0:
            said = page[at + len(self._type) : page.find(b"\n", at + 1)]
            self._kind = said.strip().decode("utf-8", "replace")

    def _take(self, suffix: bytes, after: bytes) -> None:
        """One sample: its labels and its value."""
        if len(after) > MOST_LINE_BYTES:
            raise Refused(f"a line of it is longer than {MOST_LINE_BYTES} bytes")
        labels, value = _sample(after.decode("utf-8", "replace").strip(" \t\r"))
        bound, quantile = labels.pop("le", None), labels.pop("quantile", None)
        if any(labels.get(name) != wanted for name, wanted in self._wanted.labels):
            self._elsewhere = True
            return
        key = tuple(sorted(labels.items()))
        if suffix == b"_bucket" and bound is not None:
            self._count(key, bound, value)
        elif suffix == b"_count" and bound is None:
            self._room(self._counts, key)
            self._counts[key] = _counted(value)
        elif suffix == b"" and quantile is not None:
            self._quantile(key, quantile, value)
        elif suffix == b"":
            self._bare = True

    def _count(self, key: Key, bound: str, value: float) -> None:
        upper = _number(bound)
        if math.isnan(upper) or upper == -math.inf:
            raise Refused(f"{shown(bound)} is no bound of a bucket")
        self._bounds.add(upper)
        if len(self._bounds) > MOST_BOUNDS:
            raise Refused(f"{self._wanted.metric} has more than {MOST_BOUNDS} bounds")
        self._room(self._series, key)
        self._series.setdefault(key, {})[upper] = _counted(value)

    def _quantile(self, key: Key, quantile: str, value: float) -> None:
        at = _number(quantile)
        if len(self._quantiles) < MOST_BOUNDS and 0 <= at <= 1:
            self._quantiles.add(at)
        if at == self._wanted.quantile and not math.isnan(value):
            self._room(self._values, key)
            self._values[key] = value

    def _room(self, known: Mapping[Key, object], key: Key) -> None:
        if key not in known and len(known) >= MOST_SERIES:
            raise Refused(
                f"more than {MOST_SERIES} series of {self._wanted.metric}: say which by `labels`"
            )


def _sample(text: str) -> tuple[dict[str, str], float]:
    """Labels and value of what follows a name; a time and an exemplar behind them are left out."""
    labels: dict[str, str] = {}
    at = 0
    if text.startswith("{"):
        at = 1
        while found := _LABEL.match(text, at):
            value = found[2]
            labels[found[1]] = _ESCAPE.sub(_unescaped, value) if "\\" in value else value
            at = found.end()
    rest = _REST.match(text, at)
    if rest is None or bool(rest[1]) != text.startswith("{"):
        raise Refused(f"{shown(text)} is no sample of a metric")
    return labels, _number(rest[2])


def _unescaped(found: "re.Match[str]") -> str:
    return "\n" if found[1] == "n" else found[1]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refused(f"{shown(text)} is no number") from None


def _counted(value: float) -> float:
    if not 0 <= value <= _MOST_COUNT:  # nor NaN
        raise Refused(f"{value:g} is no count of requests")
    return value


def _whole(name: str, counts: dict[float, float]) -> dict[float, float]:
    """The buckets by bound, smallest first. Raises Refused where no quantile can follow from them."""
    if math.inf not in counts or len(counts) < 2:
        raise Refused(f"{name} needs a bucket of +Inf and one below it to tell a quantile")
    return dict(sorted(counts.items()))


def _no_quantiles(name: str, what: str) -> str:
    suffix = next((s for s in _PARTS if name.endswith(s)), "")
    if suffix:
        return f"{name} {what}: name the histogram or summary itself, without {suffix}"
    return (
        f"{name} {what}, from which no quantile follows, a mean at most: name a histogram or a "
        "summary (Triton has one with --metrics-config summary_latencies=true)"
    )
