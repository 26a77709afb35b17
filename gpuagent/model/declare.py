"""What a declaration of `vocab` says: the types of signals and knobs, and what becomes of a setting.

`TENANT_FATES`, `BUDGET_FATES` and `CARD_FATES` are the columns of the table in DESIGN 2.
"""

from collections.abc import Mapping
from enum import StrEnum, unique
from types import MappingProxyType
from typing import Literal

import msgspec


@unique
class On(StrEnum):
    """What a subject is."""

    NODE = "node"
    GPU = "gpu"
    MIG = "mig"
    TENANT = "tenant"
    TENANT_GPU = "tenant_gpu"
    CGROUP = "cgroup"
    PROCESS = "process"
    MPS = "mps"


Kind = Literal["gauge", "counter"]


class Signal:
    """Something that can be read. Compared by identity: each is declared once, below."""

    __slots__ = ("dims", "expires", "help", "history", "kind", "name", "on")

    def __init__(
        self,
        name: str,
        on: tuple[On, ...],
        help: str,  # noqa: A002  (the metric's own word for it)
        *,
        kind: Kind = "gauge",
        dims: tuple[str, ...] = (),
        expires: float = 5.0,
        history: bool = False,
    ) -> None:
        self.name = name
        self.on = on
        self.help = help
        self.kind = kind
        self.dims = dims
        """Names of the dimensions beside the subject."""
        self.expires = expires
        """Age in seconds at which a reading stops being true."""
        self.history = history
        """Whether `History` keeps a ring of it."""

    def name_on(self, on: On) -> str:
        """Name of its metric for this kind of subject.

        A slice's is not its card's: a sum over cards would count the slice twice.
        """
        return self.name.replace("gpu_", "mig_", 1) if on is On.MIG else self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


@unique
class Fate(StrEnum):
    """What becomes of a knob we have turned."""

    PUT_BACK = "put back"
    """The original value is restored."""
    HOLD = "hold"
    """The value stays as it is; nothing new is wished."""
    ADOPT = "adopt"
    """The value stays and remains ours: the next decision starts from it."""
    RELEASE = "release"
    """Let go slowly, as a recovery would."""
    AS_CONFIGURED = "as configured"
    """Kept if the operator says so (`power.keep_on_stop`), else put back."""


class Fates(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a knob we have turned, by occasion. On all others it is put back."""

    stale: Fate
    """While the input is older than its bound."""
    stop: Fate
    """On a clean stop."""
    crash: Fate
    """On a start after a crash."""
    rescue: Fate
    """`restore` run by systemd after a crash, and the third crash in a row."""


BUDGET_RULE = "power/budget"
"""The rule of settings that serve the node's power budget."""

TENANT_FATES = Fates(
    stale=Fate.RELEASE, stop=Fate.PUT_BACK, crash=Fate.PUT_BACK, rescue=Fate.PUT_BACK
)
BUDGET_FATES = Fates(stale=Fate.HOLD, stop=Fate.AS_CONFIGURED, crash=Fate.ADOPT, rescue=Fate.HOLD)
CARD_FATES = Fates(stale=Fate.HOLD, stop=Fate.PUT_BACK, crash=Fate.PUT_BACK, rescue=Fate.PUT_BACK)

OWN_DAEMON_RULE = "mps/own"
"""The rule of settings by which the agent has an MPS control daemon of its own."""
OWN_DAEMON_FATES = Fates(stale=Fate.HOLD, stop=Fate.HOLD, crash=Fate.ADOPT, rescue=Fate.HOLD)
"""It outlives us: ending it would end every client, and a restart of the agent is none of theirs."""


class Knob:
    """Something that can be turned. Compared by identity: each is declared once, below."""

    __slots__ = (
        "budgeted",
        "deadband",
        "family",
        "fates",
        "fates_by_rule",
        "final",
        "help",
        "launch",
        "leftover",
        "name",
        "on",
        "put_back_seconds",
        "safer",
        "takes_effect",
        "unit",
        "verify_seconds",
    )

    def __init__(
        self,
        name: str,
        *,
        on: On,
        unit: str,
        help: str,  # noqa: A002  (the metric's own word for it)
        safer: Literal["min", "max"],
        deadband: float,
        family: str,
        takes_effect: str,
        fates: Fates,
        fates_by_rule: Mapping[str, Fates] = MappingProxyType({}),
        budgeted: bool = False,
        launch: bool = False,
        final: bool = False,
        leftover: str = "",
        verify_seconds: float = 0.5,
        put_back_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self.on = on
        self.unit = unit
        self.help = help
        self.safer = safer
        """Which of two wishes wins: the smaller or the larger value."""
        self.deadband = deadband
        """Differences below this, in `unit`, are none."""
        self.family = family
        """Name of the lever that this knob is a part of, for people: a rung of the ladder."""
        self.takes_effect = takes_effect
        """When a new value begins to act."""
        self.fates = fates
        self.fates_by_rule = fates_by_rule
        """Exceptions: what a setting was made for may matter more than which knob it turned."""
        self.budgeted = budgeted
        """Whether a budget bounds the sum over all subjects: raises then wait for verified cuts."""
        self.launch = launch
        """Whether it acts only on what is started from now on: set, it is *pending*."""
        self.final = final
        """Whether nothing undoes it: what is still going on when the agent stops is broken off."""
        self.leftover = leftover
        """What a held value reads as once whoever of ours maintained it has died; ours all the same."""
        self.verify_seconds = verify_seconds
        """A value that is as it should be is not read again sooner, however often the loop wakes."""
        self.put_back_seconds = put_back_seconds
        """How long putting it back may take, where that is longer than anything else may take."""

    @property
    def wanted_name(self) -> str:
        return f"{self.name}_wanted_{self.unit}" if self.unit else f"{self.name}_wanted"

    @property
    def real_name(self) -> str:
        return f"{self.name}_{self.unit}" if self.unit else self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def fates_under(self, rule: str) -> Fates:
        """What becomes of a setting that this rule has made."""
        return self.fates_by_rule.get(rule, self.fates)

    def safest(self, one: float, other: float) -> float:
        return min(one, other) if self.safer == "min" else max(one, other)
