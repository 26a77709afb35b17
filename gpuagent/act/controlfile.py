"""One control file of every cgroup: read from the cgroup, written there or through its systemd unit.

What a file reads is the truth, whoever has written it. Where a unit manages the cgroup, systemd is
asked to write, since it would undo what is written past it; the identity of such a target names the
unit and what it had before, so that the ledger is enough to give it back after a crash.

A unit outlives its cgroup: at a restart systemd writes what it was told into the new one. So a value
set through a unit is given back when its cgroup has gone, too, and until then nobody takes what the
new cgroup reads for its own.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.ports import Cgroups, Real, Units

T = TypeVar("T")

_THREADS = 16


class _Managed(msgspec.Struct, frozen=True):
    """The part of an identity that says through which unit the value was set."""

    unit: str
    before: str
    """`Units.before`."""


class ControlFile:
    """The calls block, so they run in threads of their own: a file that hangs must not take the
    threads that the rest of the agent works with.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        file: str,
        executor: Executor | None = None,
        *,
        units: Units | None = None,
        default: str = "",
        part: Callable[[str], str] = str.strip,
    ) -> None:
        """`default` is what a cgroup has whose controller is not enabled, and then no file; `part`
        gives the part of the file that is turned. `units` is None where there is no systemd.
        """
        self._cgroups = cgroups
        self._units = units
        self.name = file
        self._default = default
        self._part = part
        self._executor = executor or ThreadPoolExecutor(_THREADS, thread_name_prefix=file)
        self._holders: dict[str, int] = {}
        """Inode of the cgroup for which each path's unit was last told something."""

    def unit(self, subject: Subject) -> str:
        """The unit that manages the cgroup; empty for none."""
        return "" if self._units is None else self._units.manages(subject.cgroup)

    async def read(self, subject: Subject) -> str:
        """The file as text. Raises Gone also where another cgroup has taken the path."""
        held = self._holders.get(subject.cgroup, subject.inode)
        if held != subject.inode:
            await self._call(partial(self._inode, subject))
            raise Unavailable(
                f"{subject.cgroup} has been made anew with what was set before; that is given back first"
            )
        try:
            return await self._call(partial(self._read, subject))
        except Unsupported:
            if self._default and self.unit(subject):
                return self._default  # systemd has the controller enabled when it is told a value
            raise

    async def write(self, subject: Subject, text: str) -> None:
        """Raises Unavailable while systemd does not answer, although the file is written then, too:
        systemd may yet write another value over it.
        """
        write = partial(self._cgroups.write, subject.cgroup, subject.inode, self.name, text)
        unit = self.unit(subject)
        if not unit:
            await self._call(write)
            return
        assert self._units is not None
        await self._call(partial(self._inode, subject))
        self._holders[subject.cgroup] = subject.inode
        try:
            await self._units.write(unit, self.name, text)
        except Unavailable:
            with contextlib.suppress(Gone, Refused, Unsupported):
                await self._call(write)
            raise

    async def identity(self, subject: Subject) -> str:
        """TREE/INODE, since another tree may have the same path and the same inode.

        After a space, where a unit manages it: which, and what it has before our first write.
        """
        place = await self._call(partial(self._identity, subject))
        unit = self.unit(subject)
        if not unit:
            return place
        assert self._units is not None
        before = await self._units.before(unit, subject.cgroup, self.name)
        return f"{place} {msgspec.json.encode(_Managed(unit, before)).decode()}"

    async def verify(self, subject: Subject, identity: str) -> None:
        place, managed = _parts(identity)
        if managed is not None:
            self._holders.setdefault(subject.cgroup, subject.inode)
        await self._call(partial(self._verify, subject, place))

    async def owner(self, subject: Subject) -> int:
        try:
            return await self._call(partial(self._owner, subject))
        except Unsupported:
            if self._default and self.unit(subject):
                return 0
            raise

    async def let_go(
        self,
        subject: Subject,
        identity: str,
        ours: Sequence[str],
        *,
        alike: Callable[[str, str], bool],
    ) -> None:
        """Give back what the unit was told. What the file reads stays, if it is somebody else's.

        Unless it was written past systemd where only our write had the controller enabled: then the
        file goes. `alike` says whether two texts stand for the same.
        """
        _, managed = _parts(identity)
        if managed is None:
            return
        if self._units is None:
            raise Unavailable(f"{managed.unit} was set through systemd, which is not here")
        reads = await self._reads(subject)
        await self._units.give_back(managed.unit, self.name, managed.before, ours)
        after = await self._reads(subject)
        if reads is not None and after is not None and not alike(reads, after):
            await self._call(
                partial(self._cgroups.write, subject.cgroup, subject.inode, self.name, reads)
            )
        if self._holders.get(subject.cgroup) == subject.inode:
            del self._holders[subject.cgroup]

    # -- in threads ----------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def _reads(self, subject: Subject) -> str | None:
        """None where there is no such cgroup or file any more."""
        try:
            return await self._call(partial(self._read, subject))
        except (Gone, Unsupported):
            return None

    def _inode(self, subject: Subject) -> int:
        inode = self._cgroups.inode(subject.cgroup)
        if inode != subject.inode:
            raise Gone(f"another cgroup has taken the place of {subject.cgroup}")
        return inode

    def _identity(self, subject: Subject) -> str:
        return f"{self._cgroups.tree()}/{self._inode(subject)}"

    def _verify(self, subject: Subject, place: str) -> None:
        tree, _, inode = place.rpartition("/")
        # Entries of an earlier version name no tree.
        if tree and tree != self._cgroups.tree():
            raise Unavailable(
                f"{subject.cgroup} was held in another cgroup tree than paths.cgroup_root shows now; "
                "set it as it was, so that the original can be put back"
            )
        if str(self._inode(subject)) != inode:
            raise Gone(f"another cgroup has taken the place of {subject.cgroup}")

    def _owner(self, subject: Subject) -> int:
        self._inode(subject)
        return self._cgroups.owner(subject.cgroup, self.name)

    def _read(self, subject: Subject) -> str:
        self._inode(subject)
        return self._part(self._cgroups.read(subject.cgroup, self.name))


