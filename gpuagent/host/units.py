"""systemd's units: their limits are set as runtime properties over D-Bus, and taken back without a trace.

systemd owns the control files of its units and writes them anew from the unit's properties, at a
daemon-reload for one. So the property is set, and systemd writes the file. It writes a drop-in too,
under /run/systemd/system.control/, which would outlive putting the value back: it would mask later
edits of the unit, and come back with the unit's next start.

**Giving back** sets the property to what it was and then removes the drop-in, or writes the one that
somebody else had there before. There is no daemon-reload from us: it makes systemd apply all of every
unit's settings anew, the device filters of containers included, which can cut them off from their GPUs
(FACTS 5). What is left without one, seen with systemd 252: the unit in systemd's memory is as it was,
so that nothing depends on the file any more; but systemd remembers that it has read a drop-in which is
not there now, and says so until the unit is next unloaded (which a stop does) or somebody else reloads
(`NeedDaemonReload`, and a warning of `systemctl status`). A warning is the least harm of the three: a
reload is worse, and so is a file that stays, if only an empty one, for it masks one of the same name.

**Where a controller is not enabled** below a slice (cpu below system.slice on a plain Debian 12), to set
the property has systemd enable it, and then apply all settings of every unit in that slice anew, for
each of them gets the controller. Seen with systemd 252: what a runtime had written into the files of
a scope beside ours was gone. So it is refused while there is a scope in such a slice that may be a
container's.
"""

import asyncio
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.host.bus import CALL_SECONDS, SystemBus
from gpuagent.host.unitfiles import (
    SETTINGS,
    Stood,
    kept,
    properties_of,
    put_dropin,
    read_dropin,
    told,
    values,
)

_MANAGER = "/org/freedesktop/systemd1"
_MANAGER_INTERFACE = "org.freedesktop.systemd1.Manager"
_PROPERTIES_INTERFACE = "org.freedesktop.DBus.Properties"
_INTERFACES = {"service": "Service", "slice": "Slice", "scope": "Scope"}
_UNIT = re.compile(r"_?([A-Za-z0-9:_.\\@-][A-Za-z0-9:_.\\@-]{0,240}\.(service|slice|scope))")
"""As it is in a cgroup's path: with an underscore before it where the kernel has a file of that name."""
_SLICES = re.compile(r"/(?:[A-Za-z0-9:_.\\-]+\.slice/)*")
_KUBELETS = re.compile(r"/(?:[^/]*-)?kubepods(?:-[^/]*)?\.slice(?:/|$)")
_ENABLES = {"cpu": "CPUWeight=100", "io": "IOWeight=100", "memory": "MemoryAccounting=yes"}
_HARMLESS = re.compile(r"init\.scope|session-[^/]*\.scope")
"""Scopes without a device filter that somebody else has written."""


