"""Pages over real sockets: from servers that are slow, endless, broken, hostile, or just fine."""

import asyncio
import contextlib
import gzip
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from gpuagent.errors import AgentError, Refused, Unavailable
from gpuagent.host.pages import MOST_BYTES, PIECE_BYTES, HttpPages
from gpuagent.ports import Pages

_fits: Pages = HttpPages()
LONG = 30.0
"""More than any of these may take on a busy machine."""
OK = b"HTTP/1.1 200 OK\r\n"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def pages() -> AsyncIterator[HttpPages]:
    one = HttpPages()
    yield one
    await one.close()
    assert "pages" not in [t.name for t in threading.enumerate()]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server that says what the test wants to every request; its address."""

    met: set[asyncio.Task[None]] = set()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        met.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
            await writer.drain()
        if writer.transport.get_write_buffer_size():
            writer.transport.abort()  # nobody reads it any more
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    finally:
        server.close()
        for task in met:
            task.cancel()
        await asyncio.gather(*met, return_exceptions=True)
        await server.wait_closed()


def says(*parts: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))

    return answer


def forever(first: bytes, more: bytes, *, pause: float = 0.0) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


class Taken:
    """What was handed on."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.threads: set[str] = set()

    def __call__(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.threads.add(threading.current_thread().name)

    @property
    def whole(self) -> bytes:
        return b"".join(self.pieces)


def with_length(body: bytes, more: bytes = b"") -> bytes:
    return OK + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextlib.asynccontextmanager
async def application(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


# -- just fine ---------------------------------------------------------------------------------------

PAGE = b"".join(b"metric_%d 1\n" % n for n in range(40_000))


@pytest.mark.parametrize("zipped", [False, True])
async def test_a_page_comes_whole_in_small_pieces_and_not_in_the_loops_thread(
    pages: HttpPages, zipped: bool
) -> None:
    asked: list[web.Request] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        answer = web.Response(body=PAGE)
        if zipped:
            answer.enable_compression()
        return answer

    async with application(handler) as url:
        for _ in range(3):
            taken = Taken()
            await pages.get(url, taken, seconds=LONG)
            assert taken.whole == PAGE
            assert max(map(len, taken.pieces)) <= PIECE_BYTES
            assert taken.threads == {"pages"}
        assert {id(r.transport) for r in asked} == {id(asked[0].transport)}, "one connection"
        assert asked[0].headers["Accept-Encoding"] == "gzip"
        assert asked[0].headers["Accept"].startswith("text/plain;version=0.0.4")
        await pages.close()


async def test_a_body_without_length_and_one_in_chunks_are_read(pages: HttpPages) -> None:
    for answer in (
        OK + b"\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
    ):
        taken = Taken()
        async with serving(says(answer)) as url:
            await pages.get(url, taken, seconds=LONG)
        assert taken.whole == b"abc"


async def test_what_takes_a_page_can_end_it(pages: HttpPages) -> None:
    def take(_piece: bytes) -> None:
        raise Refused("enough")

    async with serving(forever(OK + b"\r\n", b"x" * 9000)) as url:
        with pytest.raises(Refused, match="enough"):
            await pages.get(url, take, seconds=LONG)


async def test_no_proxy_of_the_environment_is_asked(
    pages: HttpPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with serving(says(with_length(b"abc"))) as url:
        await pages.get(url, Taken(), seconds=LONG)


async def test_no_cookie_is_kept(pages: HttpPages) -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Cookie", ""))
        answer = web.Response(text="x")
        answer.set_cookie("who", "you")
        return answer

    async with application(handler) as url:
        for _ in range(2):
            await pages.get(url, Taken(), seconds=LONG)
        await pages.close()
    assert seen == ["", ""]


# -- what is refused ---------------------------------------------------------------------------------

BOMB = gzip.compress(b"\0" * (64 * 2**20))


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (says(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n"), Refused, "a redirect"),
        (says(b"HTTP/1.1 308 x\r\nLocation: /metrics\r\n\r\n"), Refused, "answers 308, a redirect"),
        (says(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), Refused, "answers 404"),
        (says(b"HTTP/1.1 204 No Content\r\n\r\n"), Refused, "answers 204"),
        (says(with_length(b"x", b"Content-Encoding: br\r\n")), Refused, "not asked for"),
        (says(with_length(b"no", b"Content-Encoding: gzip\r\n")), Refused, "not the gzip"),
        (says(with_length(BOMB, b"Content-Encoding: gzip\r\n")), Refused, "longer than 8 MiB"),
        (forever(OK + b"\r\n", b"x" * 65536), Refused, "longer than 8 MiB"),
        (
            forever(
                OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"
            ),
            Refused,
            "longer than 8 MiB",
        ),
        (says(with_length(BOMB[:900], b"Content-Encoding: gzip\r\n")), Unavailable, "hangs up"),
        (says(OK + b"Content-Length: 9\r\n\r\nabc"), Unavailable, "hangs up"),
        (says(b""), Unavailable, "hangs up"),
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), Unavailable, "does not speak HTTP as it should"),
        (says(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), Unavailable, "does not speak"),
        (forever(OK, b"X-A: b\r\n" * 1000), Unavailable, "does not speak HTTP"),
        (forever(OK + b"X-A: ", b"b" * 9000), Unavailable, "does not speak HTTP"),
        (forever(b"HTTP/1.1 200 ", b"b" * 9000), Unavailable, "does not speak HTTP"),
    ],
)
async def test_an_answer_that_is_no_page_is_refused(
    pages: HttpPages, answer: Answer, kind: type[AgentError], why: str
) -> None:
    taken = Taken()
    async with serving(answer) as url:
        with pytest.raises(kind, match=why) as refused:
            await pages.get(url, taken, seconds=LONG)
    assert "10.0.0.1" not in str(refused.value), "nothing of the other side's own words"
    assert len(taken.whole) <= MOST_BYTES


@pytest.mark.parametrize(
    "answer",
    [
        forever(b"", b"", pause=60.0),
        forever(OK + b"\r\n", b"a", pause=0.01),
        forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 100, pause=0.01),
        forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 20, pause=0.01),
    ],
    ids=["silent", "slow", "chunks of one byte", "always about to answer"],
)
async def test_what_does_not_end_ends_at_its_deadline(pages: HttpPages, answer: Answer) -> None:
    async with serving(answer) as url:
        with pytest.raises(Unavailable, match=r"no whole answer within 0\.4 s"):
            await pages.get(url, Taken(), seconds=0.4)


