"""Telling the service manager how the daemon fares: the sd_notify protocol, without libsystemd.

Source: sd_notify(3), systemd.service(5) (Type=notify-reload), sd_watchdog_enabled(3).
"""

import asyncio
import math
import os
import socket
from collections.abc import Coroutine, MutableMapping
from typing import Any, TypeVar

from gpuagent.log import printable

Done = TypeVar("Done")

STOP_MOST_SECONDS = 900.0
"""How long a stop, or a rescue after it, may take while it shows signs of life."""
_MORE_SECONDS = 30.0
_AGAIN_SECONDS = 5.0


class Notify:
    """Sends state to the socket in NOTIFY_SOCKET; does nothing where there is none.

    Every method returns whether the message was handed over. A manager that cannot be reached is
    never an error: the daemon goes on.
    """

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        """`address` is a path, or starts with "@" for an abstract socket; empty for none."""
        self._address = address
        self.watchdog_seconds = watchdog_seconds
        """Time within which the manager wants a sign of life; None where it wants none.

        Send one at less than half of it.
        """

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> "Notify":
        """What the manager left in the environment, taken out so that no child inherits it."""
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        meant_for = environ.pop("WATCHDOG_PID", "")
        watchdog: float | None = None
        if _is_number(microseconds) and meant_for in {"", str(os.getpid())}:
            watchdog = int(microseconds) / 1e6 or None
        return cls(address if address[:1] in {"/", "@"} else "", watchdog)

    def ready(self, status: str) -> bool:
        """Start, or a reload, is complete."""
        return self._send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, status: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(f"STATUS={_one_line(status)}")

    def watchdog(self) -> bool:
        """A sign of life."""
        return self._send("WATCHDOG=1")

    def reloading(self, mono: float) -> bool:
        """A reload has begun at `mono` (CLOCK_MONOTONIC seconds); `ready` ends it."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={int(mono * 1e6)}")

    def stopping(self) -> bool:
        """The stop has begun."""
        return self._send("STOPPING=1")

    def more_time(self, seconds: float) -> bool:
        """The stop goes on, and a sign of life comes again within so many seconds."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "WATCHDOG=1")

    async def meanwhile(self, work: Coroutine[Any, Any, Done], *, most_seconds: float) -> Done:
        """Ask for more time, up to so much, until `work` has ended; what it returns or raises.

        In a task that is being cancelled, too: see `clock.patiently`.
        """
        task = asyncio.ensure_future(work)
        try:
            for _ in range(math.ceil(most_seconds / _AGAIN_SECONDS)):
                self.more_time(_MORE_SECONDS)
                if (await asyncio.wait({task}, timeout=_AGAIN_SECONDS))[0]:
                    break
            return await task
        finally:
            task.cancel()

    def _send(self, *fields: str) -> bool:
        if not self._address:
            return False
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, kind) as sender:
                sender.connect(address)
                sender.send("\n".join(fields).encode())
        except (OSError, ValueError):
            # ValueError: a path with a zero byte. A full queue (EAGAIN) loses this sign only.
            return False
        return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _one_line(text: str) -> str:
    return printable(text)[:512]