class SystemdUnits:
    """Implements `ports.Units`. For one event loop at a time."""

    def __init__(
        self,
        *,
        clock: Clock,
        own_slice: str,
        cgroup_root: str,
        run: str = "/run",
        hierarchy: str = "/sys/fs/cgroup",
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        """`own_slice` has the scopes of our own making; `run` is where systemd and the bus are, and
        `hierarchy` the tree in which systemd makes its cgroups.
        """
        self._socket = f"{run}/dbus/system_bus_socket"
        self._booted = f"{run}/systemd/system"
        self._control = f"{run}/systemd/system.control"
        self.bus = SystemBus(f"unix:path={self._socket}", clock=clock, call_seconds=call_seconds)
        """The one connection, for whoever else asks systemd for something."""
        self._own = f"/{own_slice}/"
        self._root = cgroup_root.rstrip("/")
        self._hierarchy = hierarchy

    def manages(self, cgroup: str) -> str:
        above, _, last = cgroup.rpartition("/")
        found = _UNIT.fullmatch(last)
        if found is None or not _SLICES.fullmatch(f"{above}/") or _KUBELETS.search(cgroup):
            return ""
        if found[2] == "scope" and self._own not in f"{above}/":
            return ""
        return found[1] if self._there() else ""

    async def before(self, unit: str, cgroup: str, file: str) -> str:
        path = await self._path(unit)
        where = await self._get(path, unit, "ControlGroup")
        if where != cgroup:
            raise Refused(f"{unit} has its processes in {where!r}, not in {cgroup}")
        await asyncio.to_thread(self._may_enable, cgroup, file)
        names = properties_of(file)
        now = {name: int(await self._get(path, unit, name)) for name in names}
        dropins = await asyncio.to_thread(self._dropins, unit, names)
        return msgspec.json.encode(Stood(now, dropins)).decode()

    async def write(self, unit: str, file: str, text: str) -> None:
        await self._set(unit, values(file, text))

    async def give_back(self, unit: str, file: str, before: str, ours: Sequence[str]) -> None:
        stood = _stood(before, file)
        wrote = [each for text in ours if (each := _told(file, text)) is not None]
        await self._restore_properties(unit, stood, wrote)
        await asyncio.to_thread(self._restore_dropins, unit, stood, wrote)

    def close(self) -> None:
        """Let go of the bus."""
        self.bus.close()

    # -- what a unit has in systemd's memory ----------------------------------------------------------

    async def _restore_properties(
        self, unit: str, stood: Stood, wrote: Sequence[dict[str, int]]
    ) -> None:
        """Where they are ours. A unit that is not loaded has none."""
        try:
            path = await self._path(unit)
            back = {}
            for name, value in stood.properties.items():
                now = int(await self._get(path, unit, name))
                if now != value and now in _ours(name, wrote):
                    back[name] = value
            if back:
                await self._set(unit, back)
        except Gone:
            return

    async def _path(self, unit: str) -> str:
        """Raises Gone for a unit that is not loaded, and so has nothing in memory."""
        found = await self.bus.ask(_MANAGER, _MANAGER_INTERFACE, "GetUnit", "s", unit)
        return str(found[0])

    async def _get(self, path: str, unit: str, name: str) -> str | int:
        interface = f"org.freedesktop.systemd1.{_INTERFACES[unit.rpartition('.')[2]]}"
        answer = await self.bus.ask(path, _PROPERTIES_INTERFACE, "Get", "ss", interface, name)
        value = answer[0].value
        if not isinstance(value, str | int):
            raise Unavailable(f"systemd says {value!r} for {name} of {unit}")
        return value

    async def _set(self, unit: str, properties: dict[str, int]) -> None:
        from dbus_fast import Variant

        pairs = [[name, Variant("t", value)] for name, value in properties.items()]
        await self.bus.ask(
            _MANAGER, _MANAGER_INTERFACE, "SetUnitProperties", "sba(sv)", unit, True, pairs
        )
        # systemd writes the control files before it looks at the next message: so this comes after.
        await self.bus.ask(_MANAGER, "org.freedesktop.DBus.Peer", "Ping")

    # -- what it has on disk --------------------------------------------------------------------------

    def _dropins(self, unit: str, names: Iterable[str]) -> dict[str, str | None]:
        folder = self._folder(unit)
        return {SETTINGS[name]: read_dropin(folder, SETTINGS[name]) for name in names}

    def _restore_dropins(self, unit: str, stood: Stood, wrote: Sequence[dict[str, int]]) -> None:
        """Those that say what we have said. What somebody else has said since stays."""
        folder = self._folder(unit)
        for name, value in stood.properties.items():
            setting = SETTINGS[name]
            was, now = stood.dropins.get(setting), read_dropin(folder, setting)
            if now is None or now == was:
                continue
            ours = {kept(name, v) for v in (*_ours(name, wrote), value)}
            if told(name, now) in ours:
                put_dropin(folder, setting, was)

    def _folder(self, unit: str) -> str:
        return f"{self._control}/{unit}.d"

    # -- what there is --------------------------------------------------------------------------------

    def _there(self) -> bool:
        """Whether systemd runs this host (sd_booted(3)), with a bus to ask it over, and this tree."""
        try:
            booted = stat.S_ISDIR(os.lstat(self._booted).st_mode)
            reached = stat.S_ISSOCK(os.stat(self._socket).st_mode)
            return booted and reached and os.path.samefile(f"{self._root}/", self._hierarchy)
        except OSError:
            return False

    def _may_enable(self, cgroup: str, file: str) -> None:
        """Raises Refused where this would have systemd realise a container anew."""
        if os.path.exists(f"{self._root}{cgroup}/{file}"):
            return
        controller = file.partition(".")[0]
        for above in _above(cgroup):
            scope = self._foreign_scope(above)
            if scope and not self._enabled(above, controller):
                raise Refused(
                    f"the controller {controller} is not enabled below {above or '/'}; to have it "
                    f"enabled would make systemd set up all that is there anew, {scope} too, which "
                    "may be a container that would lose its devices; enable it while none runs "
                    f"(`systemctl set-property UNIT {_ENABLES[controller]}`)"
                )

    def _enabled(self, cgroup: str, controller: str) -> bool:
        try:
            with open(f"{self._root}{cgroup}/cgroup.subtree_control", encoding="ascii") as file:
                return controller in file.read().split()
        except (OSError, UnicodeDecodeError):
            return False

    def _foreign_scope(self, cgroup: str) -> str:
        if f"{cgroup}/".endswith(self._own):
            return ""
        try:
            names = sorted(os.listdir(f"{self._root}{cgroup}/"))
        except OSError:
            return ""
        return next((n for n in names if n.endswith(".scope") and not _HARMLESS.fullmatch(n)), "")


def _above(cgroup: str) -> Iterator[str]:
    """The cgroups above, nearest first, the root last and empty."""
    while cgroup:
        cgroup = cgroup.rpartition("/")[0]
        yield cgroup


def _told(file: str, text: str) -> dict[str, int] | None:
    """What a text of ours was to systemd; None for one that it cannot have been told."""
    try:
        return values(file, text)
    except Refused:
        return None


def _ours(name: str, wrote: Sequence[dict[str, int]]) -> set[int]:
    """What we have written of a property, as it is at once and after a daemon-reload."""
    return {v for each in wrote for v in (each[name], kept(name, each[name]))}


def _stood(text: str, file: str) -> Stood:
    """Raises Refused for what is none."""
    try:
        found = msgspec.json.decode(text, type=Stood)
    except msgspec.MsgspecError as error:
        raise Refused(f"the ledger does not say what the unit had before ({error})") from error
    if found.properties.keys() != set(properties_of(file)):
        raise Refused(f"the ledger speaks of other properties than those of {file}")
    return found
