"""News of processes from the real kernel, and the filter as a program of its own."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.connector.cn_proc import (
    PROC_EVENT_EXEC,
    PROC_EVENT_EXIT,
    PROC_EVENT_FORK,
    PROC_EVENT_NONE,
)

from gpuagent.clock import SystemClock
from gpuagent.errors import Refused, Unavailable, Unsupported
from gpuagent.host.netlink import (
    CHECKS_PER_SECOND,
    PAUSE_SECONDS,
    STORM_PER_SECOND,
    ProcessEvents,
    _meaning,
    attach_filter,
    filter_program,
)
from gpuagent.ports import ProcessEvents as Port
from gpuagent.ports import Service

_fits: tuple[Port, Service] = (
    ProcessEvents(wake=print, clock=SystemClock()),
    ProcessEvents(wake=print, clock=SystemClock()),
)


class HeldClock(SystemClock):
    """Real time, but sleeping ends when the test says so."""

    def __init__(self) -> None:
        self.asleep: list[float] = []
        self.go_on = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asleep.append(seconds)
        await self.go_on.wait()
        self.go_on.clear()


class Ears:
    """Events that are being listened to, and the reasons for which they woke the loop."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.woken: list[str] = []
        self.events = ProcessEvents(wake=self.woken.append, clock=self.clock)

    async def until(self, true: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(10):
                while not true():  # noqa: ASYNC110 - any condition, which no event announces
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"never happened: {what}; health {self.events.health}")

    async def hear(self, *expected: tuple[int, str]) -> None:
        heard: list[tuple[int, str]] = []

        def all_of_it() -> bool:
            heard.extend(self.events.take())
            return set(expected) <= set(heard)

        await self.until(all_of_it, f"{expected} among {heard}")


@pytest.fixture
async def ears() -> AsyncIterator[Ears]:
    """Skips where the kernel does not let us listen."""
    listening = Ears()
    task = asyncio.ensure_future(listening.events.run())
    try:
        await listening.until(lambda: listening.events.health.up is not None, "an answer")
        if not listening.events.health.up:
            pytest.skip(listening.events.health.why)
        yield listening
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def test_the_exit_of_a_watched_process_wakes_the_loop(ears: Ears) -> None:
    with sleeping() as child, sleeping() as other:
        ears.events.watch([child.pid], None)
        other.kill()
        other.wait()
        child.kill()
        child.wait()
        await ears.hear((child.pid, "exit"))
        assert ears.woken == [f"process {child.pid} has ended"]


async def test_an_exec_is_heard_only_if_it_matters(ears: Ears) -> None:
    asked: list[int] = []

    def matters(pid: int) -> bool:
        asked.append(pid)
        return len(asked) > 1

    ears.events.watch([], matters)
    with sleeping() as first:
        await ears.until(lambda: first.pid in asked, "the first exec")
        assert ears.events.take() == []
        with sleeping() as second:
            await ears.hear((second.pid, "exec"))


async def test_threads_that_end_are_no_exits(ears: Ears) -> None:
    ears.events.watch([os.getpid()], None)
    for _ in range(5):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    with sleeping() as child:
        ears.events.watch([os.getpid(), child.pid], None)
        child.kill()
        child.wait()
        await ears.hear((child.pid, "exit"))
    assert ears.woken == [f"process {child.pid} has ended"]


async def test_a_crowd_too_big_for_the_filter_is_still_watched(ears: Ears) -> None:
    with sleeping() as child:
        ears.events.watch([*range(1_000_000, 1_001_000), child.pid], None)
        child.kill()
        child.wait()
        await ears.hear((child.pid, "exit"))


