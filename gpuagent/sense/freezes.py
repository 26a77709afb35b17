"""Sensor `freezes`: how often and for how long the agent has frozen each tenant.

Counted on as control groups come and go. It is down while what freezes, the guard, has died under it.
"""

from collections.abc import Iterator

from gpuagent.errors import AgentError, Gone, Unavailable
from gpuagent.model.inventory import Subject, on_tenant
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import RUNNING, TENANT_FREEZES, TENANT_FROZEN_SECONDS
from gpuagent.ports import Freezer

Count = tuple[int, float]
"""Freezes, and the seconds of them."""


class Freezes:
    """See the module."""

    name = "freezes"
    interval = 1.0

    def __init__(self, freezer: Freezer) -> None:
        self._freezer = freezer
        self._watched: set[Subject] = set()
        self._last: dict[int, Count] = {}
        """What was last read of a control group, by inode."""
        self._sums: dict[str, Count] = {}
        """By tenant."""

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        self._watched |= {
            subject
            for (knob, subject), outcome in state.outcomes.items()
            if knob is RUNNING and outcome.original is not None
        }
        dead: Unavailable | None = None
        for subject in sorted(self._watched):
            try:
                await self._look(subject)
            except Unavailable as error:
                dead = error
            except Gone:
                self._watched.discard(subject)
                self._last.pop(subject.inode, None)
            except AgentError:
                self._watched.discard(subject)
        if dead is not None:
            raise dead
        return Sensed(readings=tuple(self._readings(state, now.mono)))

    async def _look(self, subject: Subject) -> None:
        found = await self._freezer.state(subject.cgroup, subject.inode)
        pulses, seconds = self._last.get(subject.inode, (0, 0.0))
        self._last[subject.inode] = found.pulses, found.frozen_seconds
        before, spent = self._sums.get(subject.tenant, (0, 0.0))
        self._sums[subject.tenant] = (
            before + max(found.pulses - pulses, 0),
            spent + max(found.frozen_seconds - seconds, 0.0),
        )
        if found.by != "us":
            self._watched.discard(subject)

    def _readings(self, state: NodeState, at: float) -> Iterator[Reading]:
        tenants = state.inventory.tenants
        if tenants is None:
            return
        names = {t.name for t in tenants}
        self._sums = {name: count for name, count in self._sums.items() if name in names}
        for tenant in tenants:
            if RUNNING.family in tenant.levers or tenant.name in self._sums:
                pulses, seconds = self._sums.get(tenant.name, (0, 0.0))
                yield Reading(TENANT_FREEZES, on_tenant(tenant.name), pulses, at)
                yield Reading(TENANT_FROZEN_SECONDS, on_tenant(tenant.name), seconds, at)
