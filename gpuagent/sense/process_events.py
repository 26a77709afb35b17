"""Sensor `process_events`: whether exec and exit are heard of, or only polled for."""

from gpuagent.errors import Unavailable
from gpuagent.model.state import Instant, NodeState, Sensed
from gpuagent.ports import ProcessEvents


class Hearing:
    """Has nothing to read but its own health: up while events arrive, down with the reason."""

    name = "process_events"
    interval = 5.0

    def __init__(self, events: ProcessEvents) -> None:
        self._events = events

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Nothing. Raises Unavailable while no events are heard; processes are polled then."""
        health = self._events.health
        if health.up is False:
            raise Unavailable(health.why)
        return Sensed()
