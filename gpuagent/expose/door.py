"""The door of a listener: who comes in, how many of them, and who has to make room.

Connections are bounded in number, on the Unix socket for every user on its own as well. Where there
is no room for another, the one that has kept us waiting longest is closed: whoever holds connections
open without asking anything, or without taking the answer, locks nobody out.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec
from aiohttp import web

from gpuagent.expose.api import to_json
from gpuagent.expose.auth import Caller, Peer, Rules, Socket, judge, look
from gpuagent.expose.problems import MEDIA_TYPE, Trouble
from gpuagent.expose.routes import Told
from gpuagent.model.inventory import Inventory

CONNECTIONS = 128
"""At once, of which the last are for administrators."""
CONNECTIONS_OF_OTHERS = 96
CONNECTIONS_PER_USER = 16
CONNECTIONS_TCP = 32
"""On each of the TCP listeners."""
FIRST_REQUEST_SECONDS = 5.0
"""How long a connection may take to bring its first complete request."""

Who = TypeVar("Who")


class Descriptor(Protocol):
    """What holds a connection open."""

    def fileno(self) -> int:
        """Negative once it is closed."""


class Guests(Generic[Who]):
    """The connections that are open, those first that have kept us waiting longest.

    A connection keeps us waiting except from a complete request until its answer is ready.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[asyncio.BaseTransport, Who] = {}
        """In the order in which the waiting began."""
        self._served: dict[asyncio.BaseTransport, Who] = {}
        self._silent: set[asyncio.BaseTransport] = set()
        """Those that have not asked anything yet."""
        self._sockets: dict[asyncio.BaseTransport, Descriptor] = {}

    @property
    def full(self) -> bool:
        return len(self.inside()) >= self._most

    def inside(self) -> dict[asyncio.BaseTransport, Who]:
        """Those that are connected, and who they are."""
        for known in (self._waiting, self._served):
            for gone in [t for t in known if not self._is_open(t)]:
                del known[gone]
                self._forget(gone)
        return {**self._waiting, **self._served}

    def add(self, transport: asyncio.BaseTransport, who: Who) -> None:
        # Once it is closed, a transport that speaks TLS no longer says what lies below it.
        sock = transport.get_extra_info("socket")
        if sock is None:
            return  # it has gone again
        self._sockets[transport] = sock
        self._waiting[transport] = who
        self._silent.add(transport)

    def who(self, transport: asyncio.BaseTransport) -> Who | None:
        return self._served.get(transport, self._waiting.get(transport))

    def asks(self, transport: asyncio.BaseTransport | None) -> None:
        """A request of this connection is complete."""
        if transport is not None and transport in self._waiting:
            self._served[transport] = self._waiting.pop(transport)
            self._silent.discard(transport)

    def answered(self, transport: asyncio.BaseTransport | None) -> None:
        """Its answer is ready: it may be taken, and the next request may come."""
        if transport is not None and transport in self._served:
            self._waiting[transport] = self._served.pop(transport)

    def recognise(self, transport: asyncio.BaseTransport) -> None:
        """This one has shown a valid token; where the kernel tells who comes, that says nothing."""

    def make_room(self, whose: Callable[[Who], bool]) -> bool:
        """Close the longest waiting of those; whether there was one."""
        self.inside()
        for transport, who in self._waiting.items():
            if whose(who):
                self._turn_out(transport)
                return True
        return False

    def turn_out_if_silent(self, transport: asyncio.BaseTransport) -> None:
        if transport in self._silent:
            self._turn_out(transport)

    def turn_all_out(self) -> None:
        for transport in self.inside():
            self._turn_out(transport)

    def _turn_out(self, transport: asyncio.BaseTransport) -> None:
        self._waiting.pop(transport, None)
        self._served.pop(transport, None)
        self._forget(transport)
        # What it has not taken of an answer is lost: closing would wait for it to be taken.
        cast(asyncio.Transport, transport).abort()

    def _forget(self, transport: asyncio.BaseTransport) -> None:
        self._silent.discard(transport)
        self._sockets.pop(transport, None)

    def _is_open(self, transport: asyncio.BaseTransport) -> bool:
        """Whether it still holds a file descriptor; one that is closing may still be sending."""
        return self._sockets[transport].fileno() >= 0


