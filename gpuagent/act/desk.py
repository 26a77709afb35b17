"""What a lane is given to do, and what all lanes share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.record import Target
from gpuagent.clock import Clock
from gpuagent.model.declare import BUDGET_RULE, Knob
from gpuagent.model.plan import Setting
from gpuagent.model.state import ACTION_RESULTS, ActionResult
from gpuagent.model.vocab import KNOBS
from gpuagent.ports import Actuator, Real


class Order(msgspec.Struct, frozen=True):
    """What a lane is to do: a setting to make or to report, or none, and then it puts back."""

    setting: Setting | None = None
    acts: bool = False
    keep: bool = False
    """Adopted: not put back, although nothing is to be written."""
    passive: str = "the agent only observes now"
    """Why nothing is written where the agent does not act."""

    @property
    def writes(self) -> bool:
        return self.setting is not None and self.acts and self.setting.blocked is None

    @property
    def budgets(self) -> bool:
        """Whether it makes a setting that serves the power budget."""
        return self.setting is not None and self.writes and self.setting.purpose == BUDGET_RULE

    @property
    def direction(self) -> tuple[bool, bool, bool]:
        """Orders of the same direction share their failures: the one would fail like the other."""
        return (self.writes, self.keep, self.setting is None)

    @property
    def essence(self) -> tuple[object, ...]:
        """All that matters but the words. Orders with the same essence ask for the same."""
        s = self.setting
        return (
            *self.direction,
            s and (s.value, s.budget_value, s.rule, s.purpose, s.blocked, s.subject),
        )


class Reach(msgspec.Struct, frozen=True):
    """What an agent that acts may turn at all; of everything else it is only said."""

    families: frozenset[str] | None = None
    """Of knobs; None for all."""
    observed: frozenset[str] = frozenset()
    """Tenants that are only observed."""

    def beyond(self, setting: Setting | None) -> str:
        """Why a setting is out of reach; empty where it is not."""
        if setting is None:
            return ""
        if self.families is not None and setting.knob.family not in self.families:
            return f"enforce.families leaves {setting.knob.family} out"
        if setting.subject.tenant in self.observed:
            return f"{setting.subject.tenant} is only observed, as its rule says"
        return ""


def for_budget(actuator: Actuator, setting: Setting, original: Real) -> Real | None:
    """What is to be written for the power budget alone; None where the setting is just that."""
    if setting.budget_value is None:
        return None
    return actuator.encode(setting.subject, setting.budget_value, original)


def said(knob: Knob, real: Real) -> str:
    """What a knob reads as, for people: with its unit, where what is written is in another one."""
    if knob.unit == "watts":
        return f"{real.value:.0f} W"
    if knob.unit == "hertz" and math.isfinite(real.value):
        return f"{real.value / 1e6:.0f} MHz"
    return real.raw


def _no_actions() -> dict[tuple[str, str], int]:
    """Every combination exists from the start, so that a rate over them is never undefined."""
    return {(k.name, r): 0 for k in KNOBS for r in ACTION_RESULTS}


@dataclass(slots=True, kw_only=True)
class Desk:
    """What all lanes share."""

    ledger: Ledger
    audit: AuditLog
    clock: Clock
    must_wait: Callable[[Target], str]
    """Why this target must not be raised now; empty if it may."""
    actions: dict[tuple[str, str], int] = field(default_factory=_no_actions)
    outside_changes: dict[str, int] = field(default_factory=lambda: {k.name: 0 for k in KNOBS})
    closed: bool = False

    def count(self, knob: str, result: ActionResult | None) -> None:
        """One more action that ended so. A knob of another version counts nowhere."""
        if result is None or (knob, result) not in self.actions:
            return
        self.actions[knob, result] += 1
        if result == "left alone":
            self.outside_changes[knob] += 1
