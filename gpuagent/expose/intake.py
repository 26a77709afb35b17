"""How often tenants and users may come: latencies, which are handed on at once, and requests for runs."""

from collections.abc import Callable

from gpuagent.errors import Unsupported
from gpuagent.expose.allowance import Allowance
from gpuagent.expose.problems import Trouble
from gpuagent.ports import LatencyReport

REPORTS_PER_SECOND = 10
"""Of one tenant; a reading is told once a second, so that more would be lost anyway."""
TENANTS_MOST = 256
"""Remembered at once; those that have been silent for a second need not be."""
RUNS_AT_ONCE = 4
RUNS_PER_SECOND = 1.0
"""Asked for by one user, who is no administrator: each takes a tick of the loop."""
USERS_MOST = 256


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


class Knocks:
    """Bounds how often each user may ask for a run. Users who have not asked lately need no memory."""

    def __init__(self) -> None:
        self._of: dict[int, Allowance] = {}

    def admit(self, uid: int, now: float) -> None:
        """Count one request at this time (monotonic seconds). Raises Trouble (429)."""
        if uid not in self._of and len(self._of) >= USERS_MOST:
            self._of = {u: a for u, a in self._of.items() if not a.whole(now)}
            while len(self._of) >= USERS_MOST:
                del self._of[next(iter(self._of))]
        allowance = self._of.setdefault(
            uid, Allowance(burst=RUNS_AT_ONCE, per_second=RUNS_PER_SECOND)
        )
        if not allowance.take(now):
            raise Trouble(429, "too many runs are asked for", "try again", retry_after=1)
