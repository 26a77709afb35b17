"""The audit log: one JSON line for every action, rotated by size, never in anybody's way.

`audit.jsonl` is the newest, then `audit.jsonl.1` and so on; what they take together is bounded.
Lines are written by a thread of its own. A line that cannot be written is counted and dropped: the
log tells what was done, and no action waits for it.
"""

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import msgspec

from gpuagent.model.inventory import Subject

_WAITING_MAX = 10_000


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
        self._waiting: deque[Action] = deque()
        self._lock = threading.Lock()
        self._writing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self.dropped = 0
        """Lines that could not be written since the start."""
        self.trouble = ""
        """Why the last of them could not; empty while the disk takes them."""

    def record(self, action: Action) -> None:
        """Hand over one line; returns at once. After `close` it is dropped."""
        with self._lock:
            if len(self._waiting) >= _WAITING_MAX:
                self.dropped += 1
                return
            self._waiting.append(action)
            if self._writing:
                return
            self._writing = True
        try:
            self._thread.submit(self._drain)
        except RuntimeError:  # the executor has been shut down
            self.dropped += 1

    def close(self) -> None:
        """Write what is left. Blocks; call it off the loop or at the very end."""
        self._thread.shutdown(wait=True)

    def _drain(self) -> None:
        while True:
            with self._lock:
                batch = list(self._waiting)
                self._waiting.clear()
                if not batch:
                    self._writing = False
                    return
            try:
                self._write(batch)
                self.trouble = ""
            except OSError as error:
                self.dropped += len(batch)
                self.trouble = f"cannot write {self._path}: {error.strerror}"

    def _write(self, batch: list[Action]) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            for action in batch:
                line = _line(action)
                if size and size + len(line) > self._file_bytes:
                    os.close(fd)
                    fd = -1
                    self._rotate()
                    fd = os.open(self._path, flags, 0o600)
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


def _line(action: Action) -> bytes:
    """JSON with the time in words first. Names from strangers are whatever they are: JSON escapes them."""
    fields = msgspec.to_builtins(action)
    time = datetime.fromtimestamp(action.wall, UTC).isoformat(timespec="milliseconds")
    try:
        return msgspec.json.encode({"time": time, **fields}) + b"\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(_plain({"time": time, **fields})) + b"\n"


def _plain(value: object) -> object:
    """The same with every lone surrogate (a byte that was not UTF-8) written as an escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
