"""The policy that holds the less important back while a cause lasts, and lets go when it ends.

One `Held` is one lever on one tenant (or on a whole card, for heat) for one cause. A cause cuts one
of them at a time, the candidate that comes first and is not at its floor yet; a lever that has been
at its floor for its time box without ending the cause is let go, remembered as futile for that
tenant and cause, and the next rung is tried. What a tenant gets in the end is the safest of what
its levers ask for: `merge` sees to that.
"""

from collections.abc import Iterator

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide import share
from gpuagent.decide.card import card_floor, card_setting
from gpuagent.decide.causes import CauseKey, Watch
from gpuagent.decide.ladder import RUNGS, Origin, Pull, may_be_held, origin, protected_from
from gpuagent.decide.share import Grip
from gpuagent.decide.victims import candidates
from gpuagent.model.inventory import NODE, Level, Subject, Tenant
from gpuagent.model.plan import Blocked, Cause, Decision, Hold, Setting
from gpuagent.model.state import Event, NodeState, Outcome
from gpuagent.model.vocab import KNOB, POWER_LIMIT, Knob

CARD = ""
"""Stands for the tenant where the lever acts on the whole card."""


HeldKey = tuple[str, str, Subject]
"""Tenant (or CARD), kind and subject of the cause."""


class Held(msgspec.Struct, frozen=True):
    """One lever on one tenant for one cause."""

    tenant: str
    cause: Cause
    """As it was when it last held."""
    knob: str
    grip: Grip


class Futile(msgspec.Struct, frozen=True):
    """A lever that was let go, why, and until when it is not pulled again."""

    tenant: str
    """Or the UUID of the card."""
    kind: str
    """Of the cause."""
    knob: str
    until: float
    blocked: Blocked


class Memory(msgspec.Struct, frozen=True):
    """What the policy remembers."""

    watch: Watch = Watch()
    held: tuple[Held, ...] = ()
    origins: dict[str, Origin] = {}
    futile: tuple[Futile, ...] = ()
    cut_at: dict[CauseKey, float] = {}
    helpless: tuple[CauseKey, ...] = ()
    """Causes for which no lever is left, said once each."""


class Backpressure:
    """See the module."""

    name = "backpressure"

    def __init__(self, config: Config) -> None:
        self._law: Law = config.backpressure
        self._power_dwell = config.power.dwell

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        watch, causes, look_again = memory.watch.look(state, self._law)
        turn = _Turn(state, self._law, self._power_dwell, memory)
        for cause in causes:
            turn.press(cause)
        turn.ease(watch, {(c.kind, c.subject) for c in causes})
        settings = turn.settings()
        decision = Decision(
            settings=settings,
            holds=turn.holds(),
            causes=causes,
            events=tuple(turn.events),
            look_again=look_again,
        )
        return turn.memory(watch), decision


