"""The routes of the API: what each answers, from the published snapshot, and who may ask."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from gpuagent.clock import Clock
from gpuagent.errors import Unavailable
from gpuagent.expose import (
    discreet,
    environment,
    explain,
    mps,
    overrides,
    picture,
    reports,
    runs,
    tokens,
)
from gpuagent.expose.access import Access
from gpuagent.expose.gate import forbidden
from gpuagent.expose.intake import Intake, Knocks
from gpuagent.expose.paging import AFTER, BEFORE, LIMIT, newest_first, part
from gpuagent.expose.problems import Trouble, not_found
from gpuagent.expose.routes import Ask, Do, For, Get, Told, current, obeyed
from gpuagent.expose.views import (
    ActionView,
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
    listen: Callable[[Callable[[], None]], None]
    intake: Intake = msgspec.field(default_factory=Intake)
    access: Callable[[], Access] = Access
    knocks: Knocks = msgspec.field(default_factory=Knocks)


# -- reading -------------------------------------------------------------------------------------------


def _node(told: Told, _ask: Ask) -> View:
    return picture.node(current(told), told.version)


def _health(told: Told, ask: Ask) -> View:
    return picture.health(current(told), ask.peer, told.clock.now().mono, told.access())


def _gpus(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    shown = picture.gpus(snapshot, ask.peer)
    marks = [f"{card.index:04d}/{wire(card.uuid)}" for card in shown]
    wanted, after = part(ask.query, marks)
    items = picture.gpu_views(snapshot, shown[wanted], ask.peer)
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
    wanted, after = part(ask.query, [wire(t.name) for t in shown])
    items = tuple(picture.row(snapshot, t) for t in shown[wanted])
    if not ask.peer.sees_all:
        items = tuple(discreet.row(r) for r in items)
    return Page(items=items, next=after, total=len(shown))


def _tenant(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    who = _named(snapshot, ask)
    if ask.peer.sees_all:
        return explain.tenant(snapshot, who)
    return discreet.full(explain.tenant(snapshot, discreet.tenant(who)))


def _explanation(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    who = _named(snapshot, ask)
    if ask.peer.sees_all:
        return explain.explanation(snapshot, who)
    return discreet.explanation(explain.explanation(snapshot, discreet.tenant(who)))


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
    found, after = newest_first(ask.query, snapshot.events, snapshot.run)
    items = tuple(picture.event(snapshot, e) for e in found)
    return Page(items=items, next=after, total=len(snapshot.events))


def _audit(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    found, after = newest_first(ask.query, snapshot.audit, snapshot.run)
    items = tuple(picture.action(snapshot, a) for a in found)
    return Page(items=items, next=after, total=len(snapshot.audit))


def _config(told: Told, _ask: Ask) -> Mapping[str, object]:
    return told.settings()


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
        about="Why a tenant is treated as it is; its own user is told so without a word on others.",
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
        query=(LIMIT, BEFORE),
        statuses=(404,),
    ),
    Get(
        path="/v1/audit",
        audience=For.READERS,
        about="What was done to the host, and what was tried and not done, the latest first.",
        answer=_audit,
        view=Page[ActionView],
        query=(LIMIT, BEFORE),
        statuses=(404,),
    ),
    Get(
        path="/v1/config",
        audience=For.ADMINS,
        about="The configuration in force.",
        answer=_config,
        view=dict[str, object],
    ),
    *environment.GETS,
    *mps.GETS,
    *overrides.GETS,
    *runs.GETS,
    *tokens.GETS,
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
    *reports.DOS,
    *overrides.DOS,
    *runs.DOS,
    *tokens.DOS,
)


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
