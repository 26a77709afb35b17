"""A clock that only `advance` moves."""

import asyncio
import heapq

from gpuagent.model.state import Instant

_BEGINS_WALL = 1_767_225_600.0
"""2026-01-01 00:00 UTC."""
_BEGINS_MONO = 1000.0


class VirtualClock:
    """Implements `clock.Clock`: monotonic and wall time go at one pace, from a fixed beginning."""

    def __init__(self, utc_offset: float = 0.0) -> None:
        self._elapsed = 0.0
        self._utc_offset = utc_offset
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._slept = 0

    @property
    def mono(self) -> float:
        """Monotonic seconds."""
        return _BEGINS_MONO + self._elapsed

    def now(self) -> Instant:
        return Instant(self.mono, _BEGINS_WALL + self._elapsed, self._utc_offset)

    async def sleep(self, seconds: float) -> None:
        """Until others have moved the clock so far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slept += 1
        heapq.heappush(self._sleeping, (self.mono + seconds, self._slept, awake))
        await awake

    def advance_to(self, mono: float) -> None:
        """Move to these monotonic seconds, never back, and wake who has slept enough."""
        self._elapsed = max(self._elapsed, mono - _BEGINS_MONO)
        while self._sleeping and self._sleeping[0][0] <= self.mono:
            _, _, awake = heapq.heappop(self._sleeping)
            if not awake.done():
                awake.set_result(None)
