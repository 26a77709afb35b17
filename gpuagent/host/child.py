"""The child's side of `worker`: its end of the pipes, and the few bytes that say which call it is in.

Standard library only, and little of it: what is imported here is paid for in every child.
"""

import ctypes
import json
import mmap
import os
import select
import signal
import struct
import sys
import time

FRAME_LIMIT_BYTES = 1 << 20
"""No frame is longer, in either direction; a longer one means that the other side is broken."""

_PENDING_LIMIT_BYTES = 2 * FRAME_LIMIT_BYTES
_HOLD_SECONDS = 0.005
"""How long a frame that may be dropped waits for others to be sent with: each write wakes the parent."""
_PR_SET_PDEATHSIG = 1

_encode = json.JSONEncoder(separators=(",", ":")).encode


class CallSlot:
    """Shared memory in which a child says which call it is in, so that it can be seen hanging.

    Layout: monotonic seconds of the last sign of life, monotonic seconds at which the call was
    entered (0 between calls), number of the call's target, name of the call. The parent only trusts a
    time that has long stood still, by when the rest of it does too, so that it needs no lock.
    """

    SIZE = 128
    _TIME = struct.Struct("=d")
    _ENTERED = struct.Struct("=ddq96s")
    _WHAT = struct.Struct("=q96s")

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, self.SIZE)

    def alive(self) -> None:
        self._TIME.pack_into(self._map, 0, time.monotonic())

    def enter(self, target: int, name: bytes) -> None:
        now = time.monotonic()
        self._ENTERED.pack_into(self._map, 0, now, now, target, name)

    def leave(self) -> None:
        self._TIME.pack_into(self._map, 8, 0.0)

    def last_alive(self) -> float:
        """Monotonic seconds of the last sign of life; 0 before the first."""
        return float(self._TIME.unpack_from(self._map, 0)[0])

    def inside(self) -> tuple[float, int, str] | None:
        """(entered, target, name) of the call the child is in, or None between calls."""
        entered = self._TIME.unpack_from(self._map, 8)[0]
        target, name = self._WHAT.unpack_from(self._map, 16)
        if not entered or entered != self._TIME.unpack_from(self._map, 8)[0]:
            return None
        return entered, target, name.rstrip(b"\0").decode("ascii", "replace")

    def close(self) -> None:
        self._map.close()


class Pipes:
    """Frames in and out, newline-delimited JSON; never blocks and never grows without bound."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._heard = b""
        self._pending = b""
        self._stuck = False
        """Whether the pipe took only part of what was pending when it was last tried."""
        self._held_since = 0.0
        self.dropped = 0
        """Frames that were not sent because the parent does not read."""
        os.set_blocking(source, False)
        os.set_blocking(sink, False)

    def send(self, frame: object, *, droppable: bool = False) -> None:
        """Send a frame; while the parent does not read, droppable ones are left out.

        Others go out at once; droppable ones after 5 ms with the next, or when `receive` waits.
        """
        if self._stuck:
            self._flush()
        data = _encode(frame).encode() + b"\n"
        full = len(self._pending) + len(data) > _PENDING_LIMIT_BYTES
        if full or (droppable and self._stuck):
            self.dropped += 1
            return
        now = time.monotonic()
        if not self._pending:
            self._held_since = now
        self._pending += data
        if not droppable or now - self._held_since >= _HOLD_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._stuck = False
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._sink, self._pending) :]
        except BlockingIOError:
            self._stuck = True
        except BrokenPipeError:
            self._pending = b""  # The parent has gone, which the other pipe tells.

    def receive(self, timeout: float) -> list[bytes]:
        """Lines that have arrived, waiting up to `timeout` seconds. Raises EOFError at the end."""
        if timeout > 0:
            self._flush()
        sinks = [self._sink] if self._stuck else []
        readable, writable, _ = select.select([self._source], sinks, [], max(0.0, timeout))
        if writable:
            self._flush()
        if not readable:
            return []
        data = os.read(self._source, 65536)
        if not data:
            raise EOFError
        *lines, self._heard = (self._heard + data).split(b"\n")
        if len(self._heard) > FRAME_LIMIT_BYTES:
            raise EOFError
        return lines

    def finish(self, seconds: float) -> None:
        """Give the parent this long to read what is still pending."""
        end = time.monotonic() + seconds
        self._flush()
        while self._pending and (left := end - time.monotonic()) > 0:
            select.select([], [self._sink], [], left)
            self._flush()


def begin(argv: list[str]) -> tuple[CallSlot, Pipes, dict[str, object]]:
    """Take up what `worker.Worker` gave: the slot, the pipes and the settings.

    The child dies with its parent, and is not ended by the signals that a terminal or a service
    manager sends to the whole group: the parent ends it.
    """
    parent, slot_fd, settings = int(argv[1]), int(argv[2]), json.loads(argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # It died before the line above.
        sys.exit(0)
    # A library that prints must not write into our frames: its output joins the errors.
    sink = os.dup(1)
    os.dup2(2, 1)
    slot = CallSlot(slot_fd)
    os.close(slot_fd)
    slot.alive()
    return slot, Pipes(0, sink), settings
