"""Signals to processes that are surely meant, and commands run as their user."""

import asyncio
import contextlib
import errno
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.host import runas
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.pidfds import ended_within, held, proc_file

_PATH = "/usr/local/bin:/usr/bin:/bin"
_KILL_SECONDS = 1.0
LOOK_UP_SECONDS = 5.0
"""To find user and program: a directory service or a mount may not answer."""
_THREADS = 8
_FORBIDDEN_CODES = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT, 126}
_FORBIDDEN_SIGNALS = {signal.SIGSYS, signal.SIGSEGV, signal.SIGABRT, signal.SIGTRAP}
_SANDBOX = (
    "; it may be for the sandbox of the agent's unit, which is the command's too (MemoryDenyWriteExecute, "
    "NoNewPrivileges, RestrictAddressFamilies): where it does well when its user runs it, relax these in a "
    "drop-in of gpuagent.service"
)
_NOT_PERMITTED = os.strerror(errno.EPERM)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _User(msgspec.Struct, frozen=True):
    uid: int
    gid: int
    name: str
    home: str
    groups: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "PATH": _PATH, "USER": self.name, "LOGNAME": self.name}


class ProcessEnder:
    """Implements `ports.Ender`."""

    def __init__(self, tree: CgroupTree) -> None:
        self._tree = tree
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ender")
        self._looking: dict[tuple[int | str, ...], Future[tuple[_User, str]]] = {}
        """By user and command: what hangs takes one thread, however often it is asked for."""

    async def alive(self, pid: int, started: int) -> bool:
        try:
            with held(pid, started):
                return True
        except Gone:
            return False

    async def catches(self, pid: int, started: int, signal: int) -> bool:
        with held(pid, started):
            status = proc_file(pid, "status")
        return caught(status) >> (signal - 1) & 1 == 1

    async def send(self, pid: int, started: int, signal: int) -> None:
        if pid in {1, os.getpid()}:
            raise Refused(f"process {pid} is not for us to signal")
        with held(pid, started) as pidfd:
            _send(pidfd, pid, signal)

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        try:
            with held(pid, started) as pidfd:
                return await ended_within(pidfd, seconds)
        except Gone:
            return True

    async def run_as(
        self,
        uid: int,
        command: Sequence[str],
        seconds: float,
        *,
        cgroup: str = "",
        inode: int = 0,
    ) -> None:
        if not command or any("\0" in word for word in command):
            raise Refused("there is no command: name one in notice_command of the tenant's rule")
        user, program = await self._looked_up(uid, command)
        with self._procs(cgroup, inode) as procs:
            process, errors = _start(user, (program, *command[1:]), procs)
        try:
            await _finish(process, seconds, program)
            trouble = _said(errors)
        finally:
            os.close(errors)
        if trouble:
            raise Refused(
                trouble + _perhaps_forbidden(errno.EPERM if _NOT_PERMITTED in trouble else 0)
            )
        if process.returncode != 0:
            ending = _ending(process.returncode) + _perhaps_forbidden(process.returncode)
            raise Unavailable(f"{program} ended with {ending}")

    async def _looked_up(self, uid: int, command: Sequence[str]) -> tuple[_User, str]:
        """The user, and the full path of the program. What hangs holds up only who asks for the same."""
        key: tuple[int | str, ...] = (uid, *command)
        job = self._looking.get(key)
        if job is None or job.done():
            job = self._looking[key] = self._threads.submit(
                lambda: (_user(uid), _found(command, uid))
            )
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(job))
        except TimeoutError as error:
            raise Unavailable(
                f"user {uid} and {command[0]} were not found within {LOOK_UP_SECONDS:g} s: see to the "
                f"directory service (`getent passwd {uid}`) and to the mount that the command is on"
            ) from error
        finally:
            if job.done():
                self._looking.pop(key, None)

    @contextlib.contextmanager
    def _procs(self, cgroup: str, inode: int) -> Iterator[int]:
        """Descriptor of cgroup.procs; -1 where the command stays in our cgroup."""
        fd = -1
        if cgroup:
            with contextlib.suppress(AgentError):
                fd = self._tree.opened(cgroup, inode, "cgroup.procs", os.O_WRONLY)
        try:
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)


