"""The listeners: the Unix sockets with roles, and the loopback address for Prometheus."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

import structlog
from aiohttp import web

from gpuagent.clock import patiently
from gpuagent.expose.api import Gate, Inbox
from gpuagent.expose.app import Speaker, loopback_app, socket_app
from gpuagent.expose.auth import Rules, cgroup_of
from gpuagent.expose.door import FIRST_REQUEST_SECONDS, Admission, Anyone, Callers, Door
from gpuagent.expose.metrics import Exposition
from gpuagent.expose.routes import Told
from gpuagent.expose.sockets import (
    BACKLOG,
    Address,
    admin_path,
    bind_admin_socket,
    bind_loopback,
    bind_socket,
    group_id,
    remove_socket,
)

_log = structlog.get_logger()

# aiohttp logs each malformed request with a traceback: a way for anybody to fill the disk. What is
# a fault of ours is logged by the outermost frame of a request.
_unsaid = logging.getLogger("gpuagent.expose.unsaid")
_unsaid.disabled = True

_TAKEN_AT_ONCE = 8
"""Connections of a Unix socket, before anything else has its turn: a crowd at the door comes slowly."""
_LAST_WORDS_SECONDS = 0.25
"""For requests in progress at the end, and once more for those that it then cancels."""


class Server:
    """All listeners. `start`, then `run` until cancelled; `stop` is part of `run`."""

    def __init__(
        self,
        told: Told,
        inbox: Inbox,
        *,
        path: str,
        group: str = "",
        metrics_listen: str = "",
        idle_seconds: float = 20.0,
    ) -> None:
        """Nothing is opened yet. An empty `metrics_listen` means no loopback listener.

        A connection is closed when no request has become complete on it, or its peer has not taken
        an answer, for `idle_seconds`; the first request has five seconds at most.
        """
        self._told = told
        self._inbox = inbox
        self._path = path
        self._group = group
        self._listen = metrics_listen
        self._idle_seconds = idle_seconds
        self._exposition = Exposition(told.version, now=lambda: told.clock.now().mono)
        self._listening = contextlib.ExitStack()
        self._rooms: list[tuple[web.AppRunner, Door]] = []
        self._started = False
        self.metrics_port: int | None = None
        """Where /metrics is, once started."""

    async def start(self) -> None:
        """Open the listeners. Raises Refused, with what to do; nothing stays open then."""
        try:
            await self._start_socket()
            if self._listen:
                await self._start_loopback(Address.parse(self._listen))
        except BaseException:  # cancelled or refused: half a server must not stay open
            await self.stop()
            raise
        self._started = True

    async def run(self) -> None:
        """Serve until cancelled, then close and remove the socket. Starts if need be."""
        try:
            if not self._started:
                await self.start()
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Listen no more; requests in progress get half a second, whoever their clients are."""
        self._listening.close()
        rooms, self._rooms = self._rooms, []
        ends = asyncio.gather(*(runner.cleanup() for runner, _ in rooms))
        await patiently(ends, 3 * _LAST_WORDS_SECONDS)
        for _, door in rooms:
            door.turn_all_out()
        self._exposition.close()

    async def _start_socket(self) -> None:
        group = group_id(self._group)
        if self._group and group is None:
            _log.warning("no such group: only root is an administrator", group=self._group)
        callers = Callers(self._told, Rules(group=group, own_cgroup=_own_cgroup()))
        app = socket_app(
            self._told,
            self._inbox,
            gate=Gate(self._group),
            peer_of=callers.peer_of,
            door=callers,
            exposition=self._exposition,
            send_seconds=self._idle_seconds,
        )
        admission = await self._http(app, callers)
        sock = bind_socket(self._path)
        await self._listen_on(sock, self._path, admission)
        beside = admin_path(self._path)
        await self._listen_on(bind_admin_socket(beside, group), beside, admission)

    async def _listen_on(
        self, sock: socket.socket, path: str, admission: Callable[[], Admission]
    ) -> None:
        self._listening.callback(sock.close)
        self._listening.callback(remove_socket, path, os.lstat(path).st_ino)
        loop = asyncio.get_running_loop()
        listener = await loop.create_unix_server(admission, sock=sock, backlog=_TAKEN_AT_ONCE)
        self._listening.callback(listener.close)
        sock.listen(BACKLOG)  # asyncio has one number for what may wait and what is taken at once

    async def _start_loopback(self, address: Address) -> None:
        door = Anyone()
        app = loopback_app(
            self._told,
            hosts=address.names,
            door=door,
            exposition=self._exposition,
            send_seconds=self._idle_seconds,
        )
        sock = bind_loopback(address)
        self._listening.callback(sock.close)
        self.metrics_port = sock.getsockname()[1]
        admission = await self._http(app, door)
        listener = await asyncio.get_running_loop().create_server(admission, sock=sock)
        self._listening.callback(listener.close)

    async def _http(self, app: web.Application, door: Door) -> Callable[[], Admission]:
        """What receives each connection, with limits on the silent and the slow."""
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_LAST_WORDS_SECONDS)
        await runner.setup()
        self._rooms.append((runner, door))
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()

        def speaker() -> Speaker:
            return Speaker(
                server,
                loop=loop,
                access_log=_unsaid,
                logger=_unsaid,
                keepalive_timeout=self._idle_seconds,
                lingering_time=2.0,
                auto_decompress=False,
            )

        first = min(FIRST_REQUEST_SECONDS, self._idle_seconds)
        return lambda: Admission(door, speaker, first)


def _own_cgroup() -> str:
    with contextlib.suppress(OSError):
        return cgroup_of("self")
    return ""
