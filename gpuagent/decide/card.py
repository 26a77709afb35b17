"""A card's power limit as a lever: its legal range, what it was before us, and what a share means."""

from gpuagent.model.inventory import Subject
from gpuagent.model.plan import Cause, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS, POWER_LIMIT


def operators_limit(state: NodeState, card: Subject) -> float | None:
    """The limit in watts that was set before us, which we never exceed; None if unknown."""
    outcome = state.outcomes.get((POWER_LIMIT, card))
    if outcome is not None and outcome.original is not None:
        return outcome.original
    return state.fresh(GPU_POWER_LIMIT_WATTS, card)


def legal_range(state: NodeState, card: Subject) -> tuple[float, float] | None:
    """(lowest, highest) limit in watts that we may set; None where it is not known."""
    gpu = state.inventory.gpu(card.gpu)
    top = operators_limit(state, card)
    if gpu is None or gpu.power_min_watts is None or top is None:
        return None
    return min(gpu.power_min_watts, top), top


def card_floor(state: NodeState, card: Subject) -> float | None:
    """The smallest share of its limit that the card allows; None if it has no room at all."""
    span = legal_range(state, card)
    return span[0] / span[1] if span is not None and 0 < span[0] < span[1] else None


def card_setting(state: NodeState, cause: Cause, share: float, because: str) -> Setting | None:
    span = legal_range(state, cause.subject)
    if span is None:
        return None
    watts = max(span[0], share * span[1])
    return Setting(
        POWER_LIMIT,
        cause.subject,
        watts,
        why=f"{watts:.0f} W, {share:.0%} of its {span[1]:.0f} W: {because}",
        rule=f"backpressure/{cause.kind}",
        numbers=(*cause.numbers, ("share", share)),
    )
