"""The state directory: made fit for use, and held by one agent at a time."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator

from gpuagent.errors import Refused

_ROOT = 0
_REMEDY = "set paths.state_dir to a directory that only the agent's user may write"


def prepare(directory: str) -> None:
    """Create the directory with mode 0700 where it is missing. Raises Refused.

    A directory that others may write is refused: what lies in it is written to the host by root.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.stat(directory)
    except OSError as error:
        raise Refused(
            f"state directory {directory} cannot be used: {error.strerror}; {_REMEDY}"
        ) from error
    us, mode = os.geteuid(), found.st_mode
    if found.st_uid not in {_ROOT, us}:
        raise Refused(
            f"state directory {directory} belongs to uid {found.st_uid}, who could have the agent "
            f"write to the host; chown it to uid {us} or {_REMEDY}"
        )
    if mode & stat.S_IWOTH:
        raise Refused(_open_to(directory, "everybody", mode))
    if mode & stat.S_IWGRP and found.st_gid != _ROOT:
        raise Refused(_open_to(directory, f"group {found.st_gid}", mode))


def require_ours(fd: int, path: str) -> None:
    """Raise Refused unless the open file is a plain one that nobody but us could have written."""
    found = os.fstat(fd)
    us, mode = os.geteuid(), found.st_mode
    if not stat.S_ISREG(mode):
        raise Refused(f"{path} is not a plain file; move it away")
    if found.st_uid != us or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(
            f"{path} belongs to uid {found.st_uid} with mode {mode & 0o7777:04o}: others than the "
            f"agent (uid {us}) could have written it, and what it says is written to the host. If "
            f"you trust it, `chown {us} {path}` and `chmod 0600 {path}`, else move it away"
        )


def _open_to(directory: str, whom: str, mode: int) -> str:
    return (
        f"state directory {directory} may be written by {whom} (mode {mode & 0o7777:04o}); "
        f"chmod it to 0700 or {_REMEDY}"
    )


@contextlib.contextmanager
def hold(directory: str) -> Iterator[None]:
    """Hold the state directory for as long as the context lasts; a death lets go of it too.

    Raises Refused where another agent holds it, with its pid, or where it cannot be written.
    """
    prepare(directory)
    path = os.path.join(directory, "lock")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refused(f"cannot open {path}: {error.strerror}; {_REMEDY}") from error
    try:
        _lock(fd, directory)
        # The pid is for the other's message only; with a full disk the lock still holds.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, directory: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        who = f"pid {pid}" if pid.isdigit() else "pid unknown"
        raise Refused(
            f"another gpuagent ({who}) holds {directory}; stop it first (`gpuagent pause` puts everything back while it runs)"
        ) from error
    except OSError as error:
        raise Refused(f"cannot lock {directory}: {error.strerror}; {_REMEDY}") from error
