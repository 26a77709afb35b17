"""The listeners: the Unix sockets with roles, the loopback address and the network with tokens."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable

import structlog
from aiohttp import web

from gpuagent.clock import patiently
from gpuagent.errors import Refused
from gpuagent.expose.api import Inbox
from gpuagent.expose.app import PAGES, Entrance, Speaker, pages_app, whole_app
from gpuagent.expose.auth import Rules, cgroup_of
from gpuagent.expose.bearer import Bearers, NoTokens, Tokens
from gpuagent.expose.door import (
    CONNECTIONS_TCP,
    FIRST_REQUEST_SECONDS,
    Admission,
    Anyone,
    Callers,
    Door,
)
from gpuagent.expose.gate import BY_TOKEN, Gate, by_group
from gpuagent.expose.metrics import Exposition
from gpuagent.expose.network import Network, Remote, Tell, say
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
from gpuagent.expose.views import ListenerView

_log = structlog.get_logger()

# aiohttp logs each malformed request with a traceback: a way for anybody to fill the disk. What is
# a fault of ours is logged by the outermost frame of a request.
_unsaid = logging.getLogger("gpuagent.expose.unsaid")
_unsaid.disabled = True

_TAKEN_AT_ONCE = 8
"""Connections of a listener, before anything else has its turn: a crowd at the door comes slowly."""
_PORT_AGAIN_SECONDS = 0.1
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
        metrics_token: bool = False,
        network: Remote | None = None,
        tokens: Tokens | None = None,
        tell: Tell = say,
        idle_seconds: float = 20.0,
        port_seconds: float = 5.0,
    ) -> None:
        """Nothing is opened yet. An empty `metrics_listen` means no loopback listener.

        `metrics_token`: /metrics needs a token there too. The network listener opens once `run` does.

        A connection is closed when no request has become complete on it, or its peer has not taken
        an answer, for `idle_seconds`; the first request has five seconds at most. A port that is in
        use is asked for again for `port_seconds`.
        """
        self._told = told
        self._inbox = inbox
        self._path = path
        self._group = group
        self._listen = metrics_listen
        self._metrics_token = metrics_token
        self._remote = network
        self._network: Network | None = None
        self._tokens = NoTokens() if tokens is None else tokens
        self._tell = tell
        self._idle_seconds = idle_seconds
        self._port_seconds = port_seconds
        self._exposition = Exposition(
            told.version, now=lambda: told.clock.now().mono, access=told.access
        )
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
            if self._remote is not None:
                await self._prepare_network(self._remote)
        except BaseException:  # cancelled or refused: half a server must not stay open
            await self.stop()
            raise
        self._started = True

    async def run(self) -> None:
        """Serve until cancelled, then close and remove the socket. Starts if need be."""
        try:
            if not self._started:
                await self.start()
            if self._network is not None:
                await self._network.run()
            await asyncio.Event().wait()
        finally:
            await self.stop()

    def renew(self) -> None:
        """Read the certificate of the network listener again, if there is one."""
        if self._network is not None:
            self._network.renew()

    @property
    def network(self) -> Network | None:
        """The listener for other machines, once started."""
        return self._network

    def listeners(self) -> tuple[ListenerView, ...]:
        """Where we listen, and what is amiss there."""
        up = self._started
        found = [
            ListenerView("unix", self._path, up, ""),
            ListenerView("admin", admin_path(self._path), up, ""),
        ]
        if self._listen:
            found.append(ListenerView("loopback", _bound(self._listen, self.metrics_port), up, ""))
        if self._remote is not None:
            port, why = None, "it is not open yet"
            if self._network is not None:
                port, why = self._network.port, self._network.why
            address = _bound(self._remote.listen, port)
            found.append(ListenerView("network", address, port is not None, why))
        return tuple(found)

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
        beside = admin_path(self._path)
        await self._listen_on(bind_socket(self._path), self._path, await self._socket_app(group))
        # With places and waiting commands of its own: no crowd on the other one keeps root out.
        await self._listen_on(
            bind_admin_socket(beside, group), beside, await self._socket_app(group)
        )

    async def _socket_app(self, group: int | None) -> Callable[[], Admission]:
        """All there is, for those whom the kernel knows, with a door of its own."""
        callers = Callers(self._told, Rules(group=group, own_cgroup=_own_cgroup()))
        entrance = Entrance(
            about="The Unix socket, where the kernel tells who asks.",
            door=callers,
            gate=Gate(by_group(self._group)),
            peer_of=callers.peer_of,
            clock=self._told.clock,
            open=frozenset({"/healthz", "/readyz"}),
            send_seconds=self._idle_seconds,
        )
        app = whole_app(self._told, self._inbox, entrance, exposition=self._exposition)
        return await self._http(app, callers)

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
        open_pages = ("/healthz", "/readyz") if self._metrics_token else PAGES
        entrance = Entrance(
            about="The loopback address, where a token tells who asks.",
            schemes=("token",),
            door=door,
            gate=Gate(BY_TOKEN),
            peer_of=Bearers(self._tokens, clock=self._told.clock, door=door).peer_of,
            clock=self._told.clock,
            open=frozenset(open_pages),
            hosts=address.names,
            send_seconds=self._idle_seconds,
            streams=CONNECTIONS_TCP // 4,
        )
        app = whole_app(self._told, self._inbox, entrance, exposition=self._exposition)
        sock = await self._port(address)
        self._listening.callback(sock.close)
        self.metrics_port = sock.getsockname()[1]
        admission = await self._http(app, door)
        listener = await asyncio.get_running_loop().create_server(
            admission, sock=sock, backlog=_TAKEN_AT_ONCE
        )
        self._listening.callback(listener.close)
        sock.listen(BACKLOG)

    async def _port(self, address: Address) -> socket.socket:
        """A port may be in use for a moment yet, by the run before or by whom it starts with. Raises Refused."""
        tries = max(1, round(self._port_seconds / _PORT_AGAIN_SECONDS))
        for _ in range(tries - 1):
            try:
                return bind_loopback(address)
            except Refused as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(_PORT_AGAIN_SECONDS)
        return bind_loopback(address)

    async def _prepare_network(self, remote: Remote) -> None:
        door = Anyone()
        bearers = Bearers(self._tokens, clock=self._told.clock, door=door, basic=True)
        entrance = Entrance(
            about="The network, over TLS, where a token tells who asks.",
            schemes=("token", "basic"),
            door=door,
            gate=Gate(BY_TOKEN),
            peer_of=bearers.peer_of,
            clock=self._told.clock,
            send_seconds=self._idle_seconds,
        )
        app = pages_app(self._told, entrance, exposition=self._exposition)
        self._network = Network(
            remote,
            admission=await self._http(app, door),
            clock=self._told.clock,
            tell=self._tell,
        )

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


def _bound(listen: str, port: int | None) -> str:
    """An address with the port that it got, which port 0 leaves to the kernel."""
    return listen if port is None else f"{listen.rpartition(':')[0]}:{port}"


def _own_cgroup() -> str:
    with contextlib.suppress(OSError):
        return cgroup_of("self")
    return ""
