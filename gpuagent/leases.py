"""The overrides in force, kept over a restart in `overrides.json`."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Iterable, Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Corrupt, Gone, Refused
from gpuagent.model.lease import MOST_LEASES, Lease, Override, utc
from gpuagent.model.state import Event, Instant
from gpuagent.starts import replace_file

_VERSION = 1
_MOST_BYTES = 1 << 20


class _Book(msgspec.Struct):
    """`overrides.json`. Monotonic times are of the boot they belong to."""

    version: int
    boot: str
    leases: list[Lease]


class Leases:
    """At most `MOST_LEASES` overrides by name, at most one on a tenant or card.

    Each ends by the monotonic clock. After a restart within the same boot that clock goes on, so
    that nothing is changed by how long we were away or by a wall clock that was set; after another
    boot the wall clock decides, and no lease is longer than it was asked for.
    """

    def __init__(self, directory: str, *, boot: str, clock: Clock) -> None:
        """`boot` identifies this boot; empty where that is not known."""
        self._path = os.path.join(directory, "overrides.json")
        self._boot = boot
        self._clock = clock
        self._active: tuple[Lease, ...] = ()
        self._writing = asyncio.Lock()
        self._stale = asyncio.Event()
        """Whether something has ended that the file still has."""

    def begin(self) -> tuple[Event, ...]:
        """Take up what an earlier run left; what is to be told of that. Blocks.

        A file that cannot be read, or is not one of ours, is no override: nobody is held back by it.
        """
        now = self._clock.now()
        try:
            book = self._read()
        except (Corrupt, Refused) as error:
            text = f"no override of the run before is in force: {self._path}: {error}"
            return (Event("overrides-unreadable", now.mono, text, alert=True),)
        same_boot = bool(self._boot) and book.boot == self._boot
        resumed = [_resumed(lease, now, same_boot=same_boot) for lease in book.leases]
        self._active = _ordered(lease for lease in resumed if lease.until > now.mono)
        ended = [lease for lease in resumed if lease.until <= now.mono]
        if ended:
            self._stale.set()
        return tuple(
            Event(
                "override-expired",
                now.mono,
                f"{lease.words} has ended while the agent did not run",
                lease.subject,
            )
            for lease in ended
        )

    async def run(self) -> None:
        """Until cancelled: what has ended is taken out of the file."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            async with self._writing:
                # It has ended anyhow; the next write takes it out.
                with contextlib.suppress(Refused):
                    await asyncio.to_thread(self._write, self._active)

    def active(self, now: Instant) -> tuple[Lease, ...]:
        """Those in force, by name: the same object while nothing changes."""
        if any(lease.until <= now.mono for lease in self._active):
            self._active = tuple(lease for lease in self._active if lease.until > now.mono)
            self._stale.set()
        return self._active

    async def set(self, asked: Override) -> str:
        """Put an override in force; one of the same name is replaced. Returns a sentence on it.

        Raises Refused where it has a fault, where another is on the same subject, where there are
        too many, and where a restart would not remember it: then it is not in force.
        """
        if fault := asked.fault():
            raise Refused(fault)
        async with self._writing:
            now = self._clock.now()
            others = [lease for lease in self.active(now) if lease.id != asked.id]
            _find_room(asked, others)
            lease = Lease(
                **msgspec.structs.asdict(asked),
                until=now.mono + asked.ttl_seconds,
                until_wall=now.wall + asked.ttl_seconds,
                created_wall=now.wall,
            )
            await asyncio.to_thread(self._write, (*others, lease))
            # Of the others, one may have ended meanwhile.
            self._active = _ordered((*(x for x in others if x in self._active), lease))
        return f"override {lease.id} is in force until {utc(lease.until_wall)}"

    async def drop(self, name: str) -> str:
        """End an override before its time. Returns a sentence on it.

        Raises Gone where there is none of this name; Refused where a restart would bring it back.
        """
        async with self._writing:
            before = self.active(self._clock.now())
            self._active = tuple(lease for lease in before if lease.id != name)
            if len(self._active) == len(before):
                raise Gone(f"there is no override {name!r}")
            try:
                await asyncio.to_thread(self._write, self._active)
            except Refused as error:
                raise Refused(f"dropped, but a restart will bring it back: {error}") from error
        return f"override {name} is dropped"

    # -- the file ------------------------------------------------------------------------------------

    def _write(self, leases: Iterable[Lease]) -> None:
        """Raises Refused."""
        book = _Book(_VERSION, self._boot, list(leases))
        # The standard library's, since a tenant's name need not be UTF-8.
        text = json.dumps(msgspec.to_builtins(book))
        try:
            replace_file(self._path, text.encode())
        except OSError as error:
            raise Refused(
                f"a restart would not remember it: {self._path}: {error.strerror}"
            ) from error

    def _read(self) -> _Book:
        """Raises Refused where the file cannot be read, Corrupt where it is none of ours."""
        try:
            raw = _content(self._path)
        except FileNotFoundError:
            return _Book(_VERSION, self._boot, [])
        except OSError as error:
            raise Refused(f"it cannot be read: {error.strerror}") from error
        try:
            book = msgspec.convert(json.loads(raw), _Book)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"it is no list of overrides: {error}") from error
        if fault := _fault(book):
            raise Corrupt(fault)
        return book


def _content(path: str) -> bytes:
    """Raises OSError, and Corrupt for what is no plain file of a sensible size."""
    # Without waiting: who puts a pipe there must not keep the agent from starting.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Corrupt("it is no plain file")
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise Corrupt(f"it has more than {_MOST_BYTES} bytes")
    return raw


def _fault(book: _Book) -> str:
    """Why it cannot be what an agent of this version wrote; empty if it can."""
    if book.version != _VERSION:
        return f"it is of version {book.version}, and this agent writes {_VERSION}"
    if len(book.leases) > MOST_LEASES:
        return f"it has more than {MOST_LEASES} overrides"
    if len({x.id for x in book.leases}) < len(book.leases):
        return "two overrides in it have one name"
    if len({x.subject for x in book.leases}) < len(book.leases):
        return "two overrides in it are on the same tenant or card"
    return next((fault for x in book.leases if (fault := x.fault())), "")


def _resumed(lease: Lease, now: Instant, *, same_boot: bool) -> Lease:
    """As it goes on now. One whose time is over ends now or before."""
    left = lease.until - now.mono if same_boot else lease.until_wall - now.wall
    if same_boot and left <= lease.ttl_seconds:
        return lease
    left = min(left, lease.ttl_seconds)
    return msgspec.structs.replace(lease, until=now.mono + left, until_wall=now.wall + left)


def _find_room(asked: Override, others: Sequence[Lease]) -> None:
    """Raises Refused."""
    for lease in others:
        if lease.subject == asked.subject:
            raise Refused(
                f"{asked.subject.tenant or asked.subject.gpu} has an override already: set "
                f"{lease.id} anew, or drop it first"
            )
    if len(others) >= MOST_LEASES:
        raise Refused(f"there are {MOST_LEASES} overrides already, which is the most; drop one")


def _ordered(leases: Iterable[Lease]) -> tuple[Lease, ...]:
    return tuple(sorted(leases, key=lambda lease: lease.id))
