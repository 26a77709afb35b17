"""A service's latency as it would report it itself: a quantile over the requests of a window."""

import math

from gpuagent.ports import LatencyReport
from gpuagent.sim.host import SimHost

WINDOW_SECONDS = 10.0
"""A service reports the quantile over the last ten seconds, once a second; assumed."""
_SLACK_SECONDS = 1e-6


class SimLatency:
    """Reads what the simulated services have measured themselves. Implements `ports.Latencies`.

    Every tenant of the scenario that has an objective reports, at the objective's quantile.
    """

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._reported = 0

    def take(self) -> list[LatencyReport]:
        """The reports of the last whole second, once; those of earlier ones nobody waits for."""
        host = self._host
        second = math.floor(host.elapsed + _SLACK_SECONDS)
        if second <= self._reported:
            return []
        self._reported = second
        at = host.clock.mono - host.elapsed + second
        reports = []
        for spec in host.scenario.tenants:
            if spec.objective is None:
                continue
            quantile = spec.objective.quantile
            seconds = self.read(spec.name, quantile, WINDOW_SECONDS, at)
            if seconds is not None:
                reports.append(LatencyReport(spec.name, quantile, seconds, at))
        return reports

    def read(self, tenant: str, quantile: float, window_seconds: float, now: float) -> float | None:
        """Latency in seconds of the requests that finished within the window before `now`.

        `now` is monotonic seconds. None for a tenant without requests, and where there are too few
        for the quantile to differ from the worst: 100 for a p99, at least 10. Nearest rank.
        """
        found = self._host.latencies(tenant, now - window_seconds)
        seen = sorted(seconds for at, seconds in found if at <= now)
        if len(seen) < max(math.ceil(1.0 / (1.0 - quantile) - 1e-9), 10):
            return None
        return seen[max(math.ceil(quantile * len(seen)), 1) - 1]
