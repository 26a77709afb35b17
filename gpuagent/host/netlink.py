"""News of exec and exit from the kernel's process connector, filtered before they reach us.

The connector (drivers/connector/cn_proc.c) tells every listener of every fork, exec and exit of
every thread. pyroute2 needs 130 µs to parse one, so only its constants and its subscription message
are used here: a socket filter drops all but the execs and exits that were asked for, and the two
numbers that are left are unpacked in place. The filter is classic BPF over the netlink message:

    offset  0  struct nlmsghdr (16 bytes)
           16  struct cn_msg (20)
           36  what, cpu (4 each), timestamp (8)
           52  pid of the thread, 56 pid of its process; in an acknowledgement: error at 52

Under a storm of processes, or when the socket overflows, listening pauses and the process table,
which is read anyway, is all there is. `health` says so.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection
from typing import Literal

from pyroute2.netlink import NLMSG_DONE
from pyroute2.netlink.connector.cn_proc import (
    CN_IDX_PROC,
    CN_VAL_PROC,
    PROC_CN_MCAST_IGNORE,
    PROC_CN_MCAST_LISTEN,
    PROC_EVENT_EXEC,
    PROC_EVENT_EXIT,
    PROC_EVENT_NONE,
    proc_event_control,
)

from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Refused, Unavailable, Unsupported
from gpuagent.model.state import Health
from gpuagent.ports import Wake

What = Literal["exec", "exit"]
Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: struct sock_filter in linux/filter.h."""

STORM_PER_SECOND = 400
"""Events that pass the filter above which listening costs more than it brings."""
CHECKS_PER_SECOND = 200
"""Execs that are looked at; each look reads a file or more."""
PAUSE_SECONDS = 30.0
RETRY_SECONDS = 300.0
"""Between attempts where the kernel does not let us listen."""

_NETLINK_CONNECTOR = 11  # linux/netlink.h
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_FEW_PER_SECOND = 10  # of so few events each is heard at once, of more those of one rest together
_REST_SECONDS = 0.08
_ACK_SECONDS = 1.0
_DRAIN_MOST = 512
_PIDS_MOST = 256  # in the filter; its size is charged to the socket (net.core.optmem_max)
_QUEUE_MOST = 4096
_BUFFER_BYTES = 1 << 20

_EVENT = struct.Struct("=36xI12xII")
_WHAT_AT, _THREAD_AT, _PROCESS_AT = 36, 52, 56

# linux/bpf_common.h
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_TO_X = 0x07  # BPF_MISC | BPF_TAX
_IF_CONSTANT = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_X = 0x1D  # BPF_JMP | BPF_JEQ | BPF_X
_RETURN = 0x06  # BPF_RET | BPF_K
_KEEP: Instruction = (_RETURN, 0, 0, 0xFFFF)
_DROP: Instruction = (_RETURN, 0, 0, 0)


def _network_order(value: int) -> int:
    """A load in the filter swaps bytes as if the message came from the network; constants follow."""
    return int.from_bytes(struct.pack("=I", value & 0xFFFFFFFF), "big")


def filter_program(pids: Collection[int], *, execs: bool) -> list[Instruction]:
    """Keeps acknowledgements, exits of the processes `pids`, and execs if wanted.

    With more than 256 pids every process's exit is kept. An exit counts only for the first thread
    of a process; an exec always is one's (`de_thread` gives the caller the process's own pid).
    """
    head = [
        (_LOAD, 0, 0, _WHAT_AT),
        (_IF_CONSTANT, 0, 1, _network_order(PROC_EVENT_NONE)),
        _KEEP,
        (_IF_CONSTANT, 0, 1, _network_order(PROC_EVENT_EXEC)),
        _KEEP if execs else _DROP,
        (_IF_CONSTANT, 1, 0, _network_order(PROC_EVENT_EXIT)),
        _DROP,
        (_LOAD, 0, 0, _THREAD_AT),
        (_TO_X, 0, 0, 0),
        (_LOAD, 0, 0, _PROCESS_AT),
        (_IF_X, 1, 0, 0),
        _DROP,
    ]
    if len(pids) > _PIDS_MOST:
        return [*head, _KEEP]
    known = [step for pid in pids for step in ((_IF_CONSTANT, 0, 1, _network_order(pid)), _KEEP)]
    return [*head, *known, _DROP]


def attach_filter(sock: socket.socket, program: list[Instruction]) -> None:
    """Set or replace the socket's filter. Raises OSError."""
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a count, padding, a pointer.
    fprog = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def _control(action: int) -> bytes:
    message = proc_event_control()
    message["header"] = {"type": NLMSG_DONE, "flags": 0, "pid": 0, "sequence_number": 0}
    message["idx"], message["val"], message["len"] = CN_IDX_PROC, CN_VAL_PROC, 4
    message["action"] = action
    message.encode()
    return bytes(message.data)


def _meaning(broken: OSError) -> AgentError:
    if broken.errno in {errno.EPERM, errno.EACCES}:
        return Refused(
            "process events: not permitted; give the agent CAP_NET_ADMIN in the host's namespaces"
        )
    if broken.errno in {errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.ENOENT}:
        return Unsupported(
            "process events: this kernel has no process connector (CONFIG_PROC_EVENTS)"
        )
    if broken.errno == errno.ECONNREFUSED:
        return Unsupported(
            "process events: nobody answers in this network namespace; run the agent in the host's"
        )
    return Unavailable(f"process events: {broken.strerror}")


