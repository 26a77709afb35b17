"""Whether a run fits: on which cards, or why not, with the numbers. Pure.

What is free on a card is what the driver says, less what has been promised to others and is not in
their use yet. A promise is kept in full from the moment it is made, whether its tenant has begun to
allocate or not; what a tenant is known to use of it is free memory no more, and so is not taken off
twice. Use that is not known (CUDA MPS, some MIG set-ups) counts as none, which refuses rather too
much. Beside that the promises on a card never add up to more than it has: a reading of what a tenant
uses may be some seconds old.

The parts of a card that are promised to tenants of L1 and L2 never add up to more than the card. Those
of L3 are ceilings and promise nothing.
"""

from collections.abc import Iterable

import msgspec

from gpuagent.config import Levels
from gpuagent.model.hours import within
from gpuagent.model.inventory import Gpu, Inventory, Level, on_gpu, on_tenant_gpu
from gpuagent.model.run import (
    MOST_RUNS,
    MOST_RUNS_OF_USER,
    Refusal,
    Reservation,
    RunAsk,
    Starter,
    Why,
    gib,
)
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    GPU_MEMORY_FREE_BYTES,
    GPU_MEMORY_TOTAL_BYTES,
    TENANT_GPU_MEMORY_BYTES,
)

_SHOWN_MOST = 8
_ROUNDING = 1e-9

