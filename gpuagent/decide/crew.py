"""Which cards may be run for efficiency: with nothing but L2 and L3 training, whole jobs at a time."""

from collections.abc import Iterator

import msgspec

from gpuagent.decide.card import legal_range
from gpuagent.decide.powercap import cap_on
from gpuagent.model.inventory import Gpu, Level, Tenant, on_gpu
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import POWER_LIMIT


class Crew(msgspec.Struct, frozen=True):
    """Cards that share tenants: a job on several goes as fast as its slowest card, so they move as one."""

    cards: tuple[str, ...]
    tenants: tuple[str, ...]
    tops: tuple[float, ...]
    """Limit of each card as it was before us, or as a declared cap has it, in watts."""
    floor: float
    """The least share of their tops that every card may have."""


def crews(state: NodeState) -> Iterator[Crew]:
    """Those whose every card and every tenant fits; for no others it is known what slowing costs."""
    left = {g.uuid: g for g in state.inventory.gpus or ()}
    while left:
        cards = _joined(state, next(iter(left)))
        gpus = [g for u in sorted(cards) if (g := left.pop(u, None)) is not None]
        if len(gpus) == len(cards) and (made := _crew(state, gpus)) is not None:
            yield made


def _joined(state: NodeState, first: str) -> set[str]:
    """The card, and all that are joined to it by a tenant on both."""
    cards, new = {first}, {first}
    while new:
        new = {u for c in new for t in state.inventory.on_card(c) for u in t.gpus} - cards
        cards |= new
    return cards


def _crew(state: NodeState, gpus: list[Gpu]) -> Crew | None:
    tenants: dict[str, Tenant] = {}
    tops, floor = [], 0.0
    for gpu in gpus:
        here = state.inventory.on_card(gpu.uuid)
        span = legal_range(state, on_gpu(gpu.uuid))
        if gpu.blind or span is None or not here or not _trains(state, gpu, here):
            return None
        capped = cap_on(state, gpu)
        top = span[1] if capped is None else min(capped, span[1])
        tops.append(top)
        floor = max(floor, span[0] / top if top > 0 else 1.0)
        tenants.update((t.name, t) for t in here)
    if floor >= 1:
        return None
    return Crew(tuple(g.uuid for g in gpus), tuple(sorted(tenants)), tuple(tops), floor)


def _trains(state: NodeState, gpu: Gpu, tenants: tuple[Tenant, ...]) -> bool:
    """Whether all that runs there is declared to be training, may be slowed, and is not L1."""
    if not all(
        t.kind == "training"
        and t.level is not Level.L1
        and t.enforce
        and POWER_LIMIT.family not in t.observed
        for t in tenants
    ):
        return False
    theirs = {p.pid for t in tenants for p in t.processes}
    listed = state.inventory.gpu_processes
    return listed is not None and all(p.pid in theirs for p in listed if p.gpu == gpu.uuid)
