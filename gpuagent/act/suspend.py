"""How it is read, encoded and set whether a process is suspended. The order is that of `Suspensions`."""

from gpuagent.act.protects import Seen, see_none_is
from gpuagent.act.suspensions import Suspensions
from gpuagent.errors import Gone, Refused
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import SUSPENDED
from gpuagent.ports import Ender, Real

_RUNS = Real(0.0, "runs")
_LOCKED = Real(0.5, SUSPENDED.leftover)
"""At rest, with all its memory: neither of the two. Of ours, it is what an attempt has left."""
_SUSPENDED = Real(1.0, "suspended")
_REALS = {real.raw: real for real in (_RUNS, _LOCKED, _SUSPENDED)}


class Suspend:
    """The raw text is "runs", "locked" or "suspended"."""

    knob: Knob = SUSPENDED

    def __init__(self, suspensions: Suspensions, *, ender: Ender, seen: Seen) -> None:
        self._suspensions = suspensions
        self._ender = ender
        self._seen = seen

    async def get(self, subject: Subject) -> Real:
        return _REALS[await self._suspensions.state(subject)]

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Half and more suspends. What somebody else has suspended or locked is left so."""
        return _SUSPENDED if value >= 0.5 and original == _RUNS else original

    async def set(self, subject: Subject, raw: str) -> None:
        """Goes on to its end also where the caller no longer waits."""
        if raw == _SUSPENDED.raw:
            await self._suspensions.suspend(
                subject, see=lambda: see_none_is(self._seen(), subject.pid, subject.started)
            )
        elif raw == _RUNS.raw:
            await self._suspensions.resume(subject)
        else:
            raise Refused(f"{raw[:80]!r} is nothing that a process can be made to be")

    async def identity(self, subject: Subject) -> str:
        """PID:STARTED. The ledger keeps the boot: within one no two processes have both."""
        return f"{subject.pid}:{subject.started}"

    async def verify(self, subject: Subject, identity: str) -> None:
        if identity != await self.identity(subject):
            raise Gone(f"{subject} is not process {identity}")
        if not await self._ender.alive(subject.pid, subject.started):
            raise Gone(f"process {subject.pid} has ended")

    async def owner(self, subject: Subject) -> int:
        """Root: whoever owns the process may run the tool too, but has no device memory to gain."""
        return 0
