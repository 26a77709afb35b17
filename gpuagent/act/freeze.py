"""How the share of time in which a cgroup is not frozen is read, encoded and set.

Raw is the share as text, "1" where nobody freezes it. A cgroup found frozen reads "frozen": where the
ledger holds it, an agent and its guard of ours have died together and left it so. One that somebody
else has frozen while it was ours reads "paused". None is frozen in which a process is suspended.
"""

import contextlib
import math

from gpuagent.act.controlfile import ControlFile
from gpuagent.act.protects import Seen, see_none_lives_in
from gpuagent.act.suspensions import Suspensions
from gpuagent.errors import Gone, Refused
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import RUNNING
from gpuagent.ports import Cgroups, Freezer, Real

THAWED = Real(1.0, "1")
_FOUND = {"unknown": Real(0.0, RUNNING.leftover), "another": Real(0.0, "paused")}
_MOST = 0.99
"""A share above this is not worth a freeze."""


class Running:
    """Freezing in pulses, by `ports.Freezer`."""

    knob: Knob = RUNNING

    def __init__(
        self, freezer: Freezer, cgroups: Cgroups, *, seen: Seen, suspensions: Suspensions
    ) -> None:
        self._freezer = freezer
        self._suspensions = suspensions
        self._file = ControlFile(cgroups, "cgroup.freeze")
        self._seen = seen

    async def get(self, subject: Subject) -> Real:
        state = await self._freezer.state(subject.cgroup, subject.inode)
        if state.by == "us":
            return _share(state.running_ratio)
        return _FOUND.get(state.by, THAWED)

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Raises Refused where somebody else has it frozen: nothing of that is ours to change."""
        if original != THAWED:
            raise Refused(
                f"{subject.cgroup} is frozen already, and not by the agent: it is left so until its "
                "cgroup.freeze reads 0"
            )
        # Written so that not-a-number, too, asks for nothing.
        if not value <= _MOST:
            return original
        least = self._freezer.least_ratio
        # Rounded down, but not below what can be had: a hundredth is the deadband.
        share = math.floor(round(max(value, 0.0) * 100, 6)) / 100
        return _share(max(share, math.ceil(round(least * 100, 6)) / 100))

    async def set(self, subject: Subject, raw: str) -> None:
        try:
            ratio = float(raw)
        except ValueError as error:
            raise Refused(f"{raw[:80]!r} is no share of time") from error
        if not 0 < ratio <= 1:
            raise Refused(f"{raw[:80]!r} is no share of time over 0 and up to 1")
        if ratio < 1:
            see_none_lives_in(self._seen(), subject.cgroup)
            await self._suspensions.freeze(subject)
            await self._freezer.set(subject.cgroup, subject.inode, ratio)
            return
        with contextlib.suppress(Gone):
            await self._freezer.set(subject.cgroup, subject.inode, ratio)
        self._suspensions.thawed(subject)

    async def identity(self, subject: Subject) -> str:
        return await self._file.identity(subject)

    async def verify(self, subject: Subject, identity: str) -> None:
        await self._file.verify(subject, identity)

    async def owner(self, subject: Subject) -> int:
        return await self._file.owner(subject)


def _share(ratio: float) -> Real:
    text = f"{ratio:.2f}"
    return Real(float(text), text)