class _Turn:
    """One decision in the making: the memory, opened up to be changed, against one state."""

    def __init__(self, state: NodeState, law: Law, power_dwell: float, memory: Memory) -> None:
        self.events: list[Event] = []
        self._state = state
        self._now = state.now.mono
        self._law = law
        self._power_dwell = power_dwell
        self._tenants = {
            t.name: t for t in state.inventory.tenants or () if may_be_held(t) and t.seats
        }
        self._held = {_key(h): h for h in memory.held if self._exists(h)}
        self._origins = {n: o for n, o in memory.origins.items() if n in self._tenants}
        self._futile = [f for f in memory.futile if f.until > self._now]
        self._cut_at = dict(memory.cut_at)
        self._helpless = set(memory.helpless)
        self._blocked: list[Setting] = []

    def _exists(self, held: Held) -> bool:
        if held.tenant == CARD:
            return self._state.inventory.gpu(held.cause.subject.gpu) is not None
        tenant = self._tenants.get(held.tenant)
        on_card = held.cause.subject == NODE or (
            tenant is not None and held.cause.subject.gpu in tenant.gpus
        )
        return tenant is not None and on_card

    # -- while a cause holds -------------------------------------------------------------------------

    def press(self, cause: Cause) -> None:
        """Let go of what has not helped; then cut the first that can be, once per dwell."""
        mine = [h for h in self._held.values() if _same(h.cause, cause)]
        for held in mine:
            self._refresh(held, cause)
        key = (cause.kind, cause.subject)
        if self._now - self._cut_at.get(key, float("-inf")) >= self._law.dwell:
            if any(self._cut(held) for held in self._offers(cause)):
                self._cut_at[key] = self._now
                self._helpless.discard(key)
            elif not mine:
                self._say_helpless(cause)
        self._blocked += self._obstacles(cause)

    def _refresh(self, held: Held, cause: Cause) -> None:
        """Bring a lever up to date with its cause and with what became of it."""
        self._put(msgspec.structs.replace(held, cause=cause))
        refusal = self._refusal(held)
        if self._observed(held):
            # Nothing answers the lever: only the first step is reported, however long it lasts.
            grip = msgspec.structs.replace(held.grip, share=max(held.grip.share, self._law.cut))
            self._put(msgspec.structs.replace(held, cause=cause, grip=grip))
        elif refusal is not None:
            self._let_go(held, refusal)
        elif share.overdue(held.grip, self._now, self._law):
            box = f"{self._law.time_box:.0f} s at its floor did not end this: {cause.why}"
            self._let_go(held, Blocked("ineffective", box))

    def _let_go(self, held: Held, blocked: Blocked) -> None:
        del self._held[_key(held)]
        who = held.tenant or held.cause.subject.gpu
        until = self._now + self._law.ineffective_for
        self._futile.append(Futile(who, held.cause.kind, held.knob, until, blocked))
        text = f"{held.knob} of {who} let go as {blocked.result}: {blocked.why}"
        self._event("lever-let-go", text, held.cause)

    def _offers(self, cause: Cause) -> Iterator[Held]:
        """The levers that may be cut for a cause, in order; the last resort for heat is the card."""
        for tenant in candidates(self._state, cause):
            held = self._held.get((tenant.name, cause.kind, cause.subject))
            if held is None and tenant.name in self._tenants:
                held = self._grasp(tenant, cause)
            if held is not None:
                yield held
        trying = any(h.tenant != CARD and _same(h.cause, cause) for h in self._held.values())
        # After a start it takes seconds until the levers on tenants are known: the card, which is
        # everybody's, waits for them.
        early = self._now - cause.since < self._power_dwell
        if cause.kind == "temperature" and not trying and not early:
            held = self._held.get((CARD, cause.kind, cause.subject)) or self._grasp_card(cause)
            if held is not None:
                yield held

    def _grasp(self, tenant: Tenant, cause: Cause) -> Held | None:
        """A new lever on a tenant: the first rung that is neither futile nor blocked everywhere."""
        for knob in RUNGS[cause.kind]:
            held = self._lever(tenant, cause, knob)
            usable = any(s.blocked is None for s in self._pull(held))
            if usable and self._futility(held) is None:
                return held
        return None

    def _lever(self, tenant: Tenant, cause: Cause, knob: Knob) -> Held:
        return Held(tenant.name, cause, knob.name, Grip(floor=tenant.limits.min_share_ratio))

    def _grasp_card(self, cause: Cause) -> Held | None:
        floor = card_floor(self._state, cause.subject)
        if floor is None:
            return None
        held = Held(CARD, cause, POWER_LIMIT.name, Grip(floor=floor))
        return held if self._futility(held) is None else None

    def _futility(self, held: Held) -> Blocked | None:
        mark = (held.tenant or held.cause.subject.gpu, held.cause.kind, held.knob)
        found = (f.blocked for f in self._futile if (f.tenant, f.kind, f.knob) == mark)
        return next(found, None)

    def _cut(self, held: Held) -> bool:
        """Cut one lever; False if it is at its floor, waits for its dwell, or is only observed."""
        if held.grip.share < 1.0 and self._observed(held):
            return False
        card = held.tenant == CARD
        dwell = self._power_dwell if card else self._law.dwell
        grip = share.cut(held.grip, self._now, self._law, dwell=dwell)
        if grip == held.grip:
            return False
        if card:
            self._say_card_limited(held.cause)
        else:
            self._origins.setdefault(held.tenant, self._origin(held.tenant))
        if held.grip.share >= 1.0:
            who = held.tenant or held.cause.subject.gpu
            self._event("held-back", f"{held.knob} of {who}: {held.cause.why}", held.cause)
        self._put(msgspec.structs.replace(held, grip=grip))
        return True

    def _outcomes(self, held: Held) -> list[Outcome]:
        found = (self._state.outcomes.get(s.key) for s in self._settings_of(held))
        return [o for o in found if o is not None]

    def _observed(self, held: Held) -> bool:
        return any(o.result == "would" for o in self._outcomes(held))

    def _refusal(self, held: Held) -> Blocked | None:
        """Why none of its settings can be made, if that is so."""
        tried = [s for s in self._settings_of(held) if s.blocked is None]
        outcomes = self._outcomes(held)
        refused = [o for o in outcomes if o.result in ("refused", "contested")]
        if not tried or len(refused) < len(tried):
            return None
        return Blocked(refused[0].result, refused[0].why)

    def _obstacles(self, cause: Cause) -> list[Setting]:
        """Levers that come before the one in use and cannot be pulled: said, with the reason."""
        said: list[Setting] = []
        for tenant in candidates(self._state, cause):
            held = self._held.get((tenant.name, cause.kind, cause.subject))
            for knob in RUNGS[cause.kind] if tenant.name in self._tenants else ():
                if held is not None and held.knob == knob.name:
                    break
                lever = self._lever(tenant, cause, knob)
                first = msgspec.structs.replace(lever, grip=Grip(floor=0, share=self._law.cut))
                futile = self._futility(lever)
                said += [
                    msgspec.structs.replace(s, blocked=s.blocked or futile)
                    for s in self._pull(first)
                    if s.blocked or futile
                ]
        return said

    # -- when it has ended ---------------------------------------------------------------------------

    def ease(self, watch: Watch, active: set[CauseKey]) -> None:
        """Let go, step by step, of what is held for causes that have ended or are unknown."""
        for key, held in list(self._held.items()):
            cause = (held.cause.kind, held.cause.subject)
            known = cause in watch.seen
            if cause in active or (held.tenant == CARD and not known):
                continue  # a card that cannot be read is held where it is (DESIGN 2)
            dwell = self._power_dwell if held.tenant == CARD else self._law.dwell
            grip = share.ease(held.grip, self._now, self._law, dwell=dwell, known=known)
            if self._observed(held) or share.forgotten(grip, self._now, self._law):
                del self._held[key]
            else:
                self._put(msgspec.structs.replace(held, grip=grip))
            if grip.share >= 1.0 > held.grip.share:
                who = held.tenant or held.cause.subject.gpu
                text = f"{held.knob} of {who}: it is held back no longer"
                self._event("released", text, held.cause)
        self._helpless &= active
        holding = {h.tenant for h in self._held.values() if h.grip.share < 1.0}
        self._origins = {n: o for n, o in self._origins.items() if n in holding}

    # -- what comes of it ----------------------------------------------------------------------------

    def settings(self) -> tuple[Setting, ...]:
        wished = [s for h in self._held.values() for s in self._settings_of(h)]
        known = {s.key for s in wished}
        return (*wished, *(s for s in self._blocked if s.key not in known))

    def _settings_of(self, held: Held) -> tuple[Setting, ...]:
        if held.grip.share >= 1.0:
            return ()
        if held.tenant == CARD:
            setting = card_setting(self._state, held.cause, held.grip.share)
            return () if setting is None else (setting,)
        return self._pull(held)

    def _pull(self, held: Held) -> tuple[Setting, ...]:
        tenant = self._tenants[held.tenant]
        taken = self._origins.get(tenant.name) or self._origin(tenant.name)
        pull = Pull(KNOB[held.knob], tenant, held.grip.share, taken, held.cause)
        others = self._state.inventory.tenants or ()
        return pull.settings(protected_from(tenant, others), self._law)

    def _origin(self, tenant: str) -> Origin:
        return origin(self._state, self._tenants[tenant])

    def _put(self, held: Held) -> None:
        self._held[_key(held)] = held

    def holds(self) -> tuple[Hold, ...]:
        """Of each tenant the tightest grip."""
        tightest: dict[str, Held] = {}
        for held in self._held.values():
            known = tightest.get(held.tenant)
            if known is None or held.grip.share < known.grip.share:
                tightest[held.tenant] = held
        return tuple(
            Hold(
                tenant=h.tenant or h.cause.subject.gpu,
                share=h.grip.share,
                rung=KNOB[h.knob].family if h.grip.share < 1.0 else "",
                cause=h.cause.kind,
                why=h.cause.why,
            )
            for h in tightest.values()
        )

    def memory(self, watch: Watch) -> Memory:
        return Memory(
            watch=watch,
            held=tuple(self._held.values()),
            origins=self._origins,
            futile=tuple(self._futile),
            cut_at={k: t for k, t in self._cut_at.items() if self._now - t < self._law.dwell},
            helpless=tuple(self._helpless),
        )

    def _say_helpless(self, cause: Cause) -> None:
        key = (cause.kind, cause.subject)
        if key not in self._helpless:
            self._helpless.add(key)
            self._event("no-lever-left", f"nothing can be held back for this: {cause.why}", cause)

    def _say_card_limited(self, cause: Cause) -> None:
        """L1's card is limited for heat only, and never silently."""
        for tenant in self._state.inventory.on_card(cause.subject.gpu):
            if tenant.level is Level.L1:
                self._event(
                    "l1-card-limited",
                    f"the power limit of a card of {tenant.name} (L1) is lowered: {cause.why}",
                    cause,
                )

    def _event(self, kind: str, text: str, cause: Cause) -> None:
        self.events.append(Event(kind, self._now, text, cause.subject, cause.numbers))


def _key(held: Held) -> HeldKey:
    return (held.tenant, held.cause.kind, held.cause.subject)


def _same(one: Cause, other: Cause) -> bool:
    return (one.kind, one.subject) == (other.kind, other.subject)
