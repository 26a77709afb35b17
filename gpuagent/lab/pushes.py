"""Latencies of simulated services, and those that somebody pushes in their place."""

from gpuagent.clock import Clock
from gpuagent.config import Config
from gpuagent.ports import Latencies, LatencyReport
from gpuagent.sense.mail import LatencyMail, marks

STANDS_SECONDS = 30.0
"""So long after a push the simulated service is not heard at that quantile: time for the next one."""


class Pushes:
    """Implements `ports.Latencies`. Whoever pushes is believed, and not what is simulated."""

    def __init__(self, services: Latencies, clock: Clock) -> None:
        self._services = services
        self._clock = clock
        self._mail = LatencyMail()
        self._pushed: dict[tuple[str, float], float] = {}
        """Monotonic seconds of the last push, by tenant and quantile."""

    def configure(self, config: Config) -> None:
        """Keep room for the tenants that have an objective."""
        self._mail.watch(marks(config))

    def push(self, report: LatencyReport) -> None:
        """Take a report in. Raises Refused."""
        self._mail.push(report)
        self._pushed[report.tenant, report.quantile] = report.at

    def take(self) -> tuple[LatencyReport, ...]:
        """What came in since the last call, pushed or simulated."""
        old = self._clock.now().mono - STANDS_SECONDS
        self._pushed = {key: at for key, at in self._pushed.items() if at > old}
        own = [r for r in self._services.take() if (r.tenant, r.quantile) not in self._pushed]
        return (*own, *self._mail.take())
