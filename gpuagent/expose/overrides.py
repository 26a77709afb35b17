"""Overrides: the routes that list, set and drop them, and what is told of each."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.expose.auth import Peer
from gpuagent.expose.paging import AFTER, LIMIT, part
from gpuagent.expose.picture import number, passive_why
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import Ask, Do, For, Get, Submit, Told, current
from gpuagent.expose.views import Done, OverrideView, Page, View
from gpuagent.model.inventory import Inventory, Level, Subject, Tenant, on_gpu, on_tenant
from gpuagent.model.lease import (
    SHARE_MIN_RATIO,
    TTL_MAX_SECONDS,
    TTL_MIN_SECONDS,
    WATTS_MAX,
    WHY_MOST,
    Lease,
    Override,
    objection,
)
from gpuagent.model.plan import DropOverride, SetOverride, Setting, Snapshot
from gpuagent.model.state import RESULTS
from gpuagent.model.text import wire

_STATUS = {"unknown": 404, "refused": 409, "range": 422}


class OverrideBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be overridden: a tenant's share, or a card's power limit."""

    ttl_seconds: Annotated[float, Meta(ge=TTL_MIN_SECONDS, le=TTL_MAX_SECONDS)]
    """How long it holds, from now: it ends by itself."""
    why: Annotated[str, Meta(min_length=1, max_length=WHY_MOST)]
    """The reason, which everything that comes of it is told with."""
    tenant: str | None = None
    """Name of the tenant; goes with `share_ratio`."""
    gpu: str | None = None
    """UUID of the card; goes with `power_limit_watts`."""
    share_ratio: Annotated[float, Meta(ge=SHARE_MIN_RATIO, le=1)] | None = None
    """What the tenant is held to, of the CPU that it used before; 1 leaves it alone."""
    power_limit_watts: Annotated[float, Meta(gt=0, le=WATTS_MAX)] | None = None


_NAME, _NUMBER, _NONE = {"type": "string", "minLength": 1}, {"type": "number"}, {"type": "null"}
_EITHER = {
    "oneOf": [
        {
            "title": "The share of a tenant",
            "required": ["tenant", "share_ratio"],
            "properties": {
                "tenant": _NAME,
                "share_ratio": _NUMBER,
                "gpu": _NONE,
                "power_limit_watts": _NONE,
            },
        },
        {
            "title": "The power limit of a card",
            "required": ["gpu", "power_limit_watts"],
            "properties": {
                "gpu": _NAME,
                "power_limit_watts": _NUMBER,
                "tenant": _NONE,
                "share_ratio": _NONE,
            },
        },
    ]
}
"""What `_what` asks of a body, for its schema."""

# -- what is told --------------------------------------------------------------------------------------


def view(snapshot: Snapshot, lease: Lease, now: float) -> OverrideView:
    """`now` is monotonic seconds of the request, from which the time that remains follows."""
    subject = lease.subject
    effect, why = _effect(snapshot, lease)
    return OverrideView(
        name=lease.id,
        tenant=wire(subject.tenant) or None,
        gpu=subject.gpu or None,
        share_ratio=lease.value if lease.on_tenant else None,
        power_limit_watts=None if lease.on_tenant else lease.value,
        remaining_seconds=max(0.0, lease.until - now),
        ttl_seconds=lease.ttl_seconds,
        created_at=number(lease.created_wall),
        by=wire(lease.by),
        why=wire(lease.why),
        effect=effect,
        effect_why=wire(why),
    )


def views_of(snapshot: Snapshot, who: Tenant) -> tuple[OverrideView, ...]:
    """The overrides on a tenant and on its cards, as they were when the picture was taken."""
    reach = {on_tenant(who.name), *(on_gpu(uuid) for uuid in who.gpus)}
    state = snapshot.state
    return tuple(view(snapshot, x, state.now.mono) for x in state.leases if x.subject in reach)


def _effect(snapshot: Snapshot, lease: Lease) -> tuple[str | None, str]:
    """What became of it, as of a setting; None where nothing has yet. And what is to be said of that."""
    against = objection(lease, snapshot.state.inventory)
    if against is not None and against.kind == "unknown":
        return None, f"{against.why}; it applies if that comes"
    if against is not None and against.kind == "refused":
        return "refused", against.why
    settings = [s for s in snapshot.plan.settings if lease.rule in (s.rule, *s.also)]
    if not settings:
        return _unheld(snapshot, lease)
    result, why = min((_became(snapshot, s) for s in settings), key=_rank)
    others = next((s for s in settings if s.rule != lease.rule), None)
    if others is not None:
        return result, f"{others.rule} asks for less: {others.why}"
    return result, f"{against.why}; {why}" if against is not None else why


