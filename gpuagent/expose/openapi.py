"""The description of the API, OpenAPI 3.1, made from the routes and the types that they take and answer.

One document for each listener: it lists what that listener offers and no more. What a field means
is told once, in the source beside the field, and read from there.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from gpuagent.expose import stream
from gpuagent.expose.fieldtexts import field_texts, structs_of
from gpuagent.expose.problems import MEDIA_TYPE, Problem
from gpuagent.expose.routes import Answer, Ask, Do, For, Get, Parameter, Told

PATH = "/openapi.json"
VERSION = "3.1.0"
"""Of OpenAPI (https://spec.openapis.org/oas/v3.1.0)."""
_REFERENCE = "#/components/schemas/{name}"

Scheme = Literal["token", "basic"]
Schema = dict[str, Any]

SCHEMES: Mapping[Scheme, Schema] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token that `gpuagent token issue` has given; it has scopes and an expiry.",
    },
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "Any user, and such a token as the password.",
    },
}

AUDIENCES: Mapping[For, str] = {
    For.ANYONE: "everybody who reaches this listener",
    For.TENANTS: "those who see everything, and to a tenant's own user for what is that tenant's",
    For.READERS: "those who see everything: administrators, and tokens with the scope `read`",
    For.SCRAPERS: "those who see everything, and to tokens with the scope `metrics`",
    For.REPORTERS: "administrators, and to those who may report for the tenant in the path: its own "
    "user, and tokens with the scope `latency:TENANT`",
    For.OVERRIDERS: "administrators, and to tokens with the scope `override`",
    For.LOCALS: "processes of this host that are in no tenant, over the Unix socket; what each may is "
    "configured",
    For.ADMINS: "administrators",
}
_HOLDERS = "every valid token, whatever its scopes"
"""Instead of anyone, where tokens tell who asks."""

PROBLEMS: Mapping[int, str] = {
    400: "What was sent is no HTTP request, or a parameter or the body cannot be read.",
    401: "No credentials came, or none that are known and valid now.",
    403: "Whoever asks may not do this.",
    404: "There is no such thing now.",
    408: "The body did not arrive in time.",
    409: "The agent, or the host as it is now, does not allow it.",
    413: "The body is too large.",
    417: "The Expect header asks for more than HTTP has.",
    422: "The body, or the configuration that was to be read, does not fit.",
    429: "Too many of these were sent; Retry-After says when to go on.",
    501: "This host cannot do it.",
    503: "Not now: no picture of the host yet, or too much is waiting. Retry-After says when.",
}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_CHALLENGE = {
    "WWW-Authenticate": {"description": "What is asked for.", "schema": {"type": "string"}}
}
_HEADERS: Mapping[int, Schema] = {401: _CHALLENGE, 429: _RETRY, 503: _RETRY}

_ANY_REQUEST = (400, 417, 503)
"""From what reads HTTP, and from the door, before a route is looked for."""
_ANY_CHANGE = (404, 408, 409, 413, 422, 501)
"""From the body, and from the table of what a command may raise (`problems.STATUS`)."""


class Plain(msgspec.Struct, frozen=True):
    """A page that is no JSON."""

    path: str
    audience: For
    about: str
    media_type: str = "text/plain"
    query: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = ()
    """Problems that it may answer beyond those that everything may."""


