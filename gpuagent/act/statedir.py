"""The state directory: made fit for use, and held by one agent at a time."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator

from gpuagent.errors import Refused

_REMEDY = "set paths.state_dir to a directory that only the agent's user may write"


def prepare(directory: str) -> None:
    """Create the directory with mode 0700 where it is missing. Raises Refused.

    A directory that everybody may write is refused: what lies in it is written to the host by root.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise Refused(
            f"state directory {directory} cannot be used: {error.strerror}; {_REMEDY}"
        ) from error
    if mode & stat.S_IWOTH:
        raise Refused(
            f"state directory {directory} may be written by everybody (mode {mode & 0o7777:04o}); "
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
            f"another gpuagent ({who}) holds {directory}; stop it first, or use another state_dir"
        ) from error
    except OSError as error:
        raise Refused(f"cannot lock {directory}: {error.strerror}; {_REMEDY}") from error
