"""Every operation, for everybody who may reach a listener: as described, and nothing without the right."""

import asyncio
import base64
import grp
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuagent.model.token import SECRET_BYTES, Token, digest, spelled
from gpuagent.tokens import TokenBook
from tests.expose import snapshots
from tests.expose.bridge import bridge
from tests.expose.certificates import make, needs_openssl, remote
from tests.expose.fuzz import Found, Who, ask_all
from tests.expose.scene import Commands, Scene, serving

EVERYTHING = frozenset(
    {"anyone", "tenants", "readers", "scrapers", "reporters", "overriders", "admins"}
)
HERE = frozenset({"anyone", "locals"})
"""Of everybody who comes from the host itself."""
STRANGER_UID = 54321
MEMBERS = "nogroup"

ROOT = Who(name="root", audiences=EVERYTHING | HERE)
MEMBER = Who(name="a member of the group", audiences=EVERYTHING | HERE)
OWNER = Who(
    name="the user of a tenant",
    audiences=HERE | {"tenants", "reporters"},
    tenants=frozenset({"train"}),
)
STRANGER = Who(name="somebody else", audiences=HERE)

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def named(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Who) else ""


class Stage:
    """What can be changed: by a command, or by a report."""

    def __init__(self) -> None:
        self.scene = Scene(snapshots.busy())
        self.commands = Commands()
        self.commands.carry_out = self.scene.admit

    def changed(self) -> object:
        return len(self.commands.seen), len(self.scene.reports)


async def all_asked(
    url: str, who: Who, changed: Callable[[], object], *, reader: Who, trusted: str | bool = True
) -> None:
    """Ask everything as `who`, and judge what came of it. `reader` may read the document."""
    get = requests.get
    reply = await asyncio.to_thread(
        lambda: get(f"{url}/openapi.json", headers=reader.headers, verify=trusted)
    )
    assert reply.status_code == 200
    document = reply.json()
    found = await asyncio.to_thread(lambda: ask_all(url, document, who, changed, trusted=trusted))
    judge(document, who, found)


def judge(document: Any, who: Who, found: Found) -> None:
    """Whoever may, did; whoever may not was refused, and changed nothing."""
    for path, item in document["paths"].items():
        for method in item.keys() - {"parameters"}:
            label = f"{method.upper()} {path}"
            if label not in found.statuses:
                assert path.endswith("/stream"), label
                continue
            statuses, changes = found.statuses[label], found.changes.get(label, set())
            if not who.may_use(item[method]):
                assert statuses == {who.refusal}, label
                assert not changes, label
            elif method == "get":
                assert not changes, label
            else:
                assert changes, label
                assert who.tenants is None or changes <= who.tenants | {""}, label
            if who.may_use(item[method]) and "{name}" not in path:
                assert min(statuses) < 300, label


# -- the Unix socket -------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize(
    ("who", "uid", "groups"),
    [
        (ROOT, 0, ()),
        (MEMBER, STRANGER_UID, (MEMBERS,)),
        (OWNER, 1000, ()),
        (STRANGER, STRANGER_UID, ()),
    ],
    ids=named,
)
async def test_everybody_at_the_unix_socket(who: Who, uid: int, groups: tuple[str, ...]) -> None:
    stage = Stage()
    numbers = tuple(grp.getgrnam(name).gr_gid for name in groups)
    async with serving(stage.scene, stage.commands, group=MEMBERS, listen="") as (_, path):
        with bridge(path, uid=uid, groups=numbers) as url:
            await all_asked(url, who, stage.changed, reader=who)


# -- tokens ------------------------------------------------------------------------------------------------


async def book_of(folder: Path, scene: Scene, scopes: tuple[str, ...]) -> tuple[TokenBook, str]:
    """A book of tokens with one for these scopes, and the text of that."""
    book = TokenBook(str(folder), scene.clock)
    text = spelled("0a1b2c3d", secrets.token_bytes(SECRET_BYTES))
    wall = snapshots.WALL
    token = Token(
        id="0a1b2c3d", scopes=scopes, by="user 0", issued_wall=wall, expires_wall=wall + 3600
    )
    await book.issue(token, digest(text))
    return book, text


def bearing(name: str, text: str, *audiences: str, tenant: str = "") -> Who:
    return Who(
        name=name,
        audiences=frozenset({"anyone", *audiences}),
        tenants=frozenset({tenant}) if tenant else None,
        headers={"Authorization": f"Bearer {text}"},
    )


NOBODY = Who(name="nobody", audiences=frozenset(), refusal=401)
GUESSER = Who(
    name="a guesser",
    audiences=frozenset(),
    refusal=401,
    headers={"Authorization": f"Bearer {spelled('0a1b2c3d', bytes(SECRET_BYTES))}"},
)
BEARERS = {
    "read": {"anyone", "tenants", "readers", "scrapers"},
    "metrics": {"anyone", "scrapers"},
    "latency:train": {"anyone", "reporters"},
    "override": {"anyone", "overriders"},
    "admin": EVERYTHING,
}
"""The audiences that the bearer of a token with this scope belongs to."""


@pytest.mark.parametrize("scope", BEARERS)
async def test_every_scope_at_the_loopback_address(scope: str, tmp_path: Path) -> None:
    stage = Stage()
    book, text = await book_of(tmp_path, stage.scene, (scope,))
    tenant = scope.partition(":")[2]
    who = bearing(scope, text, *BEARERS[scope], tenant=tenant)
    async with serving(stage.scene, stage.commands, tokens=book, metrics_token=True) as (server, _):
        url = f"http://127.0.0.1:{server.metrics_port}"
        await all_asked(url, who, stage.changed, reader=who)


@pytest.mark.parametrize("who", [NOBODY, GUESSER], ids=named)
@pytest.mark.parametrize("metrics_token", [True, False], ids=["closed", "open"])
async def test_who_has_no_token_at_the_loopback_address(
    who: Who, tmp_path: Path, *, metrics_token: bool
) -> None:
    stage = Stage()
    book, text = await book_of(tmp_path, stage.scene, ("admin",))
    admin = bearing("admin", text)
    async with serving(stage.scene, stage.commands, tokens=book, metrics_token=metrics_token) as (
        server,
        _,
    ):
        url = f"http://127.0.0.1:{server.metrics_port}"
        await all_asked(url, who, stage.changed, reader=admin)


@needs_openssl
@pytest.mark.parametrize("scheme", ["bearer", "basic", "none"])
async def test_everybody_on_the_network(scheme: str, tmp_path: Path) -> None:
    stage = Stage()
    book, text = await book_of(tmp_path, stage.scene, ("metrics",))
    reader = bearing("metrics", text, "scrapers")
    pair = base64.b64encode(f"prometheus:{text}".encode()).decode()
    basic = Who(
        name="basic", audiences=reader.audiences, headers={"Authorization": f"Basic {pair}"}
    )
    who = {"bearer": reader, "basic": basic, "none": NOBODY}[scheme]
    pair_files = make(tmp_path)
    async with serving(
        stage.scene, stage.commands, listen="", tokens=book, network=remote(pair_files)
    ) as (server, _):
        assert server.network is not None
        url = f"https://127.0.0.1:{server.network.port}"
        await all_asked(url, who, stage.changed, reader=reader, trusted=str(pair_files[0]))
