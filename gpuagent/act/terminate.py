"""How a process is ended: as an MPS client first, then by SIGTERM, grace, SIGKILL, each step seen.

One that cuda-checkpoint has resumed is suspended before all that (see `Suspensions.ending`, also for what
is not known after a restart), one that is suspended is ended as it is. Nothing puts a process back: one
that has ended is gone, and that is said.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from gpuagent.act.protects import Seen, see_none_is
from gpuagent.act.record import Target, target_of
from gpuagent.act.suspensions import Suspensions
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import SUSPENDED, TERMINATED
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
        self,
        ender: Ender,
        mps: Clients | None,
        *,
        suspensions: Suspensions,
        held: Callable[[Target], bool],
        grace_seconds: Callable[[], float],
        seen: Seen,
    ) -> None:
        """`mps` is None where there is no MPS; `held` tells whether the ledger has an entry for a target."""
        self._ender = ender
        self._mps = mps
        self._suspensions = suspensions
        self._held = held
        self._grace = grace_seconds
        self._seen = seen
        self._tried: dict[tuple[int, int], bool] = {}
        """Those that this run has begun to end; True while one is suspended, and not killed."""
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
        key = subject.pid, subject.started
        self._tried.setdefault(key, False)
        with contextlib.suppress(Gone):  # it went by itself
            async with self._suspensions.ending(subject) as suspended:
                self._tried[key] = suspended
                await self._end(subject)
        self._tried.pop(key)
        self._ended[key] = None
        while len(self._ended) > _KEPT:
            del self._ended[next(iter(self._ended))]

    async def _end(self, subject: Subject) -> None:
        pid, started = subject.pid, subject.started
        if self._mps is not None:
            # A client that dies without MPS knowing can take the others on its server with it.
            await self._mps.terminate_client(pid)
        await self._ender.send(pid, started, signal.SIGTERM)
        try:
            if await self._ender.ended(pid, started, self._grace()):
                return
        except asyncio.CancelledError:
            if self._tried[pid, started]:
                # The agent stops, and what it has suspended runs on: this one, signalled, would not for long.
                await self._kill(subject)
            raise
        await self._kill(subject)
        if not await self._ender.ended(pid, started, KILL_SECONDS):
            raise Unavailable(f"process {pid} was killed and does not end: it hangs in the kernel")

    async def _kill(self, subject: Subject) -> None:
        self._tried[subject.pid, subject.started] = False
        await self._ender.send(subject.pid, subject.started, signal.SIGKILL)

    async def let_go(self, subject: Subject, identity: str, ours: Sequence[str]) -> None:
        """One that was suspended so that it can be ended, and was not, runs on: `ports.Lingering`."""
        key = subject.pid, subject.started
        by_us = self._tried.get(key, ENDED.raw in ours)
        if (
            by_us
            and not self._held(target_of(SUSPENDED, subject))
            and await self._ender.alive(*key)
        ):
            # Where there is no such tool it cannot have been suspended.
            with contextlib.suppress(Gone, Unsupported):
                if await self._suspensions.state(subject) != "runs":
                    await self._suspensions.resume(subject)
        self._tried.pop(key, None)

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
