"""A service's latency as a sensor may read it: a quantile over the requests of a window."""

import math

from gpuagent.sim.host import SimHost


class SimLatency:
    """Reads what the simulated services have measured themselves."""

    def __init__(self, host: SimHost) -> None:
        self._host = host

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
