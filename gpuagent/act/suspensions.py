"""All that the agent asks of cuda-checkpoint: one call at a time on the host, and in which order.

While one process is being locked, calls about another can hang (cuda-checkpoint#30), and a resumption
needs the memory that a suspension frees. So whoever wants something of the tool waits for his turn:
questions first, then processes that are about to be ended, then suspensions from L3 upwards, then
resumptions from L1 downwards, each by pid. A resumption that finds no room keeps a place on its cards:
none of lower rank that needs one of them is begun before it, for `_PLACE_SECONDS` and no longer. Where
all is put back, nobody waits for another.

What a process gives up is in the ledger before it is checkpointed: so any later run knows what room it
needs, and one that is suspended although we have not begun to is somebody else's. And because the tool
hangs on a frozen process (criu#2470), no control group is frozen in pulses while a process in it is
suspended or queues for the tool, nor does the tool touch one whose group is.

To end a process that the tool has once restored can hang the whole host, unless it is suspended again
first (NVIDIA/cuda-checkpoint#53: bare metal, open driver 595). Which ones this run has resumed is kept in
memory. What an earlier run has resumed before it ended is not known any more, the driver does not tell
it, and such a process is ended like any other.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from gpuagent.act.record import Entry, Target, target_of
from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Gone, NoRoom, Refused, Unavailable, Unsupported
from gpuagent.model.inventory import Level, Subject
from gpuagent.model.vocab import RUNNING, SUSPENDED, TERMINATED
from gpuagent.ports import Checkpoint, CudaState, Freed

Done = TypeVar("Done")

Rank = tuple[int, int, int]
"""What is done, level, pid: the smallest is first."""

_ASK, _END, _SUSPEND, _RESUME = 0, 1, 2, 3
_PLACE_SECONDS = 30.0
"""For how long a resumption keeps its place from when it first found no room, however often it is tried."""
_FORGOTTEN_SECONDS = 60.0
"""One that has not been tried for so long is not wished any more: it is tried again sooner than that."""
_KEPT = 4096


class Held(Protocol):
    """What is needed of the ledger."""

    @property
    def entries(self) -> Mapping[Target, Entry]: ...

    def held(self, target: Target) -> Entry | None: ...

    async def keep(self, target: Target, freed: Mapping[str, int] | None) -> None: ...


class _Place(msgspec.Struct, frozen=True):
    """A resumption that has found no room."""

    cards: frozenset[str]
    first: float
    """When it first found none, and when it last did, in monotonic seconds."""
    last: float


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
        self,
        checkpoint: Checkpoint,
        *,
        level: Callable[[str], Level],
        clock: Clock,
        ledger: Held,
        cgroup: Callable[[int], str],
    ) -> None:
        """`level` is that of a tenant by its name, also where it is not known yet who is there.

        `cgroup` is where a process lives now; it may block, and raise Gone.
        """
        self._checkpoint = checkpoint
        self._level = level
        self._clock = clock
        self._ledger = ledger
        self._cgroup = cgroup
        self._turns = Turns()
        self._places: dict[Rank, _Place] = {}
        self._orderly = True
        self._frozen: set[Target] = set()
        """What may be frozen in pulses, as long as the ledger holds it."""
        self._in_hand: dict[int, int] = {}
        """How many suspensions and resumptions of a process are under way or queue, by pid."""
        self._met: dict[tuple[int, int], bool] = {}
        """Processes that this run has begun to suspend or resume; True from the first resumption on."""
        self._ending: set[tuple[int, int]] = set()
        self._under_way: set[asyncio.Future[Any]] = set()

    async def state(self, subject: Subject) -> CudaState:
        """Raises as `Checkpoint.state`."""
        async with self._turns.take((_ASK, 0, subject.pid)):
            try:
                return await self._checkpoint.state(subject.pid, subject.started)
            except Gone:
                self._places = {r: p for r, p in self._places.items() if r[2] != subject.pid}
                raise

    async def suspend(self, subject: Subject, *, see: Callable[[], None]) -> None:
        """`see` raises what keeps it from being suspended when its turn has come."""
        await self._see_through(self._suspend(subject, see), subject)

    async def resume(self, subject: Subject) -> None:
        """Raises as `Checkpoint.resume`, and Unavailable where another is first, or it is being ended."""
        await self._see_through(self._resume(subject), subject)

    def anothers(self, subject: Subject) -> bool:
        """Whether one that is suspended, and that we have meant to suspend, is so by somebody else."""
        entry = self._ledger.held(target_of(SUSPENDED, subject))
        return entry is not None and entry.pending and entry.freed is None

    @contextmanager
    def all_at_once(self) -> Iterator[None]:
        """As `ports.Orderly`."""
        self._orderly = False
        try:
            yield
        finally:
            self._orderly = True

    async def freeze(self, subject: Subject) -> None:
        """A cgroup is about to be frozen in pulses: until `thawed` the tool touches nobody in it.

        Raises Unavailable while a process in it is suspended, or is to be.
        """
        target = target_of(RUNNING, subject)
        fresh = target not in self._frozen
        self._frozen.add(target)
        try:
            await self._see_nobody_asleep(subject.cgroup)
        except BaseException:  # cancelled, too: then it is not frozen, and others may go on
            if fresh:
                self._frozen.discard(target)
            raise

    def thawed(self, subject: Subject) -> None:
        """It is frozen no more."""
        self._frozen.discard(target_of(RUNNING, subject))

    @asynccontextmanager
    async def ending(self, subject: Subject) -> AsyncIterator[bool]:
        """Within, nobody suspends or resumes it, and it can be ended without harm; whether it is suspended.

        Raises Gone; Refused where it was resumed and cannot be suspended.
        """
        key = (subject.pid, subject.started)
        self._ending.add(key)
        try:
            yield key in self._met and await self._see_through(self._rest(subject), subject)
        finally:
            self._ending.discard(key)

    # -- the steps ------------------------------------------------------------------------------------

    async def _suspend(self, subject: Subject, see: Callable[[], None]) -> None:
        async with self._turns.take((_SUSPEND, -self._level(subject.tenant), subject.pid)):
            self._see_it_lives_on(subject)
            see()
            await self._see_thawed(subject)
            self._meet(subject, resumed=False)
            keep = partial(self._keep, subject)
            await self._checkpoint.suspend(subject.pid, subject.started, keep)

    async def _resume(self, subject: Subject) -> None:
        rank = (_RESUME, int(self._level(subject.tenant)), subject.pid)
        async with self._turns.take(rank):
            self._see_it_lives_on(subject)
            await self._see_thawed(subject)
            freed = self._freed(subject)
            first = self._first_place(rank, frozenset(freed or ()))
            if first is not None:
                raise Unavailable(
                    f"process {first[2]} is to be resumed first, and waits for memory of the same "
                    f"card, for {_PLACE_SECONDS:g} s at most"
                )
            self._meet(subject, resumed=True)
            try:
                await self._checkpoint.resume(subject.pid, subject.started, freed)
            except NoRoom:
                self._take_place(rank, frozenset(freed or ()))
                raise
            except Unavailable:
                raise
            except AgentError:
                self._places.pop(rank, None)
                raise
            self._places.pop(rank, None)

    async def _rest(self, subject: Subject) -> bool:
        """Once nothing is being done with it: see it suspended if it was ever resumed."""
        pid, started = subject.pid, subject.started
        async with self._turns.take((_END, 0, pid)):
            resumed = self._met[pid, started]
            try:
                if await self._checkpoint.state(pid, started) in ("suspended", "unconfirmed"):
                    return True
                if resumed:
                    await self._see_thawed(subject)
                    await self._checkpoint.suspend(pid, started, partial(self._keep, subject))
            except (Refused, Unsupported, Unavailable) as error:
                if resumed:
                    raise Refused(
                        f"process {pid} was resumed by cuda-checkpoint, and to end it before it is "
                        f"suspended again can hang the host: {error}; it is left until it can be"
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

    # -- room -----------------------------------------------------------------------------------------

    async def _keep(self, subject: Subject, freed: Freed | None) -> None:
        """Into the ledger, wherever the process is held. Raises Refused where it is held nowhere."""
        targets = [t for t in _targets(subject) if self._ledger.held(t) is not None]
        for target in targets or _targets(subject)[:1]:
            await self._ledger.keep(target, freed)

    def _freed(self, subject: Subject) -> dict[str, int] | None:
        """What it has given up, as far as the ledger says."""
        entries = (self._ledger.held(target) for target in _targets(subject))
        found = (e.freed for e in entries if e is not None and e.freed is not None)
        return next((dict(freed) for freed in found), None)

    def _first_place(self, rank: Rank, cards: frozenset[str]) -> Rank | None:
        """The resumption of a smaller rank that has a place on one of these cards."""
        now = self._clock.now().mono
        self._places = {r: p for r, p in self._places.items() if now < p.last + _FORGOTTEN_SECONDS}
        if not self._orderly:
            return None
        before = (
            r
            for r, p in self._places.items()
            if r < rank and now < p.first + _PLACE_SECONDS and p.cards & cards
        )
        return min(before, default=None)

    def _take_place(self, rank: Rank, cards: frozenset[str]) -> None:
        now, known = self._clock.now().mono, self._places.get(rank)
        self._places[rank] = _Place(cards, known.first if known is not None else now, now)

    # -- who is frozen --------------------------------------------------------------------------------

    async def _see_thawed(self, subject: Subject) -> None:
        """Raises Unavailable while the agent freezes it in pulses."""
        self._frozen = {t for t in self._frozen if self._ledger.held(t) is not None}
        if not self._frozen:
            return
        path = await asyncio.to_thread(self._cgroup, subject.pid)
        groups = (t.subject.cgroup for t in self._frozen)
        around = next((group for group in groups if _is_in(path, group)), None)
        if around is not None:
            raise Unavailable(
                f"process {subject.pid} waits until {around} is thawed: cuda-checkpoint hangs on a "
                "frozen process"
            )

    async def _see_nobody_asleep(self, cgroup: str) -> None:
        """Raises Unavailable while a process in the cgroup is suspended, or in the tool's hands."""
        held = {t.subject.pid for t in self._ledger.entries if t.knob == SUSPENDED.name}
        ending = {key[0] for key in self._ending if key in self._met}
        for pid in sorted(held | ending | self._in_hand.keys()):
            try:
                path = await asyncio.to_thread(self._cgroup, pid)
            except Gone:
                continue
            if _is_in(path, cgroup):
                raise Unavailable(
                    f"{cgroup} is not frozen while process {pid} in it is suspended, or about to be: "
                    "cuda-checkpoint hangs on a frozen process"
                )

    async def _see_through(self, work: Awaitable[Done], subject: Subject) -> Done:
        """To its end also where the caller no longer waits: half a step is the worst of all."""
        task = asyncio.ensure_future(self._taken_in_hand(work, subject.pid))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        """Its error is the caller's; where none waits any more, the next look at the process shows it."""
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def _taken_in_hand(self, work: Awaitable[Done], pid: int) -> Done:
        self._in_hand[pid] = self._in_hand.get(pid, 0) + 1
        try:
            return await work
        finally:
            self._in_hand[pid] -= 1
            if not self._in_hand[pid]:
                del self._in_hand[pid]


def _targets(subject: Subject) -> tuple[Target, Target]:
    """Under which the ledger may hold a process: one that is to be ended is suspended before, too."""
    return target_of(SUSPENDED, subject), target_of(TERMINATED, subject)


def _is_in(path: str, cgroup: str) -> bool:
    return (path.rstrip("/") + "/").startswith(cgroup.rstrip("/") + "/")
