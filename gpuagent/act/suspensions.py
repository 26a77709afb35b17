"""All that the agent asks of cuda-checkpoint: one call at a time on the host, and in which order.

While one process is being locked, calls about another can hang (cuda-checkpoint#30), and a resumption
needs the memory that a suspension frees. So whoever wants something of the tool waits for his turn:
questions first, then processes that are about to be ended, then suspensions from L3 upwards, then
resumptions from L1 downwards, each by pid. A resumption that finds no room keeps its place: none of
lower rank is begun before it, for a while.

To end a process that the tool has once restored can hang the whole host, unless it is suspended again
first (NVIDIA/cuda-checkpoint#53: bare metal, open driver 595). Which ones this run has resumed is kept in
memory. What an earlier run has resumed before it ended is not known any more, the driver does not tell
it, and such a process is ended like any other.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from gpuagent.clock import Clock
from gpuagent.errors import Refused, Unavailable, Unsupported
from gpuagent.model.inventory import Level, Subject
from gpuagent.ports import Checkpoint

Done = TypeVar("Done")

Rank = tuple[int, int, int]
"""What is done, level, pid: the smallest is first."""

_ASK, _END, _SUSPEND, _RESUME = 0, 1, 2, 3
_PLACE_SECONDS = 30.0
"""For how long a resumption without room keeps its place: it is tried again sooner than that."""
_KEPT = 4096


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


class Suspensions:
    """Suspends and resumes, for all who want it. What is begun goes on also where nobody waits for it."""

    def __init__(
        self, checkpoint: Checkpoint, *, level: Callable[[str], Level], clock: Clock
    ) -> None:
        """`level` is that of a tenant by its name, also where it is not known yet who is there."""
        self._checkpoint = checkpoint
        self._level = level
        self._clock = clock
        self._turns = Turns()
        self._places: dict[Rank, float] = {}
        """Resumptions that found no room, and until when they keep their place."""
        self._met: dict[tuple[int, int], bool] = {}
        """Processes that this run has begun to suspend or resume; True from the first resumption on."""
        self._ending: set[tuple[int, int]] = set()
        self._under_way: set[asyncio.Future[Any]] = set()

    async def state(self, subject: Subject) -> Literal["runs", "locked", "suspended"]:
        """Raises as `Checkpoint.state`."""
        async with self._turns.take((_ASK, 0, subject.pid)):
            return await self._checkpoint.state(subject.pid, subject.started)

    async def suspend(self, subject: Subject, *, see: Callable[[], None]) -> None:
        """`see` raises what keeps it from being suspended when its turn has come."""
        await self._see_through(self._suspend(subject, see))

    async def resume(self, subject: Subject) -> None:
        """Raises as `Checkpoint.resume`, and Unavailable where another is first, or it is being ended."""
        await self._see_through(self._resume(subject))

    @asynccontextmanager
    async def ending(self, subject: Subject) -> AsyncIterator[bool]:
        """Within, nobody suspends or resumes it, and it can be ended without harm; whether it is suspended.

        Raises Gone; Refused where it was resumed and cannot be suspended.
        """
        key = (subject.pid, subject.started)
        self._ending.add(key)
        try:
            yield key in self._met and await self._see_through(self._rest(subject))
        finally:
            self._ending.discard(key)

    # -- the steps ------------------------------------------------------------------------------------

    async def _suspend(self, subject: Subject, see: Callable[[], None]) -> None:
        async with self._turns.take((_SUSPEND, -self._level(subject.tenant), subject.pid)):
            self._see_it_lives_on(subject)
            see()
            self._meet(subject, resumed=False)
            await self._checkpoint.suspend(subject.pid, subject.started)

    async def _resume(self, subject: Subject) -> None:
        rank = (_RESUME, int(self._level(subject.tenant)), subject.pid)
        async with self._turns.take(rank):
            self._see_it_lives_on(subject)
            first = self._first_place(rank)
            if first is not None:
                raise Unavailable(
                    f"process {first[2]} is to be resumed first, and waits for memory"
                )
            self._places.pop(rank, None)
            self._meet(subject, resumed=True)
            try:
                await self._checkpoint.resume(subject.pid, subject.started)
            except Unavailable:
                self._places[rank] = self._clock.now().mono + _PLACE_SECONDS
                raise

    async def _rest(self, subject: Subject) -> bool:
        """Once nothing is being done with it: see it suspended if it was ever resumed."""
        pid, started = subject.pid, subject.started
        async with self._turns.take((_END, 0, pid)):
            resumed = self._met[pid, started]
            try:
                if await self._checkpoint.state(pid, started) == "suspended":
                    return True
                if resumed:
                    await self._checkpoint.suspend(pid, started)
            except (Refused, Unsupported, Unavailable) as error:
                if resumed:
                    raise Refused(
                        f"process {pid} was resumed by cuda-checkpoint, and to end it before it is "
                        f"suspended again can hang the host: {error}"
                    ) from error
            return resumed

    def _see_it_lives_on(self, subject: Subject) -> None:
        if (subject.pid, subject.started) in self._ending:
            raise Unavailable(f"process {subject.pid} is being ended")

    def _meet(self, subject: Subject, *, resumed: bool) -> None:
        key = (subject.pid, subject.started)
        self._met[key] = self._met.pop(key, False) or resumed
        while len(self._met) > _KEPT:
            del self._met[next(iter(self._met))]

    def _first_place(self, rank: Rank) -> Rank | None:
        """The resumption of a smaller rank that still keeps its place."""
        now = self._clock.now().mono
        self._places = {r: until for r, until in self._places.items() if until > now}
        return min((r for r in self._places if r < rank), default=None)

    async def _see_through(self, work: Awaitable[Done]) -> Done:
        """To its end also where the caller no longer waits: half a step is the worst of all."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        """Its error is the caller's; where none waits any more, the next look at the process shows it."""
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()
