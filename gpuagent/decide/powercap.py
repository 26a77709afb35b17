"""The policy that sets the declared power cap of a tenant on the cards that it has to itself.

A power limit slows a whole card. On a card that others use too, a tenant's cap would be theirs, and
is therefore not set. Any tenant may have one, an L1 too: it is its own declaration.
"""

import msgspec

from gpuagent.config import Config
from gpuagent.decide.card import legal_range
from gpuagent.model.inventory import Gpu, Tenant, on_gpu, on_tenant
from gpuagent.model.plan import Blocked, Decision, Hold, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import GPU_POWER_WATTS, POWER_LIMIT

CAP_RULE = "power/cap"
_OBSERVED = Blocked("would", "of this tenant it is only said what would be done")


class Memory(msgspec.Struct, frozen=True):
    """Which caps are said to be unused: (tenant, card). A cap itself holds while it is declared."""

    said: tuple[tuple[str, str], ...] = ()


class PowerCap:
    """See the module."""

    name = "power-cap"

    def __init__(self, config: Config) -> None:
        """Caps are declared with the tenants, which are in the state."""

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        made = [
            (tenant, setting)
            for gpu in state.inventory.gpus or ()
            for tenant in state.inventory.on_card(gpu.uuid)
            if (setting := _setting(state, gpu, tenant)) is not None
        ]
        unused = {
            (t.name, s.subject.gpu): s.blocked.why
            for t, s in made
            if s.blocked is not None and s.blocked.result == "refused"
        }
        # Another wish for the card would hide the setting, and with it the reason.
        events = tuple(
            Event("power-cap-unused", state.now.mono, f"power cap of {t}: {why}", on_tenant(t))
            for (t, card), why in unused.items()
            if (t, card) not in memory.said
        )
        return Memory(tuple(sorted(unused))), Decision(
            settings=tuple(s for _, s in made),
            holds=tuple(_hold(s) for _, s in made if s.blocked in (None, _OBSERVED)),
            events=events,
        )


def _hold(setting: Setting) -> Hold:
    numbers = dict(setting.numbers)
    share = setting.value / numbers["cap_watts"]
    return Hold(setting.subject, share, POWER_LIMIT.family, "cap", setting.why, (setting.key,))


def cap_on(state: NodeState, gpu: Gpu) -> float | None:
    """Watts of the declared cap that is in force on a card; None for none."""
    made = [_setting(state, gpu, t) for t in state.inventory.on_card(gpu.uuid)]
    return next((s.value for s in made if s is not None and s.blocked is None), None)


def _setting(state: NodeState, gpu: Gpu, tenant: Tenant) -> Setting | None:
    cap, card = tenant.limits.power_cap_watts, on_gpu(gpu.uuid)
    span = legal_range(state, card)
    if cap is None or span is None:
        return None
    watts = min(max(cap, span[0]), span[1])
    others = [t.name for t in state.inventory.on_card(gpu.uuid) if t.name != tenant.name]
    draw = state.fresh(GPU_POWER_WATTS, card)
    drawn = () if draw is None else (("draw_watts", draw),)
    return Setting(
        POWER_LIMIT,
        card,
        watts,
        why=_why(tenant, cap, watts),
        rule=CAP_RULE,
        numbers=(
            ("declared_watts", cap),
            *drawn,
            ("floor_watts", span[0]),
            ("cap_watts", span[1]),
        ),
        blocked=_against(tenant, others),
    )


def _against(tenant: Tenant, others: list[str]) -> Blocked | None:
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        why = f"the card is not {tenant.name}'s alone: {others[0]}{more} would be slowed with it"
        return Blocked("refused", why)
    return _OBSERVED if POWER_LIMIT.family in tenant.observed else None


def _why(tenant: Tenant, cap: float, watts: float) -> str:
    declared = f"{cap:.0f} W are declared as the most for a card that {tenant.name} has to itself"
    if watts > cap:
        return f"{declared}; {watts:.0f} W, as the card takes no lower limit"
    if watts < cap:
        return f"{declared}; {watts:.0f} W, as the card has no higher limit"
    return declared