def caught(status: bytes) -> int:
    """Signals that a process has a handler for, as bits, from /proc/PID/status (proc(5), SigCgt)."""
    return _number(status, b"SigCgt:", 16)


def is_sandboxed(status: bytes) -> bool:
    """Whether a process has seccomp filters, or may gain no rights, from /proc/PID/status."""
    return _number(status, b"Seccomp:", 10) == 2 or _number(status, b"NoNewPrivs:", 10) == 1


def _number(status: bytes, name: bytes, base: int) -> int:
    for line in status.splitlines():
        if line.startswith(name):
            with contextlib.suppress(ValueError):
                return int(line.removeprefix(name), base)
    return 0


def _send(pidfd: int, pid: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError as error:
        raise Gone(f"process {pid} has ended") from error
    except OSError as error:
        raise Refused(f"process {pid} cannot be signalled: {error.strerror}") from error


# -- commands -----------------------------------------------------------------------------------------


def _user(uid: int) -> _User:
    try:
        known = pwd.getpwuid(uid)
    except (KeyError, OverflowError) as error:
        raise Refused(
            f"there is no user with number {uid} on this host (`getent passwd {uid}`), so that nothing "
            "can be run as him"
        ) from error
    groups = os.getgrouplist(known.pw_name, known.pw_gid)
    return _User(uid, known.pw_gid, known.pw_name, known.pw_dir, tuple(groups))


def _found(command: Sequence[str], uid: int) -> str:
    """Full path of the program. As root only one that nobody else can have changed. Raises Refused."""
    program = shutil.which(command[0], path=_PATH)
    if program is None and not command[0].startswith("/"):
        raise Refused(
            f"{command[0]} is not found in {_PATH}, or is not executable: give its full path"
        )
    program = program or command[0]
    if uid == 0:
        _see_it_is_roots(program)
    return program


def _see_it_is_roots(program: str) -> None:
    part = os.path.realpath(program)
    while True:
        try:
            status = os.stat(part)
        except OSError as error:
            raise Refused(f"{part}: {error.strerror}; name a program that is there") from error
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & _OTHERS_WRITE and not sticky):
            raise Refused(
                f"{program} is not run as root, since others than root can change {part}: make it root's "
                "alone, or run the tenant as another user"
            )
        if part == "/":
            return
        part = os.path.dirname(part)


def _start(
    user: _User, command: Sequence[str], procs: int
) -> tuple["subprocess.Popen[bytes]", int]:
    """The process, in a session of its own, and a descriptor from which its troubles can be read."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    groups = ",".join(map(str, user.groups))
    words = [str(theirs), str(procs), str(user.uid), str(user.gid), groups, *command]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", runas.__file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=user.environment,
            cwd="/",
            start_new_session=True,
            pass_fds=[fd for fd in (theirs, procs) if fd >= 0],
        )
    except OSError as error:
        os.close(ours)
        raise Unavailable(
            f"no process can be started: {error.strerror}; see to the limits of gpuagent.service"
        ) from error
    except ValueError as error:
        os.close(ours)
        raise Refused(f"{command[0]}: {error}") from error
    finally:
        os.close(theirs)
    return process, ours


async def _finish(process: "subprocess.Popen[bytes]", seconds: float, program: str) -> None:
    """Wait for it, and leave nothing of its group. Raises Unavailable where its time was not enough."""
    pidfd = os.pidfd_open(process.pid)
    try:
        ended = await ended_within(pidfd, seconds)
    finally:
        # It is not reaped yet, so that its number is no other's group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await ended_within(pidfd, _KILL_SECONDS)
        os.close(pidfd)
        process.poll()
    if not ended:
        raise Unavailable(
            f"{program} was not done within {seconds:g} s; it was ended: have it leave its work to a "
            "process of the tenant"
        )


def _said(errors: int) -> str:
    """Why the command could not be begun; empty where it was."""
    with contextlib.suppress(BlockingIOError):
        return os.read(errors, 1000).decode("utf-8", "replace")
    return ""


def _perhaps_forbidden(code: int) -> str:
    """What may be the reason for such an ending; empty where it is not."""
    suspect = code in _FORBIDDEN_CODES or -code in _FORBIDDEN_SIGNALS
    return _SANDBOX if suspect and is_sandboxed(proc_file(os.getpid(), "status")) else ""


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
