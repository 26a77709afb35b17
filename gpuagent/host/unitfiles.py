"""How systemd keeps what a control file is to read: as properties of a unit, and as drop-ins of its own.

Which property stands for what, and what is written into the drop-in of each, is systemd's
src/core/dbus-cgroup.c (bus_cgroup_set_property) and src/core/unit.c (unit_write_setting): for each
property set at runtime one file /run/systemd/system.control/UNIT.d/50-SETTING.conf with one line.
"""

import os
import re
from collections.abc import Mapping

import msgspec

from gpuagent.errors import Refused, Unsupported

INFINITY = 2**64 - 1
"""How systemd says "unlimited", or "not set"."""
PERCENT_US = 10_000
"""CPU time per second that is one percent of a CPU: a quota's drop-in keeps whole ones only."""
_DEFAULT_PERIOD_US = 100_000
_LARGEST = 4096
_SPAN = {"us": 1, "ms": 1000, "s": 1_000_000, "min": 60_000_000, "h": 3_600_000_000}
_SPANS = re.compile(r"\s*(\d{1,12})(us|ms|s|min|h)\b")

SETTINGS: Mapping[str, str] = {
    "CPUQuotaPerSecUSec": "CPUQuota",
    "CPUQuotaPeriodUSec": "CPUQuotaPeriodSec",
    "CPUWeight": "CPUWeight",
    "IOWeight": "IOWeight",
    "MemoryHigh": "MemoryHigh",
    "MemoryMax": "MemoryMax",
}
"""The setting of a unit file that each property is: it names the drop-in, too."""
PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "cpu.max": ("CPUQuotaPerSecUSec", "CPUQuotaPeriodUSec"),
    "cpu.weight": ("CPUWeight",),
    "io.weight": ("IOWeight",),
    "memory.high": ("MemoryHigh",),
    "memory.max": ("MemoryMax",),
}


class Stood(msgspec.Struct, frozen=True):
    """What systemd had for one control file of a unit at some time."""

    properties: dict[str, int]
    dropins: dict[str, str | None]
    """Content of each runtime drop-in, by setting; None where there is none."""


def properties_of(file: str) -> tuple[str, ...]:
    """Raises Unsupported for a file that no property stands for."""
    if file not in PROPERTIES:
        raise Unsupported(f"systemd has no property for {file}")
    return PROPERTIES[file]


def values(file: str, text: str) -> dict[str, int]:
    """The properties that make a control file read `text`. Raises Unsupported, Refused."""
    names = properties_of(file)
    numbers = _numbers(file, text.split())
    if len(numbers) != len(names) or any(not 0 <= n <= INFINITY for n in numbers):
        raise Refused(f"{text[:80]!r} for {file} is not what systemd can be told")
    return dict(zip(names, numbers, strict=True))


def _numbers(file: str, words: list[str]) -> list[int]:
    """What each property is to be; nothing where it is not understood."""
    match file, [_number(word, 1) for word in words], words:
        case "cpu.max", [None, int(period)], ["max", _]:
            return [INFINITY, _period(period)]
        case "cpu.max", [int(quota), int(period)], _ if period:
            return [round(quota * 1_000_000 / period), _period(period)]
        case "io.weight", [None, int(weight)], ["default", _]:
            return [weight]
        case "memory.high" | "memory.max", [None], ["max"]:
            return [INFINITY]
        case "cpu.weight" | "memory.high" | "memory.max", [int(number)], _:
            return [number]
    return []


def _period(us: int) -> int:
    return INFINITY if us == _DEFAULT_PERIOD_US else us


def kept(name: str, value: int) -> int:
    """What is left of a property's value in its drop-in, and after a daemon-reload in the unit."""
    if name == "CPUQuotaPerSecUSec" and value != INFINITY:
        return value // PERCENT_US * PERCENT_US
    return value


def told(name: str, content: str) -> int | None:
    """The value that a drop-in of systemd's own sets a property to; None for any other file."""
    lines = (line.strip() for line in content.splitlines())
    found = [line for line in lines if line and line[0] not in "#;["]
    setting, equals, value = found[0].partition("=") if len(found) == 1 else ("", "", "")
    if setting != SETTINGS[name] or not equals:
        return None
    value = value.strip()
    if value in {"", "infinity"}:
        return INFINITY
    if name == "CPUWeight" and value == "idle":
        return 0
    if name == "CPUQuotaPerSecUSec":
        return _number(value.removesuffix("%"), PERCENT_US) if value.endswith("%") else None
    if name == "CPUQuotaPeriodUSec":
        return _microseconds(value)
    return _number(value, 1)


def read_dropin(folder: str, setting: str) -> str | None:
    """Content of the runtime drop-in of a setting; None where there is none. Blocks.

    Raises Refused where it is none of systemd's making.
    """
    place = _place(folder, setting)
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.read(fd, _LARGEST + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"{place}: {error.strerror}") from error
    if len(data) > _LARGEST:
        raise Refused(f"{place}: this large file is no drop-in of systemd's")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{place}: it is not text, so no drop-in of systemd's") from error


def put_dropin(folder: str, setting: str, content: str | None) -> None:
    """Make it as it was: with this content, or not there, nor its folder if it was the last. Blocks.

    Where somebody has removed the folder meanwhile there is nothing to do. Raises Refused.
    """
    place = _place(folder, setting)
    try:
        if content is None:
            os.unlink(place)
        else:
            _write(place, content)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refused(f"{place}: {error.strerror}") from error
    _tidy(folder)


def _place(folder: str, setting: str) -> str:
    return f"{folder}/50-{setting}.conf"


def _write(place: str, content: str) -> None:
    whole = f"{place}.gpuagent"  # no name that systemd would read as a drop-in
    with open(whole, "wb") as file:
        file.write(content.encode())
    os.replace(whole, place)


def _tidy(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return  # it is not empty, or it has gone


def _number(text: str, scale: int) -> int | None:
    return int(text) * scale if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _microseconds(text: str) -> int | None:
    total, at = 0, 0
    while at < len(text):
        found = _SPANS.match(text, at)
        if found is None:
            return None
        total += int(found[1]) * _SPAN[found[2]]
        at = found.end()
    return total
