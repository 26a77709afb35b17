"""The dead-man guard: a process of its own that freezes control groups in pulses, and thaws them.

`freezer` starts it as `python guard.py`, with one end of a socket pair for standard input: the other
end is the agent's, so that it closes when the agent dies, however it does. Standard library only, and
little of it. A message is one datagram of words:

    pulse NUMBER SECONDS RATIO   freeze at most so long at a stretch, run this share of the time; with
                                 cgroup.freeze and cgroup.events as descriptors where NUMBER is new
    thaw NUMBER                  for good; answered by "thawed NUMBER PULSES SECONDS"
    beat                         the agent is alive; answered by "beat" and NUMBER:PULSES:SECONDS of each

It says "frozen NUMBER" once a new one has been seen frozen, and "lost NUMBER WHY" where it has let one
go. Everything is thawed when the agent's end closes, on SIGTERM, and on any error, a message that is
not understood included; while the agent is silent it rests thawed. A cgroup whose file somebody else
has written to is his: it is let go as it is, but never as our own write has frozen it.

Whose a "1" is in a pulse, the file does not say. A writer shows as an opening, a modification and a
closing; but so does `echo foo > cgroup.freeze`, which writes nothing and truncates (6.18 shows
that as a modification, too). To truncate changes the time of modification, to write does not (kernfs):
with each write of ours it is set to what no clock says. Where it has changed, the pulse is thawed at its
end all the same, and then the cgroup is let go: who freezes it again has it. What falls together with a
write of ours counts as ours.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

RUNNING_LEAST_SECONDS = 0.02
"""A tenant is left so long between two pulses whatever was asked: enough to be scheduled and to answer."""
RUNNING_MOST_SECONDS = 2.0
"""A mild ratio makes pulses shorter rather than further apart than this."""
SILENCE_SECONDS = 3.0
"""An agent that says nothing for so long is as good as dead."""
MESSAGE_BYTES_MAX = 1 << 16

_FROZEN_WITHIN_SECONDS = 0.001
"""First look at whether it is frozen: the kernel took 0.5 ms for one process that sleeps (measured)."""
_IN_MODIFY = 0x2  # include/uapi/linux/inotify.h
_IN_CLOSE_WRITE = 0x8
_IN_OPEN = 0x20
_UNTOUCHED_NS = 0
"""Time of modification of a file that nobody has truncated since we wrote to it."""
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_EVENT_BYTES = 16
_NICE = -10
_RESTLESS = "it did not come to rest within the pulse: a longer [freeze] pulse gives it more time"


def frozen_for(pulse: float, ratio: float) -> float:
    """Seconds for which to freeze at a stretch, so that `ratio` of all time is left."""
    return min(pulse, RUNNING_MOST_SECONDS * (1 - ratio) / ratio)


def running_for(frozen: float, ratio: float) -> float:
    """Seconds to run after having been frozen for so long."""
    return max(RUNNING_LEAST_SECONDS, frozen * ratio / (1 - ratio))


class Turn:
    """When one cgroup is frozen and when it runs. Pure: it is told the time.

    What it runs is measured by how long it really was frozen: it never gets less than its share,
    however late the guard comes.
    """

    def __init__(self, pulse: float, ratio: float, now: float) -> None:
        self.pulse = pulse
        self.ratio = ratio
        self.frozen = False
        self.since = now
        self.due = now
        """When it is to be frozen or thawed next."""
        self.lasted = 0.0
        """Seconds of the latest pulse."""

    def step(self, now: float) -> bool:
        """Whether it is to be frozen or thawed now; `frozen` says which."""
        if now < self.due:
            return False
        if self.frozen:
            self.lasted = now - self.since
        self.frozen = not self.frozen
        self.since = now
        self._plan()
        return True

    def change(self, pulse: float, ratio: float) -> None:
        """Another pulse and ratio, from this stretch on."""
        self.pulse, self.ratio = pulse, ratio
        self.lasted = min(self.lasted, frozen_for(pulse, ratio))
        if self.due < math.inf:
            self._plan()

    def rest(self, now: float) -> None:
        """Run until `resume`."""
        if self.frozen:
            self.lasted = now - self.since
        self.frozen, self.since, self.due = False, now, math.inf

    def resume(self, now: float) -> None:
        self.since = now
        self._plan()

    def _plan(self) -> None:
        length = (
            frozen_for(self.pulse, self.ratio)
            if self.frozen
            else running_for(self.lasted, self.ratio)
        )
        self.due = self.since + length


class Held:
    """A cgroup that is pulsed: its control files stay open, so that no other can be meant."""

    def __init__(self, number: int, freeze: int, events: int, turn: Turn) -> None:
        self.number = number
        self.turn = turn
        self.watch = -1
        self.doubted = False
        """Somebody may have frozen it in this pulse, and it may be us alone."""
        self.pulses = 0
        self.seconds = 0.0
        self.look = turn.due
        """When to look again whether it is frozen; infinite once it was seen."""
        self._wait = _FROZEN_WITHIN_SECONDS
        self.freeze_fd = freeze
        self._events = events

    @property
    def due(self) -> float:
        return min(self.turn.due, self.look) if self.turn.frozen else self.turn.due

    def freeze(self, now: float) -> None:
        self._write(b"1\n")
        if self.look < math.inf:
            self.look = now + self._wait

    def thaw(self) -> None:
        self._write(b"0\n")

    def _write(self, text: bytes) -> None:
        os.pwrite(self.freeze_fd, text, 0)
        with contextlib.suppress(OSError):  # then it looks truncated
            os.utime(self.freeze_fd, ns=(_UNTOUCHED_NS, _UNTOUCHED_NS))

    def is_truncated(self) -> bool:
        """Whether somebody has truncated the file since our last write."""
        return os.fstat(self.freeze_fd).st_mtime_ns != _UNTOUCHED_NS

    def told(self) -> bool:
        """Whether it is told to be frozen."""
        return os.pread(self.freeze_fd, 16, 0).strip() == b"1"

    def is_frozen(self) -> bool:
        """Whether all of it is."""
        return b"frozen 1" in os.pread(self._events, 256, 0).split(b"\n")

    def looked(self, now: float, *, frozen: bool) -> None:
        self._wait *= 2
        self.look = math.inf if frozen else now + self._wait

    def close(self) -> None:
        os.close(self.freeze_fd)
        os.close(self._events)


class Watch:
    """inotify on control files: who has opened one, modified it and closed it, one right after the other.

    So much, since nothing of it is about a process. Ours stay open, and what is ours is told by `skip`.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.fd = -1
        """-1 where none can be had (fs.inotify.max_user_instances): then only what the file says shows."""
        self._latest: dict[int, int] = {}
        """By watch: opened, or modified after that."""
        self._written: set[int] = set()

    def add(self, fd: int) -> int:
        if self.fd < 0:
            self.fd = int(self._libc.inotify_init1(_NONBLOCK_CLOEXEC))
        if self.fd < 0:
            return -1
        path = b"/proc/self/fd/%d" % fd
        mask = _IN_OPEN | _IN_MODIFY | _IN_CLOSE_WRITE
        return int(self._libc.inotify_add_watch(self.fd, path, mask))

    def drop(self, watch: int) -> None:
        if watch >= 0:
            self._libc.inotify_rm_watch(self.fd, watch)
            self.skip(watch)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def written(self) -> set[int]:
        """Watches whose file somebody seems to have written to; each once."""
        self._read()
        found, self._written = self._written, set()
        return found

    def skip(self, watch: int) -> None:
        """What has happened to this one until now is our own doing, or may be."""
        self._read()
        self._latest.pop(watch, None)
        self._written.discard(watch)

    def _read(self) -> None:
        if self.fd < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, 4096):
                # Events about files, not folders, carry no name: each is 16 bytes long.
                for at in range(0, len(data), _EVENT_BYTES):
                    watch = int.from_bytes(data[at : at + 4], sys.byteorder, signed=True)
                    self._take(watch, int.from_bytes(data[at + 4 : at + 8], sys.byteorder))

    def _take(self, watch: int, mask: int) -> None:
        before = self._latest.pop(watch, 0)
        if mask & _IN_OPEN or (mask & _IN_MODIFY and before):
            self._latest[watch] = mask
        elif mask & _IN_CLOSE_WRITE and before & _IN_MODIFY:
            self._written.add(watch)


