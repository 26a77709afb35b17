"""One guard process while it lives, and the agent's end of the line to it."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from gpuagent.errors import Unavailable
from gpuagent.host import guard
from gpuagent.host.pidfds import ended_within

ANSWER_SECONDS = 3.0
"""A guard that does not answer for so long is ended."""
_END_SECONDS = 1.0


class GuardLine:
    """Started when it is made. `hear` gets the words of each message; `died` is called once."""

    def __init__(self, hear: Callable[[list[str]], None], died: Callable[[], None]) -> None:
        """Raises OSError where none can be started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._socket = ours
        self._hear = hear
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._asked_at: float | None = None
        """Loop time of the oldest beat that is not answered."""
        self._loop.add_reader(ours, self._read)

    def say(self, *words: str, fds: tuple[int, ...] = ()) -> None:
        """Raises Unavailable where it has died or does not read."""
        data = " ".join(words).encode()
        try:
            socket.send_fds(self._socket, [data], fds)
        except BlockingIOError as error:
            raise Unavailable("the guard does not read what it is told") from error
        except OSError as error:
            raise Unavailable("the guard has died") from error

    def beat(self) -> None:
        """A sign of life. Raises Unavailable where it has not answered the ones before: kill it."""
        now = self._loop.time()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > ANSWER_SECONDS:
            raise Unavailable("the guard does not answer")
        self.say("beat")

    def _read(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(guard.MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                self._died()
                return
            self._asked_at = None
            self._hear(data.decode("ascii", "replace").split())

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def end(self, *, at_once: bool) -> None:
        """Hang up, whereupon it thaws everything and ends, and see it ended; killed where it does not."""
        self._hang_up()
        if at_once:
            self.process.kill()
        pidfd = os.pidfd_open(self.process.pid)
        try:
            if not await ended_within(pidfd, _END_SECONDS):
                self.process.kill()
                await ended_within(pidfd, _END_SECONDS)
        finally:
            os.close(pidfd)
            self.process.poll()
