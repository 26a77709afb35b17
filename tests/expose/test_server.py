"""The listeners under abuse: floods, junk, silence, and foreign pages."""

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.expose.auth import Rules
from gpuagent.expose.door import (
    CONNECTIONS,
    CONNECTIONS_OF_OTHERS,
    CONNECTIONS_PER_USER,
    CONNECTIONS_TCP,
    FIRST_REQUEST_SECONDS,
    Admission,
    Anyone,
    Callers,
    Guests,
)
from gpuagent.expose.sockets import admin_path
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

# -- the loopback address ---------------------------------------------------------------------------------


async def test_the_loopback_address_gives_its_pages_openly_and_nothing_else() -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        for target, status in (
            ("/metrics", 200),
            ("/healthz", 200),
            ("/readyz", 200),
            ("/v1/node", 401),
            ("/v1/health", 401),
            ("/v1/config", 401),
            ("/openapi.json", 401),
            ("/v1/nothing", 404),
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


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /v1/node HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 400),
        (b"GET /v1/node HTTP/1.1\r\nHost: x\r\nExpect: 200-maybe\r\n\r\n", 417),
    ],
)
async def test_what_is_no_request_is_a_problem_document_too(raw: bytes, status: int) -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        reply = Reply(await exchange(path, raw))
    assert reply.status == status
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json["status"] == status
    assert reply.json["detail"].isprintable()
    assert len(reply.json["detail"]) < 300


async def test_a_body_that_waits_to_be_asked_for_is_asked_for() -> None:
    head = b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n"
    commands = Commands()
    async with serving(Scene(snapshots.busy()), commands) as (_, path):
        answer = await exchange(path, head + b"Expect: 100-continue\r\n\r\n{}")
    interim, _, rest = answer.partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue"
    assert Reply(rest).status == 200
    assert len(commands.seen) == 1


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


async def test_who_does_not_take_the_answer_is_cut_off() -> None:
    async with serving(Scene(snapshots.large()), idle_seconds=0.3) as (_, path):
        with socket.socket(socket.AF_UNIX) as lazy:
            lazy.connect(path)
            lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            hung_up = select.poll()
            hung_up.register(lazy, 0)  # a hang-up is told without being asked for
            assert await asyncio.to_thread(hung_up.poll, 10_000)
            taken = 0
            with contextlib.suppress(ConnectionError):
                while chunk := lazy.recv(65536):
                    taken += len(chunk)
        assert taken < 1_000_000
        assert (await ask(path, "/v1/node")).status == 200


async def test_a_half_open_connection_harms_nobody() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        idle = [await asyncio.open_unix_connection(path) for _ in range(10)]
        for _, writer in idle[:5]:
            writer.write(b"GET /v1/no")
            writer.transport.abort()
        assert (await ask(path, "/v1/node")).status == 200
        for _, writer in idle:
            writer.close()


async def test_head_is_get_without_the_body() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        reply = await ask(path, "/metrics", method="HEAD")
    assert reply.status == 200
    assert int(reply.headers["content-length"]) > 1000
    assert reply.body == b""


async def test_one_connection_takes_many_requests() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        one = b"GET /v1/node HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await exchange(path, one * 20 + last)
    assert answer.count(b"HTTP/1.1 200") == 21


# -- the end -------------------------------------------------------------------------------------------------

STUCK = [
    b"GET ",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
    b"POST /v1/pause HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n",
]


async def test_stuck_clients_do_not_hold_up_the_end() -> None:
    commands = Commands()
    commands.hold = asyncio.Event()
    async with serving(Scene(snapshots.large()), commands) as (server, path):
        asking = asyncio.ensure_future(ask(path, "/v1/pause", method="POST"))
        await commands.until_seen(1)
        stuck = [await asyncio.open_unix_connection(path) for _ in range(15)]
        for number, (_, writer) in enumerate(stuck):
            writer.write(STUCK[number % 3])
        await asyncio.sleep(0.1)
        begun = asyncio.get_running_loop().time()
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0)
        assert not os.access(path, os.F_OK), "nobody comes in any more"
        commands.hold.set()
        assert (await asking).status == 200, "who is being served is answered"
        await stopping
        assert asyncio.get_running_loop().time() - begun < 2
        for _, writer in stuck:
            writer.close()


# -- who has to make room ----------------------------------------------------------------------------------


