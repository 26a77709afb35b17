"""Quantities as an operator writes them: "200ms", "8GiB", "250W", "40%", and back again.

A unit is written exactly as listed here, in its own case, with at most spaces before it. What is
parsed is in base units (seconds, bytes, watts, ratio 0 to 1) and finite, never negative, never
beyond what any host could mean.
"""

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z%]+)")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_LONGEST_TEXT = 64
"""Longest text looked at, far beyond any sensible quantity."""

# What a unit is in base units.
_SECONDS = {"ms": "0.001", "s": "1", "min": "60", "h": "3600", "d": "86400"}
_BYTES = {
    "TiB": str(1024**4),
    "GiB": str(1024**3),
    "MiB": str(1024**2),
    "KiB": "1024",
    "TB": str(1000**4),
    "GB": str(1000**3),
    "MB": str(1000**2),
    "kB": "1000",
    "B": "1",
}
_WATTS = {"W": "1", "kW": "1000"}
_RATIO = {"%": "0.01"}


class QuantityError(ValueError):
    """What is wrong with a value and what to write instead, in one line for the operator."""


def shown(value: object) -> str:
    """A TOML value on one line, shortened, without unprintable characters: fit for an error."""
    if isinstance(value, str):
        text = value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "..."
        quoted = json.dumps(text, ensure_ascii=False)
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in quoted)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        # Python refuses to print integers of thousands of digits, and TOML's end at 64 bits.
        return str(value) if abs(value) < 2**63 else "a number of more than 64 bits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "an array"
    return "a date or time"


@dataclass(frozen=True, slots=True)
class _Family:
    """The units of one quantity, and how to talk about it."""

    noun: str
    units: Mapping[str, str]
    remedy: str
    """What to write instead, `{n}` being the number the operator gave."""
    example: str
    """That number where none was given."""
    most: int
    most_shown: str

    def refusal(self, value: object) -> QuantityError:
        found = _NUMBER.search(value[:_LONGEST_TEXT]) if isinstance(value, str) else None
        remedy = self.remedy.format(n=found[0] if found else self.example)
        return QuantityError(f"{shown(value)} is not {self.noun}; write {remedy}")

    def amount(self, value: object) -> Decimal:
        """The value in base units, exact. Raises QuantityError."""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refusal(value)
        if isinstance(value, str):
            found = _NUMBER_AND_UNIT.fullmatch(value) if len(value) <= _LONGEST_TEXT else None
            if found is None or found[2] not in self.units:
                raise self.refusal(value)
            amount = Decimal(found[1]) * Decimal(self.units[found[2]])
        else:
            amount = self.bare(value)
        if amount > self.most:
            raise QuantityError(f"{shown(value)} is more than {self.most_shown}, the most accepted")
        return amount

    def bare(self, value: float) -> Decimal:
        """A number without its unit says nothing, unless it is 0."""
        if value == 0:
            return Decimal(0)
        if not 1e-6 <= value <= 2**63:  # Neither nan nor inf passes.
            raise self.refusal(value)
        remedy = self.remedy.format(n=_plain(Decimal(repr(value))))
        raise QuantityError(f"{shown(value)} has no unit; write {remedy}, in quotes")


class _Shares(_Family):
    """Ratios, of which the bare number is a proper form too."""

    __slots__ = ()

    def bare(self, value: float) -> Decimal:
        if 1 < value <= 100:
            percent = _plain(Decimal(repr(value)))
            raise QuantityError(f'{shown(value)} is more than 1; write "{percent}%"')
        if not 0 <= value <= 1:
            raise self.refusal(value)
        return Decimal(repr(value))


_DURATIONS = _Family("a duration", _SECONDS, "{n}s or {n}min", "5", 365 * 86400, "365d")
_SIZES = _Family("a size", _BYTES, "{n}GiB or {n}GB", "8", 1024**5, "1024TiB")
_POWERS = _Family("a power", _WATTS, "{n}W or {n}kW", "250", 1_000_000, "1000kW")
_SHARES = _Shares("a share", _RATIO, "a percentage such as 40%, or 0.4", "40", 1, "100%")


