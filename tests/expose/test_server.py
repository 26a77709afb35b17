"""The listeners under abuse: stale sockets, floods, junk, silence, and foreign pages."""

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.errors import Refused
from gpuagent.expose.auth import Rules
from gpuagent.expose.door import CONNECTIONS_OF_OTHERS, CONNECTIONS_PER_USER, Callers
from gpuagent.expose.server import Server
from gpuagent.expose.sockets import Address, bind_loopback, bind_socket, remove_socket
from tests.expose import snapshots
from tests.expose.scene import (
    Commands,
    Reply,
    Scene,
    ask,
    ask_loopback,
    exchange,
    serving,
    short_folder,
)

# -- the socket's file -----------------------------------------------------------------------------------


async def test_the_socket_is_open_to_all_and_removed_on_stop() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o666
    assert not os.access(path, os.F_OK)


async def test_run_serves_until_cancelled_and_cleans_up() -> None:
    with short_folder() as folder:
        path = f"{folder}/deep/er/s"
        server = Server(Scene(snapshots.busy()), Commands(), path=path)
        await server.start()
        running = asyncio.ensure_future(server.run())
        assert (await ask(path, "/v1/node")).status == 200
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not os.access(path, os.F_OK)


async def test_a_socket_that_nobody_listens_on_is_replaced() -> None:
    with short_folder() as folder:
        path = f"{folder}/s"
        bind_socket(path).close()
        assert os.access(path, os.F_OK)
        server = Server(Scene(snapshots.busy()), Commands(), path=path)
        await server.start()
        try:
            assert (await ask(path, "/v1/node")).status == 200
        finally:
            await server.stop()


async def test_a_socket_in_use_is_left_alone() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        second = Server(Scene(None), Commands(), path=path)
        with pytest.raises(Refused, match="in use: another agent runs"):
            await second.start()
        assert (await ask(path, "/v1/node")).status == 200


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(Refused, match="is no socket"):
        bind_socket(str(path))
    assert path.read_text() == "precious"


def test_a_path_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"107: set paths\.socket"):
        bind_socket(str(tmp_path / ("x" * 120)))


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot listen on"):
        bind_socket(str(tmp_path / "file" / "s"))


def test_only_our_own_socket_is_removed() -> None:
    with short_folder() as folder:
        path = f"{folder}/s"
        bind_socket(path).close()
        ours = os.stat(path).st_ino
        remove_socket(path, ours + 1)
        assert os.access(path, os.F_OK)
        remove_socket(path, ours)
        assert not os.access(path, os.F_OK)
        remove_socket(path, ours)


# -- the loopback address --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9485",
        "0.0.0.0:9485",
        "example.com:1",
        "127.0.0.1:99999",
        "127.0.0.1:",
        "127.0.0.1:x",
        "[::]:1",
        "10.0.0.1:80",
        "::1",
    ],
)
def test_an_address_that_is_not_loopback_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="metrics_listen"):
        Address.parse(text)


def test_loopback_addresses() -> None:
    assert Address.parse("127.0.0.1:9485") == Address("127.0.0.1", 9485)
    assert Address.parse("localhost:1") == Address("127.0.0.1", 1)
    assert Address.parse("[::1]:2") == Address("::1", 2)
    assert "[::1]" in Address("::1", 2).names


def test_a_port_in_use_says_so() -> None:
    with bind_loopback(Address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port}"):
            bind_loopback(Address("127.0.0.1", port))


async def test_a_failed_start_leaves_nothing_open() -> None:
    with short_folder() as folder, bind_loopback(Address("127.0.0.1", 0)) as taken:
        path = f"{folder}/s"
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(Scene(None), Commands(), path=path, metrics_listen=listen)
        with pytest.raises(Refused):
            await server.start()
        assert not os.access(path, os.F_OK)


async def test_the_loopback_address_offers_three_pages_only() -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        for target, status in (
            ("/metrics", 200),
            ("/healthz", 200),
            ("/readyz", 200),
            ("/v1/node", 404),
            ("/v1/health", 404),
            ("/v1/config", 404),
        ):
            assert (await ask_loopback(server.metrics_port, target)).status == status


@pytest.mark.parametrize(
    "headers",
    [
        "Host: evil.example\r\n",
        "Host: 127.0.0.1.evil.example\r\n",
        "Host: localhost\r\nHost: evil.example\r\n",
        "Host: localhost\r\nOrigin: http://evil.example\r\n",
        "Host: localhost\r\nOrigin: null\r\n",
    ],
)
async def test_a_page_in_a_browser_gets_nothing(headers: str) -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        reply = await ask_loopback(server.metrics_port, "/metrics", headers=headers)
    assert reply.status in {400, 403}
    assert b"gpuagent_" not in reply.body


