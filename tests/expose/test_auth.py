"""Who may see and do what: every route for every role, and how a peer gets its role."""

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
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.api import DOS, GETS, Gate
from gpuagent.expose.app import socket_app
from gpuagent.expose.auth import (
    Caller,
    Credentials,
    Origin,
    Peer,
    Role,
    Rules,
    below,
    judge,
    locate,
    look,
)
from gpuagent.expose.door import Anyone
from gpuagent.expose.metrics import Exposition
from gpuagent.model.inventory import Inventory, Level, Place, Seat, Tenant
from gpuagent.model.plan import Snapshot
from tests.expose import snapshots
from tests.expose.scene import Commands, Scene, serving

ADMIN = Peer(Role.ADMIN, 0)
OWNER = Peer(Role.TENANT, 1000, frozenset({"train"}))
OTHER = Peer(Role.OTHER, 1234)

# -- every route for every role --------------------------------------------------------------------------

ALLOWED = {
    # route: (administrator, the tenant's own user, anybody else)
    "GET /v1/node": (200, 200, 200),
    "GET /v1/health": (200, 200, 200),
    "GET /healthz": (200, 200, 200),
    "GET /readyz": (200, 200, 200),
    "GET /metrics": (200, 403, 403),
    "GET /metrics/dcgm": (200, 403, 403),
    "GET /v1/gpus": (200, 200, 403),
    f"GET /v1/gpus/{snapshots.GPU0}": (200, 200, 403),
    f"GET /v1/gpus/{snapshots.GPU1}": (200, 403, 403),
    "GET /v1/tenants": (200, 200, 403),
    "GET /v1/tenants/train": (200, 200, 403),
    "GET /v1/tenants/train/explanation": (200, 200, 403),
    "GET /v1/tenants/serve": (200, 403, 403),
    "GET /v1/tenants/serve/explanation": (200, 403, 403),
    "GET /v1/tenants/nobody": (404, 403, 403),
    "GET /v1/plan": (200, 403, 403),
    "GET /v1/events": (200, 403, 403),
    "GET /v1/config": (200, 403, 403),
    "POST /v1/reload": (200, 403, 403),
    "POST /v1/pause": (200, 403, 403),
    "POST /v1/unpause": (200, 403, 403),
    "POST /v1/release": (200, 403, 403),
    "POST /v1/resume": (200, 403, 403),
}


def test_the_table_names_every_route() -> None:
    names = {snapshots.GPU0: "{name}", "train": "{name}"}
    listed = {"/".join(names.get(p, p) for p in r.partition(" ")[2].split("/")) for r in ALLOWED}
    assert {g.path for g in GETS} | {p.path for p in DOS} <= listed


@pytest.mark.parametrize(("peer", "column"), [(ADMIN, 0), (OWNER, 1), (OTHER, 2)])
async def test_every_route_for_every_role(peer: Peer, column: int) -> None:
    exposition = Exposition("1")
    commands = Commands()
    app = socket_app(
        Scene(snapshots.busy()),
        commands,
        gate=Gate("gpuagent"),
        peer_of=lambda _: peer,
        door=Anyone(),
        exposition=exposition,
        send_seconds=20,
    )
    async with TestClient(TestServer(app)) as client:
        for route, statuses in ALLOWED.items():
            method, _, path = route.partition(" ")
            reply = await client.request(method, path)
            assert reply.status == statuses[column], (route, peer.role)
            if reply.status == 403:
                problem = await reply.json(content_type="application/problem+json")
                assert "usermod -aG gpuagent" in problem["remedy"]
    exposition.close()
    assert len(commands.seen) == (len(DOS) if column == 0 else 0)