def seconds(value: object) -> float:
    """Seconds from "200ms", "5s", "10min", "1h" or "2d". Raises QuantityError."""
    return float(_DURATIONS.amount(value))


def bytes_(value: object) -> int:
    """Bytes from "8GiB" (1024³ each) or "8GB" (1000³ each), rounded to a whole one.

    Raises QuantityError.
    """
    amount = _SIZES.amount(value)
    whole = int(amount.to_integral_value())
    if whole == 0 and amount:
        raise _SIZES.refusal(value)
    return whole


def watts(value: object) -> float:
    """Watts from "250W" or "1.5kW". Raises QuantityError."""
    return float(_POWERS.amount(value))


def ratio(value: object) -> float:
    """A ratio from 0 to 1 from "40%" or 0.4. Raises QuantityError."""
    return float(_SHARES.amount(value))


def split_address(value: object, *, anywhere: bool = False) -> tuple[str, int]:
    """Host and port from "127.0.0.1:9485", "[::1]:9485" or "localhost:9485"; port 0 for any.

    Loopback only, unless `anywhere`: raises QuantityError for every other address.
    """
    remedy = (
        'write "0.0.0.0:9486", "[::]:9486" or one address of this host'
        if anywhere
        else 'write "127.0.0.1:9485" or "[::1]:9485"'
    )
    text = value if isinstance(value, str) else ""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise QuantityError(f"{shown(value)} is not a host and a port; {remedy}")
    if host == "localhost":
        return host, int(port)
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise QuantityError(f"{shown(value)} is not an address of this host; {remedy}") from None
    if bracketed != (address.version == 6):
        raise QuantityError(f"{shown(value)} has its brackets wrong; {remedy}")
    if not (anywhere or address.is_loopback):
        raise QuantityError(f"{shown(value)} is not a loopback address; {remedy}")
    return str(address), int(port)


def show_seconds(value: float) -> str:
    """The shortest sensible text that `seconds` reads back as exactly this value."""
    exact = Decimal(repr(value))
    if 0 < exact < 1:
        return f"{_plain(exact * 1000)}ms"
    for unit in ("d", "h", "min"):
        if exact and exact % Decimal(_SECONDS[unit]) == 0:
            return f"{_plain(exact / Decimal(_SECONDS[unit]))}{unit}"
    return f"{_plain(exact)}s"


def show_bytes(value: int) -> str:
    """The shortest text in whole units that `bytes_` reads back as exactly this value."""
    whole = [f"{value // int(n)}{unit}" for unit, n in _BYTES.items() if value % int(n) == 0]
    return min(whole, key=len) if value else "0B"


def show_watts(value: float) -> str:
    """The shortest text that `watts` reads back as exactly this value."""
    exact = Decimal(repr(value))
    if exact and exact % 100 == 0 and exact >= 1000:
        return f"{_plain(exact / 1000)}kW"
    return f"{_plain(exact)}W"


def show_ratio(value: float) -> str:
    """A percentage that `ratio` reads back as exactly this value."""
    return f"{_plain(Decimal(repr(value)) * 100)}%"


def _plain(value: Decimal) -> str:
    """Without exponent and without zeros at the end of the fraction."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, slots=True)
class Quantity:
    """Both directions of one kind of quantity."""

    parse: Callable[[object], float]
    show: Callable[[float], str]


def _show_whole_bytes(value: float) -> str:
    return show_bytes(int(value))


QUANTITIES: dict[str, Quantity] = {
    "seconds": Quantity(seconds, show_seconds),
    "bytes": Quantity(bytes_, _show_whole_bytes),
    "watts": Quantity(watts, show_watts),
    "ratio": Quantity(ratio, show_ratio),
}
"""By the name that the schema gives them in `extra["quantity"]`."""
