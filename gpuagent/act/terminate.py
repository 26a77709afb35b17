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

from gpuagent.act.protects import Seen, is_mps_client, see_none_is
from gpuagent.act.record import Target, target_of
from gpuagent.act.suspensions import Suspensions
from gpuagent.act.targets import OfProcess
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


class Terminated(OfProcess):
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
        super().__init__(ender)
        self._mps = mps
        self._suspensions = suspensions
        self._held = held
        self._grace = grace_seconds
        self._seen = seen
        self._tried: dict[tuple[int, int], bool] = {}
        """Those that this run has begun to end; True while one is suspended, and not killed."""
        self._parted: set[tuple[int, int]] = set()
        """Those of them whose work as an MPS client has been ended."""
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
        self._forget(key)
        self._ended[key] = None
        while len(self._ended) > _KEPT:
            del self._ended[next(iter(self._ended))]

    async def _end(self, subject: Subject) -> None:
        pid, started = subject.pid, subject.started
        await self._part(subject)
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
            raise Unavailable(
                f"process {pid} was killed and does not end: it hangs in the kernel, which only the call it "
                f"is in, or a reboot, can end; `cat /proc/{pid}/stack` and the kernel log (NVRM, Xid) say where"
            )

    async def _part(self, subject: Subject) -> None:
        """End its work as an MPS client: one that dies as such can take the others on its server with it."""
        key = subject.pid, subject.started
        if self._mps is not None and await self._mps.terminate_client(subject.pid):
            self._parted.add(key)
        if key not in self._parted and is_mps_client(self._seen(), subject.pid):
            raise Refused(
                f"process {subject.pid} is a client of an MPS daemon that is not known: "
                "name its daemon in [[mps.groups]]"
            )

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
        self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._tried.pop(key, None)
        self._parted.discard(key)
