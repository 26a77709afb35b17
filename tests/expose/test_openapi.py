"""The description of the API: it is valid OpenAPI, names what there is, and says what is really sent."""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import jsonschema_rs
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from msgspec import Meta
from openapi_spec_validator import OpenAPIV31SpecValidator

from gpuagent.expose import problems
from gpuagent.expose.api import DOS, GETS
from gpuagent.expose.app import PAGES, Entrance, pages_app, whole_app
from gpuagent.expose.auth import Peer
from gpuagent.expose.door import Anyone
from gpuagent.expose.fieldtexts import structs_of
from gpuagent.expose.gate import Gate
from gpuagent.expose.metrics import Exposition
from gpuagent.expose.openapi import AUDIENCES, EVENTS, PLAINS, PROBLEMS, Offer, Plain, operations
from gpuagent.expose.openapi import document as document_of
from gpuagent.expose.routes import Ask, Do, For, Get, Submit, Told
from gpuagent.expose.views import Done, Number, Page, View
from gpuagent.model.inventory import Level, Subject, on_gpu, on_tenant
from gpuagent.model.lease import Lease
from gpuagent.model.plan import Snapshot
from gpuagent.model.token import Token
from tests.expose import snapshots
from tests.expose.full import full
from tests.expose.scene import Commands, Scene, ask, serving

ADMIN = Peer(label="user 0", admin=True)

# -- each listener and its document ------------------------------------------------------------------------

LISTENERS = ("unix", "loopback", "loopback with a token for /metrics", "network")


@contextlib.contextmanager
def listening(listener: str) -> Iterator[web.Application]:
    """The application of a listener."""
    scene, exposition = Scene(snapshots.busy()), Exposition("1")
    free: Mapping[str, frozenset[str]] = {
        "unix": frozenset({"/healthz", "/readyz"}),
        "loopback": frozenset(PAGES),
        "loopback with a token for /metrics": frozenset({"/healthz", "/readyz"}),
        "network": frozenset(),
    }
    tcp = listener != "unix"
    entrance = Entrance(
        about=f"A test of {listener}.",
        schemes=(("token", "basic") if listener == "network" else ("token",)) if tcp else (),
        door=Anyone(),
        gate=Gate("ask somebody"),
        peer_of=lambda _: ADMIN,
        clock=scene.clock,
        open=free[listener],
        hosts=frozenset({"localhost"}) if listener.startswith("loopback") else frozenset(),
        send_seconds=20,
    )
    try:
        if listener == "network":
            yield pages_app(scene, entrance, exposition=exposition)
        else:
            yield whole_app(scene, Commands(), entrance, exposition=exposition)
    finally:
        exposition.close()


async def described(app: web.Application) -> Any:
    """The document that the application serves."""
    async with TestClient(TestServer(app)) as client:
        reply = await client.get("/openapi.json", headers={"Host": "localhost"})
        assert reply.status == 200
        assert reply.content_type == "application/json"
        return json.loads(await reply.read())


@pytest.mark.parametrize("listener", LISTENERS)
async def test_it_is_valid_openapi(listener: str) -> None:
    with listening(listener) as app:
        made = await described(app)
    OpenAPIV31SpecValidator(made).validate()
    for schema in made["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": _DIALECT, **schema})
    named = [o["operationId"] for o in operations(made["paths"])]
    assert len(named) == len(set(named))
    assert made["info"]["version"] == "1.2.3"


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("listener", LISTENERS)
async def test_it_names_what_the_router_has_and_nothing_else(listener: str) -> None:
    with listening(listener) as app:
        routed = {
            (r.method, r.resource.canonical)
            for r in app.router.routes()
            if r.resource is not None and r.method != "HEAD"
        }
        made = await described(app)
    assert routed == {
        (method.upper(), path)
        for path, item in made["paths"].items()
        for method in item
        if method != "parameters"
    }


async def test_every_listener_says_who_may_come() -> None:
    found = {}
    for listener in LISTENERS:
        with listening(listener) as app:
            found[listener] = await described(app)
    unix, loopback, closed, network = (found[name] for name in LISTENERS)
    assert "security" not in unix
    assert "securitySchemes" not in unix["components"]
    assert loopback["security"] == [{"token": []}]
    assert network["security"] == [{"token": []}, {"basic": []}]
    assert loopback["paths"]["/metrics"]["get"]["security"] == []
    assert "security" not in closed["paths"]["/metrics"]["get"]
    assert "security" not in network["paths"]["/healthz"]["get"]
    assert _statuses(unix, "/v1/node") == {"200", "400", "417", "503"}
    assert _statuses(unix, "/v1/plan") == {"200", "400", "403", "417", "503"}
    assert _statuses(loopback, "/v1/node") == {"200", "400", "401", "403", "417", "503"}
    assert _statuses(loopback, "/metrics") == {"200", "400", "403", "417", "503"}
    assert _statuses(network, "/metrics") == {"200", "400", "401", "403", "417", "503"}
    assert loopback["paths"]["/metrics"]["get"]["x-audience"] == "anyone"
    assert closed["paths"]["/metrics"]["get"]["x-audience"] == "scrapers"


