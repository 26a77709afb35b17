"""Every route for everybody who may come, on every listener: a new route without a row here fails."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gpuagent.expose.api import DOS, GETS
from gpuagent.expose.app import PAGES, Entrance, pages_app, whole_app
from gpuagent.expose.auth import Caller, Credentials, Origin, Peer, Rules, judge
from gpuagent.expose.door import Anyone
from gpuagent.expose.gate import Gate, by_group
from gpuagent.expose.metrics import Exposition
from gpuagent.expose.routes import For
from gpuagent.expose.stream import PATH as STREAM
from gpuagent.model.inventory import Level
from gpuagent.model.run import Reservation, RunList
from gpuagent.tokens import TokenBook
from tests.expose import certificates, snapshots
from tests.expose.scene import Commands, Scene, ask, serving
from tests.tokens import issued

# -- who comes -------------------------------------------------------------------------------------------

ROLES = frozenset({"root", "member", "owner", "neighbour", "stranger"})
TOKENS = {
    "read": "read",
    "metrics": "metrics",
    "for-train": "latency:train",
    "for-serve": "latency:serve",
    "override": "override",
    "admin": "admin",
}
"""What a token is called here, and its scope."""
INVALID = ("nothing", "junk", "expired", "revoked", "altered")

EVERYBODY = ROLES | TOKENS.keys()
ADMINS = frozenset({"root", "member", "admin"})
READERS = ADMINS | {"read"}
SCRAPERS = READERS | {"metrics"}
OVERRIDERS = ADMINS | {"override"}
TENANTS = READERS | {"owner", "neighbour"}
HERE = ROLES - {"owner"}
"""Who comes from the host itself, and from no tenant on it."""
OF_TRAIN = READERS | {"owner"}
OF_SERVE = READERS | {"neighbour"}


@dataclass(frozen=True)
class Row:
    """A route, asked for something, and who may."""

    route: str
    """As it is declared, with its method."""
    path: str
    who: frozenset[str]
    status: int = 200
    """Of the answer to those."""
    body: Any = None


def row(
    route: str, who: frozenset[str], status: int = 200, *, name: str = "", body: Any = None
) -> Row:
    return Row(route, route.partition(" ")[2].replace("{name}", name), who, status, body)


_LATENCY = {"quantile": 0.99, "seconds": 0.1}
_OVERRIDE = {"ttl_seconds": 60, "why": "a test", "tenant": "train", "share_ratio": 0.5}
_TOKEN = {"scopes": ["read"], "expires_seconds": 60}
TABLE = (
    row("GET /healthz", SCRAPERS),
    row("GET /readyz", SCRAPERS),
    row("GET /metrics", SCRAPERS),
    row("GET /metrics/dcgm", SCRAPERS),
    row("GET /openapi.json", EVERYBODY),
    row("GET /v1/node", EVERYBODY),
    row("GET /v1/health", EVERYBODY),
    row("GET /v1/gpus", TENANTS),
    row("GET /v1/gpus/{name}", TENANTS, name=snapshots.GPU0),
    row("GET /v1/gpus/{name}", READERS, name=snapshots.GPU1),
    row("GET /v1/tenants", TENANTS),
    row("GET /v1/tenants/{name}", OF_TRAIN, name="train"),
    row("GET /v1/tenants/{name}", OF_SERVE, name="serve"),
    row("GET /v1/tenants/{name}", READERS, 404, name="nobody"),
    row("GET /v1/tenants/{name}/explanation", OF_TRAIN, name="train"),
    row("GET /v1/tenants/{name}/explanation", READERS, 404, name="nobody"),
    row("GET /v1/tenants/{name}/environment", OF_TRAIN, name="train"),
    row("GET /v1/tenants/{name}/environment", READERS, 404, name="nobody"),
    row("GET /v1/mps", READERS),
    row("GET /v1/plan", READERS),
    row("GET /v1/events", READERS),
    row("GET /v1/events/stream", TENANTS),
    row("GET /v1/audit", READERS),
    row("GET /v1/overrides", READERS),
    row("GET /v1/runs", EVERYBODY),
    row("GET /v1/refusals", EVERYBODY),
    row("GET /v1/config", ADMINS),
    row("GET /v1/tokens", ADMINS),
    row("POST /v1/reload", ADMINS),
    row("POST /v1/pause", ADMINS),
    row("POST /v1/unpause", ADMINS),
    row("POST /v1/release", ADMINS),
    row("POST /v1/resume", ADMINS),
    row("POST /v1/tokens", ADMINS, 201, body=_TOKEN),
    row("DELETE /v1/tokens/{name}", ADMINS, name="00000000"),
    # Who may start what is decided with the run; who comes from inside a tenant would leave it.
    row("POST /v1/runs", HERE, 201, body={"sla": "L3"}),
    row("PUT /v1/overrides/{name}", OVERRIDERS, name="mine", body=_OVERRIDE),
    row("DELETE /v1/overrides/{name}", OVERRIDERS, name="mine"),
    row(
        "PUT /v1/tenants/{name}/latency",
        ADMINS | {"owner", "for-train"},
        202,
        name="train",
        body=_LATENCY,
    ),
    row(
        "PUT /v1/tenants/{name}/latency",
        ADMINS | {"neighbour", "for-serve"},
        202,
        name="serve",
        body=_LATENCY,
    ),
    row("PUT /v1/tenants/{name}/latency", ADMINS, 404, name="nobody", body=_LATENCY),
)


def caller(role: str) -> Peer:
    """What the kernel's word makes of somebody in that role."""
    uid, group, cgroup = {
        "root": (0, 0, "/user.slice"),
        "member": (1234, 900, "/user.slice"),
        "owner": (0, 900, snapshots.TRAIN_PATH + "/inside"),
        "neighbour": (1001, 1001, "/user.slice"),
        "stranger": (54321, 54321, "/user.slice"),
    }[role]
    credentials = Credentials(9, uid, frozenset({group}))
    origin = Origin(7, cgroup, contained=False)
    known = Caller(credentials, origin)
    peer = judge(known, snapshots.busy().state.inventory, Rules(group=900))
    return msgspec.structs.replace(peer, caller=known)


