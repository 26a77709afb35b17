"""A child process that can be killed when it does not answer: start, frames, deadlines, end.

What may hang for good (a driver call) runs in a child, because a thread cannot be killed and a child
can at least be abandoned. The child announces each such call in a `CallSlot`, which is watched here.
Frames are newline-delimited JSON. `child` is the other side.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Generic, TypeVar

import msgspec

import gpuagent
from gpuagent.clock import patiently
from gpuagent.errors import Unavailable
from gpuagent.host.child import FRAME_LIMIT_BYTES, CallSlot

Frame = TypeVar("Frame")

COMMAND_LIMIT_BYTES = 4096
"""PIPE_BUF: a command this short is written whole or not at all."""
_ERRORS_KEPT_BYTES = 2000
_READ_BYTES = 16384
_LOOK_SECONDS = 0.5
"""Longest time between two looks at whether the child still moves."""
_DESCRIPTORS = 9
"""What a start opens in passing: three pipes of Popen's, one more for its errors, and a pidfd."""
_END_SECONDS = 1.0
"""How long a child may take to end by itself, and again to die after it was killed."""


class Ending(msgspec.Struct, frozen=True):
    """How a child's life ended."""

    why: str
    """For the operator."""
    call: str = ""
    """Name of the call that did not return; empty if it was something else."""
    target: int = -1
    """What that call was about, as the child numbers it."""
    asked: bool = False
    """Whether `stop` ended it."""
    exit_code: int | None = None
    """Where it ended by itself; negative for a signal."""


