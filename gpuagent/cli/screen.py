"""The terminal of a live view: keys come in one by one, frames go out, and all is put back at the end."""

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Self

Style = Literal["", "head", "bad", "chosen"]

_CODES: dict[Style, str] = {"head": "\x1b[1m", "bad": "\x1b[31m", "chosen": "\x1b[7m"}
_OFF = "\x1b[0m"
# Another screen, no cursor, and no wrapping: a name that is wider than we think cannot push lines.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[@-~]")
_OPEN = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
"""The beginning of a sequence whose end has not come yet."""
_NAMED = {
    b"A": "up",
    b"B": "down",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "page up",
    b"6~": "page down",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, which fits the screen, and how it is to stand out."""

    text: str
    style: Style = ""


class Keys:
    """From bytes to keys: characters, or names such as "up", "enter", "escape"."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = b""

    @property
    def pending(self) -> bool:
        """Whether an escape is there that may be a key of its own, or the beginning of one."""
        return bool(self._waiting)

    def feed(self, data: bytes) -> list[str]:
        """Keys that are complete with `data`. Sequences that mean nothing to us are dropped."""
        data = self._waiting + data
        held = _OPEN.search(data)
        self._waiting = held[0] if held else b""
        return list(self._read(data[: len(data) - len(self._waiting)]))

    def settle(self) -> list[str]:
        """What is pending, once nothing more has come for a moment."""
        waiting, self._waiting = self._waiting, b""
        return ["escape", *self._plain(waiting[1:])] if waiting else []

    def _read(self, data: bytes) -> Iterator[str]:
        at = 0
        while at < len(data):
            found = _SEQUENCE.match(data, at)
            if found:
                name = _NAMED.get(found[0][2:])
                if name:
                    yield name
                at = found.end()
            elif data[at] == 0x1B:
                yield "escape"
                at += 1
            else:
                end = data.find(b"\x1b", at)
                end = len(data) if end < 0 else end
                yield from self._plain(data[at:end])
                at = end

    def _plain(self, data: bytes) -> Iterator[str]:
        for character in self._text.decode(data):
            if character in "\r\n":
                yield "enter"
            elif character in "\x7f\x08":
                yield "backspace"
            elif character.isprintable():
                yield character


class Screen:
    """The terminal while it is ours. Enter and leave it as a context; leaving restores it."""

    def __init__(self, *, keys: int, out: int, ansi: bool, colour: bool) -> None:
        """Descriptors of a terminal. Without `ansi` frames are printed one below the other."""
        self._keys = keys
        self._out = out
        self._ansi = ansi
        self._colour = colour
        self._before: list[Any] | None = None
        self._shown: tuple[Line, ...] | None = None

    @classmethod
    def of_this_process(cls) -> "Screen":
        """Standard input and output; NO_COLOR and TERM decide on the rest."""
        ansi = os.environ.get("TERM", "dumb") not in {"", "dumb", "unknown"}
        return cls(
            keys=sys.stdin.fileno(),
            out=sys.stdout.fileno(),
            ansi=ansi,
            colour=ansi and not os.environ.get("NO_COLOR"),
        )

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Take the terminal: keys without Enter and without echo, and a screen of our own."""
        self._before = termios.tcgetattr(self._keys)
        tty.setcbreak(self._keys, termios.TCSANOW)
        self._shown = None
        if self._ansi:
            self._write(_ENTER)

    def leave(self) -> None:
        """Put the terminal back as it was."""
        # One that has gone cannot be restored, and need not be.
        with contextlib.suppress(OSError):
            if self._ansi:
                self._write(_LEAVE)
        with contextlib.suppress(termios.error):
            if self._before is not None:
                termios.tcsetattr(self._keys, termios.TCSAFLUSH, self._before)

    def size(self) -> tuple[int, int]:
        """Columns and rows; 80 by 24 where the terminal does not say."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24

    def show(self, lines: Sequence[Line]) -> None:
        """Draw a frame that fills the screen; one that is the same as before costs nothing."""
        frame = tuple(lines)
        if frame == self._shown:
            return
        self._shown = frame
        if not self._ansi:
            texts = (line.text.rstrip() for line in frame)
            self._write("".join(f"{text}\n" for text in texts if text) + "\n")
            return
        # Cleared before it is written: after a full line the cursor stands on the last cell.
        body = "\r\n".join(f"\x1b[K{self._drawn(line)}" for line in frame)
        self._write(f"\x1b[H{body}")

    def forget(self) -> None:
        """Draw the next frame whatever it is: the terminal has been resized or used by others."""
        self._shown = None

    def _drawn(self, line: Line) -> str:
        code = _CODES.get(line.style, "") if self._colour else ""
        return f"{code}{line.text}{_OFF}" if code else line.text

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._out, data) :]


class Signals:
    """Signals as things to look at, and a descriptor that becomes readable when one comes."""

    ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def __init__(self) -> None:
        self.ended_by: int | None = None
        self.suspend = False
        self.redraw = False
        self.woken, self._wake = os.pipe()
        for end in (self.woken, self._wake):
            os.set_blocking(end, False)
        self._put_back = contextlib.ExitStack()

    def __enter__(self) -> Self:
        before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._put_back.callback(signal.set_wakeup_fd, before)
        for number in (*self.ENDS, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            old = signal.signal(number, self._take)
            self._put_back.callback(signal.signal, number, old)
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back.close()
        os.close(self.woken)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def wake(self) -> None:
        """Make `woken` readable, from any thread, also after the end."""
        with contextlib.suppress(OSError):  # full is enough; closed means that nobody waits
            os.write(self._wake, b"\0")

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in self.ENDS:
            self.ended_by = number
        elif number == signal.SIGTSTP:
            self.suspend = True
        else:
            self.redraw = True


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Those that have something to read, waiting for at most so long."""
    ready, _, _ = select.select(list(descriptors), [], [], seconds)
    return set(ready)


def drained(descriptor: int) -> bytes:
    """What there is to read; empty at the end, or where the terminal has gone."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
