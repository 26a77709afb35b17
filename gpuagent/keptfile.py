"""Small files that outlive a run: read without waiting, and written whole until the disk has taken them."""

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable

from gpuagent.clock import Clock
from gpuagent.errors import Unavailable

WRITE_SECONDS = 5.0
"""A disk that takes longer does not answer."""
AGAIN_SECONDS = 5.0
"""After a write that has failed."""


def read_file(path: str, most_bytes: int, *, trusted: bool = False) -> bytes:
    """What a plain file holds, up to one byte more than that. Raises OSError for anything else.

    `trusted`: only a file that nobody but us or root can have written.
    It does not wait: who puts a pipe there must not keep the agent from starting.
    """
    with contextlib.closing(_Open(path, os.O_RDONLY)) as file:
        why = doubt(file.status) if trusted else ""
        if why:
            raise OSError(errno.EPERM, why, path)
        return file.read(most_bytes + 1)


def doubt(status: os.stat_result) -> str:
    """Why what a file says is not to be believed; empty where only we can have written it."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (0, os.geteuid()):
        return "others can write it"
    return ""


def replace_file(path: str, content: bytes, mode: int = 0o600) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part.

    Once it returns the new one is there after a power cut too. Raises OSError; then it may be either.
    """
    fresh = f"{path}.new"
    with contextlib.closing(_Open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)) as file:
        file.write(content)
    os.replace(fresh, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Open:
    """A plain file. A pipe or a device in its place is refused, not waited for."""

    def __init__(self, path: str, flags: int, mode: int = 0o600) -> None:
        """Raises OSError."""
        self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
        self.status = os.fstat(self._fd)
        if not stat.S_ISREG(self.status.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "it is no regular file", path)

    def read(self, most_bytes: int) -> bytes:
        with os.fdopen(self._fd, "rb", closefd=False) as file:
            return file.read(most_bytes)

    def write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:  # on a disk that is nearly full, what fits is written first
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


# -- off the loop ---------------------------------------------------------------------------------------


class Hung(Unavailable):
    """The disk does not answer; what it was told may be done yet."""


class Disk:
    """Calls to a disk that may hang: one at a time, and nobody waits longer than so long.

    A call that hangs keeps a thread of its own, which keeps neither others nor the process waiting.
    """

    def __init__(self, seconds: float = WRITE_SECONDS) -> None:
        self._seconds = seconds
        self._call: asyncio.Future[None] | None = None
        self._due = 0.0
        """Time of the loop at which the call in progress is late."""

    async def do(self, call: Callable[[], None]) -> None:
        """Raises Hung where the disk does not answer in time, and what `call` raises."""
        await self._turn()
        self._call = _in_thread(call)
        self._due = asyncio.get_running_loop().time() + self._seconds
        await self._turn()
        self._call.result()

    async def _turn(self) -> None:
        """Until the call in progress is done. Raises Hung once it is late."""
        if self._call is not None:
            left = self._due - asyncio.get_running_loop().time()
            await asyncio.wait({self._call}, timeout=max(0.0, left))
            if not self._call.done():
                raise Hung(
                    f"the disk has not answered within {self._seconds:g} s: see what it waits for"
                )


def _in_thread(call: Callable[[], None]) -> "asyncio.Future[None]":
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="disk", daemon=True).start()
    told = asyncio.wrap_future(done)
    told.add_done_callback(lambda late: late.cancelled() or late.exception())  # for who has left
    return told


class KeptFile:
    """One file that is to hold what its owner has in memory.

    What could not be written is tried again by `run`, and by `close` at the end.
    """

    def __init__(
        self,
        path: str,
        content: Callable[[], Callable[[], bytes]],
        *,
        clock: Clock,
        disk: Disk | None = None,
    ) -> None:
        """`content` takes what is in memory now; what it returns makes it into bytes, in a thread."""
        self.path = path
        self._content = content
        self._clock = clock
        self._disk = Disk() if disk is None else disk
        self._stale = asyncio.Event()
        self.changing = asyncio.Lock()
        """Held by whoever changes what the file is to hold, until it is written."""
        self.trouble = ""
        """Why the file holds something else than it should; empty as far as is known that it does not."""

    @property
    def stale(self) -> bool:
        """Whether the file is, or may be, another than it should."""
        return self._stale.is_set()

    def outdated(self) -> None:
        """What it should hold has changed: it is written soon."""
        self._stale.set()

    async def write(self, make: Callable[[], bytes] | None = None) -> None:
        """Write what `make` makes; what is in memory, where it is None. To be called while `changing`.

        Raises Unavailable, with what to do. Then the file may be either, and is written again.
        """
        if make is None:
            make = self._content()
            self._stale.clear()
        made = make
        try:
            await self._disk.do(lambda: replace_file(self.path, made()))
        except OSError as error:
            raise self._failed(
                f"{error.strerror}: make room on that disk, or put it in order; it is tried again"
            ) from error
        except Hung as error:
            raise self._failed(str(error)) from error
        except asyncio.CancelledError:
            self._stale.set()
            raise
        self.trouble = ""

    async def run(self) -> None:
        """Until cancelled: the file is made to hold what it should, however often that takes."""
        while True:
            await self._stale.wait()
            try:
                async with self.changing:
                    await self.write()
            except Unavailable:
                await self._clock.sleep(AGAIN_SECONDS)

    async def close(self) -> None:
        """Write what is owed to the file once more, after the last change. It takes no longer than a write."""
        async with self.changing:
            if self.stale:
                with contextlib.suppress(Unavailable):
                    await self.write()

    def _failed(self, why: str) -> Unavailable:
        self._stale.set()
        self.trouble = f"{self.path} cannot be written: {why}"
        return Unavailable(self.trouble)
