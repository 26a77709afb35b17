"""What a peer may, by what the kernel says of it and by its token; the routes are in test_roles."""

import asyncio
import grp
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.auth import (
    Caller,
    Credentials,
    Origin,
    Peer,
    Rules,
    below,
    judge,
    locate,
    look,
)
from gpuagent.expose.gate import allows
from gpuagent.expose.routes import For
from gpuagent.model.inventory import Inventory, Level, Place, Seat, Tenant
from gpuagent.model.plan import Snapshot
from tests.expose import snapshots
from tests.expose.scene import Scene, serving

# -- judging ---------------------------------------------------------------------------------------------

HOST = Origin(started=7, cgroup="/user.slice/user-0.slice/session-1.scope", contained=False)
RULES = Rules(group=900, own_cgroup="/system.slice/gpuagent.service")
TENANTS = Inventory(
    tenants=(
        snapshots.tenant("train", pids=(4242,), uid=1000),
        snapshots.tenant("root-job", path="/system.slice/job.service", pids=(55,), uid=0),
    )
)


def role(
    uid: int,
    origin: Origin | None = HOST,
    *,
    pid: int = 9,
    groups: frozenset[int] = frozenset(),
    inventory: Inventory = TENANTS,
) -> Peer:
    return judge(Caller(Credentials(pid, uid, groups), origin), inventory, RULES)


def nobody(peer: Peer) -> bool:
    """Whether this is what anybody on the host is."""
    return not any(allows(peer, a, "train") for a in For if a is not For.ANYONE)


def test_root_on_the_host_is_an_administrator() -> None:
    assert role(0).admin
    assert role(0, inventory=Inventory()).admin


def test_a_member_of_the_group_is_an_administrator() -> None:
    assert role(1234, groups=frozenset({5, 900})).admin
    assert nobody(role(1234, groups=frozenset({5})))


def test_no_group_makes_nobody_an_administrator() -> None:
    caller = Caller(Credentials(9, 1234, frozenset({0})), HOST)
    assert nobody(judge(caller, TENANTS, Rules()))


def test_a_tenants_user_is_that_tenant() -> None:
    own = frozenset({"train"})
    assert role(1000) == Peer(label="user 1000", tenants=own, reports=own)


def test_root_in_a_tenants_cgroup_is_that_tenant() -> None:
    inside = Origin(started=7, cgroup=snapshots.TRAIN_PATH + "/nested", contained=False)
    peer = role(0, inside, groups=frozenset({0, 900}))
    assert (peer.admin, peer.tenants) == (False, frozenset({"train"}))
    beside = Origin(started=7, cgroup=snapshots.TRAIN_PATH + "er", contained=False)
    assert role(0, beside).admin


def test_root_as_a_tenants_process_is_that_tenant() -> None:
    peer = role(0, Origin(550, "/elsewhere", contained=False), pid=55)
    assert (peer.admin, peer.tenants) == (False, frozenset({"root-job"}))


def test_an_administrator_who_is_a_tenant_in_a_session_stays_one() -> None:
    session = "/user.slice/user-1000.slice/session-4.scope"
    mine = Inventory(tenants=(snapshots.tenant("mine", path=session, pids=(9,), uid=1000),))
    peer = role(1000, Origin(90, session, contained=False), groups=frozenset({900}), inventory=mine)
    assert peer.admin
    boxed = role(0, Origin(90, session, contained=True), inventory=mine)
    assert (boxed.admin, boxed.tenants) == (False, frozenset({"mine"}))


def test_a_pid_that_was_given_to_another_process_is_not_the_tenants() -> None:
    assert role(0, Origin(551, "/elsewhere", contained=False), pid=55).admin


def test_root_in_an_unknown_container_is_nobody() -> None:
    peer = role(0, Origin(7, "/docker/abc", contained=True), groups=frozenset({900}))
    assert nobody(peer)
    assert "container" in peer.why


def test_a_number_in_a_container_is_not_the_hosts_user() -> None:
    assert nobody(role(1000, Origin(7, "/docker/abc", contained=True)))
    place = Place(container="abc", home="/docker/abc")
    boxed = msgspec.structs.replace(snapshots.tenant("boxed"), places=(place,))
    assert nobody(role(1000, inventory=Inventory(tenants=(boxed,))))


def test_who_has_ended_is_nobody() -> None:
    assert nobody(role(0, None))


@pytest.mark.parametrize("path", ["/", "/user.slice/user-0.slice/session-1.scope", "/system.slice"])
def test_a_cgroup_that_holds_the_agent_or_a_login_tells_nothing(path: str) -> None:
    seated = Tenant("wide", Level.L3, seats=(Seat(path, 1, "shared"),))
    origin = Origin(7, path, contained=False)
    assert role(0, origin, inventory=Inventory(tenants=(seated,))).admin


@given(st.text("/ab", max_size=8), st.text("/ab", max_size=8))
def test_below_is_by_whole_names(path: str, ancestor: str) -> None:
    parts = [p for p in path.split("/") if p]
    above = [p for p in ancestor.split("/") if p]
    clean = "/" + "/".join(parts)
    assert below(clean, "/" + "/".join(above)) == (parts[: len(above)] == above)


# -- what the kernel and /proc say -----------------------------------------------------------------------