def _statuses(made: Any, path: str) -> set[str]:
    return set(made["paths"][path]["get"]["responses"])


async def test_everybody_may_read_it_before_the_first_look_at_the_host_too() -> None:
    async with serving(Scene(None), listen="") as (_, path):
        first, second = await ask(path, "/openapi.json"), await ask(path, "/openapi.json")
    assert first.status == 200
    assert first.body == second.body
    assert first.json["paths"]["/openapi.json"]["get"]["x-audience"] == "anyone"


async def test_who_looks_for_what_is_not_there_is_sent_to_it() -> None:
    async with serving(Scene(snapshots.busy()), listen="") as (_, path):
        assert "/openapi.json" in (await ask(path, "/v2/everything")).json["remedy"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_a_method_that_it_does_not_name_is_not_taken(method: str) -> None:
    commands = Commands()
    async with serving(Scene(snapshots.busy()), commands, listen="") as (_, path):
        for target, item in (await ask(path, "/openapi.json")).json["paths"].items():
            named = {m.upper() for m in item} - {"PARAMETERS"}
            if method in named:
                continue
            reply = await ask(path, target.replace("{name}", "train"), method=method)
            assert reply.status == 405, (method, target)
            allowed = {m.strip() for m in reply.headers["allow"].split(",")}
            assert allowed - {"HEAD"} == named
    assert not commands.seen


# -- what is sent ------------------------------------------------------------------------------------------


def leased() -> Snapshot:
    """The busy host, with an override on a tenant, on a card, and on what is not there."""
    subjects = (on_tenant("train"), on_gpu(snapshots.GPU0), on_tenant("gone"))
    snapshot = snapshots.busy()
    snapshot.state.leases = tuple(
        Lease(
            id=f"lease{n}",
            subject=subject,
            value=0.5,
            ttl_seconds=60,
            by="user 0",
            why="a test",
            until=snapshots.MONO + 30,
            until_wall=snapshots.WALL + 30,
            created_wall=snapshots.WALL - 30,
        )
        for n, subject in enumerate(subjects)
    )
    return snapshot


HOSTS: Mapping[str, Callable[[], Snapshot]] = {
    "full": full,
    "busy": snapshots.busy,
    "leased": leased,
    "empty": snapshots.empty,
    "unread": snapshots.unread,
    "hostile": snapshots.hostile,
    "large": snapshots.large,
}


class Schemas:
    """Judges answers by a document."""

    def __init__(self, made: Any) -> None:
        # What the document does not name would pass: here it must not.
        self._made = copy.deepcopy(made)
        for schema in self._made["components"]["schemas"].values():
            if "properties" in schema:
                schema["additionalProperties"] = False

    def judge(self, path: str, status: int, media_type: str, body: bytes) -> None:
        """Raises a ValidationError, or a KeyError for what is not described."""
        answer = self._made["paths"][path]["get"]["responses"][str(status)]
        if "$ref" in answer:
            answer = self._made["components"]["responses"][answer["$ref"].rpartition("/")[2]]
        schema = answer["content"][media_type.partition(";")[0]]["schema"]
        told = json.loads(body) if media_type.endswith("json") else body.decode()
        whole = {**schema, "components": self._made["components"]}
        jsonschema_rs.validator_for(whole).validate(told)


def names_on(snapshot: Snapshot) -> list[str]:
    inventory = snapshot.state.inventory
    there = [t.name for t in inventory.tenants or ()] + [g.uuid for g in inventory.gpus or ()]
    return ["nobody", *(n.encode("utf-8", "backslashreplace").decode() for n in there[:20])]


@pytest.mark.parametrize("host", HOSTS)
async def test_every_answer_is_as_described(host: str) -> None:
    snapshot = HOSTS[host]()
    scene = Scene(snapshot)
    scene.access_now = msgspec.structs.replace(
        scene.access_now,
        tokens=(Token(id="0a", scopes=("read",), by="user 0", issued_wall=1, expires_wall=2),),
    )
    seen = set()
    async with serving(scene, listen="") as (_, path):
        schemas = Schemas((await ask(path, "/openapi.json")).json)
        for route in (*(g.path for g in GETS), *(p.path for p in PLAINS), "/openapi.json"):
            for name in names_on(snapshot) if "{name}" in route else [""]:
                reply = await ask(path, route.replace("{name}", quote(name, safe="")))
                seen.add((route, reply.status))
                schemas.judge(route, reply.status, reply.headers["content-type"], reply.body)
    assert {status for _, status in seen} <= {200, 404}
    if host == "leased":
        assert all((g.path, 200) in seen for g in GETS)


async def test_a_refusal_and_a_missing_picture_are_as_described() -> None:
    async with serving(Scene(None), listen="") as (_, path):
        schemas = Schemas((await ask(path, "/openapi.json")).json)
        for target, status in (("/v1/node", 503), ("/v1/tenants?limit=0", 503), ("/metrics", 503)):
            reply = await ask(path, target)
            assert reply.status == status
            schemas.judge(
                target.partition("?")[0], status, reply.headers["content-type"], reply.body
            )


def test_what_is_judged_here_can_fail() -> None:
    schemas = Schemas(of(Get(**_READS, path="/v1/x", view=Done)))
    schemas.judge("/v1/x", 200, "application/json", b'{"done":"yes"}')
    for wrong in (b'{"done":1}', b"{}", b'{"done":"yes","more":1}'):
        with pytest.raises(jsonschema_rs.ValidationError):
            schemas.judge("/v1/x", 200, "application/json", wrong)
    with pytest.raises(KeyError):
        schemas.judge("/v1/x", 404, "application/problem+json", b"{}")


# -- types ---------------------------------------------------------------------------------------------


class Taken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to us."""

    level: Level
    share_ratio: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """What is left."""


class Answered(View, frozen=True):
    """What is answered."""

    value: Number
    subject: Subject
    level: Level
    anything: object
    rest: tuple[str, ...] = ()


def _never(_told: Told, _ask: Ask) -> View:
    raise NotImplementedError


async def _nothing(_told: Told, _ask: Ask, _submit: Submit) -> View:
    raise NotImplementedError


_READS: Mapping[str, Any] = {"audience": For.ANYONE, "about": "A test.", "answer": _never}


def of(*routes: Get | Do) -> Any:
    offer = Offer(
        about="A test.",
        gets=tuple(r for r in routes if isinstance(r, Get)),
        dos=tuple(r for r in routes if isinstance(r, Do)),
    )
    return document_of("1", offer)


def test_types_come_out_as_they_are_sent() -> None:
    made = of(
        Get(**_READS, path="/v1/x", view=Page[Answered]),
        Do(
            path="/v1/x/{name}/y",
            audience=For.REPORTERS,
            about="Change it.",
            answer=_nothing,
            method="PUT",
            body=Taken,
            status=202,
            statuses=(429,),
        ),
    )
    schemas = made["components"]["schemas"]
    answered = schemas["Answered"]
    assert answered["required"] == ["value", "subject", "level", "anything", "rest"]
    check = jsonschema_rs.validator_for({**answered, "components": made["components"]})
    for value in (1.5, "+Inf", "-Inf", None):
        view = Answered(value=value, subject=on_tenant("a"), level=Level.L2, anything={"a": [1]})
        assert check.is_valid(json.loads(msgspec.json.encode(view)))
    sent = msgspec.to_builtins(view)
    for wrong in ({"value": "Infinity"}, {"level": "L2"}, {"level": 4}, {"subject": "a"}):
        assert not check.is_valid({**sent, **wrong})
    assert schemas["Taken"]["required"] == ["level"]
    assert schemas["Taken"]["additionalProperties"] is False
    assert schemas["Taken"]["properties"]["share_ratio"]["default"] == 1.0
    put = made["paths"]["/v1/x/{name}/y"]["put"]
    assert put["requestBody"]["required"] is True
    assert {"202", "404", "408", "413", "422", "429"} <= put["responses"].keys()
    assert put["x-audience"] == "reporters"
    assert made["paths"]["/v1/x/{name}/y"]["parameters"][0]["name"] == "name"
    assert "404" not in made["paths"]["/v1/x"]["get"]["responses"]


def test_a_type_that_has_no_schema_is_a_fault_that_is_seen_at_once() -> None:
    with pytest.raises(TypeError):
        of(Get(**_READS, path="/v1/x", view=dict[str, complex]))


def test_no_type_is_both_taken_and_answered() -> None:
    """Of an answer every field is required, of a body only those without a default."""
    taken = structs_of([d.body for d in DOS if d.body is not None])
    answered = structs_of([*(g.view for g in GETS), *(d.view for d in DOS)])
    assert not set(taken) & set(answered)


def test_everything_that_may_be_answered_has_words() -> None:
    assert AUDIENCES.keys() == set(For)
    assert {status for _, status in problems.STATUS} - {500} <= PROBLEMS.keys()
    routes: tuple[Get | Do | Plain, ...] = (*GETS, *DOS, *PLAINS, EVENTS)
    for route in routes:
        assert set(route.statuses) <= PROBLEMS.keys()
        assert route.about.endswith("."), route.path
