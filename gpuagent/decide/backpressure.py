"""The policy that holds the less important back while a cause lasts, and lets go when it ends.

One `Held` is one lever on one tenant (or on a whole card, for heat) for one cause. A cause cuts one
of them at a time, the candidate that comes first and is not at its floor yet; a lever that has been
at its floor for its time box without ending the cause is let go, remembered as futile for that
tenant and cause, and the next rung is tried. A tenant that no longer contributes is let go as if the
cause had ended. What a tenant gets in the end is the safest of what its levers ask for: `merge` sees
to that. While the agent only observes nothing answers a lever, so the first step is all there is.
"""

from collections.abc import Iterator

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.config import Config
from gpuagent.decide import share
from gpuagent.decide.causes import CauseKey, Watch
from gpuagent.decide.held import CARD, Held, Memory
from gpuagent.decide.levers import Levers
from gpuagent.decide.origins import relied_on
from gpuagent.model.inventory import Level, Subject
from gpuagent.model.plan import Blocked, Cause, Decision, Hold, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import KNOB

_ALERTS = frozenset({"no-lever-left", "lever-let-go", "l1-card-limited"})


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
        if state.tenants_known:
            for cause in causes:
                turn.press(cause)
            active = {(c.kind, c.subject) for c in causes}
        else:
            active = set()  # without knowing who is where, no cut is safe
        turn.ease(watch, active)
        decision = Decision(
            settings=turn.settings(),
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
        futile = [f for f in memory.futile if f.until > self._now]
        self._levers = Levers(state, law, origins=memory.origins, futile=futile)
        # What only would have been done, or has all been put back since, is no hold.
        kept = memory.held if memory.acts == state.acts else ()
        self._held = {h.key: self._floored(h) for h in kept if self._levers.exists(h)}
        self._cut_at = dict(memory.cut_at) if memory.acts == state.acts else {}
        self._helpless = set(memory.helpless)
        self._blocked: list[Setting] = []

    def _floored(self, held: Held) -> Held:
        """With the floor that the tenant has now, which a reload may have raised."""
        if held.tenant == CARD:
            return held
        floor = self._levers.tenants[held.tenant].limits.min_share_ratio
        if floor == held.grip.floor:
            return held
        grip = msgspec.structs.replace(
            held.grip, floor=floor, share=max(held.grip.share, floor), floor_since=None
        )
        return msgspec.structs.replace(held, grip=grip)

    # -- while a cause holds -------------------------------------------------------------------------

    def press(self, cause: Cause) -> None:
        """Let go of what does not help; then cut the first that can be, once per dwell."""
        key = (cause.kind, cause.subject)
        mine = [h for h in self._held.values() if h.cause_key == key]
        contributing = {t.name for t in self._levers.candidates(cause)}
        for held in mine:
            current = msgspec.structs.replace(held, cause=cause)
            self._put(current)
            if held.tenant != CARD and held.tenant not in contributing:
                self._ease(current, known=True)
            else:
                self._review(current)
        if self._now - self._cut_at.get(key, float("-inf")) >= self._law.dwell:
            if any(self._cut(held) for held in self._offers(cause)):
                self._cut_at[key] = self._now
                self._helpless.discard(key)
            elif not any(h.cause_key == key for h in self._held.values()):
                self._say_helpless(cause)
        self._blocked += self._levers.obstacles(cause, self._held)

    def _review(self, held: Held) -> None:
        """Let go of a lever that cannot be pulled, or that has had its time at the floor."""
        refusal = self._levers.refusal(held)
        if refusal is not None:
            self._give_up(held, refusal)
        elif self._state.acts and share.overdue(held.grip, self._now, self._law):
            box = f"{self._law.time_box:.0f} s at its floor did not end this: {held.cause.why}"
            self._give_up(held, Blocked("ineffective", box))

    def _give_up(self, held: Held, blocked: Blocked) -> None:
        del self._held[held.key]
        self._levers.give_up(held, blocked)
        text = f"{held.knob} of {held.name} let go as {blocked.result}: {blocked.why}"
        self._event("lever-let-go", text, held.cause)

    def _offers(self, cause: Cause) -> Iterator[Held]:
        """The levers that may be cut for a cause, in order; the last resort for heat is the card."""
        trying = False
        for tenant in self._levers.candidates(cause):
            held = self._held.get((tenant.name, cause.kind, cause.subject))
            held = held or self._levers.grasp(tenant, cause)
            if held is not None:
                trying = True
                yield held
                if not self._state.acts:
                    return  # whether the next would be needed, the first cannot show here
        # After a start it takes seconds until the levers on tenants are known: the card, which is
        # everybody's, waits for them.
        early = self._now - cause.since < self._power_dwell
        if cause.kind == "temperature" and not trying and not early:
            held = self._held.get((CARD, cause.kind, cause.subject))
            held = held or self._levers.grasp_card(cause)
            if held is not None:
                yield held

    def _cut(self, held: Held) -> bool:
        """Cut one lever; False if it is at its floor, waits for its dwell, or is only observed."""
        first = held.grip.share >= 1.0
        if not first and not self._state.acts:
            return False
        dwell = self._power_dwell if held.tenant == CARD else self._law.dwell
        grip = share.cut(held.grip, self._now, self._law, dwell=dwell)
        if grip == held.grip:
            return False
        cut = msgspec.structs.replace(held, grip=grip)
        self._put(cut)
        if first:
            self._say_held(cut)
        return True

    # -- when it has ended ---------------------------------------------------------------------------

    def ease(self, watch: Watch, active: set[CauseKey]) -> None:
        """Let go, step by step, of what is held for causes that have ended or are unknown."""
        for held in list(self._held.values()):
            known = held.cause_key in watch.seen and self._state.tenants_known
            # A card that cannot be read is held where it is (DESIGN 2).
            if held.cause_key not in active and (known or held.tenant != CARD):
                self._ease(held, known=known)
        self._helpless &= active

    def _ease(self, held: Held, *, known: bool) -> None:
        dwell = self._power_dwell if held.tenant == CARD else self._law.dwell
        grip = share.ease(held.grip, self._now, self._law, dwell=dwell, known=known)
        if not self._state.acts or share.forgotten(grip, self._now, self._law):
            del self._held[held.key]
        else:
            self._put(msgspec.structs.replace(held, grip=grip))
        if self._state.acts and grip.share >= 1.0 > held.grip.share:
            text = f"{held.knob} of {held.name}: it is held back no longer"
            self._event("released", text, held.cause)

    # -- what comes of it ----------------------------------------------------------------------------

    def settings(self) -> tuple[Setting, ...]:
        wished = [s for h in self._held.values() for s in self._levers.settings(h)]
        known = {s.key for s in wished}
        return (*wished, *(s for s in self._blocked if s.key not in known))

    def _put(self, held: Held) -> None:
        self._held[held.key] = held

    def holds(self) -> tuple[Hold, ...]:
        """Of each tenant and card the tightest grip."""
        tightest: dict[Subject, Held] = {}
        for held in self._held.values():
            known = tightest.get(held.who)
            if known is None or held.grip.share < known.grip.share:
                tightest[held.who] = held
        return tuple(
            Hold(
                subject=who,
                share=held.grip.share,
                rung=KNOB[held.knob].family if held.grip.share < 1.0 else "",
                cause=held.cause.kind,
                why=held.why,
                settings=tuple(s.key for s in self._levers.settings(held)),
            )
            for who, held in tightest.items()
        )

    def memory(self, watch: Watch) -> Memory:
        in_use = [
            place
            for held in self._held.values()
            if held.tenant != CARD and held.grip.share < 1.0
            for place in self._levers.places(held.tenant)
        ]
        return Memory(
            watch=watch,
            acts=self._state.acts,
            held=tuple(self._held.values()),
            origins=relied_on(self._levers.origins, in_use, self._now),
            futile=self._levers.futile,
            cut_at={k: t for k, t in self._cut_at.items() if self._now - t < self._law.dwell},
            helpless=tuple(self._helpless),
        )

    # -- what is said --------------------------------------------------------------------------------

    def _say_helpless(self, cause: Cause) -> None:
        key = (cause.kind, cause.subject)
        if key not in self._helpless:
            self._helpless.add(key)
            self._event("no-lever-left", f"nothing can be held back for this: {cause.why}", cause)

    def _say_held(self, held: Held) -> None:
        cause = held.cause
        kind, verb = ("held-back", "is") if self._state.acts else ("would-hold-back", "would be")
        self._event(kind, f"{held.knob} of {held.name} {verb} cut: {cause.why}", cause)
        if held.tenant != CARD:
            return
        for tenant in self._state.inventory.on_card(cause.subject.gpu):
            if tenant.level is Level.L1:  # its card is limited for heat only, and never silently
                text = (
                    f"the power limit of a card of {tenant.name} (L1) {verb} lowered: {cause.why}"
                )
                self._event(
                    "l1-card-limited" if self._state.acts else "would-limit-l1-card", text, cause
                )

    def _event(self, kind: str, text: str, cause: Cause) -> None:
        alert = kind in _ALERTS
        self.events.append(Event(kind, self._now, text, cause.subject, cause.numbers, alert))
