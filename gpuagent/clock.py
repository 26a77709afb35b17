"""Where time comes from: the system's clocks in the daemon, a clock of their own in tests."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol

from gpuagent.model.state import Instant


class Clock(Protocol):
    """Monotonic and wall time, and waiting."""

    def now(self) -> Instant: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """CLOCK_MONOTONIC, CLOCK_REALTIME and the local UTC offset, which changes at whole minutes only."""

    _minute = float("nan")
    _utc_offset = 0.0

    def now(self) -> Instant:
        wall = time.time()
        minute = wall // 60
        if minute != self._minute:
            self._utc_offset = float(time.localtime(wall).tm_gmtoff)
            self._minute = minute
        return Instant(time.monotonic(), wall, self._utc_offset)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def patiently(waiting: Awaitable[object], seconds: float) -> bool:
    """Wait for at most so long; whether it came to its end. What did not is cancelled.

    For cleaning up, which runs in tasks that are being cancelled: there `asyncio.timeout` raises
    CancelledError when it expires, up to Python 3.11.2, and the rest of the cleaning is lost.
    Raises what `waiting` raises.
    """
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        ended = task.done()
        if not ended:
            task.cancel()
    if ended:
        task.result()
    return ended
