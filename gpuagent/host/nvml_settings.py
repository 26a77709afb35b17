"""What a card is set to beside its power limit, through NVML.

No call reads back a lock of clocks (NVML has only setters: nvmlDeviceSetGpuLockedClocks and
nvmlDeviceResetGpuLockedClocks), and the driver forgets locks and modes when its last client leaves a
card without persistence mode.
"""

import math

from gpuagent.host.nvml import NvmlGpus


class NvmlSettings:
    """Implements `ports.CardSettings` over the child that reads the cards."""

    def __init__(self, gpus: NvmlGpus) -> None:
        self._gpus = gpus

    async def set_clock_limit(self, uuid: str, hertz: float | None) -> None:
        megahertz = None if hertz is None else math.floor(hertz / 1e6)
        await self._gpus.order(uuid, "clock_limit", megahertz)

    async def compute_mode(self, uuid: str) -> int:
        return await self._gpus.order(uuid, "compute_mode")

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        await self._gpus.order(uuid, "compute_mode", mode)

    async def persistence_mode(self, uuid: str) -> bool:
        return bool(await self._gpus.order(uuid, "persistence_mode"))

    async def set_persistence_mode(self, uuid: str, on: bool) -> None:
        await self._gpus.order(uuid, "persistence_mode", int(on))