def registered(app: web.Application) -> set[str]:
    """The routes that an application has, as they are declared; HEAD is GET without the body."""
    return {
        f"{r.method} {r.resource.canonical}"
        for r in app.router.routes()
        if r.method != "HEAD" and r.resource is not None
    }


def entrance(peer: Peer) -> Entrance:
    return Entrance(
        about="A test.",
        door=Anyone(),
        gate=Gate(by_group("gpuagent")),
        peer_of=lambda _: peer,
        clock=Scene(None).clock,
        open=frozenset({"/healthz", "/readyz"}),
        send_seconds=20,
    )


@contextlib.contextmanager
def app_for(role: str, commands: Commands) -> Iterator[web.Application]:
    exposition = Exposition("1")
    run = Reservation(
        name="mine", level=Level.L3, pid=9, started=7, uid=0, by="root", gpus=(), began_wall=0.0
    )
    scene = Scene(msgspec.structs.replace(snapshots.busy(), runs=RunList((run,))))
    try:
        yield whole_app(scene, commands, entrance(caller(role)), exposition=exposition)
    finally:
        exposition.close()


async def test_the_table_has_a_row_for_every_route() -> None:
    listed = {r.route for r in TABLE}
    declared = {f"GET {g.path}" for g in GETS} | {f"{d.method} {d.path}" for d in DOS}
    with app_for("root", Commands()) as app:
        assert registered(app) == listed
    assert declared <= listed
    few = Exposition("1")
    assert registered(pages_app(Scene(None), entrance(caller("root")), exposition=few)) == {
        f"GET {path}" for path in (*PAGES, "/openapi.json")
    }
    few.close()


def test_every_audience_has_a_row() -> None:
    audiences = {g.audience for g in GETS} | {d.audience for d in DOS} | {For.SCRAPERS}
    assert audiences == set(For), "an audience that no route has is never tested"


