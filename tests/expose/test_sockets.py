"""Opening the sockets: stale ones, ones in use, paths and addresses that cannot be."""

import asyncio
import grp
import os
import stat
from pathlib import Path

import pytest

from gpuagent.errors import Refused
from gpuagent.expose.server import Server
from gpuagent.expose.sockets import (
    Address,
    admin_path,
    bind_loopback,
    bind_socket,
    remove_socket,
)
from tests.expose import snapshots
from tests.expose.scene import Commands, Scene, ask, serving, short_folder

# -- the socket's file -----------------------------------------------------------------------------------


async def test_the_socket_is_open_to_all_and_removed_on_stop() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o666
    assert not os.access(path, os.F_OK)


async def test_administrators_have_a_socket_of_their_own() -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    async with serving(Scene(snapshots.busy()), group=group) as (_, path):
        beside = admin_path(path)
        found = os.stat(beside)
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
        assert (await ask(beside, "/v1/config")).status == 200
    assert not os.access(beside, os.F_OK)


async def test_without_a_group_it_is_the_owners_alone() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        assert stat.S_IMODE(os.stat(admin_path(path)).st_mode) == 0o600


async def test_on_it_the_same_roles_are_told_apart() -> None:
    tenant = Scene(snapshots.tenants_of(os.getuid(), os.getpid()))
    async with serving(tenant) as (_, path):
        assert (await ask(admin_path(path), "/v1/config")).status == 403


def test_where_it_is() -> None:
    assert admin_path("/run/gpuagent/gpuagent.sock") == "/run/gpuagent/gpuagent-admin.sock"
    assert admin_path("/run/a.b/s") == "/run/a.b/s-admin"


async def test_one_that_is_left_behind_is_replaced_and_one_in_use_is_not() -> None:
    with short_folder() as folder:
        path = f"{folder}/s"
        left = bind_socket(admin_path(path))
        server = Server(Scene(snapshots.busy()), Commands(), path=path)
        with pytest.raises(Refused, match="s-admin is in use"):
            await server.start()
        assert not os.access(path, os.F_OK)
        left.close()
        await server.start()
        try:
            assert (await ask(admin_path(path), "/v1/node")).status == 200
        finally:
            await server.stop()


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
        server = Server(Scene(None), Commands(), path=path, metrics_listen=listen, port_seconds=0.1)
        with pytest.raises(Refused):
            await server.start()
        assert not os.access(path, os.F_OK)


async def test_a_port_that_is_still_in_use_is_waited_for() -> None:
    taken = bind_loopback(Address("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with short_folder() as folder:
        server = Server(
            Scene(None), Commands(), path=f"{folder}/s", metrics_listen=f"127.0.0.1:{port}"
        )
        asyncio.get_running_loop().call_later(0.05, taken.close)
        await server.start()
        assert server.metrics_port == port
        await server.stop()
