"""The runs that were admitted, kept over a restart in `runs.json`; and the last refusals, in memory."""

import asyncio
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Corrupt, Refused, Unavailable
from gpuagent.keptfile import Disk, KeptFile, read_file
from gpuagent.model.run import (
    MOST_RUNS,
    REFUSALS_OF_USER,
    REFUSED_USERS,
    Key,
    Refusal,
    Reservation,
    RunList,
)
from gpuagent.model.state import Event

_VERSION = 1
_MOST_BYTES = 4 << 20


class _Book(msgspec.Struct):
    """`runs.json`. A pid and a start time name a process within one boot only."""

    version: int
    boot: str
    runs: list[Reservation]


class RunBook:
    """At most `MOST_RUNS`, each of one process, each with a name of its own. Implements `ports.Runs`.

    A run lasts as long as its process: whether that lives is for others to see, who say `end`.
    """

    def __init__(
        self, directory: str, *, boot: str, clock: Clock, disk: Disk | None = None
    ) -> None:
        """`boot` identifies this boot; empty where that is not known."""
        self._file = KeptFile(
            os.path.join(directory, "runs.json"), self._content, clock=clock, disk=disk
        )
        self._boot = boot
        self._clock = clock
        self._active: tuple[Reservation, ...] = ()
        self._refused: dict[int, tuple[Refusal, ...]] = {}
        """By user, those who were refused last at the end."""
        self._count = 0
        self._told = RunList()

    @property
    def trouble(self) -> str:
        """Why a restart would find others; empty while the disk takes what it is given."""
        return self._file.trouble

    @property
    def changing(self) -> asyncio.Lock:
        """Held by whoever decides on a run, until that is in here or refused: one at a time."""
        return self._file.changing

    def begin(self) -> tuple[Event, ...]:
        """Take up what an earlier run of the agent left; what is to be told of that. Blocks.

        Whether they live yet is not known here. A file that cannot be read, or is not one of ours, is
        no reservation: its tenants go on, and are known as what is found.
        """
        try:
            book = self._read()
        except (Corrupt, Refused) as error:
            text = (
                f"what `gpuagent run` has started before is not known: {self._file.path}: {error}"
            )
            return (Event("runs-unreadable", self._clock.now().mono, text, alert=True),)
        if self._boot and book.boot == self._boot:
            self._put(book.runs)
        elif book.runs:
            self._file.outdated()
        return ()

    async def run(self) -> None:
        """Until cancelled: the file is made to hold what is in force, however often that takes."""
        await self._file.run()

    async def close(self) -> None:
        """Write what the file does not hold yet, at the end; for no longer than a write may take."""
        await self._file.close()

    def active(self) -> tuple[Reservation, ...]:
        """By name: the same object while nothing changes."""
        return self._active

    def told(self) -> RunList:
        """All that readers may be told: the same object while nothing changes."""
        return self._told

    async def add(self, made: Reservation) -> None:
        """Take in a run that was admitted. To be called while `changing`.

        Raises Unavailable where a restart would not remember it. Then it is not in here.
        """
        try:
            await self._file.write(self._made((*self._active, made)))
        except Unavailable as error:
            raise Unavailable(
                f"not started, since a restart of the agent would not remember it: {error}"
            ) from error
        # Of the others, one may have ended meanwhile.
        self._put((*self._active, made))

    def amend(self, made: Reservation) -> None:
        """Know more of a run that is in here. The file follows."""
        if any(r.key == made.key for r in self._active):
            self._put((*(r for r in self._active if r.key != made.key), made))
            self._file.outdated()

    def end(self, keys: Collection[Key]) -> None:
        """Forget these. The file follows: a process that has ended stays so."""
        left = tuple(r for r in self._active if r.key not in keys)
        if len(left) < len(self._active):
            self._put(left)
            self._file.outdated()

    def refuse(self, refusal: Refusal) -> Refusal:
        """Remember a refusal; the same, numbered."""
        self._count += 1
        made = msgspec.structs.replace(refusal, number=self._count)
        before = self._refused.pop(made.uid, ())
        self._refused[made.uid] = (*before, made)[-REFUSALS_OF_USER:]
        while len(self._refused) > REFUSED_USERS:
            del self._refused[next(iter(self._refused))]
        self._tell()
        return made

    def _put(self, runs: Iterable[Reservation]) -> None:
        self._active = tuple(sorted(runs, key=lambda r: r.name))
        self._tell()

    def _tell(self) -> None:
        refused = (r for some in self._refused.values() for r in some)
        self._told = RunList(self._active, tuple(sorted(refused, key=lambda r: r.number)))

    # -- the file ------------------------------------------------------------------------------------

    def _content(self) -> Callable[[], bytes]:
        return self._made(self._active)

    def _made(self, runs: Sequence[Reservation]) -> Callable[[], bytes]:
        def make() -> bytes:
            book = _Book(_VERSION, self._boot, list(runs))
            # The standard library's, since the path of a cgroup need not be UTF-8.
            return json.dumps(msgspec.to_builtins(book)).encode()

        return make

    def _read(self) -> _Book:
        """Raises Refused where the file cannot be read, Corrupt where it is none of ours."""
        try:
            raw = read_file(self._file.path, _MOST_BYTES, trusted=True)
        except FileNotFoundError:
            return _Book(_VERSION, self._boot, [])
        except OSError as error:
            raise Refused(f"it cannot be read: {error.strerror}") from error
        if len(raw) > _MOST_BYTES:
            raise Corrupt(f"it has more than {_MOST_BYTES} bytes")
        try:
            book = msgspec.convert(json.loads(raw), _Book)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"it is no list of runs: {error}") from error
        if fault := _fault(book):
            raise Corrupt(fault)
        return book


def _fault(book: _Book) -> str:
    """Why it cannot be what an agent of this version wrote; empty if it can."""
    if book.version != _VERSION:
        return f"it is of version {book.version}, and this agent writes {_VERSION}"
    if len(book.runs) > MOST_RUNS:
        return f"it has more than {MOST_RUNS} runs"
    if len({r.key for r in book.runs}) < len(book.runs):
        return "two runs in it are of one process"
    if len({r.name for r in book.runs}) < len(book.runs):
        return "two runs in it have one name"
    return next((fault for r in book.runs if (fault := r.fault())), "")
