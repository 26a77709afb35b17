"""What an MPS control daemon's answers mean. Pure; strict, since a refused set answers like a good one.

The classic interface ("v2") exits 0 whatever it answers, says nothing where there is nothing to say,
and answers a set that it has refused with the value it keeps (FACTS 3; measured on 535 and 550).
"""

import math
import re

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported

STATES = ("INITIALIZING", "ACTIVE", "FAULT")
"""Those that 550 knows; a later one may know more."""

_MIB = 1024**2
_GIB = 1024**3
_ORDINALS = 32
_PERCENT = re.compile(r"(\d{1,3}\.\d)\n?")
_SIZE = re.compile(r"(\d{1,12})([GM])\n?")
_STATE = re.compile(r"([A-Z][A-Z_]{0,31})\n?")
_PID = re.compile(r"[1-9]\d{0,9}")
_TROUBLE: tuple[tuple[re.Pattern[str], type[AgentError]], ...] = (
    (re.compile(r'Unknown command "'), Unsupported),
    (re.compile(r"Server( \d+)? not found"), Gone),
    (re.compile(r"Insufficient privileges for UID"), Refused),
    (re.compile(r"Invalid |A (server PID|user id \(UID\)) is required"), Refused),
)
_SHOWN = 80


def percentage(reply: str) -> float:
    """An active thread percentage, as a ratio. Raises what the daemon says against it."""
    found = _PERCENT.fullmatch(reply)
    if found is None or not 0 < (percent := float(found[1])) <= 100:
        raise trouble(reply)
    return percent / 100


def percent_text(ratio: float) -> str:
    """A ratio as the daemon keeps it: a tenth of a percent is its finest step, rounded down."""
    tenths = math.floor(round(ratio * 1000, 6)) if 0 < ratio <= 1 else 0
    if tenths < 1:
        raise Refused(f"{ratio:g} is no share of the multiprocessors that MPS could keep")
    return f"{tenths / 10:.1f}"


def pids(reply: str) -> tuple[int, ...]:
    """A list of processes; an empty reply is an empty list."""
    lines = reply.splitlines()
    if not all(_PID.fullmatch(line) for line in lines):
        raise trouble(reply)
    return tuple(sorted({int(line) for line in lines}))


def state(reply: str) -> str:
    """State of a server."""
    found = _STATE.fullmatch(reply)
    if found is None:
        raise trouble(reply)
    return found[1]


def size(reply: str) -> int | None:
    """A memory limit in bytes; None for none."""
    if not reply:
        return None
    found = _SIZE.fullmatch(reply)
    if found is None:
        raise trouble(reply)
    return int(found[1]) * (_GIB if found[2] == "G" else _MIB)


def size_text(limit: int, ordinal: int) -> str:
    """`ORDINAL SIZE` of a memory limit that reads back as it is set. Raises Refused for any other.

    The daemon takes anything: 2T and 2.5G become 2M, 1536M becomes 1G, and what it does not know as
    an ordinal clears the limit of device 0.
    """
    if not 0 <= ordinal < _ORDINALS:
        raise Refused(f"MPS has devices 0 to {_ORDINALS - 1}, not {ordinal}")
    if limit >= _GIB and limit % _GIB == 0:
        return f"{ordinal} {limit // _GIB}G"
    if _MIB <= limit < _GIB and limit % _MIB == 0:
        return f"{ordinal} {limit // _MIB}M"
    raise Refused(f"MPS keeps whole G, or whole M below one G, not {limit} bytes")


def silence(reply: str) -> None:
    """Nothing, as after what has nothing to tell."""
    if reply:
        raise trouble(reply)


def trouble(reply: str) -> AgentError:
    """What a reply that is not what was asked for says."""
    said = reply.strip()[:_SHOWN]
    for pattern, kind in _TROUBLE:
        if pattern.match(said):
            return kind(f"the MPS control daemon answers: {said}")
    if not said:
        return Unavailable("the MPS control daemon answers nothing")
    return Unavailable(f"the MPS control daemon answers {said!r}, which is not understood")
