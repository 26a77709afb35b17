"""A pseudo-terminal to try things on."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def terminal(columns: int = 80, rows: int = 24) -> Iterator[tuple[int, int]]:
    """The two ends of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    resize(ours, columns, rows)
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def resize(ours: int, columns: int, rows: int) -> None:
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def written(ours: int, seconds: float = 0.0) -> bytes:
    data = b""
    while select.select([ours], [], [], seconds)[0]:
        data += os.read(ours, 65536)
    return data
