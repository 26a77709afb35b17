"""What is wished, what became of it, what is told, and what people may ask for."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gpuagent.model.audit import Action
from gpuagent.model.declare import BUDGET_RULE, Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.lease import Override
from gpuagent.model.run import RunAsk, RunList
from gpuagent.model.state import RESULTS, Event, KnobKey, NodeState, Outcome, Result
from gpuagent.model.token import Token

Mode = Literal["observe", "enforce"]


class Blocked(msgspec.Struct, frozen=True):
    """Why a setting is reported but not tried."""

    result: Result
    why: str


class Setting(msgspec.Struct, frozen=True):
    """A wish for one knob, with the reason that led to it."""

    knob: Knob
    subject: Subject
    value: float
    why: str
    """One sentence for the operator, numbers included."""
    rule: str
    """The policy and the cause: "backpressure/memory", "power/budget"."""
    numbers: tuple[tuple[str, float], ...] = ()
    """The readings that led to it, by name, in base units."""
    blocked: Blocked | None = None
    """Set where the lever is known not to be usable here: reported, never tried."""
    also: tuple[str, ...] = ()
    """Rules of the wishes that were outvoted: the value serves them too."""
    budget_value: float | None = None
    """What the power budget alone asks for, where a wish that passes (an override, heat) asks for
    less: with this the value is left on the host, if at all, when the agent ends."""

    @property
    def purpose(self) -> str:
        """The rule that decides what becomes of the value when the agent ends (DESIGN 2)."""
        return BUDGET_RULE if BUDGET_RULE in self.also else self.rule

    @property
    def key(self) -> KnobKey:
        return (self.knob, self.subject)


class Plan(msgspec.Struct, frozen=True):
    """At most one setting per knob and subject. What is absent is put back."""

    settings: tuple[Setting, ...] = ()

    def by_key(self) -> dict[KnobKey, Setting]:
        return {s.key: s for s in self.settings}


class Hold(msgspec.Struct, frozen=True):
    """How far something is to be held back, for people; derived from a policy's memory."""

    subject: Subject
    """A tenant, or a whole card."""
    share: float
    """Between the floor and 1, as decided. Whether it is so is another matter: see `effect`."""
    rung: str
    """Family of the knob in use; empty while not held back."""
    cause: str
    why: str
    settings: tuple[KnobKey, ...] = ()
    """The settings that it consists of."""
    effect: Result | None = None
    """What became of them, the most that was reached; None while nothing is known."""

    @property
    def in_force(self) -> bool:
        """Whether the host is as decided, or is being made so."""
        return self.effect in ("applied", "in flight", "pending")

    def with_effect(self, outcomes: Mapping[KnobKey, Outcome]) -> "Hold":
        """The same, with what became of it."""
        found = [outcomes[k].result for k in self.settings if k in outcomes]
        effect = min(found, key=RESULTS.index, default=None)
        return msgspec.structs.replace(self, effect=effect)


_PLAIN = {
    "memory": "the memory of a card that it uses runs short",
    "reserved": "a more important service on this host was promised the memory",
    "hours": "it is outside of its hours",
    "temperature": "a card that it uses is hot",
    "cpu": "the CPUs of the host run short",
    "latency": "a more important service on this host is near its objective",
    "power": "the cards share a power budget",
    "budget": "the cards share a power budget",
    "cap": "the power cap declared for it",
    "clock": "the cards share a power budget",
    "efficiency": "its work costs less energy at a lower power limit",
    "override": "whoever is responsible for the host has ordered it",
}


def plainly(cause: str) -> str:
    """Why something is held back, by the kind of cause, in words that name nobody."""
    return _PLAIN.get(cause, "the host needs it")


