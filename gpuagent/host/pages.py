"""Web pages that tenants of this host publish, fetched as from an adversary. The only HTTP client.

A server can be slow, endless, broken or hostile. Each page has a deadline, a size, and so much CPU
time; no redirect is followed and no proxy used. All of it happens in a thread with an event loop of
its own: what keeps a parser busy (a body cut into chunks of one byte, interim answers without end:
40 ms for what one read brings, measured) takes that time from other pages, not from the control loop.
"""

import asyncio
import contextlib
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp  # `expose` has it in memory already, the client included

import gpuagent
from gpuagent.clock import patiently
from gpuagent.errors import Refused, Unavailable
from gpuagent.ports import TakePiece

MOST_BYTES = 8 * 2**20
"""Of one page, packed and unpacked."""
PIECE_BYTES = 16 * 1024
"""Of a page, handed on at a time: after each it is somebody else's turn."""
_RECEIVED_BYTES = 16 * 1024
"""Receive buffer of a connection, for the same reason."""
_MOST_CPU_SECONDS = 0.25
"""For one page: ten times what the longest costs whose lines are of no interest (25 ms, measured)."""
_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""For the thread to keep to a deadline, before it is kept without it."""
_KEPT_SECONDS = 75.0
"""How long an unused connection is kept: longer than any pause between two scrapes."""
_HEADERS = {
    "Accept": "text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.9,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": f"gpuagent/{gpuagent.__version__}",
}


class HttpPages:
    """Implements `ports.Pages`. Its thread begins with the first page; connections are used again."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Event | None = None

    async def get(self, url: str, take: TakePiece, *, seconds: float) -> None:
        there = asyncio.run_coroutine_threadsafe(self._fetch(url, take, seconds), self._begun())
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                await asyncio.wrap_future(there)
        except TimeoutError:
            raise Unavailable(f"no whole answer within {seconds:g} s") from None

    async def close(self) -> None:
        """End all connections, and the thread."""
        if self._thread is None or self._loop is None or self._closing is None:
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        await patiently(asyncio.to_thread(self._thread.join, _GRACE_SECONDS), 2 * _GRACE_SECONDS)
        self._loop = self._thread = None

    # -- in the thread -------------------------------------------------------------------------------

    def _begun(self) -> asyncio.AbstractEventLoop:
        """The thread's event loop, begun if need be. Raises Unavailable where it cannot be."""
        if self._loop is None:
            ready = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(ready,), name="pages", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the limit on threads
                raise Unavailable(f"cannot be asked: {error}") from error
            ready.wait()
        if self._loop is None:
            raise Unavailable("cannot be asked: the agent is out of file descriptors")
        return self._loop

    def _run(self, ready: threading.Event) -> None:
        try:
            with contextlib.suppress(OSError):
                asyncio.run(self._live(ready))
        finally:
            ready.set()

    async def _live(self, ready: threading.Event) -> None:
        self._closing = asyncio.Event()
        async with _session() as self._session:
            self._loop = asyncio.get_running_loop()
            ready.set()
            await self._closing.wait()

    async def _fetch(self, url: str, take: TakePiece, seconds: float) -> None:
        effort = _Effort()
        try:
            async with asyncio.timeout(seconds) as deadline:
                with effort.bounded(deadline):
                    await self._read(url, take)
        except TimeoutError:
            if effort.too_much:
                raise Refused("its answer keeps the agent too busy") from None
            raise Unavailable(f"no whole answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(_meaning(error)) from error
        except ValueError as error:
            # What is an address to the configuration need not be one to the client.
            raise Refused("its address cannot be asked") from error

    async def _read(self, url: str, take: TakePiece) -> None:
        assert self._session is not None
        async with self._session.get(url, allow_redirects=False) as answer:
            _check_status(answer.status)
            async for piece in _unpacked(answer):
                take(piece)
                await asyncio.sleep(0)


class _Effort:
    """CPU time of the thread while a page is fetched; what it spends on others meanwhile counts, too."""

    def __init__(self) -> None:
        self.too_much = False
        self._most = time.thread_time() + _MOST_CPU_SECONDS
        self._next: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def bounded(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Have the deadline come at once when it is too much."""
        self._look(deadline)
        try:
            yield
        finally:
            if self._next is not None:
                self._next.cancel()

    def _look(self, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        if time.thread_time() <= self._most:
            self._next = loop.call_later(_LOOK_SECONDS, self._look, deadline)
        elif not deadline.expired():
            self.too_much = True
            deadline.reschedule(loop.time())


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEPT_SECONDS, socket_factory=_socket
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),  # the deadline is ours
        auto_decompress=False,
        read_bufsize=2 * PIECE_BYTES,
        trust_env=False,
    )


def _check_status(status: int) -> None:
    if 300 <= status < 400:
        raise Refused(f"answers {status}, a redirect: give the address that it leads to")
    if status != 200:
        raise Refused(f"answers {status}")


async def _unpacked(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body, unpacked, in small pieces. Raises Refused for one too long or not what it says."""
    coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in {"", "identity", "gzip", "x-gzip"}:
        raise Refused("answers in a coding that was not asked for")
    inflater = zlib.decompressobj(wbits=31) if "gzip" in coding else None
    packed = total = 0
    async for received in answer.content.iter_any():
        packed += len(received)
        for piece in _cut(received) if inflater is None else _inflated(inflater, received):
            total += len(piece)
            if max(packed, total) > MOST_BYTES:
                raise Refused(f"the page is longer than {MOST_BYTES // 2**20} MiB")
            yield piece
    if inflater is not None and not inflater.eof:
        raise Unavailable("hangs up before its answer is whole")


def _cut(received: bytes) -> Iterator[bytes]:
    for at in range(0, len(received), PIECE_BYTES):
        yield received[at : at + PIECE_BYTES]


def _inflated(inflater: Any, received: bytes) -> Iterator[bytes]:
    """What it unpacks to, however much that is."""
    try:
        while received and not inflater.eof:
            yield inflater.decompress(received, PIECE_BYTES)
            received = inflater.unconsumed_tail
    except zlib.error:
        raise Refused("the page is not the gzip that it says it is") from None


def _socket(address: Any) -> socket.socket:
    """A socket for what `getaddrinfo` says."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    with contextlib.suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
    return made


def _meaning(error: Exception) -> str:
    """What went wrong, without a word of the other side's."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not one that this host trusts"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known here"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be reached: {error.strerror}"
    if isinstance(error, aiohttp.ClientResponseError):
        return "does not speak HTTP as it should"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "hangs up before its answer is whole"
    return f"cannot be read: {type(error).__name__}"
