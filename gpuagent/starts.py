"""What one run leaves for the next: whether it ended cleanly, how often it did not, and a pause."""

import contextlib
import os

import msgspec

from gpuagent.errors import Unavailable
from gpuagent.keptfile import read_file, replace_file

CRASH_WINDOW_SECONDS = 600.0
CRASHES_TO_OBSERVE = 3
_BOOK_MOST_BYTES = 65536
_MARK_MOST_BYTES = 256


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
            return msgspec.json.decode(read_file(self._path, _BOOK_MOST_BYTES), type=_Book)
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
            by = read_file(self._path, _MARK_MOST_BYTES)[:_MARK_MOST_BYTES]
            return by.decode("utf-8", "replace").strip() or "somebody"
        except FileNotFoundError:
            return None
        except OSError:
            return "somebody (the mark cannot be read)"

    def set(self, by: str) -> None:
        """Raises Unavailable if it cannot be kept over a restart."""
        try:
            replace_file(self._path, by.encode("utf-8", "replace"))
        except OSError as error:
            raise Unavailable(
                f"paused, but a restart will not remember it: {self._path}: {error.strerror}; put "
                "that in order, then pause once more"
            ) from error

    def clear(self) -> None:
        """Raises Unavailable if the mark cannot be removed."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unavailable(f"cannot remove {self._path}: {error.strerror}") from error
