"""How the agent logs: JSON lines under systemd and in pipes, readable text on a terminal.

Modules take their logger with `structlog.get_logger()`; `setup` is called once, by the command
that runs. Names of processes, cgroups and containers are chosen by strangers: whatever could move
a cursor, forge a line or hide text is escaped before it is written.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, TextIO

import structlog

from gpuagent.model.state import Health

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
    """Send every log line of this process, those of libraries included, to `stream` (stderr)."""
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
    lines = _Lines(out)
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


class _Lines:
    """Writes whole lines. A reader that has gone never takes the daemon with it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        # A closed stream raises ValueError, a broken pipe or a full disk OSError.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = msg


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