Numbers = tuple[tuple[str, float], ...]


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision is made on."""

    state: NodeState
    runs: tuple[Reservation, ...]
    starters: tuple[Starter, ...]
    levels: Levels
    declared: frozenset[str]
    """Names of the tenants that rules declare."""
    released: bool = False
    """Whether the driver is let go of."""


class Grant(msgspec.Struct, frozen=True):
    """A run that fits."""

    name: str
    gpus: tuple[Gpu, ...]


class Obstacle(msgspec.Struct, frozen=True):
    """Why a card does not take a run."""

    why: str
    numbers: Numbers = ()
    kind: Why = "refused"


def admit(ask: RunAsk, ground: Ground) -> Grant | Refusal:
    """Where a run goes, or why it does not. The first reason counts."""
    if fault := ask.fault():
        return Refusal(kind="refused", why=fault)
    name = ask.name or _given_name(ask, ground)
    against = (
        _forbidden(ask, ground)
        or _too_many(ask, ground)
        or _name_taken(name, ground)
        or _out_of_hours(ask, ground)
    )
    if against is not None:
        return against
    found = _cards(ask, ground)
    return found if isinstance(found, Refusal) else Grant(name, found)


def _forbidden(ask: RunAsk, ground: Ground) -> Refusal | None:
    if ask.admin or any(s.allows(ask) for s in ground.starters):
        return None
    return Refusal(
        kind="forbidden",
        why=f"{ask.by} may not start tenants of {ask.level.name}",
        remedy="an administrator can allow it with a [[run.allow]] line in the configuration",
    )


def _too_many(ask: RunAsk, ground: Ground) -> Refusal | None:
    if any(r.key == ask.key for r in ground.runs):
        return Refusal(kind="refused", why="this process is a run already")
    own = sum(r.uid == ask.uid for r in ground.runs)
    if not ask.admin and own >= MOST_RUNS_OF_USER:
        return Refusal(
            kind="refused",
            why=f"{ask.by} has {own} runs, which is the most",
            remedy="wait until one has ended",
            numbers=(("runs", own),),
        )
    if len(ground.runs) >= MOST_RUNS:
        return Refusal(
            kind="refused",
            why=f"there are {MOST_RUNS} runs, which is the most",
            remedy="wait until one has ended",
            numbers=(("runs", len(ground.runs)),),
        )
    return None


def _taken(ground: Ground) -> set[str]:
    tenants = ground.state.inventory.tenants or ()
    return {r.name for r in ground.runs} | ground.declared | {t.name for t in tenants}


def _given_name(ask: RunAsk, ground: Ground) -> str:
    taken, wished = _taken(ground), f"run-{ask.pid}"
    # Of a process of this number that has ended, children may live on.
    return wished if wished not in taken else f"run-{ask.pid}-{ask.started}"


def _name_taken(name: str, ground: Ground) -> Refusal | None:
    if name in ground.declared:
        return Refusal(
            kind="refused",
            why=f"a rule declares the tenant {name}",
            remedy="`gpuagent run --tenant` starts a process with the environment of that; "
            "choose another --name",
        )
    if name in _taken(ground):
        return Refusal(
            kind="refused", why=f"there is a tenant {name} already", remedy="choose another --name"
        )
    return None


def _out_of_hours(ask: RunAsk, ground: Ground) -> Refusal | None:
    """At other hours a level may run only where it is said how much it may have then."""
    rule, now = ground.levels.of(ask.level), ground.state.now
    if rule.off_hours_share is not None or within(rule.hours, now.wall, now.utc_offset):
        return None
    minutes = int((now.wall + now.utc_offset) // 60) % (24 * 60)
    hours = ", ".join(rule.hours)
    return Refusal(
        kind="refused",
        why=f"tenants of {ask.level.name} may run at {hours}, and it is "
        f"{minutes // 60:02}:{minutes % 60:02}",
        remedy="start it then",
        numbers=(("local_minute_of_day", minutes),),
    )


# -- cards ---------------------------------------------------------------------------------------------


def _cards(ask: RunAsk, ground: Ground) -> tuple[Gpu, ...] | Refusal:
    known = ground.state.inventory.gpus
    if ground.released:
        return Refusal(
            kind="unavailable",
            why="the driver is let go of",
            remedy="`gpuagent resume` takes it up again",
        )
    if known is None:
        return Refusal(kind="unavailable", why="which cards there are is not known now")
    if not known:
        return Refusal(kind="refused", why="this host has no card")
    if ask.gpus:
        return _named(ask, ground, known)
    return _any(ask, ground, known)


def _named(ask: RunAsk, ground: Ground, known: tuple[Gpu, ...]) -> tuple[Gpu, ...] | Refusal:
    chosen: dict[str, Gpu] = {}
    for name in ask.gpus:
        card = next((g for g in known if name in (g.uuid, str(g.index))), None)
        if card is None:
            what = (
                "a MIG instance cannot be reserved" if name.startswith("MIG-") else "no such card"
            )
            return Refusal(
                kind="refused", why=f"{name}: {what}", remedy="`gpuagent status` has them"
            )
        chosen[card.uuid] = card
    for card in chosen.values():
        against = obstacle(ask, card, ground)
        if against is not None:
            return Refusal(
                kind=against.kind,
                why=f"GPU {card.index}: {against.why}",
                remedy="ask for less or for another card, or wait until somebody has ended",
                numbers=(("gpu_index", card.index), *against.numbers),
            )
    return tuple(sorted(chosen.values(), key=lambda g: g.index))


def _any(ask: RunAsk, ground: Ground, known: tuple[Gpu, ...]) -> tuple[Gpu, ...] | Refusal:
    against = {g.uuid: obstacle(ask, g, ground) for g in known}
    fitting = [g for g in known if against[g.uuid] is None]
    if len(fitting) >= ask.count:
        best = sorted(fitting, key=lambda g: _preference(ask, g, ground))[: ask.count]
        return tuple(sorted(best, key=lambda g: g.index))
    reasons = [(g, o) for g in known if (o := against[g.uuid]) is not None]
    told = "; ".join(f"GPU {g.index}: {o.why}" for g, o in reasons[:_SHOWN_MOST])
    have = f"it fits on {len(fitting)} of {len(known)} cards, and {ask.count} are wanted"
    only_unknown = bool(reasons) and all(o.kind == "unavailable" for _, o in reasons)
    return Refusal(
        kind="unavailable" if only_unknown else "refused",
        why=f"{have}: {told}" if told else have,
        remedy="ask for less, or wait until somebody has ended",
        numbers=_numbered(reasons[:_SHOWN_MOST]),
    )


def _numbered(reasons: Iterable[tuple[Gpu, Obstacle]]) -> Numbers:
    return tuple((f"gpu{g.index}_{name}", value) for g, o in reasons for name, value in o.numbers)


def _preference(ask: RunAsk, card: Gpu, ground: Ground) -> tuple[float, float, int]:
    """The less important go where no L1 is, and where they fit tightest; others where most is left."""
    left = headroom_bytes(card, ground)
    left = 0.0 if left is None else left
    if ask.level is not Level.L3:
        return (0.0, -left, card.index)
    beside = any(t.level is Level.L1 for t in ground.state.inventory.on_card(card.uuid))
    beside = beside or any(r.level is Level.L1 for r in ground.runs if card.uuid in r.gpus)
    return (float(beside), left, card.index)


def obstacle(ask: RunAsk, card: Gpu, ground: Ground) -> Obstacle | None:
    """Why this card does not take it; None if it does."""
    if card.blind:
        return Obstacle(f"it cannot be read ({card.blind})", kind="unavailable")
    if card.mig_enabled:
        return Obstacle("it is in MIG mode, and slices of a card cannot be reserved")
    return _memory_short(ask, card, ground) or _share_short(ask, card, ground)


def _memory_short(ask: RunAsk, card: Gpu, ground: Ground) -> Obstacle | None:
    if ask.memory_bytes is None:
        return None
    total = ground.state.fresh(GPU_MEMORY_TOTAL_BYTES, on_gpu(card.uuid))
    free = ground.state.fresh(GPU_MEMORY_FREE_BYTES, on_gpu(card.uuid))
    if total is None or free is None:
        return Obstacle("its memory is not known now", kind="unavailable")
    owed, promised = owed_bytes(card, ground), promised_bytes(card, ground)
    numbers = (
        ("memory_asked_bytes", ask.memory_bytes),
        ("memory_free_bytes", free),
        ("memory_owed_bytes", owed),
        ("memory_promised_bytes", promised),
        ("memory_total_bytes", total),
    )
    if ask.memory_bytes > free - owed:
        return Obstacle(
            f"{gib(ask.memory_bytes)} are asked for; {gib(free)} are free{_reserved(owed, free)}",
            numbers,
        )
    if promised + ask.memory_bytes > total:
        return Obstacle(
            f"{gib(ask.memory_bytes)} are asked for; {gib(promised)} of {gib(total)} are reserved",
            numbers,
        )
    return None


def _reserved(owed: float, free: float) -> str:
    """How much of what is free is promised already, in words."""
    if not owed:
        return ""
    if owed <= free:
        return f", of which {gib(owed)} are reserved for others"
    return f", but others were promised {gib(owed)} more than they use now"


def unshared(ask: RunAsk, gpus: Iterable[Gpu], inventory: Inventory) -> str:
    """Why the share that is asked for is not enforced; empty where it is, as far as is known."""
    cards = tuple(gpus)
    if ask.share_ratio is None or inventory.mps is None:
        return ""
    up = [d for d in inventory.mps if d.up]
    bare = [g for g in cards if not any(d.serves(g.uuid) for d in up)]
    if bare:
        listed = ", ".join(str(g.index) for g in bare)
        return f"no MPS daemon serves GPU {listed}: share is not enforced"
    if not any(all(d.serves(g.uuid) for g in cards) for d in up):
        listed = ", ".join(str(g.index) for g in cards)
        return f"no single MPS daemon serves GPU {listed}: share is not enforced"
    return ""


def _share_short(ask: RunAsk, card: Gpu, ground: Ground) -> Obstacle | None:
    if ask.share_ratio is None or ask.level is Level.L3:
        return None
    given = promised_share_ratio(card, ground)
    if given + ask.share_ratio <= 1 + _ROUNDING:
        return None
    return Obstacle(
        f"{ask.share_ratio:.0%} are asked for; {given:.0%} are promised to L1 and L2",
        (("share_asked_ratio", ask.share_ratio), ("share_promised_ratio", given)),
    )


# -- what is promised ----------------------------------------------------------------------------------


def promises(card: Gpu, ground: Ground) -> dict[str, int]:
    """Device memory that tenants have been promised on this card, by name: runs, and declared ones on it."""
    runs = {r.name for r in ground.runs}
    found = {
        t.name: t.limits.memory_reserved_bytes
        for t in ground.state.inventory.on_card(card.uuid)
        if t.limits.memory_reserved_bytes is not None and t.name not in runs
    }
    reserved = {
        r.name: r.memory_bytes
        for r in ground.runs
        if card.uuid in r.gpus and r.memory_bytes is not None
    }
    return found | reserved


def promised_bytes(card: Gpu, ground: Ground) -> float:
    return float(sum(promises(card, ground).values()))


def owed_bytes(card: Gpu, ground: Ground) -> float:
    """What is promised on this card and not in use yet, as far as is known."""
    owed = 0.0
    for name, promised in promises(card, ground).items():
        used = ground.state.fresh(TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, card.uuid))
        owed += max(0.0, promised - (0.0 if used is None else used))
    return owed


def headroom_bytes(card: Gpu, ground: Ground) -> float | None:
    """What could be promised yet; None where that is not known."""
    free = ground.state.fresh(GPU_MEMORY_FREE_BYTES, on_gpu(card.uuid))
    return None if free is None else free - owed_bytes(card, ground)


def promised_share_ratio(card: Gpu, ground: Ground) -> float:
    """The parts of this card that are promised to tenants of L1 and L2, added up."""
    runs = {r.name for r in ground.runs}
    declared = (
        t.limits.compute_share_ratio or 0.0
        for t in ground.state.inventory.on_card(card.uuid)
        if t.level is not Level.L3 and t.name not in runs
    )
    reserved = (
        r.share_ratio or 0.0 for r in ground.runs if r.level is not Level.L3 and card.uuid in r.gpus
    )
    return sum(declared) + sum(reserved)
