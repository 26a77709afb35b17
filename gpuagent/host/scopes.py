"""Transient scopes by systemd: one call over D-Bus, judged by where the process is afterwards.

The call and its properties are those of org.freedesktop.systemd1(5) and systemd.resource-control(5).
Which process is moved is settled by its start time and its users, before and after: a number may have
been given anew, and a process may have become a program of another user's.
"""

import contextlib
import os
from typing import Any

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.bus import SystemBus
from gpuagent.host.procfs import parse_cgroup, parse_stat
from gpuagent.ports import ScopeWish

CALL_SECONDS = 10.0
"""PID 1 may be busy with something else."""
_MOVED_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_BOOTED = "/run/systemd/system"
"""There only where systemd is PID 1 (sd_booted(3))."""

Properties = list[tuple[str, str, Any]]
"""Name, D-Bus signature, value."""


class SystemdScopes:
    """Implements `ports.Scopes` on the system's manager."""

    def __init__(
        self,
        bus: SystemBus,
        *,
        clock: Clock,
        booted: str = _BOOTED,
        proc: str = "/proc",
        patience: float = _MOVED_SECONDS,
    ) -> None:
        """`patience` is how long systemd may take to move a process, in seconds."""
        self._bus = bus
        self._clock = clock
        self._booted = booted
        self._proc = proc
        self._patience = patience

    async def start(self, wish: ScopeWish) -> str:
        """See `ports.Scopes`."""
        self._check(wish)
        from dbus_fast import Variant

        wanted = [[name, Variant(kind, value)] for name, kind, value in properties(wish)]
        await self._bus.ask(
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
            "StartTransientUnit",
            "ssa(sv)a(sa(sv))",
            wish.unit,
            "fail",
            wanted,
            [],
            seconds=CALL_SECONDS,
        )
        return await self._moved(wish)

    async def _moved(self, wish: ScopeWish) -> str:
        """The cgroup in which the process is, once it is the scope's."""
        until = self._clock.now().mono + self._patience
        while True:
            self._check(wish)
            path = parse_cgroup(self._read(wish.pid, "cgroup"))
            if path.rpartition("/")[2] == wish.unit:
                return path
            if self._clock.now().mono >= until:
                raise Unavailable(f"systemd has not moved process {wish.pid} to {wish.unit}")
            await self._clock.sleep(_LOOK_SECONDS)

    def _check(self, wish: ScopeWish) -> None:
        """Raises Unsupported without systemd, Gone where it is another process by now, Refused where
        it is another user's.
        """
        if not os.path.isdir(self._booted):
            raise Unsupported("this host does not run systemd")
        try:
            started = parse_stat(self._read(wish.pid, "stat")).started
        except ValueError:
            raise Gone(f"process {wish.pid}: its stat line cannot be read") from None
        if started != wish.started:
            raise Gone(f"process {wish.pid} has ended")
        if _users(self._read(wish.pid, "status")) != {wish.uid}:
            raise Refused(f"process {wish.pid} does not run as user {wish.uid} alone")

    def _read(self, pid: int, file: str) -> bytes:
        with contextlib.suppress(OSError), open(f"{self._proc}/{pid}/{file}", "rb") as found:
            return found.read(8192)
        raise Gone(f"process {pid} has ended")


def _users(status: bytes) -> set[int]:
    """Real, effective, saved and filesystem user of /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            return {int(word) for word in line.split()[1:] if word.isdigit()}
    return set()


def properties(wish: ScopeWish) -> Properties:
    """What systemd is asked for. Pure."""
    found: Properties = [
        ("Description", "s", wish.description),
        ("Slice", "s", wish.slice),
        ("PIDs", "au", [wish.pid]),
        ("CollectMode", "s", "inactive-or-failed"),
        ("CPUAccounting", "b", True),
        ("MemoryAccounting", "b", True),
    ]
    if wish.cpu_weight is not None:
        found.append(("CPUWeight", "t", wish.cpu_weight))
    if wish.memory_max_bytes is not None:
        found.append(("MemoryMax", "t", wish.memory_max_bytes))
    if wish.devices is not None:
        found.append(("DevicePolicy", "s", "closed"))
        found.append(("DeviceAllow", "a(ss)", [[node, "rw"] for node in wish.devices]))
    return found