class FileKnob:
    """A knob that is one control file. What its text means is said by those who inherit."""

    knob: Knob

    def __init__(self, file: ControlFile) -> None:
        self.file = file

    def value(self, raw: str) -> float:
        """What a text of the file stands for. Raises ValueError for one that is not understood."""
        raise NotImplementedError

    async def get(self, subject: Subject) -> Real:
        raw = await self.file.read(subject)
        try:
            return Real(self.value(raw), raw)
        except (ValueError, ZeroDivisionError) as error:
            text = f"{self.file.name} of {subject.cgroup} reads {raw[:80]!r}"
            raise Refused(f"{text}, which is not understood") from error

    async def set(self, subject: Subject, raw: str) -> None:
        await self.file.write(subject, raw)

    async def identity(self, subject: Subject) -> str:
        return await self.file.identity(subject)

    async def verify(self, subject: Subject, identity: str) -> None:
        await self.file.verify(subject, identity)

    async def owner(self, subject: Subject) -> int:
        return await self.file.owner(subject)

    async def let_go(self, subject: Subject, identity: str, ours: Sequence[str]) -> None:
        await self.file.let_go(subject, identity, ours, alike=self._alike)

    def _alike(self, one: str, other: str) -> bool:
        try:
            return one == other or self.value(one) == self.value(other)
        except (ValueError, ZeroDivisionError):
            return False


def _parts(identity: str) -> tuple[str, _Managed | None]:
    """Where it is, and the unit through which it was set; None for none. Raises Refused."""
    place, _, more = identity.partition(" ")
    if not more:
        return place, None
    try:
        return place, msgspec.json.decode(more, type=_Managed)
    except msgspec.MsgspecError as error:
        raise Refused(f"the ledger does not say how it was set ({error})") from error
