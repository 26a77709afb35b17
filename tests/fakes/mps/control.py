"""A stand-in for `nvidia-cuda-mps-control`, with servers and clients that a test makes.

It speaks as the real ones do (tests/host/test_mps_real.py holds the answers of both side by side):
`-d` leaves a daemon that listens in CUDA_MPS_PIPE_DIRECTORY, without it each line of standard input
is a command. Words that begin with `fake_` are a test's own:

    fake_server PID STATE    fake_client SERVER PID    fake_leave PID    fake_stubborn PID

FAKE_MPS_VERSION is 535 or 550; FAKE_MPS_SERVER says what becomes of a server that is started: ok,
dies, hangs (it stays INITIALIZING), fault. FAKE_MPS_KEEPS: a default percentage that no set changes.
"""

import contextlib
import os
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable

FOLDER = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
SOCKET = os.path.join(FOLDER, "control")
BOUND = 107 - len("_privileged")


class State:
    """What the daemon knows."""

    def __init__(self) -> None:
        self.version = int(os.environ.get("FAKE_MPS_VERSION", "550"))
        self.fate = os.environ.get("FAKE_MPS_SERVER", "ok")
        self.keeps = os.environ.get("FAKE_MPS_KEEPS")
        self.default = float(self.keeps or 100.0)
        self.priority = 0
        self.limits: dict[int, str] = {}
        self.servers: dict[int, str] = {}
        self.clients: dict[int, int] = {}
        """Server by client."""
        self.threads: dict[int, float] = {}
        self.stubborn: set[int] = set()
        self.next = 70000
        self.over = threading.Event()

    def answer(self, line: str) -> str | None:
        """Text, with its final newline where it is not empty; None after the last."""
        word, *rest = line.split() or [""]
        known: Callable[..., str | None] | None = getattr(self, "do_" + word, None)
        if known is None or (word == "get_server_status" and self.version < 550):
            return f'Unknown command "{word}"\n'
        return known(*rest)

    # -- servers --------------------------------------------------------------------------------

    def do_get_server_list(self) -> str:
        return "".join(f"{pid}\n" for pid in self.servers)

    def do_start_server(self, flag: str = "", uid: str = "") -> str:
        if flag != "-uid" or not uid:
            return "A user id (UID) is required to start a new server\n"
        if self.servers or self.fate == "dies":
            return ""
        self.next += 1
        self.servers[self.next] = {"ok": "ACTIVE", "hangs": "INITIALIZING", "fault": "FAULT"}[
            self.fate
        ]
        self.threads[self.next] = self.default
        return ""

    def do_get_server_status(self, pid: str = "") -> str:
        return self._of(pid, lambda server: f"{self.servers[server]}\n")

    def do_get_client_list(self, pid: str = "") -> str:
        return self._of(pid, lambda server: "".join(f"{c}\n" for c in self._on(server)))

    def do_shutdown_server(self, pid: str = "", _flag: str = "") -> str:
        def end(server: int) -> str:
            if self._on(server):
                self.servers[server] = "FAULT"
            else:
                del self.servers[server]
            return ""

        return self._of(pid, end)

    def do_terminate_client(self, server: str = "", pid: str = "") -> str:
        if int(server) not in self.servers:
            return f"Server {server} not found\nServer {server} not found!\n1\n"
        if int(pid) not in self.stubborn:
            self.clients.pop(int(pid), None)
        return "0\n"

    # -- values ---------------------------------------------------------------------------------

    def do_get_default_active_thread_percentage(self) -> str:
        return f"{self.default:.1f}\n"

    def do_set_default_active_thread_percentage(self, value: str = "") -> str:
        if self.keeps is None:
            self.default = percentage(value, self.default)
        return f"{self.default:.1f}\n"

    def do_get_active_thread_percentage(self, pid: str = "") -> str:
        return self._of(pid, self._threads)

    def do_set_active_thread_percentage(self, pid: str = "", value: str = "") -> str:
        def change(server: int) -> str:
            if self.servers[server] != "INITIALIZING":
                self.threads[server] = percentage(value, self.threads[server])
            return self._threads(server)

        return self._of(pid, change)

    def do_get_default_device_pinned_mem_limit(self, ordinal: str = "0") -> str:
        return self.limits.get(int(ordinal), "")

    def do_set_default_device_pinned_mem_limit(self, ordinal: str = "0", value: str = "") -> str:
        number = int(ordinal) if ordinal.isdecimal() else 0
        found = re.fullmatch(r"(\d+)([GM])", value)
        if number > 31:
            return ""
        if not ordinal.isdecimal():
            self.limits.pop(0, None)
        elif found is None:
            digits = value[: len(value) - len(value.lstrip("0123456789"))]
            self.limits[number] = f"{digits or 0}M\n"
        else:
            size, unit = int(found[1]), found[2]
            if unit == "M" and size >= 1024:
                size, unit = size // 1024, "G"
            self.limits[number] = f"{size}{unit}\n"
        return ""

    def do_get_default_client_priority(self) -> str:
        return f"{self.priority}\n"

    def do_set_default_client_priority(self, value: str = "") -> str:
        if value not in {"0", "1"}:
            return "Invalid priority value - must be 0 or 1!\n"
        self.priority = int(value)
        return ""

    # -- its end --------------------------------------------------------------------------------

    def do_quit(self, flag: str = "", seconds: str = "0") -> None:
        until = time.monotonic() + (float(seconds) if flag == "-t" else 3600.0)
        while self.clients and time.monotonic() < until:
            time.sleep(0.02)
        self.over.set()

    # -- what a test makes ----------------------------------------------------------------------

    def do_fake_server(self, pid: str, state: str) -> str:
        self.servers[int(pid)] = state
        self.threads.setdefault(int(pid), self.default)
        return ""

    def do_fake_client(self, server: str, pid: str) -> str:
        self.clients[int(pid)] = int(server)
        return ""

    def do_fake_leave(self, pid: str) -> str:
        self.clients.pop(int(pid), None)
        return ""

    def do_fake_stubborn(self, pid: str) -> str:
        self.stubborn.add(int(pid))
        return ""

    # -- parts ----------------------------------------------------------------------------------

    def _of(self, pid: str, told: Callable[[int], str]) -> str:
        server = int(pid) if pid.isdecimal() else 0
        return told(server) if server in self.servers else f"Server {server} not found\n"

    def _on(self, server: int) -> list[int]:
        return [pid for pid, at in self.clients.items() if at == server]

    def _threads(self, server: int) -> str:
        return "" if self.servers[server] == "INITIALIZING" else f"{self.threads[server]:.1f}\n"


