"""What is told to those who see their own tenants only: what happens to them, and nothing of others.

Reasons in full name other tenants, with their objectives, and who ordered what and why. Here each is
replaced by a sentence on the kind of cause, and numbers that are not the reader's own are left out.
"""

import msgspec

from gpuagent.expose.views import (
    CauseView,
    ExplanationView,
    HoldView,
    KnobView,
    LimitView,
    OverrideView,
    TenantRow,
    TenantView,
)
from gpuagent.model.inventory import Tenant
from gpuagent.model.plan import plainly
from gpuagent.model.state import Event

OWN_EVENTS = frozenset(
    {
        "run-admitted",
        "run-ended",
        "share-cut",
        "share-raised",
        "tenant-appeared",
        "tenant-left",
    }
)
"""Kinds whose texts are about nobody but the tenant that they are about."""
_REFUSAL = "others live there too, or it is not the agent's to turn"
_HINDRANCE = {
    "refused": "it cannot be turned here",
    "ineffective": "it has no effect here",
    "contested": "somebody else has changed it",
    "gone": "what was to be turned has gone",
}


def may_be_told(event: Event) -> bool:
    """Whether an event about a tenant says nothing of anybody else."""
    return event.kind in OWN_EVENTS


def tenant(who: Tenant) -> Tenant:
    """Without who else lives where it lives."""
    return msgspec.structs.replace(
        who,
        seats=tuple(
            msgspec.structs.replace(
                seat,
                refusal=_REFUSAL if seat.refusal else "",
                above=tuple(
                    msgspec.structs.replace(above, refusal=_REFUSAL if above.refusal else "")
                    for above in seat.above
                ),
            )
            for seat in who.seats
        ),
    )


def row(of: TenantRow) -> TenantRow:
    held = None if of.held_back is None else _hold(of.held_back)
    return msgspec.structs.replace(of, held_back=held)


def full(of: TenantView) -> TenantView:
    return msgspec.structs.replace(of, row=row(of.row), limit_rows=_limits(of.limit_rows))


def explanation(of: ExplanationView) -> ExplanationView:
    return msgspec.structs.replace(
        of,
        row=row(of.row),
        overrides=tuple(_override(o) for o in of.overrides),
        causes=tuple(_cause(c) for c in of.causes if c.tenant in (None, of.row.name)),
        cards_held=tuple(_hold(h) for h in of.cards_held),
        knobs=tuple(_knob(k) for k in of.knobs),
        limit_rows=_limits(of.limit_rows),
    )


def _limits(of: tuple[LimitView, ...]) -> tuple[LimitView, ...]:
    return tuple(msgspec.structs.replace(row, why="") for row in of)


def _hold(of: HoldView) -> HoldView:
    return msgspec.structs.replace(
        of, why=plainly(of.cause), effect_why=_HINDRANCE.get(of.effect or "", "")
    )


def _override(of: OverrideView) -> OverrideView:
    hindrance = _HINDRANCE.get(of.effect or "", "")
    return msgspec.structs.replace(of, name="", by="", why="", effect_why=hindrance)


def _cause(of: CauseView) -> CauseView:
    """A tenant's own, such as its latency, stays as it is."""
    return of if of.tenant else msgspec.structs.replace(of, why=plainly(of.kind), numbers={})


def _knob(of: KnobView) -> KnobView:
    family, _, kind = of.rule.partition("/")
    kind = family if family == "override" else kind
    return msgspec.structs.replace(
        of,
        why=plainly(kind) if of.rule else of.why,
        outcome_why=_HINDRANCE.get(of.result or "", ""),
        rule=kind,
        numbers={name: value for name, value in of.numbers.items() if name == "share"},
    )
