"""Events as they happen: server-sent events (WHATWG HTML, section 9.2), each reader at its own pace.

A stream has no queue. All of them read from the events that the latest snapshot keeps, and each knows
only the number of the last one it has passed: what a slow reader costs is that number, and what the
socket buffers. A new snapshot sets one bell; nothing else happens in the loop's time, however many
read. A reader that was not quick enough for what is kept is told how many it has missed; one that
does not take what it was sent is told so and cut off, and may come back with `Last-Event-ID`.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web

from gpuagent.errors import AgentError
from gpuagent.expose import discreet, picture
from gpuagent.expose.auth import Peer
from gpuagent.expose.gate import Gate
from gpuagent.expose.paging import Mark, mark, parted
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import For, Parameter, Told, current
from gpuagent.log import printable
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import Event
from gpuagent.model.text import wire, wired

PATH = "/v1/events/stream"
AUDIENCE = For.TENANTS
ABOUT = (
    "Events as they happen, as server-sent events: all of them for who sees everything, those about "
    "a tenant for its own user. Each has the data of one item of /v1/events; `missed`, `dropped` and "
    "`end` are about the stream itself."
)
MEDIA_TYPE = "text/event-stream"
QUERY = (
    Parameter(
        "after",
        Mark,
        "The `id` of an event: the stream begins with the one after it. The header Last-Event-ID, "
        "which a browser sends when it comes back, goes before it.",
    ),
)

STREAMS = 32
"""At once on one listener; a quarter of them is kept for administrators."""
STREAMS_PER_PEER = 4
"""Of one tenant, whatever its users and processes, and of anybody else but administrators."""
BEHIND_MOST = 256
"""Events that may come while the socket of one reader is full."""
_AT_ONCE = 64
"""Events in one write: then others have their turn."""
_RETRY = b"retry: 3000\n"
_HEARTBEAT = b":\n\n"

PeerOf = Callable[[web.Request], Peer]


def frame(kind: str, data: object, id_: str = "") -> bytes:
    """One event of a stream: ASCII, whatever the data hold, so that every reader splits lines alike."""
    text = json.dumps(wired(data), separators=(",", ":"), allow_nan=False).replace(
        "\x7f", "\\u007f"
    )
    head = f"id: {id_}\n" if id_ else ""
    name = printable(kind).encode("ascii", "backslashreplace").decode()
    return f"{head}event: {name}\ndata: {text}\n\n".encode("ascii")


class Frames:
    """The frames of the events that are kept: each is made once, for all readers."""

    def __init__(self) -> None:
        self._made: dict[int, bytes] = {}

    def of(self, snapshot: Snapshot, event: Event) -> bytes:
        made = self._made.get(event.number)
        if made is None:
            if len(self._made) > 2 * len(snapshot.events):
                oldest = snapshot.events[0].number
                self._made = {n: f for n, f in self._made.items() if n >= oldest}
            view = msgspec.to_builtins(picture.event(snapshot, event))
            made = frame(event.kind, view, mark(snapshot.run, event.number))
            self._made[event.number] = made
        return made


class Streams:
    """The streams of one listener: how many there are, and what wakes them."""

    def __init__(
        self,
        told: Told,
        *,
        gate: Gate,
        peer_of: PeerOf,
        send_seconds: float,
        most: int = STREAMS,
    ) -> None:
        """A reader that takes nothing for `send_seconds` is dropped; see `Reader.run` for the rest."""
        self.told = told
        self.frames = Frames()
        self.bell = asyncio.Event()
        """Set once there is something new; then another takes its place."""
        self.closing = False
        self.send_seconds = send_seconds
        self._gate = gate
        self._peer_of = peer_of
        self._most = most
        self._count = 0
        self._open: Counter[str] = Counter()
        """By whom they are counted for (`_owners`)."""
        told.listen(self.ring)

    def ring(self) -> None:
        """Wake all streams: one step for each, which comes after whatever the loop is at."""
        self.bell.set()
        self.bell = asyncio.Event()

    async def close(self, _app: web.Application) -> None:
        """End all streams, and let none begin."""
        self.closing = True
        self.ring()

    def peer(self, request: web.Request) -> Peer:
        """Who reads, as of now. Raises an error of ours where it may not, or no longer."""
        peer = self._peer_of(request)
        self._gate.check(peer, AUDIENCE)
        return peer

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request for a stream; raises Trouble before it has begun."""
        peer, snapshot = self.peer(request), current(self.told)
        passed = Passed.of(request, snapshot)
        if request.method == "HEAD":
            return web.Response(content_type=MEDIA_TYPE)
        with self._place(peer):
            response = web.StreamResponse()
            response.content_type = MEDIA_TYPE
            response.force_close()
            with contextlib.suppress(ConnectionError):  # the reader has gone
                await response.prepare(request)
                await Reader(self, request, response, peer, passed).run()
            return response

    @contextlib.contextmanager
    def _place(self, peer: Peer) -> Iterator[None]:
        """Count a stream for as long as it lasts. Raises Trouble (503)."""
        owners = _owners(peer)
        if self.closing or self._count >= (self._most if peer.admin else self._most * 3 // 4):
            raise Trouble(503, "too many streams are open", "try again", retry_after=5)
        for owner in () if peer.admin else owners:
            if self._open[owner] >= STREAMS_PER_PEER:
                why = f"{owner} has {STREAMS_PER_PEER} streams open already"
                raise Trouble(503, why, retry_after=5)
        self._count += 1
        self._open.update(owners)
        try:
            yield
        finally:
            self._count -= 1
            self._open -= Counter(owners)  # which forgets whom nothing is left of


def _owners(peer: Peer) -> tuple[str, ...]:
    """For whom a stream counts: for tenants, since one may have as many users as it likes."""
    if peer.sees_all or not peer.tenants:
        return (peer.label,)
    return tuple(f"tenant {wire(name)}" for name in sorted(peer.tenants))


class Passed(msgspec.Struct, frozen=True):
    """Up to which event a reader has come."""

    number: int
    earlier: bool = False
    """Whether what it had before was of another run: how much it has missed of that is not known."""

    @classmethod
    def of(cls, request: web.Request, snapshot: Snapshot) -> "Passed":
        """Where the reader says it is, else at the newest. Raises Trouble (400)."""
        newest = _newest(snapshot)
        # A browser that comes back keeps the query of the address and adds the header.
        text = request.headers.get("Last-Event-ID") or request.query.get("after")
        if text is None:
            return cls(newest)
        run, number = parted(text)
        return cls(min(number, newest)) if run == snapshot.run else cls(0, earlier=True)


def _newest(snapshot: Snapshot) -> int:
    return snapshot.events[-1].number if snapshot.events else 0


class Reader:
    """One stream."""

    def __init__(
        self,
        streams: Streams,
        request: web.Request,
        response: web.StreamResponse,
        peer: Peer,
        passed: Passed,
    ) -> None:
        self._streams = streams
        self._request = request
        self._response = response
        self._peer = peer
        self._passed = passed.number
        self._earlier = passed.earlier
        self._heartbeat_seconds = streams.send_seconds * 3 / 4
        self._look_seconds = streams.send_seconds / 4
        self._due_at = 0.0
        """When the reader's right is looked at again."""
        self._came = 0
        """Events that came while the last write waited for the reader."""

    async def run(self) -> None:
        """Until the reader goes or is too slow, its right ends, or the agent does.

        Where nothing happens a comment is sent after three quarters of `send_seconds`, so that both
        sides notice a dead peer. Raises ConnectionError where the reader has gone.
        """
        await self._taken(_RETRY + _HEARTBEAT)
        self._due_at = self._now + self._look_seconds
        while True:
            bell = self._streams.bell  # before the look: what comes during it rings this one
            if why := self._over():
                await self._taken(frame("end", {"why": why}))
                return
            newest = _newest(self._latest)
            data = self._due()
            taken = not data or await self._taken(data)
            behind = bool(data) and self._came > BEHIND_MOST
            if taken and self._passed < newest:
                await asyncio.sleep(0)  # others have their turn
            elif taken and not behind and not await self._rung(bell):
                taken = await self._taken(_HEARTBEAT)
            if not taken or behind:
                await self._drop()
                return

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _latest(self) -> Snapshot:
        return current(self._streams.told)

    def _over(self) -> str:
        """Why the stream has to end; empty while it has not. Raises ConnectionError."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionError("the reader has gone")
        if self._streams.closing:
            return "the agent stops"
        if self._now >= self._due_at:
            self._due_at = self._now + self._look_seconds
            try:
                self._peer = self._streams.peer(self._request)
            except AgentError as error:
                return str(error)
        return ""

    def _due(self) -> bytes:
        """What to send next: then the reader has passed it."""
        snapshot = self._latest
        events, parts = snapshot.events, []
        kept_from = events[0].number if events else 1
        if self._earlier or self._passed + 1 < kept_from:
            missed = None if self._earlier else kept_from - 1 - self._passed
            parts.append(frame("missed", {"events": missed}))
            self._earlier = False
            self._passed = max(self._passed, kept_from - 1)
        first = self._passed + 1 - kept_from
        some = events[first : first + _AT_ONCE]
        parts += [self._streams.frames.of(snapshot, e) for e in some if self._may_see(e)]
        self._passed += len(some)
        return b"".join(parts)

    def _may_see(self, event: Event) -> bool:
        """What is about cards and the node may name other tenants, and so may most reasons."""
        tenant = event.subject.tenant if event.subject is not None else ""
        own = tenant != "" and self._peer.may_see(tenant)
        return self._peer.sees_all or (own and discreet.may_be_told(event))

    async def _rung(self, bell: asyncio.Event) -> bool:
        """Whether there is something new, rather than only time for a sign of life."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_seconds):
                return await bell.wait()
        return False

    async def _drop(self) -> None:
        """Tell a slow reader what it loses. It may never read that; the connection ends all the same."""
        lost = _newest(self._latest) - self._passed
        why = "you read too slowly; come back with Last-Event-ID"
        await self._taken(frame("dropped", {"events": lost, "why": why}), seconds=0)

    async def _taken(self, data: bytes, *, seconds: float | None = None) -> bool:
        """Write; whether the reader had taken enough of it in time. Raises ConnectionError."""
        writing = asyncio.ensure_future(self._write(data))
        # If nobody waits for it any more, nobody else asks how it ended, which would be logged.
        writing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # Not cancelled where it is late: what waits for room in the socket is shared by all writes.
        await asyncio.wait(
            {writing}, timeout=self._streams.send_seconds if seconds is None else seconds
        )
        if writing.done():
            writing.result()
        return writing.done()

    async def _write(self, data: bytes) -> None:
        newest = _newest(self._latest)
        await self._response.write(data)
        await self._request.writer.drain()
        # Neither waits unless the socket is full: what else came was not for this reader to take.
        self._came = _newest(self._latest) - newest
