"""What the backpressure policy says of what it does: one event for each beginning and each end.

An event is about who is held, and its text and numbers are those of the cause.
"""

from gpuagent.decide.causes import Sample
from gpuagent.decide.held import CARD, Futile, Held
from gpuagent.model.inventory import Level, Subject, on_gpu, on_tenant
from gpuagent.model.plan import Blocked, Cause
from gpuagent.model.state import Event, NodeState

_ALERTS = frozenset({"no-lever-left", "lever-let-go", "l1-card-limited"})


class Said:
    """The events of one decision."""

    def __init__(self, state: NodeState) -> None:
        self.events: list[Event] = []
        self._state = state

    def held(self, held: Held) -> None:
        """It is, or would be, cut from a share of 1."""
        cause, acts = held.cause, self._state.acts
        kind, verb = ("held-back", "is") if acts else ("would-hold-back", "would be")
        self._say(kind, f"{held.knob} of {held.name} {verb} cut: {cause.why}", cause, held.who)
        if held.tenant != CARD:
            return
        for tenant in self._state.inventory.on_card(cause.subject.gpu):
            if tenant.level is Level.L1:  # its card is limited for heat only, and never silently
                text = (
                    f"the power limit of a card of {tenant.name} (L1) {verb} lowered: {cause.why}"
                )
                self._say("l1-card-limited" if acts else "would-limit-l1-card", text, cause)

    def released(self, held: Held) -> None:
        text = f"{held.knob} of {held.name}: it is held back no longer"
        self._say("released", text, held.cause, held.who)

    def let_go(self, held: Held, blocked: Blocked) -> None:
        """Nothing is said to be let go where nothing was held."""
        if self._state.acts:
            text = f"{held.knob} of {held.name} let go as {blocked.result}: {blocked.why}"
            self._say("lever-let-go", text, held.cause, held.who)

    def tested(self, held: Held) -> None:
        text = f"{held.knob} of {held.name} let go to see whether it still helps: {held.cause.why}"
        self._say("lever-tested", text, held.cause, held.who)

    def missed(self, futile: Futile, sample: Sample) -> None:
        text = f"{futile.knob} of {futile.name} is used again: without it, {sample.why}"
        # A card is a lever for causes of its own only.
        card = futile.name == sample.subject.gpu
        who = on_gpu(futile.name) if card else on_tenant(futile.name)
        self.events.append(Event("lever-missed", self._state.now.mono, text, who))

    def helpless(self, cause: Cause, *, more: bool) -> None:
        """`more` says whether something is held back for it already."""
        what = "nothing more can" if more else "nothing can"
        self._say("no-lever-left", f"{what} be held back for this: {cause.why}", cause)

    def _say(self, kind: str, text: str, cause: Cause, who: Subject | None = None) -> None:
        """`who` is held; None for what is about the cause itself."""
        alert, about = kind in _ALERTS, cause.subject if who is None else who
        self.events.append(Event(kind, self._state.now.mono, text, about, cause.numbers, alert))
