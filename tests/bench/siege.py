"""How late the agent's loop is while people who mean it ill, or are only slow, hang on its listeners.

Each of the besiegers is measured alone, in rounds as in `telling`: an empty loop runs beside the agent,
and the round counts in which that was served best. They run in a process of their own:

    python -m tests.bench.siege KIND PORT SOCKET SECONDS
"""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tests.bench.lag import Lagging
from tests.bench.pace import Pace
from tests.bench.rows import Row, p99
from tests.bench.scene import answers, scene
from tests.bench.scrape import Scrapes
from tests.bench.telling import Round, quietest
from tests.stage.stage import until

_ROUNDS = 3
_ROUND_SECONDS = 6.0
_HOLDERS = 100
_READERS = 20
_PER_SECOND = 100.0
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n\r\n"


def _tcp(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def hold_half_open(port: int, _path: str, stop: threading.Event) -> None:
    """Connections that send half a request and then nothing; a new one for each that is closed."""
    held: list[socket.socket] = []
    while not stop.wait(0.1):
        while len(held) < _HOLDERS:
            one = _tcp(port)
            one.sendall(_REQUEST[:20])
            one.setblocking(False)
            held.append(one)
        held = [one for one in held if not _closed(one)]


def _closed(one: socket.socket) -> bool:
    try:
        return one.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_slowly(port: int, _path: str, stop: threading.Event) -> None:
    """Scrapes whose answers are taken a byte at a time, and asked for again and again."""
    held: list[socket.socket] = []
    while not stop.wait(0.05):
        while len(held) < _READERS:
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            one.connect(("127.0.0.1", port))
            one.sendall(_REQUEST * 50)
            one.setblocking(False)
            held.append(one)
        for one in list(held):
            with contextlib.suppress(BlockingIOError):
                try:
                    ended = one.recv(1) == b""
                except ConnectionError:
                    ended = True
                if ended:
                    held.remove(one)


def flood(port: int, _path: str, stop: threading.Event) -> None:
    """Requests for what is not to be had without a token, each with a connection of its own."""
    _paced(stop, lambda: _ask(_tcp(port), b"GET /v1/tenants HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))


def churn(_port: int, path: str, stop: threading.Event) -> None:
    """Connections to the Unix socket, each of which has to be told whose it is."""

    def once() -> None:
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(5)
        one.connect(path)
        _ask(one, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    _paced(stop, once)


def _ask(one: socket.socket, request: bytes) -> None:
    with one:
        one.sendall(request)
        one.recv(65536)


def _paced(stop: threading.Event, once: Callable[[], None]) -> None:
    due, dice = time.monotonic(), random.Random(1)
    while not stop.wait(max(0.0, due - time.monotonic())):
        with contextlib.suppress(OSError):
            once()
        due = max(due, time.monotonic() - 1.0) + dice.uniform(0.5, 1.5) / _PER_SECOND


KINDS: dict[str, Callable[[int, str, threading.Event], None]] = {
    f"{_HOLDERS} half-open connections": hold_half_open,
    f"{_READERS} slow readers of /metrics": read_slowly,
    f"{_PER_SECOND:.0f} requests/s without a token": flood,
    f"{_PER_SECOND:.0f} connections/s to the Unix socket": churn,
}


def measure(pace: Pace) -> Iterator[Row]:
    """8 GPUs and 20 tenants; the budget is the loop's own (DESIGN 8)."""
    with scene(cards=8, tenants=20) as here:
        folder = here.stage.folder
        for kind in KINDS:
            with (
                Lagging(folder, str(here.stage.config), here.stage.driver.env) as agent,
                Lagging(folder) as alone,
            ):
                until("the agent answers", lambda: answers(here.port, "/readyz"))
                with here.working():
                    time.sleep(pace.seconds(_ROUND_SECONDS) / 2)
                    seconds = pace.seconds(_ROUND_SECONDS)
                    rounds = [
                        _round(kind, here.port, f"{folder}/agent.sock", seconds)
                        for _ in range(_ROUNDS)
                    ]
                    served = answers(here.port, "/readyz")
                seen, machine = agent.end(), alone.end()
            quiet = quietest(rounds, machine)
            late = quiet.of(seen)
            yield Row(
                f"event-loop lag p99 under {kind}",
                1e3 * p99(late),
                "ms",
                10.0,
                25.0,
                f"worst {1e3 * max(late):.0f} ms; an empty loop beside it "
                f"{1e3 * p99(quiet.of(machine)):.1f} ms; /readyz answers after it: {served}",
            )


def _round(kind: str, port: int, path: str, seconds: float) -> Round:
    began = time.monotonic()
    command = (sys.executable, "-m", "tests.bench.siege", kind, str(port), path, str(seconds))
    subprocess.run(command, check=True, timeout=seconds + 60)
    return Round(began, time.monotonic(), Scrapes())


def main() -> None:
    kind, port, path, seconds = sys.argv[1:]
    stop = threading.Event()
    threading.Timer(float(seconds), stop.set).start()
    KINDS[kind](int(port), path, stop)


if __name__ == "__main__":
    main()
