"""Runs a program of somebody else's with a deadline, and says what it said: never more than that."""

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
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
    complaint: str = ""
    """The end of what it printed to standard error, where that was to be kept apart."""
    whole: bool = True
    """Whether `text` is all that it printed."""

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


async def run(
    command: Sequence[str],
    *,
    seconds: float,
    said: str = "",
    env: Mapping[str, str] | None = None,
    apart: bool = False,
    kept: int = KEPT_BYTES,
) -> Ran:
    """Run it for so long at most, then kill it with all that it has started.

    `said` is told it on standard input: a line or a few, no more than a pipe takes at once. `env` is all
    of its environment. `apart` keeps what it complains of apart from what it says; of either so many
    bytes are kept. Killed also when the caller is cancelled. Raises Refused, Unavailable where it cannot
    be started.
    """
    process = _start(command, said.encode(), env, apart=apart)
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        with process:
            process.kill()
        raise Unavailable(f"{command[0]}: {error.strerror}") from error
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    heard = _Heard(process.stdout, kept)
    complaint = _Heard(process.stderr, kept) if apart else None
    loop.add_reader(pidfd, _note, loop, pidfd, ended)
    for one in (heard, complaint) if complaint else (heard,):
        loop.add_reader(one.fd, one.read)
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
        if complaint is not None:
            complaint.close(loop)
        # Reaped here where it has ended; the next start of any process reaps it otherwise.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0 if ended.is_set() else 0.2)
    return Ran(
        process.returncode if in_time else None,
        heard.text,
        complaint.text if complaint else "",
        whole=heard.whole,
    )


def _start(
    command: Sequence[str], said: bytes, env: Mapping[str, str] | None, *, apart: bool
) -> "subprocess.Popen[bytes]":
    assert len(said) <= select.PIPE_BUF
    if env is None:
        env = {"LC_ALL": "C", **{k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}}
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if said else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if apart else subprocess.STDOUT,
            cwd="/",
            env=env,
            start_new_session=True,
            bufsize=0,
        )
    except PermissionError as error:
        raise Refused(f"{command[0]} may not be run: {error.strerror}") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error.strerror}") from error
    if process.stdin is not None:
        # It fits into the pipe, so that nobody waits for it to be read. Who does not listen has ended.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(said)
    return process


def _note(loop: asyncio.AbstractEventLoop, pidfd: int, ended: asyncio.Event) -> None:
    loop.remove_reader(pidfd)
    ended.set()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    # Its number is its own until it is reaped, which only we do.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Heard:
    """The end of what comes out of a pipe."""

    def __init__(self, pipe: IO[bytes] | None, kept: int) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._kept = kept
        self.fd = pipe.fileno()
        self._data = b""
        self.whole = True
        os.set_blocking(self.fd, False)

    def read(self) -> None:
        if not self._read():
            asyncio.get_running_loop().remove_reader(self.fd)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what is left, and no more: whoever it has started may keep the pipe open."""
        loop.remove_reader(self.fd)
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                self._read()
        self._pipe.close()

    def _read(self) -> bytes:
        data = os.read(self.fd, _READ_BYTES)
        longer = self._data + data
        self._data = longer[-self._kept :]
        self.whole = self.whole and len(longer) <= self._kept
        return data

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "replace")
