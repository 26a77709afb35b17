"""What a route is: who may ask it, what it takes, what it answers. The lists of them are in `api`.

No request reads or changes the host. A route that reads answers from the published snapshot; one
that changes something hands a command to the inbox, which the next tick drains.
"""

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, unique
from typing import Any, Literal, Protocol

import msgspec

from gpuagent.clock import Clock
from gpuagent.expose.access import Access
from gpuagent.expose.auth import Peer
from gpuagent.expose.intake import Intake, Knocks
from gpuagent.expose.problems import Trouble
from gpuagent.expose.views import Done, View
from gpuagent.model.plan import Command, Snapshot


@unique
class For(Enum):
    """Who may use a route."""

    ANYONE = "anyone"
    TENANTS = "tenants"
    """Who sees everything, and a tenant's own user for what is that tenant's."""
    READERS = "readers"
    """Who sees everything."""
    SCRAPERS = "scrapers"
    """Who sees everything, and who was given the right to scrape."""
    REPORTERS = "reporters"
    """Administrators, and who may report for the tenant named in the path."""
    OVERRIDERS = "overriders"
    """Administrators, and who was given the right to override."""
    LOCALS = "locals"
    """Who comes over the Unix socket from a process of the host that is in no tenant."""
    ADMINS = "admins"


class Told(Protocol):
    """What the API tells from."""

    @property
    def clock(self) -> Clock: ...

    @property
    def version(self) -> str: ...

    def latest(self) -> Snapshot | None:
        """The last published snapshot; None before the first."""

    def settings(self) -> Mapping[str, object]:
        """The configuration in force, as plain values."""

    def access(self) -> Access:
        """The ways in, as they are now."""

    def listen(self, ring: Callable[[], None]) -> None:
        """Call `ring` after each new snapshot, for good; it must only note that."""

    @property
    def intake(self) -> Intake:
        """Where the latencies that tenants report go."""

    @property
    def knocks(self) -> Knocks:
        """How often each user may ask for a run."""


class Ask(msgspec.Struct, frozen=True):
    """A request, as far as an answer depends on it."""

    peer: Peer
    name: str = ""
    """The variable part of the path, decoded."""
    query: Mapping[str, str] = {}
    body: Any = None
    """What was sent, as the type that the route declares; None where it declares none."""


class Parameter(msgspec.Struct, frozen=True):
    """One thing that may stand in the query."""

    name: str
    type: Any
    """Its type, with bounds where it has any (`msgspec.Meta`): its JSON Schema is made of this."""
    about: str


Answer = View | Mapping[str, object] | msgspec.Raw
"""Raw is JSON that has been made before."""
Submit = Callable[[Command], Awaitable[str]]
"""Hands a command in and waits for its answer, a sentence. Raises an error of ours."""


class Get(msgspec.Struct, frozen=True, kw_only=True):
    """A route that reads."""

    path: str
    audience: For
    about: str
    """What it answers, in one sentence."""
    answer: Callable[[Told, Ask], Answer]
    view: Any
    """The type of the answer: its JSON Schema is made of this."""
    query: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = ()
    """Problems that it may answer beyond those that every route may (see `openapi`)."""


class Do(msgspec.Struct, frozen=True, kw_only=True):
    """A route that changes something."""

    path: str
    audience: For
    about: str
    """What it does, in one sentence."""
    answer: Callable[[Told, Ask, Submit], Awaitable[View]]
    method: Literal["POST", "PUT", "DELETE"] = "POST"
    view: Any = Done
    body: Any = None
    """The type of the JSON body; None where there is none. Unknown keys are refused by the type."""
    status: int = 200
    statuses: tuple[int, ...] = ()
    """Problems that it may answer beyond those that every change may (see `openapi`)."""


def obeyed(command: Callable[[str], Command]) -> Callable[[Told, Ask, Submit], Awaitable[View]]:
    """The answer of a route that hands in `command(by)` and says what came of it."""

    async def answer(_told: Told, ask: Ask, submit: Submit) -> View:
        return Done(done=await submit(command(ask.peer.label)))

    return answer


def current(told: Told) -> Snapshot:
    """The last snapshot. Raises Trouble (503) before the first."""
    snapshot = told.latest()
    if snapshot is None:
        raise Trouble(503, "the agent has not finished its first look at the host", retry_after=1)
    return snapshot
