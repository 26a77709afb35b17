"""The routes as an HTTP application: rights, limits, problem documents, and what keeps it alive.

The outermost frame of every request is `_guard`: whatever a request provokes ends there as a
problem document.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Corrupt
from gpuagent.expose import problems
from gpuagent.expose.api import DOS, GETS, STALE_SECONDS, Desk, Inbox, to_json
from gpuagent.expose.auth import Peer
from gpuagent.expose.bearer import Unauthenticated
from gpuagent.expose.door import Door
from gpuagent.expose.gate import Gate
from gpuagent.expose.metrics import CONTENT_TYPE, Exposition
from gpuagent.expose.misfit import misfit
from gpuagent.expose.openapi import EVENTS, PLAINS, Offer, Plain, Scheme, described
from gpuagent.expose.problems import Problem, Trouble
from gpuagent.expose.routes import Ask, Do, For, Get, Told, current
from gpuagent.expose.stream import PATH as STREAM
from gpuagent.expose.stream import STREAMS, Streams
from gpuagent.log import printable
from gpuagent.model.plan import Snapshot

BODY_MOST_BYTES = 4096
_REASON_MOST = 200
_BODY_SECONDS = 5.0

PeerOf = Callable[[web.Request], Peer]

_log = structlog.get_logger()


class Text(Protocol):
    """The text of a page for Prometheus."""

    async def __call__(self, snapshot: Snapshot, *, zipped: bool) -> bytes: ...


class Pages:
    """The pages for machines: /metrics, /metrics/dcgm, /healthz, /readyz."""

    def __init__(self, told: Told, exposition: Exposition) -> None:
        self._told = told
        self._exposition = exposition

    async def metrics(self, request: web.Request) -> web.Response:
        return await self._exposed(request, self._exposition.text)

    async def dcgm(self, request: web.Request) -> web.Response:
        return await self._exposed(request, self._exposition.dcgm_text)

    async def _exposed(self, request: web.Request, text: Text) -> web.Response:
        zipped = "gzip" in request.headers.get("Accept-Encoding", "")
        body = await text(current(self._told), zipped=zipped)
        response = web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
        response.headers["Vary"] = "Accept-Encoding"
        if zipped:
            response.headers["Content-Encoding"] = "gzip"
        return response

    async def healthz(self, _request: web.Request) -> web.Response:
        """Whether the loop turns. The agent is alive before its first tick, too."""
        snapshot = self._told.latest()
        if snapshot is not None:
            age = self._told.clock.now().mono - snapshot.state.now.mono
            if age > STALE_SECONDS:
                raise Trouble(503, f"the control loop has been stuck for {age:.0f} s")
        return web.Response(text="ok\n")

    async def readyz(self, _request: web.Request) -> web.Response:
        """Whether there is a picture of the host."""
        current(self._told)
        return web.Response(text="ready\n")


PAGES = ("/metrics", "/metrics/dcgm", "/healthz", "/readyz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """How one kind of listener tells who asks, and what it gives without asking that."""

    about: str
    """Which listener, in one sentence."""
    schemes: tuple[Scheme, ...] = ()
    """How a token may be sent; none where the kernel tells who asks."""
    door: Door
    gate: Gate
    peer_of: PeerOf
    """Raises Trouble where it cannot be told."""
    clock: Clock
    open: frozenset[str] = frozenset()
    """Those of PAGES that anybody may have."""
    hosts: frozenset[str] = frozenset()
    """The names that it may be asked by; empty for any."""
    send_seconds: float
    """A reader that has not taken its answer within this time is cut off."""
    streams: int = STREAMS
    """How many streams of events may be open at once: each keeps a connection."""

    def offer(
        self,
        *,
        gets: tuple[Get, ...] = (),
        dos: tuple[Do, ...] = (),
        plains: tuple[Plain, ...] = (),
    ) -> Offer:
        """These routes, as they are offered here."""
        return Offer(
            about=self.about,
            gets=gets,
            dos=dos,
            plains=plains,
            schemes=self.schemes,
            free=self.open,
            guarded=bool(self.hosts),
        )


def whole_app(
    told: Told, inbox: Inbox, entrance: Entrance, *, exposition: Exposition
) -> web.Application:
    """Everything there is: all routes of `api`, and the pages."""
    app = _bare_app(told, entrance, exposition)
    desk = Desk(inbox)
    offer = entrance.offer(gets=GETS, dos=DOS, plains=(*PLAINS, EVENTS))
    for get in (*GETS, described(told.version, offer)):
        _add(app, _pattern(get.path), _reader(told, get, entrance))
    for do in DOS:
        _add(app, _pattern(do.path), _taker(told, desk, do, entrance), method=do.method)
    streams = Streams(
        told,
        gate=entrance.gate,
        peer_of=entrance.peer_of,
        send_seconds=entrance.send_seconds,
        most=entrance.streams,
    )
    _add(app, STREAM, streams.respond)
    app.on_shutdown.append(streams.close)
    return app


def pages_app(told: Told, entrance: Entrance, *, exposition: Exposition) -> web.Application:
    """The pages for machines, and nothing else."""
    app = _bare_app(told, entrance, exposition)
    about_it = described(told.version, entrance.offer(plains=PLAINS))
    _add(app, about_it.path, _reader(told, about_it, entrance))
    return app


def _bare_app(told: Told, entrance: Entrance, exposition: Exposition) -> web.Application:
    """With the pages only."""
    middlewares = [_guard(entrance)]
    if entrance.hosts:
        middlewares.append(_same_host(entrance.hosts))
    app = web.Application(middlewares=middlewares, client_max_size=BODY_MOST_BYTES)
    pages = Pages(told, exposition)
    answers = (pages.metrics, pages.dcgm, pages.healthz, pages.readyz)
    for path, answer in zip(PAGES, answers, strict=True):
        _add(app, path, _page(path, answer, entrance))
    app.on_response_prepare.append(_finish)
    return app


def _page(path: str, answer: Handler, entrance: Entrance) -> Handler:
    if path in entrance.open:
        return answer

    async def respond(request: web.Request) -> web.StreamResponse:
        # /metrics names every tenant; whether we are well is not for every stranger either.
        entrance.gate.check(entrance.peer_of(request), For.SCRAPERS)
        return await answer(request)

    return respond


def _add(app: web.Application, path: str, handler: Handler, *, method: str = "GET") -> None:
    router = app.router
    if method == "GET":
        router.add_get(path, handler, expect_handler=_expected)
    else:
        router.add_route(method, path, handler, expect_handler=_expected)


async def _expected(request: web.Request) -> web.StreamResponse | None:
    """What the one expectation that HTTP has asks for; any other is refused."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        refusal = _problem(Trouble(417, "the Expect header asks for more than HTTP has").problem())
        refusal.force_close()  # a body may be on its way
        return refusal
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The response that follows counts what was sent of itself.
        request.writer.output_size = 0
    return None


