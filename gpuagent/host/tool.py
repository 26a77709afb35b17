"""Runs a program of somebody else's with a deadline, and says what it said: never more than that."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

import msgspec

from gpuagent.errors import Refused, Unavailable, Unsupported

KEPT_BYTES = 16 * 1024
"""Of what it prints: the end."""
_READ_BYTES = 65536
_KILL_SECONDS = 2.0
"""How long a killed process may take to end before it is left to the kernel."""
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "HOME")


class Ran(msgspec.Struct, frozen=True):
    """How a program ended."""

    code: int | None
    """Exit code, negative for a signal; None where it had not ended in time and was killed."""
    text: str
    """The end of what it printed."""

    @property
    def in_time(self) -> bool:
        return self.code is not None

    @property
    def line(self) -> str:
        """Its last words, for people."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it says nothing"


def find(program: str, remedy: str) -> str:
    """Path of a program, which is a path or a name to look for in PATH. Raises Unsupported."""
    found = shutil.which(program)
    if found is None:
        where = "is not there" if "/" in program else "is not in PATH"
        raise Unsupported(f"{program} {where}: {remedy}")
    return found


async def run(command: Sequence[str], *, seconds: float) -> Ran:
    """Run it for so long at most, then kill it with all that it has started.

    Killed also when the caller is cancelled. Raises Refused, Unavailable where it cannot be started.
    """
    process = _start(command)
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        with process:
            process.kill()
        raise Unavailable(f"{command[0]}: {error.strerror}") from error
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    heard = _Heard(process.stdout)
    loop.add_reader(pidfd, _note, loop, pidfd, ended)
    loop.add_reader(heard.fd, heard.read)
    in_time = False
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
        in_time = True
    except TimeoutError:
        _kill(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await ended.wait()
    finally:
        if not ended.is_set():
            _kill(process)
            loop.remove_reader(pidfd)
        os.close(pidfd)
        heard.close(loop)
        # Reaped here where it has ended; the next start of any process reaps it otherwise.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if ended.is_set() else 0.2)
    return Ran(process.returncode if in_time else None, heard.text)


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"LC_ALL": "C", **{k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}},
            start_new_session=True,
            bufsize=0,
        )
    except PermissionError as error:
        raise Refused(f"{command[0]} may not be run: {error.strerror}") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error.strerror}") from error


def _note(loop: asyncio.AbstractEventLoop, pidfd: int, ended: asyncio.Event) -> None:
    loop.remove_reader(pidfd)
    ended.set()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    # Its number is its own until it is reaped, which only we do.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Heard:
    """The end of what comes out of a pipe."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self.fd = pipe.fileno()
        self._data = b""
        os.set_blocking(self.fd, False)

    def read(self) -> None:
        data = os.read(self.fd, _READ_BYTES)
        self._data = (self._data + data)[-KEPT_BYTES:]
        if not data:
            asyncio.get_running_loop().remove_reader(self.fd)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what is left, and no more: whoever it has started may keep the pipe open."""
        loop.remove_reader(self.fd)
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                data = os.read(self.fd, _READ_BYTES)
                self._data = (self._data + data)[-KEPT_BYTES:]
        self._pipe.close()

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "replace")