def _unheld(snapshot: Snapshot, lease: Lease) -> tuple[str | None, str]:
    """Of one that wishes nothing: it leaves its tenant alone, or nothing can be done for it."""
    if not lease.on_tenant or lease.value < 1.0:
        return None, (
            "there is nothing yet that could be turned for it: the CPU use of a tenant is watched "
            "for ten seconds before a share of it is held"
            if lease.on_tenant
            else "there is nothing yet that could be turned for it"
        )
    ours = (o for o in snapshot.outcomes.values() if o.original is not None)
    if any(o.subject.tenant == lease.subject.tenant for o in ours):
        return "in flight", "what was turned is being put back"
    return "applied", "it is left alone"


def _became(snapshot: Snapshot, setting: Setting) -> tuple[str | None, str]:
    outcome = snapshot.outcomes.get(setting.key)
    if outcome is not None:
        return outcome.result, outcome.why
    if setting.blocked is not None:
        return setting.blocked.result, setting.blocked.why
    return None, ""


def _rank(became: tuple[str | None, str]) -> int:
    """The most that was reached comes first; what is not known yet, last."""
    order: tuple[str | None, ...] = (*RESULTS, None)
    return order.index(became[0])


# -- routes --------------------------------------------------------------------------------------------


def _list(told: Told, ask: Ask) -> View:
    snapshot = current(told)
    leases = snapshot.state.leases
    wanted, after = part(ask.query, [x.id for x in leases])
    now = told.clock.now().mono
    items = tuple(view(snapshot, x, now) for x in leases[wanted])
    return Page(items=items, next=after, total=len(leases))


async def _set(told: Told, ask: Ask, submit: Submit) -> View:
    snapshot = current(told)
    override = _asked(ask, ask.body, snapshot.state.inventory)
    if fault := override.fault():
        raise Trouble(422, fault)
    against = objection(override, snapshot.state.inventory)
    if against is not None:
        raise Trouble(_STATUS[against.kind], against.why, against.remedy)
    done = await submit(SetOverride(override))
    near = _important(override, snapshot.state.inventory, ask.peer)
    done = f"{done}; {near}" if near else done
    passive = passive_why(snapshot.posture)
    return Done(done=f"{done}; nothing is changed now: {passive}" if passive else done)


def _important(override: Override, inventory: Inventory, reader: Peer) -> str:
    """That an L1 uses the card which is to be limited, in words; empty where none does."""
    card = inventory.gpu(override.subject.gpu)
    if card is None:
        return ""
    l1 = [t.name for t in inventory.on_card(card.uuid) if t.level is Level.L1]
    seen = [wire(name) for name in l1 if reader.may_see(name)]
    if not l1:
        return ""
    who = f"{', '.join(seen)} (L1)" if len(seen) == len(l1) else "a tenant of L1"
    return f"GPU {card.index} is used by {who}, which a lower limit slows too"


def _asked(ask: Ask, body: OverrideBody, inventory: Inventory) -> Override:
    subject, value = _what(body, inventory)
    return Override(
        id=ask.name,
        subject=subject,
        value=value,
        ttl_seconds=body.ttl_seconds,
        by=ask.peer.label,
        why=body.why,
    )


def _what(body: OverrideBody, inventory: Inventory) -> tuple[Subject, float]:
    """Raises Trouble (422, 503)."""
    share, watts = body.share_ratio, body.power_limit_watts
    if body.tenant and share is not None and body.gpu is None and watts is None:
        if inventory.tenants is None:
            raise Trouble(503, "who the tenants are is not known yet", "try again", retry_after=1)
        real = (t.name for t in inventory.tenants if wire(t.name) == body.tenant)
        return on_tenant(next(real, body.tenant)), share
    if body.gpu and watts is not None and body.tenant is None and share is None:
        if inventory.gpus is None:
            raise Trouble(503, "which cards there are is not known", "see /v1/health", 1)
        return on_gpu(body.gpu), watts
    raise Trouble(
        422,
        "an override is a share of a tenant or a power limit of a card",
        "give tenant and share_ratio, or gpu and power_limit_watts",
    )


async def _drop(_told: Told, ask: Ask, submit: Submit) -> View:
    return Done(done=await submit(DropOverride(by=ask.peer.label, id=ask.name)))


GETS: tuple[Get, ...] = (
    Get(
        path="/v1/overrides",
        audience=For.READERS,
        about="The overrides in force, by name.",
        answer=_list,
        view=Page[OverrideView],
        query=(LIMIT, AFTER),
    ),
)
DOS: tuple[Do, ...] = (
    Do(
        path="/v1/overrides/{name}",
        audience=For.OVERRIDERS,
        about="Put an override in force for a limited time; one of the same name is replaced.",
        answer=_set,
        method="PUT",
        body=Annotated[OverrideBody, Meta(extra_json_schema=_EITHER)],
        statuses=(404, 409),
    ),
    Do(
        path="/v1/overrides/{name}",
        audience=For.OVERRIDERS,
        about="End an override before its time.",
        answer=_drop,
        method="DELETE",
        statuses=(404, 409),
    ),
)