async def test_a_tenants_own_user_sees_nobody_else() -> None:
    exposition = Exposition("1")
    broken = msgspec.structs.replace(snapshots.ENFORCING, config_error="a.toml:1: serve: unknown")
    app = socket_app(
        Scene(snapshots.busy(posture=broken)),
        Commands(),
        gate=Gate(""),
        peer_of=lambda _: OWNER,
        door=Anyone(),
        exposition=exposition,
        send_seconds=20,
    )
    async with TestClient(TestServer(app)) as client:
        for route, statuses in ALLOWED.items():
            method, _, path = route.partition(" ")
            if statuses[1] == 200:
                text = await (await client.request(method, path)).text()
                assert "serve" not in text, route
        page = await (await client.get("/v1/gpus")).json()
        assert [g["index"] for g in page["items"]] == [0]
        health = await (await client.get("/v1/health")).json()
        assert "administrators are told" in health["config_error"]
        refusal = await client.post("/v1/pause")
        assert "names no group" in await refusal.text()
    exposition.close()


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


def test_root_on_the_host_is_an_administrator() -> None:
    assert role(0).role is Role.ADMIN
    assert role(0, inventory=Inventory()).role is Role.ADMIN


def test_a_member_of_the_group_is_an_administrator() -> None:
    assert role(1234, groups=frozenset({5, 900})).role is Role.ADMIN
    assert role(1234, groups=frozenset({5})).role is Role.OTHER


def test_no_group_makes_nobody_an_administrator() -> None:
    caller = Caller(Credentials(9, 1234, frozenset({0})), HOST)
    assert judge(caller, TENANTS, Rules()).role is Role.OTHER


def test_a_tenants_user_is_that_tenant() -> None:
    assert role(1000) == Peer(Role.TENANT, 1000, frozenset({"train"}))


def test_root_in_a_tenants_cgroup_is_that_tenant() -> None:
    inside = Origin(started=7, cgroup=snapshots.TRAIN_PATH + "/nested", contained=False)
    peer = role(0, inside, groups=frozenset({0, 900}))
    assert (peer.role, peer.tenants) == (Role.TENANT, frozenset({"train"}))
    beside = Origin(started=7, cgroup=snapshots.TRAIN_PATH + "er", contained=False)
    assert role(0, beside).role is Role.ADMIN


def test_root_as_a_tenants_process_is_that_tenant() -> None:
    peer = role(0, Origin(550, "/elsewhere", contained=False), pid=55)
    assert (peer.role, peer.tenants) == (Role.TENANT, frozenset({"root-job"}))


def test_an_administrator_who_is_a_tenant_in_a_session_stays_one() -> None:
    session = "/user.slice/user-1000.slice/session-4.scope"
    mine = Inventory(tenants=(snapshots.tenant("mine", path=session, pids=(9,), uid=1000),))
    peer = role(1000, Origin(90, session, contained=False), groups=frozenset({900}), inventory=mine)
    assert peer.role is Role.ADMIN
    boxed = role(0, Origin(90, session, contained=True), inventory=mine)
    assert (boxed.role, boxed.tenants) == (Role.TENANT, frozenset({"mine"}))


def test_a_pid_that_was_given_to_another_process_is_not_the_tenants() -> None:
    assert role(0, Origin(551, "/elsewhere", contained=False), pid=55).role is Role.ADMIN


def test_root_in_an_unknown_container_is_nobody() -> None:
    peer = role(0, Origin(7, "/docker/abc", contained=True), groups=frozenset({900}))
    assert peer.role is Role.OTHER
    assert "container" in peer.why


def test_a_number_in_a_container_is_not_the_hosts_user() -> None:
    assert role(1000, Origin(7, "/docker/abc", contained=True)).role is Role.OTHER
    place = Place(container="abc", home="/docker/abc")
    boxed = msgspec.structs.replace(snapshots.tenant("boxed"), places=(place,))
    assert role(1000, inventory=Inventory(tenants=(boxed,))).role is Role.OTHER


def test_who_has_ended_is_nobody() -> None:
    assert role(0, None).role is Role.OTHER


@pytest.mark.parametrize("path", ["/", "/user.slice/user-0.slice/session-1.scope", "/system.slice"])
def test_a_cgroup_that_holds_the_agent_or_a_login_tells_nothing(path: str) -> None:
    seated = Tenant("wide", Level.L3, seats=(Seat(path, 1, "shared"),))
    origin = Origin(7, path, contained=False)
    assert role(0, origin, inventory=Inventory(tenants=(seated,))).role is Role.ADMIN


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