class Worker(Generic[Frame]):
    """One life of one child: made, run once, done."""

    def __init__(
        self,
        module: str,
        *,
        settings: Mapping[str, object],
        decode: Callable[[bytes], Frame],
        take: Callable[[Frame], None],
        deadline: float,
        quiet: float,
    ) -> None:
        """`run` starts `python -m module` and calls `take` with each decoded frame.

        `decode` raises msgspec.DecodeError on a malformed frame. `deadline`: seconds that an
        announced call may take. `quiet`: seconds without any sign of life that end the child.
        """
        self._module = module
        self._settings = settings
        self._decode = decode
        self._take = take
        self.deadline = deadline
        """Seconds; may be changed while the child runs."""
        self._quiet = quiet
        self._verdict: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._dead = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._heard = b""
        self._errors = b""

    @property
    def pid(self) -> int | None:
        """The child's PID; None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether there is a process: also one that was killed and that the kernel still holds."""
        return self._process is not None and not self._dead.is_set()

    def send(self, message: Mapping[str, object]) -> None:
        """Send one command. Raises Unavailable where the child has ended or does not read."""
        data = json.dumps(message).encode() + b"\n"
        assert len(data) <= COMMAND_LIMIT_BYTES
        stdin = None if self._process is None else self._process.stdin
        if stdin is None or stdin.closed:
            raise Unavailable(f"{self._module} is not running")
        try:
            os.write(stdin.fileno(), data)
        except BlockingIOError as error:
            raise Unavailable(f"{self._module} does not read its commands") from error
        except BrokenPipeError as error:
            raise Unavailable(f"{self._module} has ended") from error

    def stop(self, why: str) -> None:
        """Ask the child to end; `run` sees to it and returns."""
        self._decide(Ending(why, asked=True))

    async def ended(self, seconds: float) -> None:
        """Wait until the process has ended, but no longer than this; `alive` says whether it has."""
        await patiently(self._dead.wait(), seconds)

    async def run(self) -> Ending:
        """Start the child and serve it until it ends or must be ended; says how.

        The child has ended when this returns or is cancelled, unless the kernel holds it (`alive`).
        Raises Unavailable if it cannot be started.
        """
        slot_fd = -1
        try:
            slot_fd = os.memfd_create("gpuagent-call")
            os.ftruncate(slot_fd, CallSlot.SIZE)
            slot = CallSlot(slot_fd)
            _see_room(slot_fd)
            process = self._start(slot_fd)
        except OSError as error:
            raise Unavailable(f"cannot start {self._module}: {error.strerror}") from error
        finally:
            if slot_fd >= 0:
                os.close(slot_fd)
        patient = True
        try:
            ending = await self._watch(slot)
            patient = ending.asked
            return ending
        finally:
            slot.close()
            await self._end(process, patient=patient)

    # -- start and end --------------------------------------------------------------------------------

    def _start(self, slot_fd: int) -> subprocess.Popen[bytes]:
        root = os.path.dirname(os.path.dirname(os.path.abspath(gpuagent.__file__)))
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        arguments = (str(os.getpid()), str(slot_fd), json.dumps(self._settings))
        process = subprocess.Popen(
            # -P: nothing is imported from the working directory, whoever may write there.
            [sys.executable, "-P", "-m", self._module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(slot_fd,),
            env={**os.environ, "PYTHONPATH": path},
            # A session of its own: a terminal's Ctrl-C is for us alone.
            start_new_session=True,
            bufsize=0,
        )
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            with process:
                process.kill()
            raise
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdin.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._reap)
        self._listen(process.stdout, self._hear)
        self._listen(process.stderr, self._note)
        return process

    def _listen(self, pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
        os.set_blocking(pipe.fileno(), False)
        loop = asyncio.get_running_loop()

        def readable() -> None:
            data = os.read(pipe.fileno(), _READ_BYTES)
            if data:
                take(data)
            else:
                loop.remove_reader(pipe.fileno())

        loop.add_reader(pipe.fileno(), readable)

    def _reap(self) -> None:
        """The process has ended: take its exit code, then what it has still written."""
        process = self._process
        if process is None or process.poll() is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._dead.set()
        for pipe, take in ((process.stdout, self._hear), (process.stderr, self._note)):
            while pipe is not None and not pipe.closed and (data := _rest(pipe)):
                take(data)
        words = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        why = f"{self._module} {how}{': ' if words else ''}{words}"
        self._decide(Ending(why, exit_code=code))

    async def _end(self, process: subprocess.Popen[bytes], *, patient: bool) -> None:
        """End the process: by closing its input where it may still listen, else by SIGKILL."""
        assert process.stdin is not None
        process.stdin.close()
        if patient:
            await self.ended(_END_SECONDS)
        if self.alive:
            process.send_signal(signal.SIGKILL)
            await self.ended(_END_SECONDS)
        loop = asyncio.get_running_loop()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            loop.remove_reader(pipe.fileno())
            pipe.close()

    # -- while it lives -------------------------------------------------------------------------------

    def _decide(self, ending: Ending) -> None:
        """The first verdict stands."""
        if not self._verdict.done():
            self._verdict.set_result(ending)

    async def _watch(self, slot: CallSlot) -> Ending:
        """The verdict, which may be that a call hangs or that the child stands still.

        A standstill counts when two looks find it: one look may follow a pause of our own.
        """
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        suspect: float | None = None
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal suspect, timer
            since, ending = self._standstill(slot, began)
            if ending is not None and since == suspect:
                self._decide(ending)
                return
            suspect = since
            timer = loop.call_later(min(self.deadline / 4, _LOOK_SECONDS), look)

        look()
        try:
            return await self._verdict
        finally:
            if timer is not None:
                timer.cancel()

    def _standstill(self, slot: CallSlot, began: float) -> tuple[float | None, Ending | None]:
        """Since when the child has stood still for too long, and what to make of it."""
        now = time.monotonic()
        inside = slot.inside()
        if inside is not None:
            entered, target, call = inside
            if now - entered <= self.deadline:
                return None, None
            why = f"{call} did not return in {self.deadline:g} s"
            return entered, Ending(why, call, target)
        alive = max(began, slot.last_alive())
        if now - alive <= self._quiet:
            return None, None
        return alive, Ending(f"{self._module} gave no sign of life for {self._quiet:g} s")

    def _note(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-_ERRORS_KEPT_BYTES:]

    def _hear(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        try:
            for line in lines:
                if not self._verdict.done():
                    self._take(self._decode(line))
        except msgspec.DecodeError as error:
            self._malformed(str(error))
        if len(self._heard) > FRAME_LIMIT_BYTES:
            self._malformed(f"it is longer than {FRAME_LIMIT_BYTES} bytes")

    def _malformed(self, why: str) -> None:
        self._heard = b""
        self._decide(Ending(f"{self._module} sent a frame that cannot be read: {why}"))


def _see_room(fd: int) -> None:
    """Raises OSError where too few file descriptors are free to start a child.

    Popen would find that out, too, but up to Python 3.11.3 it leaves its first pipes open then.
    """
    spare: list[int] = []
    try:
        while len(spare) < _DESCRIPTORS:
            spare.append(os.dup(fd))
    finally:
        for each in spare:
            os.close(each)


def _rest(pipe: IO[bytes]) -> bytes:
    try:
        return os.read(pipe.fileno(), _READ_BYTES)
    except BlockingIOError:
        return b""
