"""How a process is ended: as an MPS client first, then by SIGTERM, grace, SIGKILL, each step seen.

Nothing puts a process back: one that has ended is gone, and that is said.
"""

import contextlib
import signal
from collections.abc import Callable
from typing import Protocol

from gpuagent.act.protects import Seen, see_none_is
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import TERMINATED
from gpuagent.ports import Ender, Real

RUNS = Real(0.0, "runs")
ENDED = Real(1.0, "ended")
KILL_SECONDS = 5.0
"""A process that SIGKILL has not ended after so long hangs in the kernel."""
_KEPT = 1024


class Clients(Protocol):
    """What is needed of `ports.Mps`."""

    async def terminate_client(self, pid: int) -> bool: ...


class Terminated:
    """Whether a process has been ended. One that we ended reads so for as long as that is wished."""

    knob: Knob = TERMINATED

    def __init__(
        self, ender: Ender, mps: Clients | None, *, grace_seconds: Callable[[], float], seen: Seen
    ) -> None:
        """`mps` is None where there is no MPS."""
        self._ender = ender
        self._mps = mps
        self._grace = grace_seconds
        self._seen = seen
        self._ended: dict[tuple[int, int], None] = {}
        """Those that we have ended, the latest last."""

    async def get(self, subject: Subject) -> Real:
        if (subject.pid, subject.started) in self._ended:
            return ENDED
        await self._alive(subject)
        return RUNS

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        # Written so that not-a-number, too, asks for nothing.
        return ENDED if value >= ENDED.value else original

    async def set(self, subject: Subject, raw: str) -> None:
        if raw != ENDED.raw:
            raise Refused(f"{raw[:80]!r} is nothing that a process can be made to be")
        see_none_is(self._seen(), subject.pid, subject.started)
        await self._alive(subject)
        with contextlib.suppress(Gone):  # it went by itself
            await self._end(subject)
        self._ended[subject.pid, subject.started] = None
        while len(self._ended) > _KEPT:
            del self._ended[next(iter(self._ended))]

    async def _end(self, subject: Subject) -> None:
        pid, started = subject.pid, subject.started
        if self._mps is not None:
            # A client that dies without MPS knowing can take the others on its server with it.
            await self._mps.terminate_client(pid)
        await self._ender.send(pid, started, signal.SIGTERM)
        if await self._ender.ended(pid, started, self._grace()):
            return
        await self._ender.send(pid, started, signal.SIGKILL)
        if not await self._ender.ended(pid, started, KILL_SECONDS):
            raise Unavailable(f"process {pid} was killed and does not end: it hangs in the kernel")

    async def identity(self, subject: Subject) -> str:
        """PID:STARTED. The ledger keeps the boot: within one no two processes have both."""
        return f"{subject.pid}:{subject.started}"

    async def verify(self, subject: Subject, identity: str) -> None:
        if identity != await self.identity(subject):
            raise Gone(f"{subject} is not process {identity}")
        await self._alive(subject)

    async def owner(self, subject: Subject) -> int:
        """Root: nobody un-ends a process."""
        return 0

    async def _alive(self, subject: Subject) -> None:
        """Raises Gone where it has ended."""
        if not await self._ender.alive(subject.pid, subject.started):
            raise Gone(f"process {subject.pid} has ended, and nothing brings it back")
