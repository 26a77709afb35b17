"""The door of a listener: who comes in, how many of them, and who they were when they came.

Connections are bounded in number, for every user on its own as well, so that no tenant can lock an
administrator out.
"""

import asyncio
from collections.abc import Callable
from typing import cast
from weakref import WeakKeyDictionary

from aiohttp import web

from gpuagent.expose.api import Told
from gpuagent.expose.auth import Caller, Peer, Role, Rules, Socket, judge, look
from gpuagent.model.inventory import Inventory

CONNECTIONS = 128
"""At once, of which the last are for administrators."""
CONNECTIONS_OF_OTHERS = 96
CONNECTIONS_PER_USER = 16

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class Callers:
    """Who is connected. What the kernel says is read as they come; their role follows the tenants."""

    def __init__(self, told: Told, rules: Rules) -> None:
        self._told = told
        self._rules = rules
        self._inside: WeakKeyDictionary[asyncio.BaseTransport, Caller] = WeakKeyDictionary()

    def admit(self, transport: asyncio.Transport) -> bool:
        """Note who has connected; whether there is room for them."""
        try:
            caller = look(cast(Socket, transport.get_extra_info("socket")))
        except OSError:
            return False  # it has gone again
        uids = [c.credentials.uid for t, c in self._inside.items() if _is_open(t)]
        if self._judge(caller).role is Role.ADMIN:
            room = len(uids) < CONNECTIONS
        else:
            alike = uids.count(caller.credentials.uid)
            room = len(uids) < CONNECTIONS_OF_OTHERS and alike < CONNECTIONS_PER_USER
        if room:
            self._inside[transport] = caller
        return room

    def peer_of(self, request: web.Request) -> Peer:
        """The role of whoever sent `request`, by the tenants that exist now."""
        caller = self._inside.get(request.transport) if request.transport is not None else None
        if caller is None:
            return Peer(Role.OTHER, -1, why="the connection has been closed")
        return self._judge(caller)

    def _judge(self, caller: Caller) -> Peer:
        snapshot = self._told.latest()
        inventory = Inventory() if snapshot is None else snapshot.state.inventory
        return judge(caller, inventory, self._rules)


def _is_open(transport: asyncio.BaseTransport) -> bool:
    """Whether it still holds a file descriptor; one that is closing may still be sending."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.fileno() >= 0


class Admission(asyncio.Protocol):
    """Stands at the door for one connection, then hands it to the HTTP server."""

    def __init__(self, server: web.Server, admit: Callable[[asyncio.Transport], bool]) -> None:
        self._server = server
        self._admit = admit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        if not self._admit(stream):
            stream.write(_FULL)
            stream.close()
            return
        inside = self._server()
        stream.set_protocol(inside)
        inside.connection_made(stream)
