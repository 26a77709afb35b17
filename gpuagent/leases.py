"""The overrides in force, kept over a restart in `overrides.json`."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Corrupt, Gone, Refused, Unavailable
from gpuagent.keptfile import Disk, KeptFile, read_file
from gpuagent.model.lease import (
    MOST_LEASES,
    MOST_USED,
    USED_CORES,
    Lease,
    Override,
    Used,
    utc,
)
from gpuagent.model.plan import Plan
from gpuagent.model.state import Event, Instant

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

    def __init__(
        self, directory: str, *, boot: str, clock: Clock, disk: Disk | None = None
    ) -> None:
        """`boot` identifies this boot; empty where that is not known."""
        self._file = KeptFile(
            os.path.join(directory, "overrides.json"), self._content, clock=clock, disk=disk
        )
        self._boot = boot
        self._clock = clock
        self._active: tuple[Lease, ...] = ()
        self._lingering: dict[str, None] = {}
        """Names of those that were dropped and may be in the file still, as far as anybody was told."""
        self._used: dict[str, tuple[Used, ...]] = {}
        """By name, what the tenant of an override used before it was held."""

    @property
    def trouble(self) -> str:
        """Why a restart would find others in force; empty while the disk takes what it is given."""
        return self._file.trouble

    def begin(self) -> tuple[Event, ...]:
        """Take up what an earlier run left; what is to be told of that. Blocks.

        A file that cannot be read, or is not one of ours, is no override: nobody is held back by it.
        """
        now = self._clock.now()
        try:
            book = self._read()
        except (Corrupt, Refused) as error:
            text = f"no override of the run before is in force: {self._file.path}: {error}"
            return (Event("overrides-unreadable", now.mono, text, alert=True),)
        same_boot = bool(self._boot) and book.boot == self._boot
        resumed = [_resumed(lease, now, same_boot=same_boot) for lease in book.leases]
        self._active = _ordered(lease for lease in resumed if lease.until > now.mono)
        self._used = {lease.id: lease.used for lease in self._active if lease.used}
        ended = [lease for lease in resumed if lease.until <= now.mono]
        if ended:
            self._file.outdated()
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
        """Until cancelled: the file is made to hold what is in force, however often that takes."""
        await self._file.run()

    async def close(self) -> None:
        """Write what the file does not hold yet, at the end; for no longer than a write may take."""
        await self._file.close()

    def active(self, now: Instant) -> tuple[Lease, ...]:
        """Those in force, by name: the same object while nothing changes."""
        if any(lease.until <= now.mono for lease in self._active):
            self._active = tuple(lease for lease in self._active if lease.until > now.mono)
            self._file.outdated()
        return self._active

    def learn(self, used: Mapping[str, tuple[Used, ...]]) -> None:
        """Keep what tenants used before they were held, by override, for a run after this one."""
        names = {lease.id for lease in self._active}
        known = {n: u[:MOST_USED] for n, u in {**self._used, **used}.items() if n in names}
        if known != self._used:
            self._used = known
            self._file.outdated()

    async def set(self, asked: Override) -> str:
        """Put an override in force; one of the same name is replaced. Returns a sentence on it.

        Raises Refused where it has a fault, where another is on the same subject, and where there are
        too many; Unavailable where a restart would not remember it. Then it is not in force.
        """
        if fault := asked.fault():
            raise Refused(fault)
        async with self._file.changing:
            now = self._clock.now()
            others = [lease for lease in self.active(now) if lease.id != asked.id]
            _find_room(asked, others)
            lease = Lease(
                **msgspec.structs.asdict(asked),
                until=now.mono + asked.ttl_seconds,
                until_wall=now.wall + asked.ttl_seconds,
                created_wall=now.wall,
            )
            try:
                await self._file.write(self._made((*others, lease)))
            except Unavailable as error:
                raise Unavailable(
                    f"not in force, since a restart would not remember it: {error}"
                ) from error
            self._lingering.pop(asked.id, None)
            # Of the others, one may have ended meanwhile.
            self._active = _ordered((*(x for x in others if x in self._active), lease))
        return f"override {lease.id} is in force until {utc(lease.until_wall)}"

    async def drop(self, name: str) -> str:
        """End an override before its time. Returns a sentence on it.

        Raises Gone where there is none of this name; Unavailable where a restart would bring it back,
        as long as that is so.
        """
        async with self._file.changing:
            before = self.active(self._clock.now())
            self._active = tuple(lease for lease in before if lease.id != name)
            if len(self._active) == len(before) and name not in self._lingering:
                raise Gone(f"there is no override {name!r}")
            self._lingering = dict.fromkeys([*self._lingering, name][-MOST_LEASES:])
            try:
                await self._file.write()
            except Unavailable as error:
                raise Unavailable(f"dropped, but a restart may bring it back: {error}") from error
            del self._lingering[name]
        return f"override {name} is dropped"

    # -- the file ------------------------------------------------------------------------------------

    def _content(self) -> Callable[[], bytes]:
        return self._made(self._active)

    def _made(self, leases: Sequence[Lease]) -> Callable[[], bytes]:
        """What makes the text of the file, of what is known now: that takes a while."""
        used = self._used

        def make() -> bytes:
            text = self._text(leases, used)
            if len(text) > _MOST_BYTES:
                # What was used can be measured again, an override cannot.
                text = self._text(leases, {})
            return text.encode()

        return make

    def _text(self, leases: Iterable[Lease], used: Mapping[str, tuple[Used, ...]]) -> str:
        told = [msgspec.structs.replace(x, used=used.get(x.id, ())) for x in leases]
        # The standard library's, since a tenant's name need not be UTF-8.
        return json.dumps(msgspec.to_builtins(_Book(_VERSION, self._boot, told)))

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
            raise Corrupt(f"it is no list of overrides: {error}") from error
        if fault := _fault(book):
            raise Corrupt(fault)
        return book


def used_in(plan: Plan) -> dict[str, tuple[Used, ...]]:
    """What tenants used before the overrides that a plan carries out held them, by override."""
    found: dict[str, tuple[Used, ...]] = {}
    for setting in plan.settings:
        name = setting.rule.removeprefix("override/")
        cores = dict(setting.numbers).get(USED_CORES)
        if setting.blocked is None and name != setting.rule and cores is not None:
            used = Used(setting.subject.cgroup, setting.subject.inode, cores)
            found[name] = (*found.get(name, ()), used)
    return found


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
        return msgspec.structs.replace(lease, resumed=True)
    left = min(left, lease.ttl_seconds)
    return msgspec.structs.replace(
        lease,
        until=now.mono + left,
        until_wall=now.wall + left,
        resumed=True,
        used=lease.used if same_boot else (),
    )


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
