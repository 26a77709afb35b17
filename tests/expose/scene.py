"""A stage for the API: a snapshot that the test sets, an inbox that notes, a clock that it owns."""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec

from gpuagent.expose.access import Access
from gpuagent.expose.bearer import Tokens
from gpuagent.expose.intake import Intake, Knocks
from gpuagent.expose.network import Remote, Tell, say
from gpuagent.expose.server import Server
from gpuagent.model.plan import Command, Snapshot, StartRun
from gpuagent.model.run import Reservation, RunList
from gpuagent.model.state import Instant
from gpuagent.ports import LatencyReport
from tests.expose import snapshots


class StillClock:
    """Shows what the test set."""

    def __init__(self) -> None:
        self.instant = snapshots.NOW

    def now(self) -> Instant:
        return self.instant

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Scene:
    """What the API tells from."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot
        self.clock = StillClock()
        self.version = "1.2.3"
        self.settings_now: dict[str, object] = {"mode": "observe", "power": {"budget": None}}
        self.reports: list[LatencyReport] = []
        self.intake = Intake(self.reports.append)
        self._listeners: list[Callable[[], None]] = []
        self.access_now = Access()
        self.knocks = Knocks()

    def latest(self) -> Snapshot | None:
        return self.snapshot

    def settings(self) -> Mapping[str, object]:
        return self.settings_now

    def access(self) -> Access:
        return self.access_now

    def listen(self, ring: Callable[[], None]) -> None:
        self._listeners.append(ring)

    def admit(self, command: Command) -> None:
        """Publish the run that a command asks for, as the loop does that has admitted it."""
        if isinstance(command, StartRun) and self.snapshot is not None:
            ask = command.ask
            run = Reservation(
                name=ask.name or f"run-{ask.pid}",
                level=ask.level,
                pid=ask.pid,
                started=ask.started,
                uid=ask.uid,
                by=ask.by,
                gpus=ask.gpus or (snapshots.GPU0,),
                memory_bytes=ask.memory_bytes,
                share_ratio=ask.share_ratio,
                began_wall=snapshots.WALL,
            )
            self.show(msgspec.structs.replace(self.snapshot, runs=RunList((run,))))

    def show(self, snapshot: Snapshot | None) -> None:
        """Publish another snapshot."""
        self.snapshot = snapshot
        for ring in self._listeners:
            ring()


class Commands:
    """An inbox that notes what comes and answers as the test says."""

    def __init__(self) -> None:
        self.seen: list[Command] = []
        self.answer: str | Exception = "done as you wished"
        self.carry_out: Callable[[Command], None] = lambda _: None
        self.hold: asyncio.Event | None = None
        self._came = asyncio.Event()

    async def until_seen(self, count: int) -> None:
        """Wait until so many commands have come."""
        async with asyncio.timeout(20):
            while len(self.seen) < count:
                self._came.clear()
                await self._came.wait()

    async def submit(self, command: Command) -> str:
        self.seen.append(command)
        self._came.set()
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        self.carry_out(command)
        return self.answer


@contextlib.contextmanager
def short_folder() -> Iterator[str]:
    """A folder that others may enter, with a path short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="ga-")
    os.chmod(folder, 0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def serving(
    scene: Scene,
    commands: Commands | None = None,
    *,
    group: str = "",
    listen: str = "127.0.0.1:0",
    metrics_token: bool = False,
    network: Remote | None = None,
    tokens: Tokens | None = None,
    tell: Tell = say,
    idle_seconds: float = 15.0,
) -> AsyncIterator[tuple[Server, str]]:
    """A server on real sockets; yields it and the path of its Unix socket.

    With `network`, once that has been opened, or could not be.
    """
    with short_folder() as folder:
        path = f"{folder}/s"
        inbox = commands if commands is not None else Commands()
        server = Server(
            scene,
            inbox,
            path=path,
            group=group,
            metrics_listen=listen,
            metrics_token=metrics_token,
            network=network,
            tokens=tokens,
            tell=tell,
            idle_seconds=idle_seconds,
        )
        await server.start()
        running = asyncio.ensure_future(server.run())
        try:
            if server.network is not None:
                await asyncio.wait_for(server.network.tried.wait(), 20)
            yield server, path
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop()  # one that is cancelled before it has begun does not stop by itself


class Reply:
    """A response, taken apart."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1]) if lines[0] else 0
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def exchange(path: str, raw: bytes, *, deadline: float = 20.0) -> bytes:
    """Send bytes over the Unix socket and read until the server closes."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(deadline):
            with contextlib.suppress(ConnectionError):
                writer.write(raw)
                await writer.drain()
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ask(
    path: str, target: str, *, method: str = "GET", headers: str = "", body: bytes = b""
) -> Reply:
    """One request over the Unix socket."""
    length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}{length}\r\n"
    return Reply(await exchange(path, head.encode() + body))


async def ask_loopback(port: int, target: str, *, headers: str = "Host: 127.0.0.1\r\n") -> Reply:
    """One request to the loopback listener."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            writer.write(f"GET {target} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n".encode())
            await writer.drain()
            return Reply(await reader.read())
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
