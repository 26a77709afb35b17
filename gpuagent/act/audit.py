"""The audit log: one JSON line for every action, rotated by size, never in anybody's way.

`audit.jsonl` is the newest, then `audit.jsonl.1` and so on; what they take together is bounded.
Lines are written by a thread of its own. A line that cannot be written is counted and dropped: the
log tells what was done, and no action waits for it, nor does the end of the process.

The latest actions are kept in memory as well, for whoever asks: nobody reads files for that.
"""

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import structlog

from gpuagent.behind import Behind
from gpuagent.model.audit import Action
from gpuagent.model.text import wired

KEPT = 1000
"""Actions in memory, the latest."""
_RECALL_BYTES = 1024 * 1024
"""Of the end of a file, at most: more than `KEPT` usual lines."""
_WAITING_MAX = 10_000

_log = structlog.get_logger()


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
        self._number = 0
        self._kept: deque[Action] = deque(maxlen=KEPT)
        self._told: tuple[Action, ...] | None = ()
        """`_kept` as it is told; None when that has to be made anew."""

    @property
    def dropped(self) -> int:
        """Lines that could not be written since the start."""
        return self._behind.refused + self._failed

    def record(self, action: Action) -> None:
        """Keep it and hand over its line; returns at once. After `close` the line is dropped."""
        self._keep(action)
        self._behind.put(action)

    def recall(self) -> None:
        """Keep what the ends of the newest two files say of the runs before; at the start, once.

        Blocking, and bounded. What is torn, or no line of ours, is passed over.
        """
        newest = [_end_of(self._path)]
        if len(newest[0]) < KEPT:
            newest.insert(0, _end_of(f"{self._path}.1"))
        for action in [a for part in newest for a in part][-KEPT:]:
            self._keep(action)

    def latest(self) -> tuple[Action, ...]:
        """Those in memory, oldest first, numbered without a gap. The same object until there is another."""
        if self._told is None:
            self._told = tuple(self._kept)
        return self._told

    def _keep(self, action: Action) -> None:
        self._number += 1
        self._kept.append(msgspec.structs.replace(action, number=self._number))
        self._told = None

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


def _end_of(path: str) -> list[Action]:
    """The actions in the last part of a file, oldest first; none where there is no such file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        fd = os.open(path, flags)
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode):
                end = os.pread(fd, _RECALL_BYTES, max(0, found.st_size - _RECALL_BYTES))
                return list(_actions(end))
        finally:
            os.close(fd)
    return []


def _actions(lines: bytes) -> Iterator[Action]:
    for line in lines.split(b"\n"):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = msgspec.json.decode(line, type=dict[str, object])
            if isinstance(numbers := fields.get("numbers"), list):
                # JSON has no infinity: such a number was written as null, and is not told.
                fields["numbers"] = [n for n in numbers if not _is_null(n)]
            yield msgspec.structs.replace(msgspec.convert(fields, Action), number=0)


def _is_null(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and pair[1] is None


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
