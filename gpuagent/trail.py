"""Where the last run kept its books, for whoever cleans up after it with another configuration.

The state directory and the cgroup root are in the configuration, and that may have been changed, or
broken, since the run that wrote the ledger. So each run leaves its paths beside its socket.
"""

import contextlib
import os
import stat

import msgspec

from gpuagent.config import Paths
from gpuagent.keptfile import replace_file

_SUFFIX = ".paths"
_MOST_BYTES = 65536


def _place(paths: Paths) -> str:
    """Named after the socket: two agents may have theirs in one folder."""
    stem, suffix = os.path.splitext(paths.socket)
    return f"{paths.socket if suffix == _SUFFIX else stem}{_SUFFIX}"


def leave(paths: Paths) -> None:
    """Note the paths of the run that begins. What cannot be written is done without."""
    with contextlib.suppress(OSError):
        replace_file(_place(paths), msgspec.json.encode(paths))


def left(paths: Paths) -> Paths | None:
    """The paths of the run before, if it left any where this configuration looks for them.

    Only a plain file of our own is believed: it says where root writes.
    """
    try:
        fd = os.open(_place(paths), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        try:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=Paths)
        except (OSError, msgspec.DecodeError):
            return None


def wipe(paths: Paths) -> None:
    """Nothing of this run is left."""
    with contextlib.suppress(OSError):
        os.unlink(_place(paths))
