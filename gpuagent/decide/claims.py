"""What each card asks of the node's power budget, and in which order cards are served and cut.

The order is POLCA's (Patel et al., arXiv 2308.12908): when power runs short the less important work is
slowed first, all of it, before any more important is. A card is slowed as a whole, so that what counts
is who is on it: nobody or L3 only is cut first, then L2 beside L3, L2 only, L1 beside others, and a
card that L1 has to itself last.
"""

from collections.abc import Sequence
from enum import IntEnum, unique

from gpuagent.decide.allocate import Claim
from gpuagent.decide.card import legal_range, operators_limit
from gpuagent.decide.demand import Appetite
from gpuagent.decide.powercap import cap_on
from gpuagent.model.inventory import Gpu, Level, Tenant, on_gpu
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import GPU_POWER_WATTS


@unique
class Rank(IntEnum):
    """Who is on a card. The lower is served first and cut last."""

    L1 = 1
    L1_SHARED = 2
    L2 = 3
    L2_SHARED = 4
    L3 = 5
    NOBODY = 6

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def is_l1(self) -> bool:
        return self <= Rank.L1_SHARED


_WORDS = {
    Rank.L1: "L1 only",
    Rank.L1_SHARED: "L1 beside others",
    Rank.L2: "L2 only",
    Rank.L2_SHARED: "L2 beside L3",
    Rank.L3: "L3 only",
    Rank.NOBODY: "no tenant",
}


def rank_of(tenants: Sequence[Tenant]) -> Rank:
    """Of a card with these tenants."""
    levels = {t.level for t in tenants}
    if not levels:
        return Rank.NOBODY
    alone = len(levels) == 1
    match min(levels):
        case Level.L1:
            return Rank.L1 if alone else Rank.L1_SHARED
        case Level.L2:
            return Rank.L2 if alone else Rank.L2_SHARED
        case _:
            return Rank.L3


def claim(
    state: NodeState, gpu: Gpu, *, limit: float | None, appetite: Appetite | None
) -> Claim | None:
    """What a card asks for; `limit` is what it was last given. None where it cannot be limited."""
    card, rank = on_gpu(gpu.uuid), rank_of(state.inventory.on_card(gpu.uuid))
    span = legal_range(state, card)
    if span is None:
        # A card that cannot be read just now is held where it is.
        return None if limit is None else Claim(gpu.uuid, rank, limit, limit, limit, frozen=True)
    floor, top = span
    capped = cap_on(state, gpu)
    cap = top if capped is None else max(min(capped, top), floor)
    known = cap if limit is None else limit
    asks = None if appetite is None else appetite.demand(state.now.mono, cap=cap)
    if asks is None or state.fresh(GPU_POWER_WATTS, card) is None:
        asks = known  # unknown: it keeps what it has
    return Claim(gpu.uuid, rank, floor, cap, min(max(asks, floor), cap), top=top)


def holds_anyhow(claims: Sequence[Claim], usable: float) -> bool:
    """Whether the budget holds whatever the cards do, so that nothing need be limited."""
    return sum(max(c.cap, c.top) for c in claims) <= usable and not any(c.frozen for c in claims)


def beyond_control(
    state: NodeState, gpus: Sequence[Gpu], claims: Sequence[Claim]
) -> tuple[float, list[Gpu]]:
    """Watts that cards may draw which we cannot limit, and those of which that is not known.

    Each counts with its limit, else with the most its kind may have; an unknown one counts like the
    largest of the others, for too little would be a budget that is not kept.
    """
    controlled = {c.card for c in claims}
    known: dict[str, float] = {}
    unknown: list[Gpu] = []
    for gpu in gpus:
        if gpu.uuid not in controlled:
            most = operators_limit(state, on_gpu(gpu.uuid)) or gpu.power_max_watts
            if most:
                known[gpu.uuid] = most
            else:
                unknown.append(gpu)
    largest = max((*known.values(), *(c.cap for c in claims)), default=0.0)
    return sum(known.values()) + largest * len(unknown), unknown
