"""Takes in the latencies that tenants report: so many a second of each, and never later than at once."""

from collections.abc import Callable

from gpuagent.errors import Unsupported
from gpuagent.expose.allowance import Allowance
from gpuagent.expose.problems import Trouble
from gpuagent.ports import LatencyReport

REPORTS_PER_SECOND = 10
"""Of one tenant; a reading is told once a second, so that more would be lost anyway."""
TENANTS_MOST = 256
"""Remembered at once; those that have been silent for a second need not be."""


def nobody(_report: LatencyReport) -> None:
    """Where no latency is taken. Raises Unsupported."""
    raise Unsupported("this agent takes no reports of latency: its host is a simulated one")


class Intake:
    """Hands reports on, unless one tenant sends too many."""

    def __init__(self, hand_on: Callable[[LatencyReport], None] = nobody) -> None:
        """`hand_on` returns at once; it raises Refused where it does not take a report."""
        self._hand_on = hand_on
        self._allowances: dict[str, Allowance] = {}

    def admit(self, tenant: str, now: float) -> None:
        """Count one message of a tenant at this time (monotonic seconds). Raises Trouble (429)."""
        allowance = self._allowances.get(tenant)
        if allowance is None:
            if len(self._allowances) >= TENANTS_MOST:
                self._forget(now)
            allowance = Allowance(burst=REPORTS_PER_SECOND, per_second=REPORTS_PER_SECOND)
            self._allowances[tenant] = allowance
        if not allowance.take(now):
            raise Trouble(
                429,
                f"more than {REPORTS_PER_SECOND} reports within a second",
                "once a second is enough",
                retry_after=1,
            )

    def take(self, report: LatencyReport) -> None:
        """Hand one report on. Raises what the other side raises."""
        self._hand_on(report)

    def _forget(self, now: float) -> None:
        """Those who may send as many as ever need no memory; if there is none, the oldest has to go."""
        for name in [n for n, a in self._allowances.items() if a.whole(now)]:
            del self._allowances[name]
        while len(self._allowances) >= TENANTS_MOST:
            del self._allowances[next(iter(self._allowances))]