async def test_nobody_there(pages: HttpPages) -> None:
    async with serving(says(b"")) as url:
        pass
    with pytest.raises(Unavailable, match="cannot be reached: "):
        await pages.get(url, Taken(), seconds=LONG)
    with pytest.raises(Unavailable, match=r"name is not known|no whole answer"):
        await pages.get("http://no-such-host.invalid/", Taken(), seconds=5.0)


@pytest.mark.parametrize(
    "answer",
    [
        forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 2000),
        forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500),
    ],
    ids=["chunks of one byte", "always about to answer"],
)
async def test_what_keeps_the_agent_busy_ends_long_before_its_deadline(
    pages: HttpPages, answer: Answer
) -> None:
    async with serving(answer) as url:
        with pytest.raises(Refused, match="keeps the agent too busy"):
            await pages.get(url, Taken(), seconds=LONG)


async def test_one_that_is_hostile_takes_no_time_from_others(pages: HttpPages) -> None:
    slow = forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 100, pause=0.05)
    async with serving(slow) as bad, serving(says(with_length(b"abc"))) as good:
        hostile = asyncio.ensure_future(pages.get(bad, Taken(), seconds=2.0))
        for _ in range(5):
            taken = Taken()
            await pages.get(good, taken, seconds=LONG)
            assert taken.whole == b"abc"
        assert not hostile.done()
        with pytest.raises(Unavailable):
            await hostile


async def test_who_gives_up_ends_the_request_too(pages: HttpPages) -> None:
    gone = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        try:
            await forever(OK + b"\r\n", b"a", pause=0.01)(writer)
        finally:
            gone.set()

    async with serving(answer) as url:
        asked = asyncio.ensure_future(pages.get(url, Taken(), seconds=LONG))
        await asyncio.sleep(0.1)
        asked.cancel()
        await asyncio.wait({asked})
        async with asyncio.timeout(10):
            await gone.wait()


NO_DESCRIPTORS = """
import asyncio, os, resource
from gpuagent.errors import Unavailable
from gpuagent.host.pages import HttpPages

async def main():
    pages, limits = HttpPages(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
    for round in range(2):
        try:
            await pages.get("http://127.0.0.1:1/", print, seconds=20)
        except Unavailable as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await pages.close()

asyncio.run(main())
"""


def test_without_file_descriptors_there_is_no_answer_and_later_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert first == "cannot be asked: the agent is out of file descriptors"
    assert second.startswith("cannot be reached")


async def test_an_address_that_only_the_client_finds_wrong_is_refused(pages: HttpPages) -> None:
    with pytest.raises((Refused, Unavailable)):
        await pages.get("http://" + "a" * 300 + ".example/", Taken(), seconds=5.0)


async def test_it_can_be_closed_at_any_time_and_opened_again() -> None:
    pages = HttpPages()
    await pages.close()
    async with serving(says(with_length(b"abc"))) as url:
        for _ in range(2):
            await pages.get(url, Taken(), seconds=LONG)
            await pages.close()
    async with serving(forever(b"", b"", pause=60.0)) as url:
        asked = asyncio.ensure_future(pages.get(url, Taken(), seconds=LONG))
        await asyncio.sleep(0.1)
        await pages.close()
        asked.cancel()
        await asyncio.wait({asked})
