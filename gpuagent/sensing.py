"""Runs the sensors: each when it is due, none waited for longer than a moment, all of them measured."""

import asyncio
from collections.abc import Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import AgentError
from gpuagent.model.state import Health, Instant, NodeState, Sensed
from gpuagent.ports import Sensor

PATIENCE_SECONDS = 0.05
"""How long a tick waits for the sensors it has asked; what comes later is taken by a later tick."""
_SILENT_INTERVALS = 5.0
_SILENT_AT_LEAST = 10.0


class Sensing:
    """Level-triggered reading of all sensors.

    A sensor that fails is down, with the reason, and is asked again when it is next due. One that
    does not return is left running and down: it holds up nobody, and is not asked twice at once.
    """

    def __init__(
        self, sensors: Sequence[Sensor], clock: Clock, *, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._sensors = tuple(sensors)
        self._clock = clock
        self._patience = patience
        self._health = {s.name: Health(s.name, None) for s in sensors}
        self._running: dict[str, asyncio.Task[Sensed]] = {}
        self._asked: dict[str, float] = {}
        """When each was last asked, monotonic seconds; and below, when it was done."""
        self._ended: dict[str, float] = {}

    @property
    def health(self) -> tuple[Health, ...]:
        return tuple(self._health.values())

    async def read(self, now: Instant, state: NodeState) -> tuple[Sensed, ...]:
        """What the sensors have to say now, those included that were asked in earlier ticks."""
        asked = [self._ask(s, now, state) for s in self._sensors if self._due(s, now.mono)]
        if asked:
            await asyncio.wait(asked, timeout=self._patience)
        found = [self._collect(s, now.mono) for s in self._sensors if s.name in self._running]
        return tuple(f for f in found if f is not None)

    def _due(self, sensor: Sensor, now: float) -> bool:
        asked = self._asked.get(sensor.name)
        free = sensor.name not in self._running
        # A millisecond early is on time: ticks are no more exact than that.
        return free and (asked is None or now - asked >= sensor.interval - 1e-3)

    def _ask(self, sensor: Sensor, now: Instant, state: NodeState) -> asyncio.Task[Sensed]:
        self._asked[sensor.name] = now.mono
        task = asyncio.ensure_future(self._timed(sensor, now, state))
        self._running[sensor.name] = task
        return task

    async def _timed(self, sensor: Sensor, now: Instant, state: NodeState) -> Sensed:
        try:
            return await sensor.read(now, state)
        finally:
            self._ended[sensor.name] = self._clock.now().mono

    def _collect(self, sensor: Sensor, now: float) -> Sensed | None:
        task, began = self._running[sensor.name], self._asked[sensor.name]
        known = self._health[sensor.name]
        if not task.done():
            silent = now - began
            if silent >= max(_SILENT_AT_LEAST, _SILENT_INTERVALS * sensor.interval):
                why = f"has not answered for {silent:.0f} s"
                self._health[sensor.name] = msgspec.structs.replace(known, up=False, why=why)
            return None
        del self._running[sensor.name]
        ended = self._ended[sensor.name]
        seconds = ended - began
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._health[sensor.name] = Health(
                sensor.name, True, "", ended, seconds, known.failures
            )
            return task.result()
        # A sensor's bug is contained (DESIGN 9): it is down and says so, the agent goes on.
        why = str(error) if isinstance(error, AgentError) else f"bug in the agent: {error!r}"
        self._health[sensor.name] = msgspec.structs.replace(
            known, up=False, why=why, seconds=seconds, failures=known.failures + 1
        )
        return None

    async def close(self) -> None:
        """End the readings that are still going on."""
        tasks = list(self._running.values())
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