def percentage(text: str, before: float) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        return value if 0 < value <= 100 else before
    return before


class Daemon(socketserver.ThreadingUnixStreamServer):
    """Listens, each user in a thread."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(SOCKET, Talk)
        self.state = State()


class Talk(socketserver.StreamRequestHandler):
    """One user's commands: each answered by its length on a line, then that many bytes."""

    server: Daemon

    def handle(self) -> None:
        for line in self.rfile:
            said = self.server.state.answer(line.decode().rstrip("\n"))
            with contextlib.suppress(OSError):
                self.wfile.write(f"{len(said or '')}\n{said or ''}".encode())
            if said is None:
                return


def reached() -> socket.socket | None:
    talk = socket.socket(socket.AF_UNIX)
    try:
        talk.connect(SOCKET)
    except OSError:
        return None
    return talk


def serve() -> int:
    if len(SOCKET) > BOUND:
        return 1
    os.makedirs(FOLDER, exist_ok=True)
    if reached() is not None:
        print("An instance of this daemon is already running")
        return 1
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)
    daemon = Daemon()
    os.chmod(SOCKET, 0o666)
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    threading.Thread(target=daemon.serve_forever, daemon=True).start()
    daemon.state.over.wait()
    time.sleep(0.01)
    os.unlink(SOCKET)
    return 0


def talk() -> int:
    connection = reached()
    if connection is None:
        print("Cannot find MPS control daemon process", file=sys.stderr)
        return 1
    stream = connection.makefile("rwb")
    for line in sys.stdin:
        stream.write(line.encode())
        stream.flush()
        length = stream.readline()
        sys.stdout.write(stream.read(int(length or 0)).decode())
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(serve() if "-d" in sys.argv else talk())