class Guard:
    """All that is pulsed, and the line to the agent."""

    def __init__(self, line: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line
        line.setblocking(False)
        self._clock = clock
        self._held: dict[int, Held] = {}
        self._watch = Watch()
        self._heard = clock()
        self._resting = False
        self._ending = False
        self._alarm, self._bell = os.pipe2(_NONBLOCK_CLOEXEC)

    def run(self) -> None:
        """Until the agent's end closes, a signal, or an error. Everything is thawed then."""
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        try:
            while not self._ending:
                self._wait()
                self._hear()
                self._leave_to_others()
                self._step()
                self._leave_to_others()  # what was read meanwhile wakes nobody
        finally:
            for held in self._held.values():
                if held.turn.frozen:
                    with contextlib.suppress(OSError):
                        held.thaw()
            self._close()

    def _close(self) -> None:
        for held in self._held.values():
            held.close()
        self._watch.close()
        signal.set_wakeup_fd(-1)
        os.close(self._alarm)
        os.close(self._bell)

    def _end(self, *_: object) -> None:
        self._ending = True

    def _wait(self) -> None:
        due = min((h.due for h in self._held.values()), default=math.inf)
        if self._held and not self._resting:
            due = min(due, self._heard + SILENCE_SECONDS)
        left = None if due == math.inf else max(0.0, due - self._clock())
        ears = [self._line.fileno(), self._alarm]
        select.select([*ears, self._watch.fd] if self._watch.fd >= 0 else ears, [], [], left)

    # -- the agent ------------------------------------------------------------------------------------

    def _hear(self) -> None:
        while not self._ending:
            try:
                data, fds, _, _ = socket.recv_fds(self._line, MESSAGE_BYTES_MAX, 2)
            except BlockingIOError:
                return
            except ConnectionError:
                data, fds = b"", []
            if not data:
                self._ending = True
                return
            self._heard = self._clock()
            self._obey(data.decode("ascii").split(), fds)

    def _obey(self, words: list[str], fds: list[int]) -> None:
        """Raises ValueError for what is not understood, which ends the guard."""
        now = self._clock()
        match words:
            case ["beat"]:
                told = (f"{h.number}:{h.pulses}:{h.seconds:.3f}" for h in self._held.values())
                self._say("beat", *told)
            case ["pulse", number, pulse, ratio]:
                self._pulse(int(number), fraction(pulse, 10.0), fraction(ratio, 1.0), fds)
            case ["thaw", number]:
                self._thaw(int(number))
            case _:
                raise ValueError(f"not understood: {' '.join(words)[:80]!r}")
        if self._resting:
            self._resting = False
            for held in self._held.values():
                held.turn.resume(now)

    def _pulse(self, number: int, pulse: float, ratio: float, fds: list[int]) -> None:
        known = self._held.get(number)
        if known is not None:
            known.turn.change(pulse, ratio)
            for fd in fds:
                os.close(fd)
            return
        if not fds:
            return  # it was let go meanwhile, and the agent has not heard of it yet
        freeze, events = fds
        held = Held(number, freeze, events, Turn(pulse, ratio, self._clock()))
        held.watch = self._watch.add(freeze)
        self._held[number] = held

    def _thaw(self, number: int) -> None:
        held = self._held.get(number)
        if held is None:
            self._say("thawed", str(number), "0", "0")
            return
        try:
            if held.turn.frozen:
                self._count(held, self._clock() - held.turn.since)
                held.thaw()
        except OSError as error:
            self._lose(held, _words(error))
            return
        self._forget(held)
        self._say("thawed", str(number), str(held.pulses), f"{held.seconds:.3f}")

    def _say(self, *words: str) -> None:
        try:
            self._line.send(" ".join(words).encode())
        except BlockingIOError:
            pass  # an agent that does not read is silent, too
        except OSError:
            self._ending = True

    # -- the cgroups ----------------------------------------------------------------------------------

    def _step(self) -> None:
        now = self._clock()
        if self._held and not self._resting and now - self._heard >= SILENCE_SECONDS:
            self._rest(now)
        for held in list(self._held.values()):
            # One of them may have been let go on the turn of another.
            if held.due <= now and held.number in self._held:
                try:
                    self._turn(held, now)
                except OSError as error:
                    self._lose(held, _words(error))

    def _turn(self, held: Held, now: float) -> None:
        if held.turn.frozen and held.look <= now:
            seen = held.is_frozen()
            held.looked(now, frozen=seen)
            if seen:
                self._say("frozen", str(held.number))
        if now < held.turn.due:
            return
        self._leave_to_others()
        if held.number not in self._held or not held.turn.step(now):
            return
        if held.told() is held.turn.frozen:
            self._give_up(held)
        elif held.turn.frozen:
            held.freeze(now)
            self._watch.skip(held.watch)
        else:
            self._end_pulse(held)
            if held.look < math.inf and held.number in self._held:
                self._lose(held, _RESTLESS)

    def _end_pulse(self, held: Held) -> None:
        self._count(held, held.turn.lasted)
        held.thaw()
        self._watch.skip(held.watch)
        if held.doubted:
            self._give_up(held)

    def _count(self, held: Held, seconds: float) -> None:
        if held.is_frozen():
            held.pulses += 1
            held.seconds += seconds

    def _rest(self, now: float) -> None:
        """Thawed until the agent says something."""
        self._resting = True
        for held in list(self._held.values()):
            frozen = held.turn.frozen
            held.turn.rest(now)
            try:
                if frozen:
                    self._end_pulse(held)
            except OSError as error:
                self._lose(held, _words(error))

    def _leave_to_others(self) -> None:
        written = self._watch.written()
        for held in [h for h in self._held.values() if h.watch in written]:
            try:
                held.doubted = held.turn.frozen and held.told() and held.is_truncated()
            except OSError as error:
                self._lose(held, _words(error))
                continue
            if not held.doubted:
                self._give_up(held)

    def _give_up(self, held: Held) -> None:
        """Leave it as it is: as somebody else wants it."""
        self._forget(held)
        self._say("lost", str(held.number), "another")

    def _lose(self, held: Held, why: str) -> None:
        """Let it go, thawed if that can be."""
        with contextlib.suppress(OSError):
            held.thaw()
        self._forget(held)
        self._say("lost", str(held.number), why)

    def _forget(self, held: Held) -> None:
        del self._held[held.number]
        self._watch.drop(held.watch)
        held.close()


def _words(error: OSError) -> str:
    return error.strerror or "an error"


def fraction(text: str, most: float) -> float:
    """A number over 0 and under `most`. Raises ValueError."""
    value = float(text)
    if not 0 < value < most:
        raise ValueError(f"{text[:80]!r} is not between 0 and {most:g}")
    return value


def main() -> None:
    """Guard over what standard input tells of."""
    # A late thaw holds a tenant longer than was promised.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with socket.socket(fileno=0) as line:
        Guard(line).run()


if __name__ == "__main__":
    main()
