"""What one run leaves for the next: whether it ended cleanly, how often it did not, and a pause."""

import contextlib
import os

import msgspec

from gpuagent.errors import Refused

CRASH_WINDOW_SECONDS = 600.0
CRASHES_TO_OBSERVE = 3


class _Book(msgspec.Struct):
    """`starts.json`. Times are CLOCK_MONOTONIC seconds of the boot they belong to."""

    boot: str = ""
    running: bool = False
    crashes: list[float] = []


class Starts:
    """Counts runs that ended without saying so, within this boot.

    The third within ten minutes means that something we do brings us down again and again: the next
    run only observes (DESIGN 9), until somebody stops it cleanly. A file that cannot be read or
    written counts nothing and stops nobody.
    """

    def __init__(self, directory: str, boot: str) -> None:
        self._path = os.path.join(directory, "starts.json")
        self._boot = boot
        self._book = _Book(boot)

    def begin(self, now: float) -> int:
        """Note that a run begins; how many crashes in a row led to it within the window."""
        known = self._read()
        if known.boot == self._boot:
            recent = [c for c in known.crashes if 0 <= now - c <= CRASH_WINDOW_SECONDS]
            self._book.crashes = [*recent, now] if known.running else recent
        self._book.running = True
        self._write()
        return len(self._book.crashes)

    def end(self) -> None:
        """Note that this run ended as it should: the crashes before it are over with."""
        self._book.running = False
        self._book.crashes = []
        self._write()

    def _read(self) -> _Book:
        try:
            with open(self._path, "rb") as file:
                return msgspec.json.decode(file.read(65536), type=_Book)
        except (OSError, msgspec.DecodeError, RecursionError):
            return _Book()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            replace_file(self._path, msgspec.json.encode(self._book))


class PauseMark:
    """A pause outlives the run it was asked of: a restart must not undo an operator's stop."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "paused")

    def read(self) -> str | None:
        """Who asked for it; None while there is no pause. Unreadable counts as paused."""
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                return file.read(256).strip() or "somebody"
        except FileNotFoundError:
            return None
        except OSError:
            return "somebody (the mark cannot be read)"

    def set(self, by: str) -> None:
        """Raises Refused if it cannot be kept over a restart."""
        try:
            replace_file(self._path, by.encode("utf-8", "replace"))
        except OSError as error:
            raise Refused(
                f"paused, but a restart will not remember it: {self._path}: {error.strerror}"
            ) from error

    def clear(self) -> None:
        """Raises Refused if the mark cannot be removed."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"cannot remove {self._path}: {error.strerror}") from error


def replace_file(path: str, content: bytes, mode: int = 0o600) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part."""
    fresh = f"{path}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        left = memoryview(content)
        while left:  # on a disk that is nearly full, what fits is written first
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
