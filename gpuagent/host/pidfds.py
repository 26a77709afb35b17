"""Processes held by descriptor: the one that was meant, and when it ends."""

import asyncio
import contextlib
import os
import select
from collections.abc import Iterator

from gpuagent.clock import patiently
from gpuagent.errors import Gone, Unavailable
from gpuagent.host.procfs import parse_stat


@contextlib.contextmanager
def held(pid: int, started: int) -> Iterator[int]:
    """A descriptor of the process with this number and start time; closed afterwards.

    The start time is looked at before and after it is opened: it is that process and no other.
    Raises Gone, also for one that has ended and is not reaped; Unavailable.
    """
    _same(pid, started)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise Gone(f"process {pid} has ended") from error
    except OSError as error:
        raise Unavailable(f"process {pid} cannot be held: {error.strerror}") from error
    try:
        _same(pid, started)
        if _has_ended(pidfd):
            raise Gone(f"process {pid} has ended")
        yield pidfd
    finally:
        os.close(pidfd)


async def ended_within(pidfd: int, seconds: float) -> bool:
    """Wait until the process ends, for so long at most; whether it has."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        return await patiently(ended.wait(), seconds)
    finally:
        loop.remove_reader(pidfd)


def proc_file(pid: int, name: str) -> bytes:
    """A file of /proc about a process. Raises Gone, Unavailable."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Gone(f"process {pid} has ended") from error
    except OSError as error:
        raise Unavailable(f"/proc/{pid}/{name}: {error.strerror}") from error


def _same(pid: int, started: int) -> None:
    try:
        same = pid > 0 and parse_stat(proc_file(pid, "stat")).started == started
    except ValueError as error:
        raise Gone(f"process {pid}: its stat line cannot be read") from error
    if not same:
        raise Gone(f"process {pid} has ended; another has its number")


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