class Line:
    """A connection as the door sees it, with a real socket pair below."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.turned_out = False

    def get_extra_info(self, name: str) -> socket.socket:
        return self.here

    def abort(self) -> None:
        self.turned_out = True
        self.close()

    def close(self) -> None:
        self.here.close()
        self.there.close()


@contextlib.contextmanager
def lines(count: int) -> Iterator[list[Any]]:
    made = [Line() for _ in range(count)]
    try:
        yield made
    finally:
        for line in made:
            line.close()


def tenants_door() -> Callers:
    """A door at which this process is a tenant."""
    return Callers(Scene(snapshots.tenants_of(os.getuid(), os.getpid())), Rules())


def test_one_user_takes_his_own_place_only() -> None:
    door = tenants_door()
    with lines(CONNECTIONS_PER_USER + 2) as here:
        *first, late, later = here
        assert all(door.admit(line) for line in first)
        assert not any(line.turned_out for line in first)
        door.asks(first[0])
        assert door.admit(late), "the longest waiting makes room"
        assert [line.turned_out for line in first[:3]] == [False, True, False]
        for line in (*first, late):
            door.asks(line)
        assert not door.admit(later), "all the others have asked and wait for us"


def test_the_longest_waiting_goes_first_and_whoever_is_served_stays() -> None:
    door = Anyone()
    with lines(CONNECTIONS_TCP + 2) as here:
        *first, late, later = here
        for line in first:
            assert door.admit(line)
            door.asks(line)
        assert door.full
        assert not door.admit(late)
        door.answered(first[7])
        door.answered(first[3])
        assert door.admit(late)
        assert first[7].turned_out
        assert not first[3].turned_out
        assert door.admit(later)
        assert first[3].turned_out
        assert sum(line.turned_out for line in here) == 2


@given(st.lists(st.tuples(st.sampled_from("comeask"), st.integers(0, 9)), max_size=60))
def test_whatever_comes_and_goes_the_house_is_never_over_full(steps: list[tuple[str, int]]) -> None:
    door = Guests[int](4)
    with lines(10) as here:
        for what, n in steps:
            line = here[n]
            if what == "a":
                door.asks(line)
            elif what == "o":
                door.answered(line)
            elif what == "m":
                line.close()
            elif line.here.fileno() >= 0 and (not door.full or door.make_room(lambda _: True)):
                door.add(line, n)
            assert len(door.inside()) <= 4
            assert all(here[n].here.fileno() >= 0 for n in door.inside().values())


async def connect(port: int, raw: bytes = b"") -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    await writer.drain()
    return writer


@pytest.mark.parametrize("raw", [b"", b"GET /metrics HTTP/1.1\r\nX: drip"])
async def test_idle_connections_do_not_keep_prometheus_out(raw: bytes) -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        idle = [await connect(server.metrics_port, raw) for _ in range(40)]
        reply = await ask_loopback(server.metrics_port, "/metrics")
        for writer in idle:
            writer.close()
    assert reply.status == 200
    assert b"gpuagent_build_info" in reply.body


async def test_who_asks_and_takes_no_answer_does_not_keep_prometheus_out() -> None:
    async with serving(Scene(snapshots.large())) as (server, _):
        assert server.metrics_port is not None
        request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        lazy = [await connect(server.metrics_port, request) for _ in range(40)]
        # Those that are still being worked for stay: their turn ends when the text is ready.
        for _ in range(400):
            reply = await ask_loopback(server.metrics_port, "/readyz")
            if reply.status == 200:
                break
            await asyncio.sleep(0.05)
        assert reply.status == 200
        for writer in lazy:
            writer.close()


async def test_in_a_full_house_an_answer_is_the_last_one() -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        alone, writer = await asyncio.open_connection("127.0.0.1", server.metrics_port)
        writer.write(request)
        assert b"Connection: close" not in await alone.readuntil(b"ok\n")
        idle = [await connect(server.metrics_port) for _ in range(CONNECTIONS_TCP - 1)]
        writer.write(request)
        async with asyncio.timeout(20):
            assert b"Connection: close" in await alone.read()
        for each in (writer, *idle):
            each.close()


async def test_the_first_request_has_to_come_soon_and_later_ones_may_take_longer() -> None:
    async with serving(Scene(snapshots.busy()), idle_seconds=0.4) as (server, path):
        assert server.metrics_port is not None
        for raw in (b"", b"GET /v1/node HTTP/1.1\r\nX: drip"):
            assert await exchange(path, raw, deadline=10) == b""
    assert FIRST_REQUEST_SECONDS == 5


async def test_administrators_are_let_in_last() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        opened = [
            await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS_OF_OTHERS + 8)
        ]
        assert (await ask(path, "/v1/node")).status == 200
        for _, writer in opened:
            writer.close()


async def test_administrators_who_crowd_one_socket_do_not_crowd_the_other() -> None:
    async with serving(Scene(snapshots.busy())) as (server, path):
        door = server._rooms[0][1]
        with lines(CONNECTIONS) as here:
            for line in here:
                assert door.admit(line)
                door.asks(line)  # and its body never comes
            assert Reply(await exchange(path, b"")).status == 503
            assert (await ask(admin_path(path), "/v1/node")).status == 200


async def test_a_full_house_of_the_idle_lets_one_more_in() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        opened = [await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS + 12)]
        assert (await ask(path, "/v1/node")).status == 200
        for _, writer in opened:
            writer.close()


async def test_a_full_house_of_the_busy_says_come_again() -> None:
    scene = Scene(snapshots.busy())
    door = Callers(scene, Rules())
    with lines(CONNECTIONS) as here:
        for line in here:
            assert door.admit(line)
            door.asks(line)
        with short_folder() as folder:
            path = f"{folder}/s"
            listener = await asyncio.get_running_loop().create_unix_server(
                lambda: Admission(door, asyncio.Protocol, 5), path
            )
            async with listener:
                reply = Reply(await exchange(path, b""))
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json["status"] == 503