class Cause(msgspec.Struct, frozen=True):
    """A condition that calls for relief, and since when it has held."""

    kind: str
    """memory, temperature, power, cpu, latency."""
    subject: Subject
    since: float
    why: str
    numbers: tuple[tuple[str, float], ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """What one policy makes of a state."""

    settings: tuple[Setting, ...] = ()
    holds: tuple[Hold, ...] = ()
    causes: tuple[Cause, ...] = ()
    events: tuple[Event, ...] = ()
    look_again: float | None = None
    """Monotonic seconds at which a condition may be complete: the loop ticks then."""
    complete: bool = True
    """Whether what is not wished is really not wished, and not merely not decided yet."""


class Posture(msgspec.Struct, frozen=True):
    """What the agent may do now, and why."""

    mode: Mode
    """As configured."""
    simulated: bool = False
    """Whether the host is a simulated one: everything that is told of it carries the mark."""
    paused: bool = False
    released: bool = False
    """The driver is to be let go of: nothing is read from it until it is taken up again."""
    demoted: str = ""
    """Why it observes although configured to enforce (third crash); empty otherwise."""
    config_path: str = ""
    config_error: str = ""
    """Why the file as it stands is not in force; empty while it is."""
    config_loaded_wall: float = 0.0

    @property
    def acts(self) -> bool:
        """Whether anything on the host may be changed."""
        return self.mode == "enforce" and not self.paused and not self.demoted


class LoopStats(msgspec.Struct, frozen=True):
    """The loop's own health."""

    ticks: int = 0
    tick_seconds: float = 0.0
    """Duration of the last tick."""
    lag_seconds: float = 0.0
    """How late the last tick began."""


class Snapshot(msgspec.Struct, frozen=True):
    """One immutable picture of everything, which all readers share."""

    state: NodeState
    posture: Posture
    plan: Plan = Plan()
    outcomes: Mapping[KnobKey, Outcome] = msgspec.field(default_factory=dict)
    holds: tuple[Hold, ...] = ()
    causes: tuple[Cause, ...] = ()
    actions: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Actions since start by (knob, result)."""
    outside_changes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How often somebody else has changed a value of ours since start, by knob."""
    run: str = ""
    """Tells this run of the agent from any other: numbers of events and actions hold within it."""
    events: tuple[Event, ...] = ()
    """The latest, bounded, oldest first; numbered without a gap."""
    events_by_kind: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Events since start by kind."""
    audit: tuple[Action, ...] = ()
    """The latest actions, bounded, oldest first; numbered without a gap."""
    runs: RunList = RunList()
    """What `gpuagent run` has started, and what it was refused lately."""
    stats: LoopStats = LoopStats()


# -- what people may ask for: drained by the next tick ------------------------------------------------


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Put everything back and only observe, until `Unpause`."""

    by: str


class Unpause(msgspec.Struct, frozen=True, tag="unpause"):
    by: str


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Read the configuration file again."""

    by: str


class ReleaseGpus(msgspec.Struct, frozen=True, tag="release"):
    """Close every driver handle, so that MIG can be changed or the driver unloaded."""

    by: str


class ResumeGpus(msgspec.Struct, frozen=True, tag="resume"):
    by: str


class SetOverride(msgspec.Struct, frozen=True, tag="set-override"):
    """Put an override in force; one of the same name is replaced."""

    override: Override

    @property
    def by(self) -> str:
        return self.override.by


class DropOverride(msgspec.Struct, frozen=True, tag="drop-override"):
    """End an override before its time."""

    by: str
    id: str


class StartRun(msgspec.Struct, frozen=True, tag="start-run"):
    """Make a tenant of the process that asks, if it fits."""

    ask: RunAsk

    @property
    def by(self) -> str:
        return self.ask.by


class IssueToken(msgspec.Struct, frozen=True, tag="issue-token"):
    """Make a token valid. Its secret stays with whoever asked."""

    by: str
    token: Token
    digest: str
    """Of the secret's text (`model.token.digest`)."""


class RevokeToken(msgspec.Struct, frozen=True, tag="revoke-token"):
    by: str
    id: str


Command = (
    Pause
    | Unpause
    | Reload
    | ReleaseGpus
    | ResumeGpus
    | SetOverride
    | DropOverride
    | StartRun
    | IssueToken
    | RevokeToken
)