@pytest.mark.parametrize(
    "headers",
    [
        "Host: localhost\r\n",
        "Host: LOCALHOST:9485\r\n",
        "Host: [::1]:9485\r\n",
        "Host: 127.0.0.1:1\r\nOrigin: http://localhost:3000\r\n",
    ],
)
async def test_who_asks_by_a_loopback_name_is_answered(headers: str) -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        reply = await ask_loopback(server.metrics_port, "/metrics", headers=headers)
    assert reply.status == 200
    assert reply.headers["x-content-type-options"] == "nosniff"


# -- abuse -----------------------------------------------------------------------------------------------

JUNK = [
    b"",
    b"\x00" * 100,
    b"\xff\xfe\xfd" * 1000,
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET " + b"/a" * 50_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/node HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /v1/node HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b"2000\r\n" + b"x" * 0x2000 + b"\r\n0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/node HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /v1/node HTTP/1.1\r\nHost: x\r\nExpect: 200-maybe\r\nConnection: close\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/tenants/%ff%00%2e%2e HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /v1/tenants?limit=%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
]


async def shout(path: str, raw: bytes) -> bytes:
    """Send bytes, then end our side, and read what comes."""
    reader, writer = await asyncio.open_unix_connection(path)
    answer = b""
    try:
        async with asyncio.timeout(20):
            writer.write(raw)
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer


async def test_junk_never_is_a_fault_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    commands = Commands()
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        for raw in JUNK:
            answer = await shout(path, raw)
            assert not answer or Reply(answer).status < 500, raw[:80]
        assert (await ask(path, "/v1/node")).status == 200
    assert commands.seen == []
    assert "Traceback" not in capfd.readouterr().err


_KEPT = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@_KEPT
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from(
                [
                    b"GET /v1/tenants/",
                    b"POST /v1/pause",
                    b" HTTP/1.1\r\n",
                    b"Host: x\r\n",
                    b"\r\n\r\n",
                ]
            ),
        ),
        max_size=8,
    )
)
def test_any_bytes_leave_the_server_serving(parts: list[bytes]) -> None:
    async def scenario() -> None:
        async with serving(Scene(snapshots.busy()), listen="") as (_, path):
            answer = await shout(path, b"".join(parts))
            assert not answer or Reply(answer).status < 500
            assert (await ask(path, "/v1/node")).status == 200

    asyncio.run(scenario())


@_KEPT
@given(st.text(max_size=60))
def test_any_path_and_query_is_answered(text: str) -> None:
    async def scenario() -> None:
        target = "/v1/tenants/" + "".join(f"%{b:02x}" for b in text.encode("utf-8", "replace"))
        async with serving(Scene(snapshots.busy()), listen="") as (_, path):
            assert (await ask(path, target)).status < 500
            assert (await ask(path, f"/v1/tenants?after={target}")).status == 200

    asyncio.run(scenario())


async def test_silent_and_slow_connections_are_closed() -> None:
    async with serving(Scene(snapshots.busy()), idle_seconds=0.3) as (_, path):
        assert await exchange(path, b"", deadline=10) == b""
        assert await exchange(path, b"GET /v1/node HTTP/1.1\r\nX: drip", deadline=10) == b""


async def test_a_half_open_connection_harms_nobody() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        idle = [await asyncio.open_unix_connection(path) for _ in range(10)]
        for _, writer in idle[:5]:
            writer.write(b"GET /v1/no")
            writer.transport.abort()
        assert (await ask(path, "/v1/node")).status == 200
        for _, writer in idle:
            writer.close()


async def test_one_connection_takes_many_requests() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        one = b"GET /v1/node HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await exchange(path, one * 20 + last)
    assert answer.count(b"HTTP/1.1 200") == 21


class Line:
    """A connection as the door sees it, with a real socket pair below."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()

    def get_extra_info(self, name: str) -> socket.socket:
        return self.here

    def close(self) -> None:
        self.here.close()
        self.there.close()


def test_one_user_cannot_take_every_connection() -> None:
    callers = Callers(Scene(snapshots.tenants_of(os.getuid(), os.getpid())), Rules())
    lines = [Line() for _ in range(CONNECTIONS_PER_USER + 1)]
    try:
        admitted = [callers.admit(line) for line in lines]  # type: ignore[arg-type]
        assert admitted == [True] * CONNECTIONS_PER_USER + [False]
        lines[0].close()
        late = Line()
        lines.append(late)
        assert callers.admit(late)  # type: ignore[arg-type]
    finally:
        for line in lines:
            line.close()


async def test_administrators_are_let_in_last() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        opened = [
            await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS_OF_OTHERS + 8)
        ]
        assert (await ask(path, "/v1/node")).status == 200
        for _, writer in opened:
            writer.close()


async def test_a_full_house_says_come_again() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        opened = []
        reply = None
        for _ in range(140):
            reader, writer = await asyncio.open_unix_connection(path)
            opened.append(writer)
        async with asyncio.timeout(10):
            reply = Reply(await reader.read())
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        for writer in opened:
            writer.close()