# -- the Unix socket ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", sorted(ROLES))
async def test_every_route_for_every_role(role: str) -> None:
    commands = Commands()
    with app_for(role, commands) as app:
        async with TestClient(TestServer(app)) as client:
            for each in TABLE:
                method, _, _ = each.route.partition(" ")
                may = role in each.who or each.path in {"/healthz", "/readyz"}
                before = len(commands.seen)
                async with client.request(method, each.path, json=each.body) as reply:
                    assert reply.status == (each.status if may else 403), each
                    if not may:
                        problem = await reply.json(content_type="application/problem+json")
                        assert "usermod -aG gpuagent" in problem["remedy"]
                assert may or len(commands.seen) == before, each


@pytest.mark.parametrize(("role", "other"), [("owner", "serve"), ("neighbour", "train")])
async def test_a_tenants_own_user_reads_of_nobody_else(role: str, other: str) -> None:
    broken = msgspec.structs.replace(snapshots.ENFORCING, config_error=f"a.toml:1: {other}: no")
    scene, exposition = Scene(snapshots.busy(posture=broken)), Exposition("1")
    app = whole_app(scene, Commands(), entrance(caller(role)), exposition=exposition)
    async with TestClient(TestServer(app)) as client:
        for each in TABLE:
            # The description of the API, which has words of all kinds, names no tenant.
            if role in each.who and each.route.startswith("GET") and each.path != "/openapi.json":
                async with client.get(each.path) as reply:
                    if each.path != STREAM:
                        assert not re.search(rf"\b{other}\b", await reply.text()), each
        health = await (await client.get("/v1/health")).json()
        assert "administrators are told" in health["config_error"]
    exposition.close()


def test_without_a_group_the_remedy_is_root() -> None:
    assert "names no group" in by_group("")


async def test_a_token_is_not_looked_at_on_a_socket() -> None:
    async with serving(Scene(snapshots.busy())) as (_, path):
        for header in ("Bearer gpa_00000000_x", "Basic Og==", ""):
            reply = await ask(path, "/v1/plan", headers=f"Authorization: {header}\r\n")
            assert reply.status == 400
            assert "leave the header out" in reply.json["remedy"]


# -- tokens --------------------------------------------------------------------------------------------------