class Door(Protocol):
    """What a listener and its application need of it."""

    def admit(self, transport: asyncio.Transport) -> bool:
        """Note who has connected; whether there is room for them."""

    @property
    def full(self) -> bool: ...

    def asks(self, transport: asyncio.BaseTransport | None) -> None: ...

    def answered(self, transport: asyncio.BaseTransport | None) -> None: ...

    def recognise(self, transport: asyncio.BaseTransport) -> None:
        """This one has shown a valid token."""

    def turn_out_if_silent(self, transport: asyncio.BaseTransport) -> None: ...

    def turn_all_out(self) -> None: ...


class Stranger:
    """Somebody who has come over TCP."""

    def __init__(self) -> None:
        self.known = False
        """Whether a valid token has been shown."""


class Anyone(Guests[Stranger]):
    """The door of a TCP address. Those who have shown no valid token make room first."""

    def __init__(self, most: int = CONNECTIONS_TCP) -> None:
        super().__init__(most)

    def admit(self, transport: asyncio.Transport) -> bool:
        """Note that somebody has connected; whether there is room."""
        if self.full and not (self.make_room(lambda s: not s.known) or self.make_room(_anybody)):
            return False
        self.add(transport, Stranger())
        return True

    def recognise(self, transport: asyncio.BaseTransport) -> None:
        """This one has shown a valid token."""
        who = self.who(transport)
        if who is not None:
            who.known = True


def _anybody(_who: object) -> bool:
    return True


class Callers(Guests[Caller]):
    """Who is connected. What the kernel says is read as they come; their role follows the tenants."""

    def __init__(self, told: Told, rules: Rules) -> None:
        super().__init__(CONNECTIONS)
        self._told = told
        self._rules = rules

    def admit(self, transport: asyncio.Transport) -> bool:
        """Note who has connected; whether there is room for them."""
        try:
            caller = look(cast(Socket, transport.get_extra_info("socket")))
        except OSError:
            return False  # it has gone again
        room = self._admits_admin() if self._is_admin(caller) else self._admits_other(caller)
        if room:
            self.add(transport, caller)
        return room

    def _admits_admin(self) -> bool:
        if not self.full:
            return True
        return self.make_room(lambda c: not self._is_admin(c)) or self.make_room(lambda _: True)

    def _admits_other(self, caller: Caller) -> bool:
        inside = self.inside().values()
        uid = caller.credentials.uid
        if sum(1 for c in inside if c.credentials.uid == uid) >= CONNECTIONS_PER_USER:
            return self.make_room(lambda c: c.credentials.uid == uid and not self._is_admin(c))
        if len(inside) >= CONNECTIONS_OF_OTHERS:
            return self.make_room(lambda c: not self._is_admin(c))
        return True

    def _is_admin(self, caller: Caller) -> bool:
        return self._judge(caller).admin

    def peer_of(self, request: web.Request) -> Peer:
        """What whoever sent `request` may, by the tenants that exist now. Raises Trouble (400)."""
        if "Authorization" in request.headers:
            # Taken silently, it would look as if it gave rights, or took some away.
            raise Trouble(
                400,
                "on a socket the kernel tells who asks; no Authorization is looked at",
                "leave the header out, or send it to the loopback address",
            )
        caller = self.who(request.transport) if request.transport is not None else None
        if caller is None:
            return Peer(label="nobody", why="the connection has been closed")
        return self._judge(caller)

    def _judge(self, caller: Caller) -> Peer:
        snapshot = self._told.latest()
        inventory = Inventory() if snapshot is None else snapshot.state.inventory
        return msgspec.structs.replace(judge(caller, inventory, self._rules), caller=caller)


class Admission(asyncio.Protocol):
    """Stands at the door for one connection, then hands it to what speaks HTTP."""

    def __init__(self, door: Door, speaker: Callable[[], asyncio.Protocol], seconds: float) -> None:
        """`seconds` is how long the first complete request may take to come."""
        self._door = door
        self._speaker = speaker
        self._seconds = seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        if not self._door.admit(stream):
            stream.write(_FULL)
            stream.close()
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._seconds, self._door.turn_out_if_silent, stream)
        inside = self._speaker()
        stream.set_protocol(inside)
        inside.connection_made(stream)


def _refusal() -> bytes:
    body = to_json(Trouble(503, "too many connections are open", "try again").problem())
    return (
        "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
        f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


_FULL = _refusal()
