"""How a card's power limit is read, encoded and written (NVML, in milliwatts)."""

import math

from gpuagent.errors import Gone, Refused
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import POWER_LIMIT
from gpuagent.ports import Gpus, Real


class PowerLimit:
    """The power limit as set. The raw text is whole milliwatts, NVML's own unit."""

    knob: Knob = POWER_LIMIT

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    async def get(self, subject: Subject) -> Real:
        milliwatts = round(await self._gpus.power_limit(subject.gpu) * 1000)
        return Real(milliwatts / 1000, str(milliwatts))

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Rounded down to a milliwatt. The legal range is the policy's business and the driver's."""
        # Written so that not-a-number, too, asks for nothing.
        if not 0 < value < original.value:
            return original
        # A value that came from milliwatts comes back as the same: no float error is rounded down.
        milliwatts = math.floor(round(value * 1000, 3))
        return Real(milliwatts / 1000, str(milliwatts))

    async def set(self, subject: Subject, raw: str) -> None:
        try:
            milliwatts = int(raw)
        except ValueError as error:
            raise Refused(f"{raw[:80]!r} is not a power limit in milliwatts") from error
        await self._gpus.set_power_limit(subject.gpu, milliwatts / 1000)

    async def identity(self, subject: Subject) -> str:
        """The card's UUID, which no other card has. Whether it is there shows when it is read."""
        return subject.gpu

    async def verify(self, subject: Subject, identity: str) -> None:
        if subject.gpu != identity:
            raise Gone(f"{subject} is not {identity}")

    async def owner(self, subject: Subject) -> int:
        """Root: the driver lets nobody else set it."""
        return 0