PLAINS: tuple[Plain, ...] = (
    Plain("/metrics", For.SCRAPERS, "Everything that is measured and done, for Prometheus."),
    Plain("/metrics/dcgm", For.SCRAPERS, "The cards under the names of NVIDIA's DCGM exporter."),
    Plain("/healthz", For.SCRAPERS, "200 while the control loop turns."),
    Plain("/readyz", For.SCRAPERS, "200 once there is a picture of the host."),
)
"""Their handlers are in `app`."""
EVENTS = Plain(stream.PATH, stream.AUDIENCE, stream.ABOUT, stream.MEDIA_TYPE, stream.QUERY)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one listener offers, and how it tells who asks."""

    about: str
    """Which listener, and by what it tells who asks."""
    gets: tuple[Get, ...] = ()
    dos: tuple[Do, ...] = ()
    plains: tuple[Plain, ...] = ()
    schemes: tuple[Scheme, ...] = ()
    """Any one of them will do; none where the kernel tells who asks."""
    free: frozenset[str] = frozenset()
    """Paths that anybody may have, without credentials."""
    guarded: bool = False
    """Whether every route may be refused (403), as where foreign Host headers are."""


def described(version: str, offer: Offer) -> Get:
    """`GET /openapi.json` of a listener: the document, made now and once."""
    answer: Answer = {}

    def told(_told: Told, _ask: Ask) -> Answer:
        return answer

    get = Get(
        path=PATH,
        audience=For.ANYONE,
        about="This document.",
        answer=told,
        view=dict[str, object],
    )
    whole = msgspec.structs.replace(offer, gets=(*offer.gets, get))
    answer = msgspec.Raw(msgspec.json.encode(document(version, whole)))
    return get


def document(version: str, offer: Offer) -> Schema:
    """The OpenAPI document of what a listener offers, as plain values."""
    types = _Types(offer)
    paths: dict[str, Schema] = {}
    for get in offer.gets:
        paths.setdefault(get.path, {})["get"] = _get(get, offer, types)
    for plain in offer.plains:
        paths.setdefault(plain.path, {})["get"] = _plain(plain, offer, types)
    for do in offer.dos:
        paths.setdefault(do.path, {})[do.method.lower()] = _do(do, offer, types)
    for path, item in paths.items():
        if names := _names(path):
            item["parameters"] = [_path_parameter(name) for name in names]
    used = sorted({int(s) for o in operations(paths) for s in o["responses"] if int(s) >= 400})
    components: Schema = {
        "schemas": types.components,
        "responses": {_problem_name(status): _problem(status) for status in used},
    }
    made: Schema = {
        "openapi": VERSION,
        "info": {"title": "gpuagent", "version": version, "description": _about(offer)},
        "paths": dict(sorted(paths.items())),
        "components": components,
    }
    if offer.schemes:
        components["securitySchemes"] = {name: SCHEMES[name] for name in offer.schemes}
        made["security"] = [{name: []} for name in offer.schemes]
    sent: Schema = msgspec.json.decode(msgspec.json.encode(made))
    return sent


def operations(paths: Mapping[str, Schema]) -> Iterable[Schema]:
    """Every operation of the paths of a document."""
    return (o for item in paths.values() for key, o in item.items() if key != "parameters")


def _about(offer: Offer) -> str:
    return (
        f"{offer.about}\n\n"
        'Unknown is null, never 0. Names end in their base unit. JSON has no infinity: "+Inf" is '
        "no limit. What goes wrong is told in a problem document (RFC 9457), whose `remedy` says "
        "what to do; 405 names in Allow what a path takes; 500 is a fault of the agent. HEAD is GET "
        "without the body. In a path, write / as %2F. `x-audience` names who may use a route."
    )


# -- operations ----------------------------------------------------------------------------------------


def _get(get: Get, offer: Offer, types: "_Types") -> Schema:
    made = _operation(get, "get", offer, get.statuses)
    made["responses"] = {"200": _success(types.told(get.view)), **made["responses"]}
    return made | _query(get.query, types)


def _do(do: Do, offer: Offer, types: "_Types") -> Schema:
    made = _operation(do, do.method.lower(), offer, (*_ANY_CHANGE, *do.statuses))
    if do.body is not None:
        content = {"application/json": {"schema": types.taken(do.body)}}
        made["requestBody"] = {"required": True, "content": content}
    made["responses"] = {str(do.status): _success(types.told(do.view)), **made["responses"]}
    return made


def _plain(plain: Plain, offer: Offer, types: "_Types") -> Schema:
    made = _operation(plain, "get", offer, plain.statuses)
    text = {"description": "As asked for.", "content": {plain.media_type: {"schema": _TEXT}}}
    made["responses"] = {"200": text, **made["responses"]}
    return made | _query(plain.query, types)


def _query(query: tuple[Parameter, ...], types: "_Types") -> Schema:
    if not query:
        return {}
    return {
        "parameters": [
            {"name": p.name, "in": "query", "description": p.about, "schema": types.taken(p.type)}
            for p in query
        ]
    }


_TEXT = {"type": "string"}


def _operation(
    route: Get | Do | Plain, method: str, offer: Offer, statuses: Iterable[int]
) -> Schema:
    free = route.path in offer.free
    audience = For.ANYONE if free else route.audience
    may = {*_ANY_REQUEST, *statuses}
    if "{" in route.path:
        may.add(404)
    if offer.schemes and not free:
        may.add(401)
    if offer.guarded or audience is not For.ANYONE:
        may.add(403)
    to = _HOLDERS if 401 in may and audience is For.ANYONE else AUDIENCES[audience]
    made: Schema = {
        "operationId": _operation_id(route.path, method),
        "tags": [_tag(route)],
        "summary": re.split(r"[:;.]", route.about, maxsplit=1)[0],
        "description": f"{route.about} Open to {to}.",
        "x-audience": audience.value,
        "responses": {
            str(s): {"$ref": f"#/components/responses/{_problem_name(s)}"} for s in sorted(may)
        },
    }
    if offer.schemes and free:
        made["security"] = []
    return made


def _operation_id(path: str, method: str) -> str:
    """Such as get_tenants_name_explanation: stable, and a name in any language."""
    parts = path.strip("/").removeprefix("v1/").replace("{", "").replace("}", "")
    return f"{method}_{''.join(c if c.isalnum() else '_' for c in parts)}"


def _tag(route: Get | Do | Plain) -> str:
    if not route.path.startswith("/v1/"):
        return "pages"
    return route.path.split("/")[2]


def _names(path: str) -> list[str]:
    """The variable parts of a path."""
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _path_parameter(name: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": "As listed; write / as %2F.",
        "schema": {"type": "string", "minLength": 1},
    }


def _success(schema: Schema) -> Schema:
    return {"description": "As asked for.", "content": {"application/json": {"schema": schema}}}


def _problem(status: int) -> Schema:
    schema = {"$ref": _REFERENCE.format(name=Problem.__name__)}
    made: Schema = {"description": PROBLEMS[status], "content": {MEDIA_TYPE: {"schema": schema}}}
    if status in _HEADERS:
        made["headers"] = _HEADERS[status]
    return made


def _problem_name(status: int) -> str:
    """Not the phrase of the status: Python 3.13 has others than 3.11."""
    return f"Problem{status}"


# -- types ---------------------------------------------------------------------------------------------


class _Types:
    """The schemas of all types of an offer, each named once."""

    def __init__(self, offer: Offer) -> None:
        told = [*(g.view for g in offer.gets), *(d.view for d in offer.dos), Problem]
        taken = [d.body for d in offer.dos if d.body is not None]
        queries = (*(g.query for g in offer.gets), *(p.query for p in offer.plains))
        taken += [p.type for query in queries for p in query]
        self._told, told_parts = _schemas(told)
        self._taken, taken_parts = _schemas(taken)
        for cls in structs_of(told):
            if not cls.__struct_config__.omit_defaults:
                _always(told_parts, cls)
        for cls in structs_of([*told, *taken]):
            for parts in (told_parts, taken_parts):
                _explain(parts, cls)
        self.components = dict(sorted({**taken_parts, **told_parts}.items()))

    def told(self, kind: Any) -> Schema:
        """The schema of what is answered."""
        return self._told[repr(kind)]

    def taken(self, kind: Any) -> Schema:
        """The schema of what is sent to us."""
        return self._taken[repr(kind)]


def _schemas(kinds: list[Any]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """The schema of each, and of the named types that they are made of."""
    made, parts = msgspec.json.schema_components(
        kinds, schema_hook=_anything, ref_template=_REFERENCE
    )
    return {repr(kind): schema for kind, schema in zip(kinds, made, strict=True)}, parts


def _anything(kind: type) -> Schema:
    """What msgspec has no schema for. Raises NotImplementedError for all but a value of any kind."""
    if kind is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError


def _named(parts: dict[str, Schema], cls: type) -> Iterable[Schema]:
    """The schemas of a class: several of a generic one."""
    name = cls.__name__
    return (s for s in parts.values() if s.get("title", "").partition("[")[0] == name)


def _always(parts: dict[str, Schema], cls: type) -> None:
    """What is answered has all its fields, those with a default too."""
    for schema in _named(parts, cls):
        schema["required"] = list(schema["properties"])
        for field in schema["properties"].values():
            field.pop("default", None)


def _explain(parts: dict[str, Schema], cls: type) -> None:
    """Say of each field what stands below it in the source."""
    texts = field_texts(cls)
    for schema in _named(parts, cls):
        for field, value in schema.get("properties", {}).items():
            if field in texts:
                value["description"] = texts[field]