class ProcessEvents:
    """Listens while it runs. A service of the daemon; without it the process table is polled."""

    def __init__(self, *, wake: Wake, clock: Clock) -> None:
        self._wake = wake
        self._clock = clock
        self._socket: socket.socket | None = None
        self._pids: frozenset[int] = frozenset()
        self._matters: Callable[[int], bool] | None = None
        self._heard: deque[tuple[int, What]] = deque(maxlen=_QUEUE_MOST)
        self._checked_in = 0  # this second, so many execs
        self._checks = 0
        self._health = Health("process_events", up=None)

    @property
    def health(self) -> Health:
        """Whether anything is heard; `why` says what is done instead."""
        return self._health

    def watch(self, pids: Collection[int], matters: Callable[[int], bool] | None) -> None:
        """Hear of the exits of `pids`, and of each exec for which `matters(pid)` holds.

        At most 200 execs a second are looked at; the process table finds the others.
        """
        wanted = frozenset(pids)
        changed = wanted != self._pids or (matters is None) != (self._matters is None)
        self._pids, self._matters = wanted, matters
        if changed and self._socket is not None:
            # A filter that does not fit leaves the old one; the exits it misses are polled.
            with contextlib.suppress(OSError):
                attach_filter(self._socket, self._program())

    def take(self) -> list[tuple[int, What]]:
        """What was heard since the last call, in order."""
        heard = list(self._heard)
        self._heard.clear()
        return heard

    async def run(self) -> None:
        """Listen until cancelled; after a storm again in 30 s, where not permitted in 5 minutes."""
        while True:
            pause = PAUSE_SECONDS
            try:
                await self._listen()
            except Unavailable as over:
                self._turned(up=False, why=str(over))
            except (Refused, Unsupported) as never:
                self._turned(up=False, why=str(never))
                pause = RETRY_SECONDS
            await self._clock.sleep(pause)

    async def _listen(self) -> None:
        """Returns never; raises Unavailable when a storm breaks loose."""
        try:
            sock = socket.socket(
                socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_CONNECTOR
            )
        except OSError as broken:
            raise _meaning(broken) from broken
        with sock:
            try:
                await self._subscribe(sock)
                self._socket = sock
                self._turned(up=True, why="")
                await self._hear(sock)
            except OSError as broken:
                if broken.errno == errno.ENOBUFS:
                    raise self._storm("more events than the socket holds") from broken
                raise _meaning(broken) from broken
            finally:
                self._socket = None
                # Kernels before 6.6 count listeners by these messages alone.
                with contextlib.suppress(OSError):
                    sock.send(_control(PROC_CN_MCAST_IGNORE))

    async def _subscribe(self, sock: socket.socket) -> None:
        attach_filter(sock, self._program())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.bind((0, CN_IDX_PROC))
        sock.connect((0, 0))  # from now on the kernel alone can send to us
        sock.send(_control(PROC_CN_MCAST_LISTEN))
        try:
            async with asyncio.timeout(_ACK_SECONDS):
                while True:
                    await _readable(sock)
                    what, error, _ = _EVENT.unpack_from(sock.recv(256))
                    if what == PROC_EVENT_NONE:
                        break
        except TimeoutError:
            raise Unsupported(
                "process events: the kernel does not answer in this PID or user namespace; "
                "run the agent in the host's"
            ) from None
        if error:
            raise _meaning(OSError(error, os.strerror(error)))

    async def _hear(self, sock: socket.socket) -> None:
        pace = _Pace()
        while True:
            if pace.most > _FEW_PER_SECOND:
                await asyncio.sleep(_REST_SECONDS)
            else:
                await _readable(sock)
            now = self._clock.now().mono
            pace.add(self._drain(sock, int(now)), now)
            if pace.most > STORM_PER_SECOND:
                raise self._storm(f"more than {STORM_PER_SECOND} events a second")

    def _drain(self, sock: socket.socket, second: int) -> int:
        """Queue what has arrived, wake the loop if any of it matters; how many events it was."""
        woken, number = "", 0
        while number < _DRAIN_MOST:
            try:
                what, _thread, pid = _EVENT.unpack_from(sock.recv(256))
            except BlockingIOError:
                break
            number += 1
            if what == PROC_EVENT_EXIT and pid in self._pids:
                self._heard.append((pid, "exit"))
                woken = f"process {pid} has ended"
            elif what == PROC_EVENT_EXEC and self._exec_matters(pid, second):
                self._heard.append((pid, "exec"))
                woken = f"process {pid} of a tenant has started"
        if woken:
            self._wake(woken)
        return number

    def _exec_matters(self, pid: int, second: int) -> bool:
        if self._matters is None:
            return False
        if second != self._checked_in:
            self._checked_in, self._checks = second, 0
        self._checks += 1
        return self._checks <= CHECKS_PER_SECOND and self._matters(pid)

    def _program(self) -> list[Instruction]:
        return filter_program(sorted(self._pids), execs=self._matters is not None)

    def _storm(self, what: str) -> Unavailable:
        return Unavailable(
            f"process events: {what}; not listening for {PAUSE_SECONDS:.0f} s, "
            "the process table is read instead"
        )

    def _turned(self, *, up: bool, why: str) -> None:
        before = self._health
        now = self._clock.now().mono
        self._health = Health(
            "process_events",
            up=up,
            why=why,
            last_success=now if up else before.last_success,
            failures=0 if up else before.failures + 1,
        )


class _Pace:
    """How many events there are in a second."""

    def __init__(self) -> None:
        self._second = 0
        self._now = 0
        self._before = 0

    def add(self, number: int, at: float) -> None:
        """So many at this time, monotonic seconds."""
        second = int(at)
        if second != self._second:
            self._before = self._now if second == self._second + 1 else 0
            self._second, self._now = second, 0
        self._now += number

    @property
    def most(self) -> int:
        """The higher of this second's number so far and that of the second before."""
        return max(self._now, self._before)


async def _readable(sock: socket.socket) -> None:
    """Wait until something has arrived."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), arrived)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
