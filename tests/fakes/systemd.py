"""A system bus of the tests' own, and a systemd on it: units, properties, drop-ins, control files.

What it does is what systemd 252 was seen to do when a property is set at runtime: it remembers the
value, writes one drop-in for it, and then, before it answers anything else, the control file.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dbus_fast import Message, MessageType, RequestNameReply, Variant
from dbus_fast.aio import MessageBus

DAEMON = shutil.which("dbus-daemon")
NONE_HERE = "dbus-daemon (Debian: dbus-daemon) is not installed"
INFINITY = 2**64 - 1
_MANAGER = "org.freedesktop.systemd1.Manager"
_CONFIG = """\
<busconfig>
  <type>session</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/>
  </policy>
</busconfig>
"""
_HEADER = (
    '# This is a drop-in unit file extension, created via "systemctl set-property"\n'
    "# or an equivalent operation. Do not edit.\n"
)
_SECTION = {"service": "Service", "slice": "Slice", "scope": "Scope"}


class Bus:
    """A dbus-daemon on a socket below a folder that stands for /run."""

    def __init__(self, run: Path) -> None:
        self.socket = run / "dbus/system_bus_socket"
        self._config = run / "bus.conf"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert DAEMON is not None
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._config.write_text(_CONFIG.format(socket=self.socket))
        self._process = await asyncio.create_subprocess_exec(
            DAEMON,
            f"--config-file={self._config}",
            "--nofork",
            "--nopidfile",
            "--print-address",
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        await asyncio.wait_for(self._process.stdout.readline(), 20)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None


class Unit:
    """One that is loaded."""

    def __init__(self, cgroup: str) -> None:
        self.cgroup = cgroup
        self.properties = {
            "CPUQuotaPerSecUSec": INFINITY,
            "CPUQuotaPeriodUSec": INFINITY,
            "CPUWeight": INFINITY,
            "IOWeight": INFINITY,
            "MemoryHigh": INFINITY,
            "MemoryMax": INFINITY,
        }


class FakeSystemd:
    """`org.freedesktop.systemd1`, as far as limits of units are asked of it."""

    def __init__(self, run: Path, root: Path) -> None:
        self._run = run
        self._root = root
        self._bus: MessageBus | None = None
        self.units: dict[str, Unit] = {}
        self.error: tuple[str, str] | None = None
        """Name and text of the error with which every call is answered."""
        self.silent = False
        """Whether no call is answered."""
        self.slow_seconds = 0.0
        """How long a call waits until it is dealt with."""
        self.calls: list[str] = []
        (run / "systemd/system").mkdir(parents=True, exist_ok=True)

    async def start(self, address: str) -> None:
        self._bus = MessageBus(bus_address=address)
        self._bus.add_message_handler(self._handle)
        await self._bus.connect()
        reply = await self._bus.request_name("org.freedesktop.systemd1")
        assert reply is RequestNameReply.PRIMARY_OWNER

    def stop(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()
            self._bus = None

    def make(self, name: str, cgroup: str, **files: str) -> Unit:
        """A unit that runs, with these control files."""
        folder = self._root / cgroup[1:]
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file.replace("_", ".")).write_text(f"{text}\n")
        self.units[name] = Unit(cgroup)
        return self.units[name]

    def started_again(self, name: str) -> None:
        """Its cgroup has been made anew: what the unit has in memory is written there."""
        self._realize(self.units[name])

    def folder(self, name: str) -> Path:
        return self._run / f"systemd/system.control/{name}.d"

    def dropins(self, name: str) -> dict[str, str]:
        return {f.name: f.read_text() for f in sorted(self.folder(name).glob("*"))}

    def set(self, name: str, values: dict[str, int]) -> None:
        """As somebody's `systemctl set-property --runtime` does."""
        unit = self.units[name]
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in values.items():
            unit.properties[key] = value
            setting, text = _line(key, value)
            section = _SECTION[name.rpartition(".")[2]]
            (folder / f"50-{setting}.conf").write_text(f"{_HEADER}[{section}]\n{setting}={text}\n")
        self._realize(unit)

    def _realize(self, unit: Unit) -> None:
        has = unit.properties
        period = has["CPUQuotaPeriodUSec"]
        period = 100_000 if period == INFINITY else period
        quota = has["CPUQuotaPerSecUSec"]
        texts = {
            "cpu.max": f"{'max' if quota == INFINITY else quota * period // 1_000_000} {period}",
            "cpu.weight": f"{100 if has['CPUWeight'] == INFINITY else has['CPUWeight']}",
            "io.weight": f"default {100 if has['IOWeight'] == INFINITY else has['IOWeight']}",
            "memory.high": "max" if has["MemoryHigh"] == INFINITY else str(has["MemoryHigh"]),
            "memory.max": "max" if has["MemoryMax"] == INFINITY else str(has["MemoryMax"]),
        }
        for file, text in texts.items():
            (self._root / unit.cgroup[1:] / file).write_text(f"{text}\n")

    # -- the bus --------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> Message | bool | None:
        if message.message_type is not MessageType.METHOD_CALL:
            return None
        self.calls.append(f"{message.member}")
        if self.silent:
            return True
        if self.slow_seconds:
            loop = asyncio.get_running_loop()
            loop.call_later(self.slow_seconds, self._answer_late, message)
            return True
        return self._answer(message)

    def _answer_late(self, message: Message) -> None:
        if self._bus is not None:
            self._bus.send(self._answer(message))

    def _answer(self, message: Message) -> Message:
        if self.error is not None:
            return Message.new_error(message, *self.error)
        match message.interface, message.member, message.body:
            case "org.freedesktop.DBus.Peer", "Ping", _:
                return Message.new_method_return(message)
            case "org.freedesktop.systemd1.Manager", "GetUnit", [name]:
                if name not in self.units:
                    return _no_such_unit(message, name)
                return Message.new_method_return(message, "o", [_path(name)])
            case "org.freedesktop.DBus.Properties", "Get", [interface, key]:
                return self._get(message, interface, key)
            case "org.freedesktop.systemd1.Manager", "SetUnitProperties", [name, True, pairs]:
                if name not in self.units:
                    return _no_such_unit(message, name)
                self.set(name, {key: variant.value for key, variant in pairs})
                return Message.new_method_return(message)
        return Message.new_error(message, "org.freedesktop.DBus.Error.UnknownMethod", "no such")

    def _get(self, message: Message, interface: str, key: str) -> Message:
        found = [(n, u) for n, u in self.units.items() if _path(n) == message.path]
        if not found:
            return Message.new_error(
                message, "org.freedesktop.DBus.Error.UnknownObject", "no object"
            )
        name, unit = found[0]
        if interface != f"org.freedesktop.systemd1.{_SECTION[name.rpartition('.')[2]]}":
            return Message.new_error(
                message, "org.freedesktop.DBus.Error.UnknownInterface", "no interface"
            )
        value = (
            Variant("s", unit.cgroup)
            if key == "ControlGroup"
            else Variant("t", unit.properties[key])
        )
        return Message.new_method_return(message, "v", [value])


