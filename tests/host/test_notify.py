"""sd_notify against real datagram sockets, by path and abstract."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuagent.host.notify import Notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket, and its address as in NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        if request.param == "path":
            address = str(tmp_path / "n")
            sock.bind(address)
        else:
            sock.bind("")  # the kernel chooses an abstract name
            address = "@" + sock.getsockname()[1:].decode()
        yield sock, address


def test_every_message(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    notify = Notify(address)
    for sent, expected in (
        (notify.ready("two cards"), b"READY=1\nSTATUS=two cards"),
        (notify.status("busy"), b"STATUS=busy"),
        (notify.watchdog(), b"WATCHDOG=1"),
        (notify.reloading(12.3456789), b"RELOADING=1\nMONOTONIC_USEC=12345678"),
        (notify.stopping(), b"STOPPING=1"),
        (notify.more_time(30), b"EXTEND_TIMEOUT_USEC=30000000\nWATCHDOG=1"),
    ):
        assert sent
        assert sock.recv(4096) == expected


def test_a_status_is_one_line_whatever_is_in_it(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    assert Notify(address).status("a\nMAINPID=1\x1b" + "x" * 9999)
    message = sock.recv(65536)
    assert b"\n" not in message
    assert message.startswith(b"STATUS=a\\x0aMAINPID=1\\x1bx")
    assert len(message) < 600


def test_without_a_manager_nothing_happens() -> None:
    assert Notify().ready("x") is False
    assert Notify.from_environment({}).watchdog() is False


@pytest.mark.parametrize(
    "address", ["/nonexistent/notify", "@nobody-listens-here", "/a\0b", "/" + "x" * 200]
)
def test_a_manager_that_cannot_be_reached_is_no_error(address: str) -> None:
    assert Notify(address).ready("x") is False


def test_a_full_queue_is_no_error_and_does_not_wait(manager: tuple[socket.socket, str]) -> None:
    _, address = manager
    notify = Notify(address)
    results = {notify.watchdog() for _ in range(3000)}
    assert results == {True, False}


def test_the_environment_is_taken_so_that_no_child_inherits_it() -> None:
    environ = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
        "PATH": "/bin",
    }
    assert Notify.from_environment(environ).watchdog_seconds == 30
    assert environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("microseconds", "pid", "expected"),
    [
        ("2000000", "", 2.0),
        ("2000000", "1", None),
        ("0", "", None),
        ("", "", None),
        ("-5", "", None),
        ("soon", "", None),
        ("\u0662", "", None),
    ],
)
def test_the_watchdog_is_for_us_or_not(microseconds: str, pid: str, expected: float | None) -> None:
    environ = {"WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
    assert Notify.from_environment(environ).watchdog_seconds == expected


def test_an_address_of_another_kind_is_ignored() -> None:
    assert Notify.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"}).ready("x") is False


# -- more time for a stop -------------------------------------------------------------------------------


class Counting(Notify):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def more_time(self, seconds: float) -> bool:
        self.asked += 1
        return True


async def test_more_time_is_asked_for_while_it_lasts_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpuagent.host.notify._AGAIN_SECONDS", 0.01)
    gate, notify = asyncio.Event(), Counting()

    async def work() -> str:
        await gate.wait()
        return "done"

    waiting = asyncio.create_task(notify.meanwhile(work(), most_seconds=0.03))
    await asyncio.sleep(0.2)
    assert notify.asked == 3, "beyond that the manager is to decide"
    assert not waiting.done()
    gate.set()
    assert await waiting == "done"


async def test_what_the_work_raises_is_raised_and_it_ends_with_its_caller() -> None:
    async def fails() -> None:
        raise KeyError("a fault")

    with pytest.raises(KeyError):
        await Counting().meanwhile(fails(), most_seconds=10)
    ended = asyncio.Event()

    async def lasts() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(Counting().meanwhile(lasts(), most_seconds=10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(ended.wait(), 5)


def test_the_unit_lets_both_ask() -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "gpuagent.service").read_text()
    assert "NotifyAccess=exec" in unit, "else `gpuagent restore` is not heard"
    (limit,) = (line for line in unit.splitlines() if line.startswith("TimeoutStopSec="))
    # Until the first sign, and between two, it must not run out.
    assert int(limit.partition("=")[2]) >= 30