def test_look_finds_this_process_on_a_socket_pair() -> None:
    one, other = socket.socketpair()
    with one, other:
        caller = look(one)
    assert caller.credentials.pid == os.getpid()
    assert caller.credentials.uid == os.getuid()
    assert os.getgid() in caller.credentials.groups
    assert caller.origin is not None
    assert caller.origin.contained is False


def test_locate_survives_a_name_with_parentheses_and_a_missing_process(tmp_path: Path) -> None:
    for pid, chain in (("7", "7"), ("8", "8\t1")):
        folder = tmp_path / pid
        folder.mkdir()
        fields = " ".join(str(n) for n in range(1, 45))
        (folder / "stat").write_text(f"{pid} (a) b) (c) S {fields}")
        (folder / "status").write_text(f"Name:\ta\nNSpid:\t{chain}\nGroups:\t1 2 \n")
        (folder / "uid_map").write_text("0 0 4294967295\n")
        (folder / "cgroup").write_text("1:name=systemd:/x\n0::/some/where\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "uid_map").write_text("         0          0 4294967295\n")
    assert locate(7, str(tmp_path)) == Origin(19, "/some/where", contained=False)
    inside = locate(8, str(tmp_path))
    assert inside is not None
    assert inside.contained
    assert locate(9, str(tmp_path)) is None
    (tmp_path / "7" / "stat").write_text("junk")
    assert locate(7, str(tmp_path)) is None


class Odd:
    """A socket whose kernel knows no peer groups and no peer pidfd."""

    def __init__(self, pid: int) -> None:
        self._credentials = struct.pack("iII", pid, 5, 6)

    def getsockopt(self, level: int, name: int, size: int = 0, /) -> Any:
        if name == socket.SO_PEERCRED:
            return self._credentials
        raise OSError(92, "Protocol not available")


def test_an_older_kernel_gives_groups_through_proc() -> None:
    caller = look(Odd(os.getpid()))
    assert caller.credentials.uid == 5
    assert caller.credentials.groups == {6, *os.getgroups()}


# -- real peers ------------------------------------------------------------------------------------------

_CLIENT = """
import os, socket, sys
sys.stdin.readline()
uid, groups = int(sys.argv[3]), [int(g) for g in sys.argv[4:]]
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(f"{sys.argv[2]} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode())
data = b""
while chunk := s.recv(65536):
    data += chunk
print(data.split(b" ")[1].decode())
"""


@contextmanager
def peer(
    path: str, request: str, *, uid: int, groups: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, which asks once it is told to."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _CLIENT, path, request, str(uid), *map(str, groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def go(child: subprocess.Popen[str]) -> str:
    """Let the client ask; the status that it got."""
    out, _ = await asyncio.to_thread(child.communicate, "\n", 20)
    return out.strip()


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def _with(tenant: Tenant) -> Snapshot:
    snapshot = snapshots.busy()
    snapshot.state.inventory = msgspec.structs.replace(snapshot.state.inventory, tenants=(tenant,))
    return snapshot


@needs_root
async def test_another_user_gets_totals_only() -> None:
    async with serving(Scene(snapshots.busy()), group="nogroup") as (_, path):
        for request, status in (
            ("GET /v1/node", "200"),
            ("GET /v1/plan", "403"),
            ("POST /v1/pause", "403"),
        ):
            with peer(path, request, uid=54321) as child:
                assert await go(child) == status


@needs_root
async def test_a_supplementary_group_makes_an_administrator() -> None:
    members = grp.getgrnam("nogroup").gr_gid
    async with serving(Scene(snapshots.busy()), group="nogroup") as (_, path):
        with peer(path, "GET /v1/plan", uid=54321, groups=(7, members)) as child:
            assert await go(child) == "200"


@needs_root
async def test_more_groups_than_the_socket_option_holds() -> None:
    members = grp.getgrnam("nogroup").gr_gid
    many = (*range(100_000, 100_400), members)
    async with serving(Scene(snapshots.busy()), group="nogroup") as (_, path):
        with peer(path, "GET /v1/plan", uid=54321, groups=many) as child:
            assert await go(child) == "200"


@needs_root
async def test_root_as_a_process_of_a_tenant_is_held_to_that_tenant() -> None:
    scene = Scene(None)
    async with serving(scene) as (_, path):
        for request, status in (
            ("GET /v1/tenants/train", "200"),
            ("GET /v1/plan", "403"),
            ("POST /v1/pause", "403"),
        ):
            with peer(path, request, uid=0) as child:
                origin = locate(child.pid)
                assert origin is not None
                process = msgspec.structs.replace(
                    snapshots.process(child.pid, uid=0), started=origin.started
                )
                tenant = snapshots.tenant("train", path="/nowhere")
                scene.snapshot = _with(msgspec.structs.replace(tenant, processes=(process,)))
                assert await go(child) == status, request


@needs_root
async def test_the_user_of_a_tenant_sees_it() -> None:
    async with serving(Scene(_with(snapshots.tenant("train", uid=54321)))) as (_, path):
        with peer(path, "GET /v1/tenants/train/explanation", uid=54321) as child:
            assert await go(child) == "200"
        with peer(path, "GET /v1/tenants/train", uid=54322) as child:
            assert await go(child) == "403"
