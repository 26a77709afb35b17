"""Where latencies wait for the next tick, whoever brings them. Bounded."""

import math
from collections.abc import Mapping

from gpuagent.config import Config
from gpuagent.errors import Refused
from gpuagent.model.inventory import Level
from gpuagent.ports import LatencyReport, Wake

MOST_TENANTS = 256
MOST_QUANTILES = 4
"""Of one tenant: each is a series of its own in /metrics."""
WAKES_PER_SECOND = 4
"""Of the loop, at most: whoever rises over his mark again and again costs no more than that."""
KEPT_SECONDS = 60.0
"""A tenant, and each quantile of it, keeps its place for so long after its last report."""


class LatencyMail:
    """Implements `ports.Latencies`. Not for use from other threads than the loop's."""

    def __init__(self, wake: Wake = lambda _why: None) -> None:
        self._wake = wake
        self._marks: Mapping[tuple[str, float], float] = {}
        self._places: dict[str, dict[float, LatencyReport]] = {}
        """The newest of each tenant and quantile, taken or not."""
        self._news: dict[tuple[str, float], LatencyReport] = {}
        self._over: set[tuple[str, float]] = set()
        self._woke_for: dict[str, float] = {}
        """By tenant, monotonic seconds of a wake within the last second."""

    def watch(self, marks: Mapping[tuple[str, float], float]) -> None:
        """Wake the loop when what is reported of a tenant and quantile rises over its mark, in seconds."""
        self._marks = dict(marks)
        self._over &= marks.keys()

    def push(self, report: LatencyReport) -> None:
        """Take a report in, unless a newer one is known.

        Raises Refused for what is no latency, and where there is no room; the text says which.
        """
        _check(report)
        places = self._room(report)
        known = places.get(report.quantile)
        if known is not None and known.at > report.at:
            return
        places[report.quantile] = report
        key = (report.tenant, report.quantile)
        self._news[key] = report
        mark = self._marks.get(key, math.inf)
        if report.seconds < mark:
            self._over.discard(key)
        elif key not in self._over and self._may_wake(report):
            self._over.add(key)
            self._wake("a latency has risen over its mark")

    def take(self) -> tuple[LatencyReport, ...]:
        """What came in since the last call, the newest of each tenant and quantile."""
        news = tuple(self._news.values())
        self._news.clear()
        return news

    def _may_wake(self, report: LatencyReport) -> bool:
        """Whether the loop may be woken: once a second for a tenant. Else the next tick is soon enough."""
        recent = {t: at for t, at in self._woke_for.items() if abs(report.at - at) < 1.0}
        if report.tenant in recent or len(recent) >= WAKES_PER_SECOND:
            return False
        self._woke_for = {**recent, report.tenant: report.at}
        return True

    def _room(self, report: LatencyReport) -> dict[float, LatencyReport]:
        """The tenant's places, with one for this report. Raises Refused."""
        tenant, old = report.tenant, report.at - KEPT_SECONDS
        if (tenant, report.quantile) in self._marks:
            # The room of those to be protected is their own: nobody else can fill it.
            return self._places.setdefault(tenant, {})
        if tenant not in self._places and len(self._places) >= MOST_TENANTS:
            for name in [n for n, p in self._places.items() if all(r.at < old for r in p.values())]:
                self._forget(name, *self._places[name])
            if len(self._places) >= MOST_TENANTS:
                raise Refused(
                    f"latencies of {MOST_TENANTS} tenants are known already, which is the most; "
                    f"one that falls silent makes room after {KEPT_SECONDS:.0f} s"
                )
        places = self._places.get(tenant, {})
        own = {q for name, q in self._marks if name == tenant}
        if report.quantile not in places and len(places.keys() | own) >= MOST_QUANTILES:
            for quantile in [q for q, r in places.items() if r.at < old]:
                self._forget(tenant, quantile)
            if len(places.keys() | own) >= MOST_QUANTILES:
                raise Refused(
                    f"{MOST_QUANTILES} quantiles of {tenant} are known already, which is the most; "
                    f"one that is not reported makes room after {KEPT_SECONDS:.0f} s"
                )
        return self._places.setdefault(tenant, places)

    def _forget(self, tenant: str, *quantiles: float) -> None:
        for quantile in quantiles:
            del self._places[tenant][quantile]
            self._news.pop((tenant, quantile), None)
        if not self._places[tenant]:
            del self._places[tenant]


def marks(config: Config) -> dict[tuple[str, float], float]:
    """What `watch` wants: seconds from which the latency of a tenant is a cause."""
    return {
        (t.name, t.latency_quantile): t.latency_slo * config.backpressure.latency_high
        for t in config.tenants
        if t.latency_slo is not None and t.sla is Level.L1
    }


def _check(report: LatencyReport) -> None:
    if not 0 < report.quantile < 1:
        raise Refused(f"{report.quantile!r} is not a quantile; give one between 0 and 1: 0.99")
    if not (math.isfinite(report.seconds) and report.seconds > 0):
        raise Refused(f"{report.seconds!r} is not a latency; give seconds, more than 0")
    if not math.isfinite(report.at):
        raise Refused(f"{report.at!r} is not a time; give monotonic seconds")
