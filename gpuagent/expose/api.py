"""The routes of the API: what each answers, from the published snapshot, and who may ask."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Unavailable
from gpuagent.expose import explain, picture
from gpuagent.expose.auth import Peer, Role
from gpuagent.expose.problems import Trouble, not_found
from gpuagent.expose.routes import Ask, Do, For, Get, Parameter, Told, current, obeyed
from gpuagent.expose.views import (
    EventView,
    ExplanationView,
    GpuView,
    HealthView,
    NodeView,
    Page,
    PlanView,
    TenantRow,
    TenantView,
    View,
)
from gpuagent.model.inventory import Tenant
from gpuagent.model.plan import (
    Command,
    Pause,
    ReleaseGpus,
    Reload,
    ResumeGpus,
    Snapshot,
    Unpause,
)
from gpuagent.model.text import wire, wired

STALE_SECONDS = 30.0
"""A picture older than this means that the loop is stuck."""
_ANSWER_SECONDS = 30.0
"""A command that takes longer is reported as handed in, not as done."""
_COMMANDS_WAITING = 16
_PAGE = 100
_PAGE_MOST = 1000


class Inbox(Protocol):
    """Where commands go."""

    async def submit(self, command: Command) -> str:
        """Hand a command in. Returns a sentence on what was done; raises an error of ours."""


class Sources(msgspec.Struct, frozen=True):
    """A `Told` made of callables."""

    latest: Callable[[], Snapshot | None]
    settings: Callable[[], Mapping[str, object]]
    clock: Clock
    version: str


# -- reading -------------------------------------------------------------------------------------------


def _node(told: Told, _ask: Ask) -> View:
    return picture.node(current(told), told.version)


def _health(told: Told, ask: Ask) -> View:
    return picture.health(current(told), ask.peer, told.clock.now().mono)


def _gpus(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    shown = picture.gpus(snapshot, ask.peer)
    marks = [f"{card.index:04d}/{wire(card.uuid)}" for card in shown]
    part, after = _part(ask.query, marks)
    items = picture.gpu_views(snapshot, shown[part], ask.peer)
    return Page(items=items, next=after, total=len(shown))


def _gpu(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    for card in picture.gpus(snapshot, ask.peer):
        if wire(card.uuid) == ask.name:
            return picture.gpu_views(snapshot, [card], ask.peer)[0]
    if not ask.peer.sees_all:
        raise forbidden(ask.peer, "see a card that none of your tenants is on")
    return not_found(f"there is no card {ask.name!r} here", "GET /v1/gpus lists the cards by UUID")


def _tenants(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    shown = picture.tenants(snapshot, ask.peer)
    part, after = _part(ask.query, [wire(t.name) for t in shown])
    items = tuple(picture.row(snapshot, t) for t in shown[part])
    return Page(items=items, next=after, total=len(shown))


def _part(query: Mapping[str, str], marks: Sequence[str]) -> tuple[slice, str | None]:
    """Which of the items, marked in ascending order, are asked for, and the `after` of the next part.

    What `after` names need not exist any more.
    """
    after = query.get("after")
    start = 0 if after is None else sum(1 for m in marks if m <= after)
    end = start + _size(query)
    return slice(start, end), marks[end - 1] if end < len(marks) else None


def _size(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0):
        raise Trouble(400, f"limit={text!r} is no number of items", f"use 1 to {_PAGE_MOST}")
    return min(int(text), _PAGE_MOST)


def _tenant(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    return picture.tenant(snapshot, _named(snapshot, ask))


def _explanation(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    return explain.explanation(snapshot, _named(snapshot, ask))


def _named(snapshot: Snapshot, ask: Ask) -> Tenant:
    """The tenant asked for. Who may not see it does not learn whether it exists."""
    for tenant in picture.tenants(snapshot, ask.peer):
        if wire(tenant.name) == ask.name:
            return tenant
    if not ask.peer.sees_all:
        raise forbidden(ask.peer, "see a tenant that is not yours")
    return not_found(
        f"there is no tenant {ask.name!r} here",
        "GET /v1/tenants lists them; in a path, write / as %2F",
    )


def _plan(told: Told, _ask: Ask) -> View:
    return explain.plan(current(told))


def _events(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    items = picture.events(snapshot, _size(ask.query))
    return Page(items=items, next=None, total=len(snapshot.events))


def _config(told: Told, _ask: Ask) -> Mapping[str, object]:
    return told.settings()


LIMIT = Parameter("limit", int, f"How many items at most, 1 to {_PAGE_MOST}; {_PAGE} by default.")
AFTER = Parameter("after", str, "The `next` of the part before.")

GETS: tuple[Get, ...] = (
    Get(
        path="/v1/node",
        audience=For.ANYONE,
        about="Totals of the host; names no tenant.",
        answer=_node,
        view=NodeView,
    ),
    Get(
        path="/v1/health",
        audience=For.ANYONE,
        about="Whether the agent can do what it is for.",
        answer=_health,
        view=HealthView,
    ),
    Get(
        path="/v1/gpus",
        audience=For.TENANTS,
        about="The cards, by index.",
        answer=_gpus,
        view=Page[GpuView],
        query=(LIMIT, AFTER),
    ),
    Get(
        path="/v1/gpus/{name}",
        audience=For.TENANTS,
        about="One card, by UUID.",
        answer=_gpu,
        view=GpuView,
    ),
    Get(
        path="/v1/tenants",
        audience=For.TENANTS,
        about="The tenants, by name.",
        answer=_tenants,
        view=Page[TenantRow],
        query=(LIMIT, AFTER),
    ),
    Get(
        path="/v1/tenants/{name}",
        audience=For.TENANTS,
        about="One tenant in full.",
        answer=_tenant,
        view=TenantView,
    ),
    Get(
        path="/v1/tenants/{name}/explanation",
        audience=For.TENANTS,
        about="Why a tenant is treated as it is.",
        answer=_explanation,
        view=ExplanationView,
    ),
    Get(
        path="/v1/plan",
        audience=For.READERS,
        about="All that is wished, and what became of it.",
        answer=_plan,
        view=PlanView,
    ),
    Get(
        path="/v1/events",
        audience=For.READERS,
        about="What happened, the latest first.",
        answer=_events,
        view=Page[EventView],
        query=(LIMIT,),
    ),
    Get(
        path="/v1/config",
        audience=For.ADMINS,
        about="The configuration in force.",
        answer=_config,
        view=dict[str, object],
    ),
)

DOS: tuple[Do, ...] = (
    Do(
        path="/v1/reload",
        audience=For.ADMINS,
        about="Read the configuration file again.",
        answer=obeyed(Reload),
    ),
    Do(
        path="/v1/pause",
        audience=For.ADMINS,
        about="Put everything back and only observe.",
        answer=obeyed(Pause),
    ),
    Do(path="/v1/unpause", audience=For.ADMINS, about="End a pause.", answer=obeyed(Unpause)),
    Do(
        path="/v1/release",
        audience=For.ADMINS,
        about="Let go of the driver, so that it can be changed or unloaded.",
        answer=obeyed(ReleaseGpus),
    ),
    Do(
        path="/v1/resume",
        audience=For.ADMINS,
        about="Take the driver up again.",
        answer=obeyed(ResumeGpus),
    ),
)


# -- may they? -----------------------------------------------------------------------------------------


class Gate:
    """Tells who may use a route, and which group to join where it is refused."""

    def __init__(self, group: str) -> None:
        self._group = group

    def check(self, peer: Peer, audience: For) -> None:
        """Raises Trouble (403)."""
        if audience is For.ANYONE or peer.role is Role.ADMIN:
            return
        if audience in {For.TENANTS, For.REPORTERS} and peer.role is Role.TENANT:
            return
        raise forbidden(peer, "do this")

    def remedy(self) -> str:
        if not self._group:
            return "ask root: the configuration names no group of administrators (api.group)"
        return (
            f"join the group {self._group} (usermod -aG {self._group} USER, then log in again), "
            "or ask an administrator"
        )


def forbidden(peer: Peer, what: str) -> Trouble:
    reason = f": {peer.why}" if peer.why else ""
    return Trouble(403, f"{peer.label} may not {what}{reason}")


# -- commands ------------------------------------------------------------------------------------------


class Desk:
    """Takes commands to the inbox, never more than a few at once."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting = 0

    async def submit(self, command: Command) -> str:
        """Hand the command in and wait for its answer. Raises what the inbox raises."""
        if self._waiting >= _COMMANDS_WAITING:
            raise Trouble(503, "too many commands are waiting", "try again", retry_after=1)
        self._waiting += 1
        try:
            return await self._answer(self._inbox.submit(command))
        finally:
            self._waiting -= 1

    async def _answer(self, submitted: Awaitable[str]) -> str:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await submitted
        except TimeoutError:
            raise Unavailable(
                f"the loop has not answered within {_ANSWER_SECONDS:.0f} s; the command may still "
                "be carried out: look at /v1/health"
            ) from None


# -- JSON ----------------------------------------------------------------------------------------------


def to_json(answer: object) -> bytes:
    """UTF-8 JSON. Text that is no UTF-8 is sent escaped. Views hold no infinity: `picture.number`."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return msgspec.json.encode(wired(msgspec.to_builtins(answer)))
