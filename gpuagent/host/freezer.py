"""Freezing control groups in pulses: what the agent does of it, and keeping the guard that does it.

The guard (`guard`) is started with the first freeze and stays. When it dies, what it may have left
frozen is thawed here at once, through files that were open all along; then a new one takes over, after
a pause that grows. An agent and a guard killed at the same moment leave a cgroup frozen: it reads as
frozen by nobody knows whom, and the ledger knows whether that was us.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from gpuagent.clock import patiently
from gpuagent.config import Freeze
from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.host import guard
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.guardline import ANSWER_SECONDS, GuardLine
from gpuagent.ports import FreezeState

T = TypeVar("T")

BEAT_SECONDS = 0.5
"""Between signs of life, while anything is frozen."""
PAUSES = (0.05, 0.5, 1.0, 2.0, 4.0)
"""Before the next guard; from the first again once one has lived for `SOUND_SECONDS`."""
SOUND_SECONDS = 60.0
WAIT_SECONDS = 5.0
"""For so long after the death of a sound guard nothing is said of what it froze: the next one comes."""
_MOVE = "run it in a service of its own, as the shipped unit does"
_TOTALS_KEPT = 1024
_THREADS = 4
_ANOTHER = "another"
_NO_GUARD = "nothing keeps a guard here: only a running agent freezes"
_HIS = "somebody else has frozen or thawed {}; it is left so until its cgroup.freeze reads 0"
_DIED = "the guard has died; what it froze is thawed until there is a new one"


class _Hold:
    """A cgroup that the guard pulses for us."""

    def __init__(self, path: str, inode: int, number: int, fds: tuple[int, int]) -> None:
        self.path = path
        self.inode = inode
        self.number = number
        self.fds = fds
        """Of cgroup.freeze and cgroup.events."""
        self.ratio = 1.0
        self.answer: asyncio.Future[str] | None = None
        """While somebody waits: empty for done, else why not."""
        self.past = (0, 0.0)
        """Pulses and seconds before this guard."""

    def answered(self, why: str) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(why)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # gone, so not frozen either
            os.pwrite(self.fds[0], b"0\n", 0)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class CgroupFreezer:
    """Implements `ports.Freezer`. `run` keeps the guard: without it there is only thawing."""

    def __init__(self, tree: CgroupTree, settings: Freeze) -> None:
        self._tree = tree
        self._settings = settings
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="freeze")
        self._holds: dict[int, _Hold] = {}
        """By inode."""
        self._numbers = 0
        self._others: set[int] = set()
        """Inodes of those that somebody else has taken from us."""
        self._totals: dict[int, tuple[int, float]] = {}
        self._line: GuardLine | None = None
        self._needed = asyncio.Event()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._serving = False
        self._why = _NO_GUARD
        self._failures = 0
        self._waits_until = float("-inf")

    @property
    def guard_pid(self) -> int | None:
        """Process number of the guard; None while there is none."""
        return None if self._line is None else self._line.process.pid

    @property
    def least_ratio(self) -> float:
        least = guard.RUNNING_LEAST_SECONDS
        return least / (least + self._settings.pulse)

    def reconfigure(self, settings: Freeze) -> None:
        """From the next change of a ratio on."""
        self._settings = settings

    # -- ports.Freezer --------------------------------------------------------------------------------

    async def state(self, path: str, inode: int) -> FreezeState:
        try:
            frozen = await self._call(lambda: self._told(path, inode))
        except Gone:
            self._let_go(inode)
            self._others.discard(inode)
            self._totals.pop(inode, None)
            raise
        hold = self._holds.get(inode)
        if hold is not None and self._line is not None:
            return self._said(inode, hold.ratio, "us")
        if hold is not None and self._now < self._waits_until:
            raise Unavailable(self._why)
        self._let_go(inode)
        if frozen:
            return self._said(inode, 0.0, "another" if inode in self._others else "unknown")
        self._others.discard(inode)
        return self._said(inode, 1.0, "nobody")

    async def set(self, path: str, inode: int, ratio: float) -> None:
        if inode in self._others:
            raise Refused(_HIS.format(path))
        if ratio >= 1:
            await self._thaw(path, inode)
            return
        if not ratio >= self.least_ratio * (1 - 1e-9):
            raise Refused(
                f"{ratio:g} is less than the {self.least_ratio:.3f} that must be left: a longer [freeze] "
                "pulse allows less"
            )
        await self._call(lambda: self._see_we_are_elsewhere(path, inode))
        line = await self._guard()
        hold = self._holds.get(inode)
        if hold is None:
            await self._take(line, path, inode, ratio)
        else:
            hold.ratio = ratio
            line.say(*self._order(hold))

    async def _take(self, line: GuardLine, path: str, inode: int, ratio: float) -> None:
        fds = await self._call(lambda: self._opened(path, inode))
        self._numbers += 1
        hold = self._holds[inode] = _Hold(path, inode, self._numbers, fds)
        hold.past = self._totals.get(inode, (0, 0.0))
        hold.ratio = ratio
        hold.thaw()  # where an earlier run of ours has left it frozen
        why = await self._asked(line, hold, *self._order(hold), fds=fds)
        if why:
            self._let_go(inode)
        if why == _ANOTHER:
            raise Refused(_HIS.format(path))
        if why:
            raise Unavailable(f"{path} was not frozen: {why}")

    async def _thaw(self, path: str, inode: int) -> None:
        hold, line = self._holds.get(inode), self._line
        if hold is None:
            await self._call(lambda: self._write_thawed(path, inode))
            return
        why = "there is no guard" if line is None else await self._asked(line, hold, "thaw")
        if why == _ANOTHER:
            raise Refused(_HIS.format(path))
        self._let_go(inode)

    async def _asked(
        self, line: GuardLine, hold: _Hold, *words: str, fds: tuple[int, ...] = ()
    ) -> str:
        """What the guard answers: empty for done, else why not."""
        answer = hold.answer = asyncio.get_running_loop().create_future()
        if words == ("thaw",):
            words = ("thaw", str(hold.number))
        try:
            line.say(*words, fds=fds)
            await patiently(asyncio.wait({answer}), self._settings.pulse + ANSWER_SECONDS)
            return answer.result() if answer.done() else "the guard does not answer"
        except Unavailable as error:
            return str(error)
        finally:
            hold.answer = None

    # -- files ----------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _told(self, path: str, inode: int) -> bool:
        """Whether the cgroup is told to be frozen."""
        text = self._tree.read(path, "cgroup.freeze").strip()
        if self._tree.inode(path) != inode:
            raise Gone(f"another cgroup has taken the place of {path}")
        return text == "1"

    def _opened(self, path: str, inode: int) -> tuple[int, int]:
        freeze = self._tree.opened(path, inode, "cgroup.freeze", os.O_RDWR)
        try:
            return freeze, self._tree.opened(path, inode, "cgroup.events", os.O_RDONLY)
        except AgentError:
            os.close(freeze)
            raise

    def _write_thawed(self, path: str, inode: int) -> None:
        if self._told(path, inode):
            self._tree.write(path, inode, "cgroup.freeze", "0")

    def _see_we_are_elsewhere(self, path: str, inode: int) -> None:
        """Raises Refused where we live in the cgroup or below it: nobody would thaw us."""
        above = _own_cgroup()
        if path == "/" or not above.startswith("/") or ".." in above.split("/"):
            raise Refused(
                f"{path} is not frozen, since the agent may live in it: the tenant needs a cgroup of its own"
            )
        while above != "/":
            with contextlib.suppress(Gone):
                if above == path or self._tree.inode(above) == inode:
                    raise Refused(f"{path} is not frozen, since the agent lives in it: {_MOVE}")
            above = above.rpartition("/")[0] or "/"

    # -- the guard ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a guard from the first freeze on, until cancelled; then everything is thawed."""
        self._serving = True
        try:
            while True:
                await self._needed.wait()
                began = self._now
                await self._serve()
                if self._now - began >= SOUND_SECONDS:
                    self._failures = 0
                if not self._holds:
                    self._needed.clear()
                pause = PAUSES[min(self._failures, len(PAUSES) - 1)]
                self._failures += 1
                await asyncio.sleep(pause)
        finally:
            self._serving = False
            self._why = _NO_GUARD
            for inode in list(self._holds):
                self._let_go(inode)

    async def _serve(self) -> None:
        """One life of a guard."""
        self._down.clear()
        try:
            line = self._line = GuardLine(self._hear, self._died)
        except OSError as error:
            self._why = (
                f"no guard can be started: {error.strerror}; see to the limits of gpuagent.service"
            )
            return
        at_once = False
        try:
            for hold in self._holds.values():
                hold.past = self._totals.get(hold.inode, (0, 0.0))
                line.say(*self._order(hold), fds=hold.fds)
            self._up.set()
            while not await patiently(self._down.wait(), BEAT_SECONDS):
                if self._holds:
                    line.beat()
        except Unavailable:
            at_once = True
            line.process.kill()
            self._died()
        finally:
            self._line = None
            self._up.clear()
            await line.end(at_once=at_once)
            # One that hung in a write may have come back to it before it died.
            for hold in self._holds.values():
                hold.thaw()

    def _order(self, hold: _Hold) -> tuple[str, ...]:
        return "pulse", str(hold.number), repr(self._settings.pulse), repr(hold.ratio)

    async def _guard(self) -> GuardLine:
        """The guard, awaited for a moment where there is none. Raises Unavailable."""
        if not self._serving:
            raise Unavailable(self._why)
        self._needed.set()
        await patiently(self._up.wait(), ANSWER_SECONDS)
        if self._line is None:
            raise Unavailable(self._why)
        return self._line

    def _died(self) -> None:
        """Thaw what it may have left frozen, before anything else is done."""
        for hold in self._holds.values():
            hold.thaw()
            hold.answered("the guard has died")
        self._line = None
        self._up.clear()
        self._why = _DIED
        if self._now >= self._waits_until + SOUND_SECONDS:
            self._waits_until = self._now + WAIT_SECONDS
        self._down.set()

    def _hear(self, words: list[str]) -> None:
        match words:
            case ["beat", *told]:
                for each in told:
                    self._count(*each.split(":"))
            case ["frozen", number]:
                self._answer(number, "")
            case ["thawed", number, pulses, seconds]:
                self._count(number, pulses, seconds)
                self._answer(number, "")
            case ["lost", number, *why]:
                self._lost(number, " ".join(why))

    def _of(self, number: str) -> _Hold | None:
        return next((h for h in self._holds.values() if str(h.number) == number), None)

    def _answer(self, number: str, why: str) -> None:
        if (hold := self._of(number)) is not None:
            hold.answered(why)

    def _lost(self, number: str, why: str) -> None:
        hold = self._of(number)
        if hold is None:
            return
        if why == _ANOTHER:
            self._others.add(hold.inode)
        hold.answered(why)
        del self._holds[hold.inode]
        hold.close()

    def _let_go(self, inode: int) -> None:
        """Thaw it and forget it, and have the guard forget it."""
        hold = self._holds.pop(inode, None)
        if hold is None:
            return
        if self._line is not None:
            with contextlib.suppress(Unavailable):
                self._line.say("thaw", str(hold.number))
        hold.thaw()
        hold.close()

    # -- small things ---------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _said(
        self, inode: int, ratio: float, by: Literal["nobody", "us", "another", "unknown"]
    ) -> FreezeState:
        return FreezeState(ratio, by, *self._totals.get(inode, (0, 0.0)))

    def _count(self, number: str, pulses: str, seconds: str) -> None:
        hold = self._of(number)
        if hold is None:
            return
        while len(self._totals) >= _TOTALS_KEPT and hold.inode not in self._totals:
            del self._totals[next(iter(self._totals))]
        before, lasted = hold.past
        self._totals[hold.inode] = (before + int(pulses), lasted + float(seconds))


def _own_cgroup() -> str:
    """Our cgroup v2 path; empty where we have none."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), "")
