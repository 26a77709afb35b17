"""How the agent logs: JSON lines under systemd and in pipes, readable text on a terminal.

Modules take their logger with `structlog.get_logger()`; `setup` is called once, by the command
that runs. Names of processes, cgroups and containers are chosen by strangers: whatever could move
a cursor, forge a line or hide text is escaped before it is written. A reader that is stuck, as a
hung journald is, costs lines, which are counted, and never time.
"""

import atexit
import contextlib
import logging
import os
import select
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Literal, TextIO

import structlog

from gpuagent.behind import Behind
from gpuagent.model.state import Health

_WAITING_MOST_LINES = 2000

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["auto", "json", "text"]

_Line = MutableMapping[str, Any]


def printable(text: str, keep: str = "") -> str:
    r"""`text` with everything that is not visible written as an escape such as \x1b.

    Control characters, line breaks, bidirectional overrides, unassigned code points and bytes that
    were not UTF-8 (lone surrogates) are escaped; characters in `keep` are not.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def setup(*, level: Level = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Send every log line of this process, those of libraries included, to `stream` (stderr).

    Lines may be on their way when a logger returns; at the end of the process `flush` waits for them.
    `os._exit` needs it called.
    """
    out = stream if stream is not None else sys.stderr
    least = getattr(logging, level.upper())
    text = form == "text" or (form == "auto" and out.isatty())
    shared: list[Callable[[Any, str, _Line], _Line]] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: list[Any] = [structlog.processors.JSONRenderer(default=str)]
    if text:
        plain = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        renderer = [_escape, plain]
    lines = _lines_to(out)
    atexit.unregister(flush)
    atexit.register(flush)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: lines,
        # Loggers are made at import time, before `setup`: they must look the setting up again.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_FromLibraries()]
    root.setLevel(max(least, logging.WARNING))


def flush(seconds: float = 0.5) -> bool:
    """Wait until every line so far is written, but no longer than that; whether it is."""
    lines = structlog.get_config()["logger_factory"]()
    return lines.flush(seconds) if isinstance(lines, _Lines) else True


class _Lines:
    """Takes whole lines from structlog, of every level alike."""

    def __init__(
        self, write: Callable[[str], None], flush: Callable[[float], bool] = lambda _: True
    ) -> None:
        self.msg = write
        self.debug = self.info = self.warning = write
        self.error = self.critical = self.exception = write
        self.flush = flush


def _lines_to(stream: TextIO) -> _Lines:
    """By a thread, except into memory, which keeps nobody waiting."""
    try:
        stream.fileno()
    except (OSError, ValueError):
        return _Lines(partial(_say, stream))
    below = _Below(stream)
    return _Lines(below.lines.put, below.lines.flush)


def _say(stream: TextIO, line: str) -> None:
    with contextlib.suppress(ValueError):  # it has been closed
        stream.write(line + "\n")


class _Below:
    """Writes lines to the file below a stream, in a thread.

    Not through the stream, whose lock a stuck write would hold: the interpreter, which flushes it at
    its end, aborts then.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._refused = 0
        self.lines = Behind(self._take, most=_WAITING_MOST_LINES, name="log")

    def _take(self, lines: list[str]) -> None:
        # There was no room while these waited: what was refused came after them.
        refused = self.lines.refused
        for line in lines:
            self._write(line)
        if refused != self._refused:
            log = structlog.wrap_logger(_Lines(self._write))
            # As an error, so that it is said at every level.
            log.error("log lines were dropped: nobody took them", lines=refused - self._refused)
            self._refused = refused

    def _write(self, line: str) -> None:
        """A reader that has gone never takes the daemon with it."""
        # A closed stream raises ValueError, a broken pipe or a full disk OSError.
        with contextlib.suppress(OSError, ValueError):
            left = (line + "\n").encode(self._stream.encoding, "backslashreplace")
            while left:
                left = left[_write_some(self._stream.fileno(), left) :]


def _write_some(fd: int, data: bytes) -> int:
    """Bytes written. Waits, also where others have made the pipe non-blocking. Raises OSError."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        room = select.poll()
        room.register(fd, select.POLLOUT)
        room.poll()
        return 0


class _FromLibraries(logging.Handler):
    """Passes on what libraries say through the standard logging module."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info
        )


def _escape(_logger: Any, _method: str, line: _Line) -> _Line:
    for key, value in line.items():
        if isinstance(value, str):
            # A traceback is the one value that is meant to have lines of its own.
            line[key] = printable(value, keep="\n" if key == "exception" else "")
        elif value is not None and not isinstance(value, bool | int | float):
            line[key] = printable(str(value))
    return line


class HealthChanges:
    """Says a change of health once, in both directions, and nothing while it stays the same."""

    def __init__(self) -> None:
        self._down_since: dict[str, float | None] = {}

    def say(self, health: Health, now: float) -> bool:
        """Log `health` if it turned at `now` (monotonic seconds); whether it did.

        The reason may change from one failure to the next: that alone is not said again.
        """
        if health.up is None:
            return False
        since = self._down_since.get(health.name)
        log = structlog.get_logger()
        if not health.up and since is None:
            self._down_since[health.name] = now
            log.warning("cannot read", sensor=health.name, why=health.why)
            return True
        if health.up and since is not None:
            self._down_since[health.name] = None
            log.info("reads again", sensor=health.name, down_seconds=round(now - since, 1))
            return True
        return False