class Keys:
    """A book with one token of every kind, and texts that are no valid tokens."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self.book = TokenBook(str(folder), scene.clock)
        self.texts: dict[str, str] = {"nothing": "", "junk": "gpa_ junk"}
        self._scene = scene

    async def fill(self) -> None:
        for name, scope in TOKENS.items():
            self.texts[name] = await issued(self.book, self._scene.clock, scope)
        self.texts["revoked"] = await issued(self.book, self._scene.clock, "admin")
        await self.book.revoke(self.texts["revoked"].split("_")[1])
        self.texts["expired"] = await issued(self.book, self._scene.clock, "admin", seconds=5)
        now = self._scene.clock.instant
        later = msgspec.structs.replace(now, mono=now.mono + 6, wall=now.wall + 6)
        self._scene.clock.instant = later
        right = self.texts["admin"]
        self.texts["altered"] = right[:-1] + ("A" if right[-1] != "A" else "E")

    def bearer(self, name: str) -> dict[str, str]:
        text = self.texts[name]
        return {"Authorization": f"Bearer {text}"} if text else {}

    def basic(self, name: str) -> dict[str, str]:
        text = self.texts[name]
        pair = base64.b64encode(f"prometheus:{text}".encode()).decode()
        return {"Authorization": f"Basic {pair}"} if text else {}


@pytest.fixture
async def keys(tmp_path: Path) -> tuple[Keys, Scene]:
    scene = Scene(snapshots.busy())
    made = Keys(tmp_path, scene)
    await made.fill()
    return made, scene


async def status_of(
    session: aiohttp.ClientSession,
    url: str,
    each: Row,
    headers: dict[str, str],
    **how: Any,
) -> tuple[int, aiohttp.ClientResponse]:
    method, _, _ = each.route.partition(" ")
    body = None if each.body is None else json.dumps(each.body).encode()
    url = url + each.path
    async with session.request(method, url, data=body, headers=headers, **how) as reply:
        return reply.status, reply


@pytest.mark.parametrize("closed", [False, True], ids=["open-metrics", "metrics-token"])
async def test_every_route_for_every_token_on_the_loopback_address(
    keys: tuple[Keys, Scene], closed: bool
) -> None:
    made, scene = keys
    commands = Commands()
    openly = {"/healthz", "/readyz"} if closed else set(PAGES)
    async with (
        serving(scene, commands, tokens=made.book, metrics_token=closed) as (server, _),
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{server.metrics_port}"
        for each in TABLE:
            for name in (*TOKENS, *INVALID):
                before = len(commands.seen)
                got, reply = await status_of(session, url, each, made.bearer(name))
                if each.path in openly:
                    assert got == 200, (each, name)
                elif name in INVALID:
                    assert got == 401, (each, name)
                    assert reply.headers.getall("WWW-Authenticate") == ['Bearer realm="gpuagent"']
                else:
                    assert got == (each.status if name in each.who else 403), (each, name)
                if name not in each.who:
                    assert len(commands.seen) == before, (each, name)
        got, _ = await status_of(session, url, TABLE[5], made.basic("read"))
        assert got == 401, "Basic is for the network only: browsers send it by themselves"


@certificates.needs_openssl
@pytest.mark.parametrize("basic", [False, True], ids=["bearer", "basic"])
async def test_every_route_for_every_token_on_the_network(
    keys: tuple[Keys, Scene], basic: bool, tmp_path: Path
) -> None:
    made, scene = keys
    commands = Commands()
    pair = certificates.make(tmp_path)
    trust = certificates.trusting(pair[0])
    async with (
        serving(
            scene, commands, tokens=made.book, listen="", network=certificates.remote(pair)
        ) as (server, _),
        aiohttp.ClientSession() as session,
    ):
        assert server.network is not None
        url = f"https://localhost:{server.network.port}"
        for each in TABLE:
            for name in (*TOKENS, *INVALID):
                headers = made.basic(name) if basic else made.bearer(name)
                headers["Host"] = "gpu7.example"  # by whatever name it is reached
                got, reply = await status_of(
                    session, url, each, headers, ssl=trust, server_hostname="localhost"
                )
                if each.path not in (*PAGES, "/openapi.json"):
                    assert got == 404, (each, name)
                elif name in INVALID:
                    assert got == 401, (each, name)
                    challenges = reply.headers.getall("WWW-Authenticate")
                    assert [c.partition(" ")[0] for c in challenges] == ["Bearer", "Basic"]
                else:
                    assert got == (200 if name in each.who else 403), (each, name)
    assert commands.seen == []


async def test_the_administrators_socket_has_the_same_routes() -> None:
    """It is the same application; who comes in there is another matter (test_sockets)."""
    async with serving(Scene(snapshots.busy())) as (_, path):
        for each in TABLE:
            if each.route.startswith("GET") and each.path != STREAM:
                assert (await ask(f"{path}-admin", each.path)).status == each.status


async def test_a_refusal_says_neither_what_is_wrong_nor_what_there_is(
    keys: tuple[Keys, Scene],
) -> None:
    made, scene = keys
    texts = set()
    async with (
        serving(scene, tokens=made.book) as (server, _),
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{server.metrics_port}/v1/tenants/"
        for name in INVALID:
            for tenant in ("train", "nobody"):
                async with session.get(url + tenant, headers=made.bearer(name)) as reply:
                    assert reply.headers["Connection"] == "close"
                    texts.add(await reply.text())
        async with session.get(url + "train", headers=made.bearer("override")) as reply:
            of_other_scope = await reply.json(content_type=None)
    assert len(texts) == 1
    assert reply.status == 403
    assert "gpuagent token issue" in of_other_scope["remedy"]
    assert "its scopes are override" in of_other_scope["detail"]


async def test_revoked_and_expired_end_at_once(keys: tuple[Keys, Scene]) -> None:
    made, scene = keys
    async with (
        serving(scene, tokens=made.book) as (server, _),
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{server.metrics_port}/v1/plan"

        async def status(name: str) -> int:
            async with session.get(url, headers=made.bearer(name)) as reply:
                return reply.status

        assert (await status("read"), await status("admin")) == (200, 200)
        await made.book.revoke(made.texts["read"].split("_")[1])
        assert (await status("read"), await status("admin")) == (401, 200)
