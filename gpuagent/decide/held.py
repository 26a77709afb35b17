"""What the backpressure policy remembers: who is held by what, for what, and what did not help."""

import msgspec

from gpuagent.decide.causes import CauseKey, Watch
from gpuagent.decide.ladder import AT_ONCE
from gpuagent.decide.origins import Before, Origins
from gpuagent.decide.pi import Past
from gpuagent.decide.relief import Relief
from gpuagent.decide.share import Grip
from gpuagent.model.inventory import Subject, on_gpu, on_tenant
from gpuagent.model.plan import Blocked, Cause

CARD = ""
"""Stands for the tenant where the lever acts on a whole card."""

HeldKey = tuple[str, str, Subject]
"""Tenant (or CARD), kind and subject of the cause."""


class Held(msgspec.Struct, frozen=True):
    """One lever on one tenant, or on a card, for one cause."""

    tenant: str
    cause: Cause
    """As it was when it last held."""
    knob: str
    grip: Grip
    relief: Relief | None = None
    """What has come of it since the trouble began; None before its first cut."""
    over_at: float = float("-inf")
    """When the value was last over its mark, monotonic seconds."""
    kept_since: float | None = None
    """Since when it is kept at its floor although the value is over its mark, because it helps."""
    trust_seconds: float = 0.0
    """How long it is kept so before that is tested; 0 for as long as the law says."""

    @property
    def key(self) -> HeldKey:
        return (self.tenant, self.cause.kind, self.cause.subject)

    @property
    def cause_key(self) -> CauseKey:
        return (self.cause.kind, self.cause.subject)

    @property
    def stepped(self) -> bool:
        """Whether it moves in steps under either law: a card, and what is pulled or not."""
        return self.tenant == CARD or self.knob in AT_ONCE

    @property
    def left(self) -> float:
        """What is left to who is held: its share, or nothing of what is suspended or ended."""
        return 0.0 if self.knob in AT_ONCE and self.grip.share < 1.0 else self.grip.share

    @property
    def why(self) -> str:
        """Why it is held now: for the cause, or because it is let go of step by step."""
        if not self.grip.calm:
            return self.cause.why
        return f"the cause has ended and it is let go step by step; it was: {self.cause.why}"

    @property
    def who(self) -> Subject:
        """The tenant or the card that is held."""
        return on_tenant(self.tenant) if self.tenant else on_gpu(self.cause.subject.gpu)

    @property
    def name(self) -> str:
        return self.tenant or self.cause.subject.gpu


Mark = tuple[str, CauseKey, str]
"""Name of the tenant or card, the cause, and the knob."""


class Futile(msgspec.Struct, frozen=True):
    """A lever that was let go, why, and until when it is not pulled again for such a cause."""

    name: str
    """Of the tenant, or the UUID of the card."""
    knob: str
    until: float
    blocked: Blocked
    cause: CauseKey
    relief: Relief | None = None
    """What has come of doing without it; None where nothing had come of using it yet."""
    trust_seconds: float = 0.0
    """For how long it is kept before it is tested, where it is missed."""

    @property
    def mark(self) -> Mark:
        """What it is that was let go, and for what."""
        return (self.name, self.cause, self.knob)

    def after(self, effect: float, at: float) -> "Futile":
        """With a sample of its cause."""
        if self.relief is None:
            return self
        # The worst stays what the level was when it was let go.
        return msgspec.structs.replace(self, relief=self.relief.after(at, effect, settled=True))

    @property
    def regretted(self) -> bool:
        """Whether doing without it has made things worse."""
        return self.relief is not None and self.relief.regretted

    def trust(self, longest: float) -> float:
        """How long to keep it before it is tested the next time, in seconds; 0 for the usual time.

        Twice as long as before where it was plain that it is of use.
        """
        proven = self.relief is not None and self.relief.soon
        return min(2 * self.trust_seconds, longest) if proven else 0.0


class Memory(msgspec.Struct, frozen=True):
    """All of it."""

    watch: Watch = Watch()
    acts: bool = True
    """Whether the agent acted when this was written: what only would have been done is forgotten."""
    held: tuple[Held, ...] = ()
    origins: Origins = {}
    before: Before = Before()
    futile: tuple[Futile, ...] = ()
    cut_at: dict[CauseKey, float] = {}
    pasts: dict[CauseKey, Past] = {}
    """What the law `pi` remembers of each cause."""
    missed: dict[Mark, float] = {}
    """Levers that were let go and missed, until they are used again, and how long to trust them then."""
    helpless: tuple[CauseKey, ...] = ()
    """Causes for which no lever is left, said once each."""