def _reader(told: Told, get: Get, entrance: Entrance) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        peer, name = entrance.peer_of(request), request.match_info.get("name", "")
        entrance.gate.check(peer, get.audience, name)
        ask = Ask(peer, name, dict(request.query))
        return web.Response(body=to_json(get.answer(told, ask)), content_type="application/json")

    return respond


def _pattern(path: str) -> str:
    """Names may hold anything; aiohttp by itself would not match one with a brace."""
    return path.replace("{name}", "{name:[^/]+}")


def _taker(told: Told, desk: Desk, do: Do, entrance: Entrance) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        peer, name = entrance.peer_of(request), request.match_info.get("name", "")
        entrance.gate.check(peer, do.audience, name)
        ask = Ask(peer, name, dict(request.query), _parsed(await _body(request), do.body))
        done = await do.answer(told, ask, desk.submit)
        return web.Response(status=do.status, body=to_json(done), content_type="application/json")

    return respond


async def _body(request: web.Request) -> bytes:
    """What was sent. Raises Trouble (408), HTTPRequestEntityTooLarge."""
    if (request.content_length or 0) > BODY_MOST_BYTES:
        raise web.HTTPRequestEntityTooLarge(BODY_MOST_BYTES, request.content_length or 0)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise Trouble(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None


def _parsed(body: bytes, kind: Any) -> Any:
    """The body as the type that the route declares. Raises Trouble (400, 422).

    Where a route declares none, what is sent is bounded and not looked at.
    """
    if kind is None:
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Trouble(422, f"the body does not fit: {misfit(error, kind)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Trouble(400, f"the body is no JSON: {printable(str(error))}") from None


def _guard(entrance: Entrance) -> Middleware:
    door, gate = entrance.door, entrance.gate

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        pause = 0.0
        door.asks(request.transport)
        try:
            response = await handler(request)
        except Unauthenticated as error:
            response, pause = _unknown(error), error.pause_seconds
        except AgentError as error:
            response = _refused(error, gate)
        except web.HTTPException as error:
            response = _from_router(request, error)
        except web.RequestPayloadError:
            response = _problem(Trouble(400, "the body is not what its headers say").problem())
        except Exception:  # noqa: BLE001 - the outermost frame: no request ends the daemon
            _log.exception("a request met a fault of the agent", path=request.path)
            response = _refused(Corrupt("this is a fault of the agent; its log says more"), gate)
        door.answered(request.transport)
        if pause:
            # It counts as waiting from here on, and makes room for others if need be.
            await entrance.clock.sleep(pause)
        if door.full:
            response.force_close()  # others wait: one answer each
        return await _send(request, response, entrance.send_seconds)

    return guard


def _same_host(hosts: frozenset[str]) -> Middleware:
    """Refuses what a web page in somebody's browser could send (DNS rebinding, cross-site)."""

    @web.middleware
    async def same_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.getall("Host", [])
        if len(asked) != 1 or _host_of(asked[0]) not in hosts:
            raise Trouble(403, "the Host header names another host", "ask by the loopback address")
        for origin in request.headers.getall("Origin", []):
            if _host_of(origin.partition("://")[2]) not in hosts:
                raise Trouble(403, "the Origin header names another host")
        return await handler(request)

    return same_host


def _host_of(authority: str) -> str:
    """Host of "host:port" or "[v6]:port", in lower case."""
    if authority.startswith("["):
        return authority.partition("]")[0].lower() + "]"
    return authority.partition(":")[0].lower()


def _unknown(error: Unauthenticated) -> web.Response:
    response = _problem(error.problem())
    for challenge in error.challenges:
        response.headers.add("WWW-Authenticate", challenge)
    response.force_close()  # another guess is another connection
    return response


def _refused(error: AgentError, gate: Gate) -> web.Response:
    problem = problems.of(error)
    if problem.status == 403 and not problem.remedy:
        problem = msgspec.structs.replace(problem, remedy=gate.remedy)
    response = _problem(problem)
    retry_after = error.retry_after if isinstance(error, Trouble) else 0
    if retry_after or problem.status == 503:
        response.headers["Retry-After"] = str(retry_after or 1)
    return response


def _from_router(request: web.Request, error: web.HTTPException) -> web.Response:
    """What the router or the body's limit raised, as a problem document."""
    details = {
        404: ("there is nothing at this path", "GET /openapi.json tells what there is"),
        405: (f"this path does not take {printable(request.method)}", "see the Allow header"),
        413: (f"a body may have {BODY_MOST_BYTES} bytes at most", ""),
    }
    detail, remedy = details.get(error.status, (error.reason, ""))
    response = _problem(Trouble(error.status, detail, remedy).problem())
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _problem(problem: Problem) -> web.Response:
    return web.Response(
        status=problem.status, body=to_json(problem), content_type=problems.MEDIA_TYPE
    )


async def _send(
    request: web.Request, response: web.StreamResponse, seconds: float
) -> web.StreamResponse:
    """Send now, while the time can be bounded: the server itself would wait for ever."""
    try:
        async with asyncio.timeout(seconds):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the reader has gone
    return response


class Speaker(web.RequestHandler):
    """Speaks HTTP on one connection. What is no HTTP gets a problem document as well."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called for what never reaches the application, and if that itself fails."""
        if status < 500:
            reason = printable((message or "").partition("\n")[0])[:_REASON_MOST]
            trouble = Trouble(status, f"this is no HTTP request: {reason}" if reason else "")
        else:
            _log.error("a request met a fault of the agent", exc_info=exc)
            trouble = Trouble(status, "this is a fault of the agent; its log says more")
        response = _problem(trouble.problem())
        response.force_close()
        return response


async def _finish(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "gpuagent"
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
