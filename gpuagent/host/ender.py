"""Signals to processes that are surely meant, and commands run as their user."""

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.host import runas
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.pidfds import ended_within, held, proc_file

_PATH = "/usr/local/bin:/usr/bin:/bin"
_KILL_SECONDS = 1.0
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
        user = _user(uid)
        program = _found(command, uid)
        with self._procs(cgroup, inode) as procs:
            process, errors = _start(user, (program, *command[1:]), procs)
        try:
            await _finish(process, seconds, program)
            trouble = _said(errors)
        finally:
            os.close(errors)
        if trouble:
            raise Refused(trouble)
        if process.returncode != 0:
            raise Unavailable(f"{program} ended with {_ending(process.returncode)}")

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
    for line in status.splitlines():
        if line.startswith(b"SigCgt:"):
            with contextlib.suppress(ValueError):
                return int(line[7:], 16)
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
        raise Refused(f"there is no user with number {uid} on this host") from error
    groups = os.getgrouplist(known.pw_name, known.pw_gid)
    return _User(uid, known.pw_gid, known.pw_name, known.pw_dir, tuple(groups))


def _found(command: Sequence[str], uid: int) -> str:
    """Full path of the program. As root only one that nobody else can have changed. Raises Refused."""
    if not command or any("\0" in word for word in command):
        raise Refused("there is no command")
    program = shutil.which(command[0], path=_PATH)
    if program is None and not command[0].startswith("/"):
        raise Refused(f"{command[0]} is not found in {_PATH}, or is not executable")
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
            raise Refused(f"{part}: {error.strerror}") from error
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & _OTHERS_WRITE and not sticky):
            raise Refused(f"{program} is not run as root, since others than root can change {part}")
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
        raise Unavailable(f"no process can be started: {error.strerror}") from error
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
        raise Unavailable(f"{program} was not done within {seconds:g} s; it was ended")


def _said(errors: int) -> str:
    """Why the command could not be begun; empty where it was."""
    with contextlib.suppress(BlockingIOError):
        return os.read(errors, 1000).decode("utf-8", "replace")
    return ""


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
