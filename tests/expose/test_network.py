"""The network listener: TLS or nothing, certificates that change, and crowds at the door."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.door import CONNECTIONS_TCP, Anyone
from gpuagent.expose.network import (
    HANDSHAKES,
    HANDSHAKES_PER_ADDRESS,
    Crowd,
    Network,
    Remote,
    network_of,
)
from gpuagent.expose.sockets import Address, bind_loopback
from gpuagent.model.state import Instant
from gpuagent.tokens import TokenBook
from tests.expose import snapshots
from tests.expose.certificates import make, needs_openssl, put, remote, trusting
from tests.expose.scene import Reply, Scene, StillClock, ask, serving
from tests.expose.test_server import lines
from tests.prometheus import NONE_HERE, PROMETHEUS, watching
from tests.tokens import issued

pytestmark = needs_openssl

Pair = tuple[Path, Path]
Told = list[tuple[str, str, bool]]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make(tmp_path)


@pytest.fixture
async def scene() -> Scene:
    return Scene(snapshots.busy())


async def keys(folder: Path, scene: Scene) -> tuple[TokenBook, str]:
    """A book, and the line that shows a token of it."""
    book = TokenBook(str(folder), scene.clock)
    text = await issued(book, scene.clock, "metrics")
    return book, f"Authorization: Bearer {text}\r\n"


async def ask_tls(port: int, target: str, trust: ssl.SSLContext, headers: str = "") -> Reply:
    """One request over TLS."""
    reader, writer = await asyncio.open_connection("localhost", port, ssl=trust)
    try:
        async with asyncio.timeout(20):
            head = f"GET {target} HTTP/1.1\r\nHost: gpu7.example\r\nConnection: close\r\n"
            writer.write(f"{head}{headers}\r\n".encode())
            return Reply(await reader.read())
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def port_of(server: Any) -> int:
    port = server.network.port
    assert port is not None
    return int(port)


def view_of(server: Any) -> Any:
    return next(one for one in server.listeners() if one.name == "network")


# -- TLS or nothing ------------------------------------------------------------------------------------------


async def test_a_scrape_over_tls(scene: Scene, pair: Pair, tmp_path: Path) -> None:
    book, header = await keys(tmp_path, scene)
    async with serving(scene, tokens=book, network=remote(pair)) as (server, path):
        reply = await ask_tls(port_of(server), "/metrics", trusting(pair[0]), header)
        assert reply.status == 200
        assert b"gpuagent_build_info" in reply.body
        scene.access_now = server_access(server)
        health = (await ask(path, "/v1/health")).json
        # Port 0 leaves it to the kernel: what is told is the one that it gave.
        told = {x["name"]: x["address"] for x in health["listeners"]}
        assert told["loopback"] == f"127.0.0.1:{server.metrics_port}"
        assert told["network"].endswith(f":{port_of(server)}")
        assert 0 not in {server.metrics_port, port_of(server)}
    assert [(x["name"], x["up"], x["why"]) for x in health["listeners"]] == [
        ("unix", True, ""),
        ("admin", True, ""),
        ("loopback", True, ""),
        ("network", True, ""),
    ]
    assert health["degraded"] is False


def server_access(server: Any) -> Any:
    from gpuagent.expose.access import Access

    return Access(listeners=server.listeners())


async def test_plain_text_gets_nothing(scene: Scene, pair: Pair) -> None:
    async with serving(scene, network=remote(pair)) as (server, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await reader.read()
        writer.close()
        assert (await ask(path, "/v1/node")).status == 200


async def test_older_versions_of_tls_are_refused(scene: Scene, pair: Pair) -> None:
    old = trusting(pair[0])
    with pytest.warns(DeprecationWarning, match="TLSVersion"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with serving(scene, network=remote(pair)) as (server, _):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask_tls(port_of(server), "/healthz", old)


async def test_without_a_certificate_it_stays_shut_and_the_rest_goes_on(
    scene: Scene, tmp_path: Path
) -> None:
    told: Told = []
    missing = remote((tmp_path / "no.crt", tmp_path / "no.key"))
    async with serving(scene, network=missing, tell=lambda *a: told.append(a)) as (server, path):
        assert not view_of(server).up
        assert "no.crt: no such file" in view_of(server).why
        assert (await ask(path, "/v1/node")).status == 200
        scene.access_now = server_access(server)
        health = (await ask(path, "/v1/health")).json
        assert health["degraded"] is True
        assert "no.key: no such file" in health["listeners"][-1]["why"]
        await put_and_look(
            server, make(tmp_path, "late"), (tmp_path / "no.crt", tmp_path / "no.key")
        )
        assert view_of(server).up
        reply = await ask_tls(port_of(server), "/healthz", trusting(tmp_path / "no.crt"))
    assert reply.status == 401
    assert [(kind, alert) for kind, _, alert in told] == [
        ("network-listener", True),
        ("network-listener", False),
    ]


async def test_an_address_in_use_is_tried_again(scene: Scene, pair: Pair) -> None:
    taken = bind_loopback(Address("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken:
        where = Remote(f"127.0.0.1:{port}", str(pair[0]), str(pair[1]))
        async with serving(scene, network=where) as (server, path):
            assert f"cannot listen on 127.0.0.1:{port}" in view_of(server).why
            assert (await ask(path, "/v1/node")).status == 200
            taken.close()
            await look(server)
            assert view_of(server).why == ""
            assert port_of(server) == port


# -- certificates that change ----------------------------------------------------------------------------------


async def look(server: Any) -> None:
    """As a reload has it do."""
    server.renew()
    await asyncio.wait_for(server.network.tried.wait(), 20)


async def put_and_look(server: Any, new: Pair, over: Pair) -> None:
    put(new, over)
    await look(server)


async def test_a_new_certificate_is_used_from_the_next_connection_on(
    scene: Scene, pair: Pair, tmp_path: Path
) -> None:
    book, header = await keys(tmp_path, scene)
    old, new = trusting(pair[0]), make(tmp_path, "two")
    async with serving(scene, tokens=book, network=remote(pair)) as (server, _):
        port = port_of(server)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=old)
        one = f"GET /readyz HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode()
        writer.write(one)
        await reader.readuntil(b"ready\n")
        await put_and_look(server, new, pair)
        writer.write(one)
        async with asyncio.timeout(20):
            await reader.readuntil(b"ready\n")  # a connection that was open goes on
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask_tls(port, "/readyz", old, header)
        assert (await ask_tls(port, "/readyz", trusting(pair[0]), header)).status == 200


async def test_a_broken_pair_leaves_the_old_in_force_and_says_so(
    scene: Scene, pair: Pair, tmp_path: Path
) -> None:
    book, header = await keys(tmp_path, scene)
    told: Told = []
    trust = trusting(pair[0])
    async with serving(
        scene, tokens=book, network=remote(pair), tell=lambda *a: told.append(a)
    ) as (server, _):
        whole = pair[1].read_bytes()
        pair[1].write_bytes(make(tmp_path, "two")[1].read_bytes())
        await look(server)
        assert "is not the key of" in view_of(server).why
        assert "the one before stays in use" in view_of(server).why
        assert view_of(server).up
        assert (await ask_tls(port_of(server), "/readyz", trust, header)).status == 200
        await look(server)
        pair[1].write_bytes(whole)
        await look(server)
        assert view_of(server).why == ""
    kinds = [(kind, alert) for kind, _, alert in told]
    assert kinds == [
        ("network-listener", True),
        ("certificate", False),
        ("network-listener", False),
    ]


async def test_a_certificate_that_expires_meanwhile_is_said_and_still_served(
    scene: Scene, tmp_path: Path
) -> None:
    book, header = await keys(tmp_path, scene)
    told: Told = []
    pair = make(tmp_path, valid=("20000101000000Z", "20270115080100Z"))  # a minute after WALL
    async with serving(
        scene, tokens=book, network=remote(pair), tell=lambda *a: told.append(a)
    ) as (server, _):
        assert server.network is not None
        ends = server.network.certificate_ends_wall
        assert ends == snapshots.WALL + 60
        assert view_of(server).why == ""
        scene.clock.instant = Instant(snapshots.MONO + 61, ends + 1)
        await look(server)
        assert "it has expired at 2027-01-15 08:01:00 UTC" in view_of(server).why
        careless = trusting(pair[0])
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        assert (await ask_tls(port_of(server), "/readyz", careless, header)).status == 200
        await put_and_look(server, make(tmp_path, "new"), pair)
        assert view_of(server).why == ""
    assert [alert for kind, _, alert in told if kind == "network-listener"] == [True, False]


async def test_files_that_have_not_changed_are_not_read(pair: Pair) -> None:
    told: Told = []
    network = Network(
        remote(pair), admission=asyncio.Protocol, clock=StillClock(), tell=lambda *a: told.append(a)
    )
    await network._look()
    first = network._context
    assert first is not None
    await network._look()
    assert network._context is first
    put((pair[0], pair[1]), pair)  # the same text in a new file
    await network._look()
    assert network._context is not first
    assert [kind for kind, _, _ in told] == ["certificate"]


# -- crowds ----------------------------------------------------------------------------------------------------


async def half_open(port: int, raw: bytes = b"") -> socket.socket:
    """A connection whose handshake never goes on."""
    loop = asyncio.get_running_loop()
    one = socket.socket()
    one.setblocking(False)
    await loop.sock_connect(one, ("127.0.0.1", port))
    if raw:
        await loop.sock_sendall(one, raw)
    return one


@pytest.mark.parametrize("raw", [b"", b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x01\xff"])
async def test_half_open_handshakes_are_few_and_keep_nobody_out(
    scene: Scene, pair: Pair, tmp_path: Path, raw: bytes
) -> None:
    book, header = await keys(tmp_path, scene)
    async with serving(scene, tokens=book, network=remote(pair)) as (server, path):
        port = port_of(server)
        stuck = [await half_open(port, raw) for _ in range(20)]
        reply = await ask_tls(port, "/metrics", trusting(pair[0]), header)
        assert reply.status == 200
        assert server.network is not None
        assert server.network.handshakes <= HANDSHAKES_PER_ADDRESS
        assert (await ask(path, "/v1/node")).status == 200
        for one in stuck:
            one.close()


async def test_a_flood_from_one_address_is_turned_away_and_the_loop_turns(
    scene: Scene, pair: Pair, tmp_path: Path
) -> None:
    """The clock stands, so that the allowance of this address ends with its burst."""
    book, header = await keys(tmp_path, scene)
    trust = trusting(pair[0])
    async with serving(scene, tokens=book, network=remote(pair)) as (server, path):
        port = port_of(server)
        reader, writer = await asyncio.open_connection("localhost", port, ssl=trust)
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        await reader.readuntil(b"ready\n")
        crowd = [await half_open(port) for _ in range(100)]
        with pytest.raises(OSError):
            await ask_tls(port, "/readyz", trust, header)
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        async with asyncio.timeout(20):
            await reader.readuntil(b"ready\n")  # who is in is served
        assert (await ask(path, "/v1/node")).status == 200
        now = scene.clock.instant
        scene.clock.instant = type(now)(now.mono + 10, now.wall + 10)
        assert (await ask_tls(port, "/readyz", trust, header)).status == 200
        for one in crowd:
            one.close()
        writer.close()


async def test_handshakes_of_all_addresses_are_bounded(pair: Pair) -> None:
    network = Network(remote(pair), admission=asyncio.Protocol, clock=StillClock())
    async with asyncio.TaskGroup() as group:
        for n in range(60):
            network._make_room(f"10.0.0.{n % 20}")
            task = group.create_task(asyncio.Event().wait())
            network._greeting[task] = f"10.0.0.{n % 20}"  # type: ignore[index]
            assert network.handshakes <= HANDSHAKES
        for task in list(network._greeting):  # type: ignore[assignment]
            task.cancel()


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 0.2)), max_size=200))
def test_a_crowd_of_any_addresses_is_bounded_in_all(steps: list[tuple[int, float]]) -> None:
    crowd, now, let_in = Crowd(), 0.0, 0
    for number, passed in steps:
        now += passed
        let_in += crowd.admits(f"10.0.{number >> 8}.{number & 255}", now)
    assert len(crowd) <= 1024
    assert let_in <= 128 + 32 * now + 1


def test_one_address_does_not_use_up_what_all_have() -> None:
    crowd = Crowd()
    assert sum(crowd.admits("10.0.0.1", 0.0) for _ in range(1000)) == 32
    assert crowd.admits("10.0.0.2", 0.0)


@pytest.mark.parametrize(
    ("address", "whose"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 1, 0, 3), "fe80::"),
    ],
)
def test_whose_connection_it_is(address: Any, whose: str) -> None:
    assert network_of(address) == whose


def test_whoever_has_shown_a_token_goes_last() -> None:
    door = Anyone()
    with lines(CONNECTIONS_TCP + 1) as here:
        *first, late = here
        for line in first:
            assert door.admit(line)
        door.recognise(first[0])
        assert door.admit(late)
        assert not first[0].turned_out
        assert first[1].turned_out


async def test_who_does_not_take_the_answers_is_cut_off(pair: Pair, tmp_path: Path) -> None:
    scene = Scene(snapshots.large())
    book, header = await keys(tmp_path, scene)
    trust = trusting(pair[0])
    async with serving(scene, tokens=book, network=remote(pair), idle_seconds=0.3) as (server, _):
        port = port_of(server)
        door = server._rooms[-1][1]
        assert isinstance(door, Anyone)
        _, writer = await asyncio.open_connection("localhost", port, ssl=trust, limit=1024)
        # More than the sockets of both sides take.
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode() * 40)
        assert (await ask_tls(port, "/readyz", trust, header)).status == 200
        async with asyncio.timeout(60):
            while door.inside():  # noqa: ASYNC110 - the server tells nobody whom it cuts off
                await asyncio.sleep(0.02)
        writer.transport.abort()
        assert (await ask_tls(port, "/readyz", trust, header)).status == 200


async def test_the_end_closes_everything(scene: Scene, pair: Pair) -> None:
    async with serving(scene, network=remote(pair)) as (server, _):
        port = port_of(server)
        stuck = await half_open(port)
        _, writer = await asyncio.open_connection("localhost", port, ssl=trusting(pair[0]))
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)
    stuck.close()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# -- a real Prometheus -----------------------------------------------------------------------------------------


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_prometheus_scrapes_over_tls_with_basic_auth(
    scene: Scene, pair: Pair, tmp_path: Path
) -> None:
    book, header = await keys(tmp_path, scene)
    password = tmp_path / "password"
    password.write_text(header.split()[-1])
    how = (
        f"scheme: https\ntls_config: {{ca_file: {pair[0]}, server_name: localhost}}\n"
        f"basic_auth: {{username: prometheus, password_file: {password}}}"
    )
    async with (
        serving(scene, tokens=book, network=remote(pair), listen="") as (server, _),
        watching(port_of(server), tmp_path, how=how) as prometheus,
    ):
        up = await prometheus.query("up")
        assert [one["value"][1] for one in up] == ["1", "1"]
        assert await prometheus.query("gpuagent_build_info")