async def test_a_storm_nobody_asked_for_does_not_reach_us(ears: Ears) -> None:
    ears.events.watch([1], None)
    await asyncio.to_thread(_storm, STORM_PER_SECOND // 2)
    with sleeping() as child:
        ears.events.watch([child.pid], None)
        child.kill()
        child.wait()
        await ears.hear((child.pid, "exit"))
    assert ears.events.health.up


async def test_a_storm_switches_off_and_after_a_pause_on_again(ears: Ears) -> None:
    checked = 0

    def matters(_: int) -> bool:
        nonlocal checked
        checked += 1
        return False

    ears.events.watch([], matters)
    stop = threading.Event()
    storm = asyncio.ensure_future(asyncio.to_thread(_storm_until, stop))
    try:
        await ears.until(lambda: ears.events.health.up is False, "the storm is noticed")
    finally:
        stop.set()
        await storm
    assert "400 events a second" in ears.events.health.why
    assert "process table is read instead" in ears.events.health.why
    assert ears.clock.asleep == [PAUSE_SECONDS]
    ears.clock.go_on.set()
    await ears.until(lambda: ears.events.health.up is True, "hearing again")
    assert ears.events.health.why == ""
    with sleeping() as child:
        ears.events.watch([child.pid], None)
        child.kill()
        child.wait()
        await ears.hear((child.pid, "exit"))


def _storm(processes: int) -> None:
    for _ in range(processes):
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitpid(pid, 0)


def _storm_until(stop: threading.Event) -> None:
    while not stop.is_set():
        _storm(20)


async def test_looking_at_execs_is_bounded(ears: Ears) -> None:
    seconds: list[int] = []

    def matters(_: int) -> bool:
        seconds.append(int(ears.clock.now().mono))
        return False

    ears.events.watch([], matters)
    await asyncio.to_thread(_storm, CHECKS_PER_SECOND + 100)
    await ears.until(lambda: bool(seconds), "an exec")
    await asyncio.sleep(0.2)
    assert max(seconds.count(s) for s in seconds) <= CHECKS_PER_SECOND


async def test_an_overflow_counts_as_a_storm(ears: Ears) -> None:
    """The socket overflows while the loop is held up."""
    ears.events.watch([], lambda _: False)
    heard = ears.events._socket
    assert heard is not None
    heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel makes it its least
    _storm(40)
    await ears.until(lambda: ears.events.health.up is False, "the overflow is noticed")
    assert "more events than the socket holds" in ears.events.health.why


ASK_ONCE = """
import asyncio
from gpuagent.clock import SystemClock
from gpuagent.host.netlink import ProcessEvents

async def main():
    events = ProcessEvents(wake=print, clock=SystemClock())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(events.run())
        while events.health.up is None:
            await asyncio.sleep(0.01)
        print(events.health.up, events.health.why)
        task.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("namespaces", "why"),
    [
        (["--net"], "nobody answers in this network namespace; run the agent in the host's"),
        (["--pid", "--fork"], "does not answer in this PID or user namespace; run the agent in"),
    ],
)
def test_in_a_container_it_says_why_and_stays_off(namespaces: list[str], why: str) -> None:
    if subprocess.run(
        ["unshare", *namespaces, "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip("no namespaces can be made here")
    child = subprocess.run(
        ["unshare", *namespaces, sys.executable, "-c", ASK_ONCE],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.stdout.startswith("False process events: ")
    assert why in child.stdout


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (errno.EPERM, Refused, "CAP_NET_ADMIN"),
        (errno.EPROTONOSUPPORT, Unsupported, "CONFIG_PROC_EVENTS"),
        (errno.ECONNREFUSED, Unsupported, "network namespace"),
        (errno.ENOMEM, Unavailable, "memory"),
    ],
)
def test_errors_say_what_to_do(number: int, error: type[Exception], text: str) -> None:
    meant = _meaning(OSError(number, os.strerror(number)))
    assert type(meant) is error
    assert text in str(meant)


# -- the filter, run by the kernel on messages of our own ---------------------------------------------


@contextlib.contextmanager
def filtered(pids: list[int], *, execs: bool) -> Iterator[Callable[[bytes], bool]]:
    """Whether a message passes: a filter sees a datagram of a Unix socket just as netlink's."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        attach_filter(right, filter_program(pids, execs=execs))
        right.setblocking(False)

        def passes(message: bytes) -> bool:
            # A Unix socket refuses to send what the peer's filter drops.
            with contextlib.suppress(PermissionError):
                left.send(message)
            with contextlib.suppress(BlockingIOError):
                return right.recv(256) == message
            return False

        yield passes


def message(what: int, thread: int, process: int) -> bytes:
    return struct.pack("=36xI12xII16x", what, thread, process)


KINDS = st.sampled_from([PROC_EVENT_NONE, PROC_EVENT_FORK, PROC_EVENT_EXEC, PROC_EVENT_EXIT])
PIDS = st.integers(1, 2**22)


@given(st.lists(PIDS, max_size=300, unique=True), KINDS, PIDS, st.booleans(), st.booleans())
def test_the_filter_keeps_what_was_asked_for(
    pids: list[int], what: int, pid: int, execs: bool, leader: bool
) -> None:
    watched = pids[:1] or [pid]
    with filtered(pids, execs=execs) as passes:
        for process in {pid, watched[0]}:
            thread = process if leader else process + 1
            wanted = (
                what == PROC_EVENT_NONE
                or (what == PROC_EVENT_EXEC and execs)
                or (what == PROC_EVENT_EXIT and leader and (process in pids or len(pids) > 256))
            )
            assert passes(message(what, thread, process)) is wanted


def test_a_short_message_is_dropped() -> None:
    with filtered([7], execs=True) as passes:
        assert not passes(b"short")
        assert passes(message(PROC_EVENT_EXIT, 7, 7))
