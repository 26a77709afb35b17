"""Where time comes from: the system's clocks in the daemon, a clock of their own in tests."""

import asyncio
import time
from typing import Protocol

from gpuagent.model.state import Instant


class Clock(Protocol):
    """Monotonic and wall time, and waiting."""

    def now(self) -> Instant: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """CLOCK_MONOTONIC, CLOCK_REALTIME and the local UTC offset."""

    def now(self) -> Instant:
        wall = time.time()
        return Instant(time.monotonic(), wall, float(time.localtime(wall).tm_gmtoff))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
