"""How a process is suspended and resumed, one at a time on the host, and in which order.

While one process is being locked, calls about another can hang (cuda-checkpoint#30), and a resumption
needs the memory that a suspension frees. So whoever wants something of the tool waits for his turn:
questions first, then suspensions from L3 upwards, then resumptions from L1 downwards, each by pid. A
resumption that finds no room keeps its place: none of lower rank is begun before it, for a while.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gpuagent.act.protects import Seen, see_none_is
from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Level, Subject
from gpuagent.model.vocab import SUSPENDED
from gpuagent.ports import Checkpoint, Ender, Real

Rank = tuple[int, int, int]
"""What is done, level, pid: the smallest is first."""

_ASK, _SUSPEND, _RESUME = 0, 1, 2
_RUNS = Real(0.0, "runs")
_LOCKED = Real(0.5, SUSPENDED.leftover)
"""At rest, with all its memory: neither of the two. Of ours, it is what an attempt has left."""
_SUSPENDED = Real(1.0, "suspended")
_REALS = {real.raw: real for real in (_RUNS, _LOCKED, _SUSPENDED)}
_PLACE_SECONDS = 30.0
"""For how long a resumption without room keeps its place: it is tried again sooner than that."""


class Turns:
    """A lock that goes to the waiting one of the smallest rank, whoever came first."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._came = 0

    @asynccontextmanager
    async def take(self, rank: Rank) -> AsyncIterator[None]:
        if self._taken:
            await self._wait(rank)
        self._taken = True
        try:
            yield
        finally:
            self._next()

    async def _wait(self, rank: Rank) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came += 1
        heapq.heappush(self._waiting, (rank, self._came, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # It had just become ours.
            raise

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False


class Suspend:
    """The raw text is "runs", "locked" or "suspended"."""

    knob: Knob = SUSPENDED

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        ender: Ender,
        level: Callable[[str], Level],
        seen: Seen,
        clock: Clock,
    ) -> None:
        """`level` is that of a tenant by its name, also where it is not known yet who is there."""
        self._checkpoint = checkpoint
        self._ender = ender
        self._level = level
        self._seen = seen
        self._clock = clock
        self._turns = Turns()
        self._places: dict[Rank, float] = {}
        """Resumptions that found no room, and until when they keep their place."""
        self._under_way: set[asyncio.Future[None]] = set()

    async def get(self, subject: Subject) -> Real:
        async with self._turns.take((_ASK, 0, subject.pid)):
            return _REALS[await self._checkpoint.state(subject.pid, subject.started)]

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Half and more suspends. What somebody else has suspended or locked is left so."""
        return _SUSPENDED if value >= 0.5 and original == _RUNS else original

    async def set(self, subject: Subject, raw: str) -> None:
        """Goes on to its end also where the caller no longer waits: half a step is the worst of all."""
        if raw not in (_RUNS.raw, _SUSPENDED.raw):
            raise Refused(f"{raw[:80]!r} is nothing that a process can be made to be")
        work = self._suspend(subject) if raw == _SUSPENDED.raw else self._resume(subject)
        await self._see_through(work)

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

    # -- the two ways ---------------------------------------------------------------------------------

    async def _suspend(self, subject: Subject) -> None:
        async with self._turns.take((_SUSPEND, -self._level(subject.tenant), subject.pid)):
            see_none_is(self._seen(), subject.pid, subject.started)
            await self._checkpoint.suspend(subject.pid, subject.started)

    async def _resume(self, subject: Subject) -> None:
        rank = (_RESUME, int(self._level(subject.tenant)), subject.pid)
        async with self._turns.take(rank):
            first = self._first_place(rank)
            if first is not None:
                raise Unavailable(
                    f"process {first[2]} is to be resumed first, and waits for memory"
                )
            self._places.pop(rank, None)
            try:
                await self._checkpoint.resume(subject.pid, subject.started)
            except Unavailable:
                self._places[rank] = self._clock.now().mono + _PLACE_SECONDS
                raise

    def _first_place(self, rank: Rank) -> Rank | None:
        """The resumption of a smaller rank that still keeps its place."""
        now = self._clock.now().mono
        self._places = {r: until for r, until in self._places.items() if until > now}
        return min((r for r in self._places if r < rank), default=None)

    async def _see_through(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: "asyncio.Future[None]") -> None:
        """Its error is the caller's; where none waits any more, the next look at the process shows it."""
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()