def _no_such_unit(message: Message, name: str) -> Message:
    return Message.new_error(
        message, "org.freedesktop.systemd1.NoSuchUnit", f"Unit {name} not loaded."
    )


def _path(name: str) -> str:
    return "/org/freedesktop/systemd1/unit/" + "".join(
        c if c.isalnum() else f"_{ord(c):02x}" for c in name
    )


def _line(key: str, value: int) -> tuple[str, str]:
    match key:
        case "CPUQuotaPerSecUSec":
            return "CPUQuota", "" if value == INFINITY else f"{value // 10_000}%"
        case "CPUQuotaPeriodUSec":
            return "CPUQuotaPeriodSec", "" if value == INFINITY else _span(value)
        case "MemoryHigh" | "MemoryMax":
            return key, "infinity" if value == INFINITY else str(value)
    return key, "" if value == INFINITY else "idle" if value == 0 else str(value)


def _span(us: int) -> str:
    parts = []
    for unit, size in (("s", 1_000_000), ("ms", 1000), ("us", 1)):
        count, us = divmod(us, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)


@asynccontextmanager
async def systemd(folder: Path) -> AsyncIterator[tuple[Bus, FakeSystemd]]:
    """Both, below FOLDER/run, with cgroups below FOLDER/cg."""
    bus = Bus(folder / "run")
    fake = FakeSystemd(folder / "run", folder / "cg")
    (folder / "cg").mkdir(exist_ok=True)
    await bus.start()
    try:
        await fake.start(f"unix:path={bus.socket}")
        yield bus, fake
    finally:
        fake.stop()
        await asyncio.sleep(0.01)
        await bus.kill()
