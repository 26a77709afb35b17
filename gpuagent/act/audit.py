"""The audit log: one JSON line for every action, rotated by size, never in anybody's way.

`audit.jsonl` is the newest, then `audit.jsonl.1` and so on; what they take together is bounded.
Lines are written by a thread of its own. A line that cannot be written is counted and dropped: the
log tells what was done, and no action waits for it, nor does the end of the process.
"""

import errno
import os
import stat
from datetime import UTC, datetime

import msgspec
import structlog

from gpuagent.behind import Behind
from gpuagent.model.inventory import Subject
from gpuagent.model.text import wired

_WAITING_MAX = 10_000

_log = structlog.get_logger()


class Action(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing done to the host, or the end of an attempt to do it. Base units of the knob."""

    wall: float
    knob: str
    subject: Subject
    did: str
    """set, put back, left alone, would set, or not set."""
    result: str
    why: str
    """The reason for it, or what stood in its way."""
    rule: str = ""
    before: str = ""
    """The value as the host showed it before, verbatim."""
    wrote: str = ""
    after: str = ""
    """The value as it read back, verbatim."""
    original: str = ""
    numbers: tuple[tuple[str, float], ...] = ()


class AuditLog:
    """`audit.jsonl` of a state directory: at most `files` files of `file_bytes` each."""

    def __init__(
        self, directory: str, *, file_bytes: int = 8 * 1024 * 1024, files: int = 5
    ) -> None:
        self._path = os.path.join(directory, "audit.jsonl")
        self._file_bytes = file_bytes
        self._files = files
        self._failed = 0
        self.trouble = ""
        """Why the last lines could not be written; empty while the disk takes them."""
        self._behind = Behind(self._take, most=_WAITING_MAX, name="audit")

    @property
    def dropped(self) -> int:
        """Lines that could not be written since the start."""
        return self._behind.refused + self._failed

    def record(self, action: Action) -> None:
        """Hand over one line; returns at once. After `close` it is dropped."""
        self._behind.put(action)

    def close(self, seconds: float = 2.0) -> None:
        """Write what is left, for at most so long: a disk that hangs is left alone, and that is said."""
        if not self._behind.close(seconds):
            _log.warning(
                "the last lines of the audit log are not written: the disk does not answer",
                path=self._path,
                seconds=seconds,
            )

    def _take(self, batch: list[Action]) -> None:
        try:
            self._write(batch)
            self.trouble = ""
        except OSError as error:
            self._failed += len(batch)
            self.trouble = f"cannot write {self._path}: {error.strerror}"

    def _write(self, batch: list[Action]) -> None:
        fd = _open(self._path)
        try:
            size = os.fstat(fd).st_size
            for action in batch:
                line = _line(action)
                if size and size + len(line) > self._file_bytes:
                    os.close(fd)
                    fd = -1
                    self._rotate()
                    fd = _open(self._path)
                    size = 0
                size += _write_all(fd, line)
        finally:
            if fd >= 0:
                os.close(fd)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = f"{self._path}.{number}"
            newer = f"{self._path}.{number - 1}" if number > 1 else self._path
            if os.path.exists(newer):
                os.replace(newer, older)
        if self._files == 1:
            os.unlink(self._path)


def _open(path: str) -> int:
    """To append to it. Raises OSError for anything but a file: a pipe would keep us waiting."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a file")
    return fd


def _line(action: Action) -> bytes:
    """JSON with the time in words first. Names from strangers are whatever they are: JSON escapes them."""
    fields = msgspec.to_builtins(action)
    time = datetime.fromtimestamp(action.wall, UTC).isoformat(timespec="milliseconds")
    try:
        return msgspec.json.encode({"time": time, **fields}) + b"\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(wired({"time": time, **fields})) + b"\n"


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
