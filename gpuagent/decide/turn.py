"""One decision of the backpressure policy in the making: who is cut, who is let go, and what is said."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.decide import pi, share
from gpuagent.decide.beside import beside, thawed
from gpuagent.decide.causes import CauseKey, Sample, Watch
from gpuagent.decide.held import CARD, Futile, Held, Memory
from gpuagent.decide.levers import Levers
from gpuagent.decide.origins import WINDOW_SECONDS, Before, relied_on, with_those_held
from gpuagent.decide.relief import Relief
from gpuagent.decide.said import Said
from gpuagent.decide.share import Grip
from gpuagent.decide.sustained import Verdict
from gpuagent.model.inventory import Level, Subject
from gpuagent.model.plan import Blocked, Cause, Hold, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import KNOB

_TRUST_BOXES = 4.0
"""A lever that helps, but not enough, is let go after so many time boxes to see whether it still does."""


class Turn:
    """One decision in the making: the memory, opened up to be changed, against one state."""

    def __init__(
        self,
        state: NodeState,
        memory: Memory,
        *,
        samples: dict[CauseKey, Sample],
        law: Law,
        power_dwell: float,
    ) -> None:
        self._said = Said(state)
        self._state = state
        self._samples = samples
        self._now = state.now.mono
        self._law = law
        self._power_dwell = power_dwell
        futile = [self._watched(f) for f in memory.futile if f.until > self._now]
        origins = with_those_held(memory.origins, memory.before, state)
        self._levers = Levers(state, law, origins=origins, futile=futile, missed=memory.missed)
        # What only would have been done, or has all been put back since, is no hold.
        kept = memory.held if memory.acts == state.acts else ()
        self._held = {h.key: self._floored(h) for h in kept if self._levers.exists(h)}
        for gone in (h for h in kept if h.key not in self._held and h.grip.share < 1.0):
            if state.acts:
                self._said.released(gone)
        self._cut_at = dict(memory.cut_at) if memory.acts == state.acts else {}
        self._pasts = dict(memory.pasts) if memory.acts == state.acts else {}
        self._helpless = set(memory.helpless)
        self._blocked: list[Setting] = []
        self._waiting: dict[CauseKey, Level] = {}
        """Causes for which nobody above a level is held, until what those of that level use is known."""

    def _watched(self, futile: Futile) -> Futile:
        """With what has come of doing without the lever; said where it is missed."""
        sample = self._samples.get(futile.cause)
        if sample is None or not self._state.acts:
            return futile
        now = futile.after(sample.effect, sample.at)
        if now.regretted:
            self._said.missed(now, sample)
        return now

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
        """Let go of what does not help; then cut the first that can be, as the law says."""
        key = (cause.kind, cause.subject)
        contributing = {t.name for t in self._levers.candidates(cause)}
        contributing |= {h.tenant for h in self._mine(key) if self._levers.idled(h)}
        for held in self._mine(key):
            current = msgspec.structs.replace(held, cause=cause)
            self._put(current)
            if (held.tenant != CARD and held.tenant not in contributing) or self._rests(current):
                self._ease(current, known=True)
            else:
                self._review(current)
        offers = self._offers(cause)
        regulates = self._law.control == "pi"
        cut = (
            self._regulate(key, contributing, offers)
            if regulates
            else self._cut_in_time(key, offers)
        )
        if cut:
            self._helpless.discard(key)
        elif cut is not None and key not in self._waiting:
            self._say_if_helpless(cause)
        for held in self._mine(key):
            self._judge(held)
        self._blocked += self._levers.obstacles(cause, self._held)

    def _rests(self, held: Held) -> bool:
        """Whether the value has been under its mark for so long that the cause is as good as over.

        Between its two marks a cause goes on; nobody is held for it without end.
        """
        if self._law.control == "pi" and not held.stepped:
            return False  # which moves all the time
        if self._samples[held.cause_key].verdict is Verdict.HIGH:
            return False
        grip = held.grip
        since = held.over_at if grip.calm else max(held.over_at, grip.moved_at)
        return self._now - since >= max(self._law.probe_min, grip.pause)

    def _say_if_helpless(self, cause: Cause) -> None:
        key = (cause.kind, cause.subject)
        mine = self._mine(key)
        if key not in self._helpless and all(self._spent(h) for h in mine):
            self._helpless.add(key)
            self._said.helpless(cause, more=bool(mine))

    def _spent(self, held: Held) -> bool:
        """Whether it has been at its floor for its time box, and so can do no more."""
        return held.grip.at_floor and self._now - held.grip.moved_at >= self._law.time_box

    def _judge(self, held: Held) -> None:
        """Count the time for which a lever at its floor has not eased its cause.

        Where there is no further rung to try, a part of the way counts as relief too: letting go
        of what helps, though not enough, would make things worse.
        """
        grip, sample, relief = held.grip, self._samples[held.cause_key], held.relief
        if grip.calm:
            return
        by_pi = self._law.control == "pi" and not held.stepped
        over = sample.error > 0 if by_pi else sample.verdict is Verdict.HIGH
        helped = False
        if relief is not None:
            settled = grip.at_floor and self._now - grip.moved_at > sample.shows
            relief = relief.after(sample.at, sample.effect, settled=settled)
            helped = self._levers.last(held) and relief.plain
        kept = held.kept_since if grip.at_floor else None
        if kept is None and grip.at_floor and over and helped:
            kept = self._now
        grip = share.judged(grip, self._now, sample.at, over=over and not helped)
        high = self._now if over else held.over_at
        self._put(
            msgspec.structs.replace(held, grip=grip, relief=relief, kept_since=kept, over_at=high)
        )

    def _mine(self, key: CauseKey) -> list[Held]:
        return [h for h in self._held.values() if h.cause_key == key]

    def _cut_in_time(self, key: CauseKey, offers: Iterable[Held]) -> bool | None:
        """Cut once per dwell, for what was measured since, while that is over its mark.

        None where there is nothing to cut for now.
        """
        last, sample = self._cut_at.get(key, float("-inf")), self._samples[key]
        early = self._now - last < self._law.dwell or sample.at <= last
        if early or sample.verdict is not Verdict.HIGH:
            return None
        if not any(self._cut(held) for held in offers):
            return False
        self._cut_at[key] = self._now
        return True

    def _review(self, held: Held) -> None:
        """Let go of a lever that cannot be pulled, or that has had its time at the floor."""
        refusal = self._levers.refusal(held)
        if refusal is not None:
            self._give_up(held, refusal)
        elif self._state.acts and share.overdue(held.grip, self._now, self._law):
            box = f"{self._law.time_box:.0f} s at its floor did not ease this: {held.cause.why}"
            self._give_up(held, Blocked("ineffective", box))
        elif self._to_be_tested(held):
            self._give_up(held, Blocked("ineffective", "let go to see whether it still helps"))

    def _to_be_tested(self, held: Held) -> bool:
        since = held.kept_since
        return since is not None and not held.grip.calm and self._now - since >= self._trust(held)

    def _trust(self, held: Held) -> float:
        sample = self._samples.get(held.cause_key)
        shows = 0.0 if sample is None else sample.shows
        return held.trust_seconds or max(_TRUST_BOXES * self._law.time_box, shows)

    def _give_up(self, held: Held, blocked: Blocked) -> None:
        del self._held[held.key]
        self._levers.give_up(held, blocked, trust_seconds=self._trust(held))
        self._begin_anew(held.cause_key)  # with the next lever
        if held.kept_since is not None and blocked.result == "ineffective":
            self._said.tested(held)
        else:
            self._said.let_go(held, blocked)

    def _offers(self, cause: Cause) -> Iterator[Held]:
        """The levers that may be cut for a cause, in order; the last resort for heat is the card."""
        key = (cause.kind, cause.subject)
        for tenant in self._levers.candidates(cause):
            if tenant.level < self._waiting.get(key, tenant.level):
                break
            held = self._held.get((tenant.name, *key)) or self._levers.grasp(tenant, cause)
            if held is not None:
                yield held
                if not self._state.acts:
                    return  # whether the next would be needed, the first cannot show here
            elif (
                self._now - max(cause.since, tenant.since)
                < WINDOW_SECONDS
                > self._now - cause.since
            ):
                # What it uses may not be known yet: nobody more important is held in its place.
                self._waiting[key] = tenant.level
        if cause.kind == "temperature" and self._needs_card(cause):
            held = self._held.get((CARD, *key)) or self._levers.grasp_card(cause)
            if held is not None:
                yield held

    def _needs_card(self, cause: Cause) -> bool:
        """Whether all that its tenants can do has been done, and has had its time.

        After a start it takes seconds until the levers on tenants are known: the card, which is
        everybody's, waits for them.
        """
        held = self._mine((cause.kind, cause.subject))
        pressed = [h for h in held if h.tenant != CARD and not h.grip.calm]
        early = self._now - cause.since < self._power_dwell
        return not early and all(self._spent(h) for h in pressed)

    def _cut(self, held: Held) -> bool:
        """Cut one lever; False if it is at its floor, waits for its dwell, or is only observed."""
        first = held.grip.share >= 1.0
        if not first and not self._state.acts:
            return False
        dwell = self._power_dwell if held.tenant == CARD else self._law.dwell
        shows = self._samples[held.cause_key].shows
        grip = share.cut(held.grip, self._now, self._law, dwell=dwell, shows=shows)
        if grip == held.grip:
            return False
        self._grip(held, grip)
        return True

    # -- by the law `pi` -----------------------------------------------------------------------------

    def _regulate(self, key: CauseKey, names: set[str], offers: Iterable[Held]) -> bool | None:
        """One step on the tenants of these names that are held for a cause, or on one of `offers`.

        Takes from the first that has something, gives to the last of the lowest level first. None
        where nothing was to be taken, else whether something was.
        """
        if not self._mine(key):
            self._begin_anew(key)
        sample = self._samples[key]
        past, change = pi.step(self._pasts.get(key, pi.Past()), sample.at, sample.error, self._law)
        self._pasts[key] = past
        taken = any(self._move(held, change) for held in offers) if change < 0 else None
        if change > 0:
            mine = [h for h in self._mine(key) if h.tenant in names]
            any(self._move(held, change) for held in self._most_important_first(mine))
        return taken

    def _begin_anew(self, key: CauseKey) -> None:
        """As if the value had been at the middle of its marks; no sample counts twice all the same."""
        self._pasts[key] = pi.Past(self._pasts.get(key, pi.Past()).at)

    def _move(self, held: Held, change: float) -> bool:
        """Change a tenant's share; False if it is at the end of its range, or only observed."""
        if held.stepped:
            return self._cut(held)
        if held.grip.share < 1.0 and not self._state.acts:
            return False
        grip = pi.moved(held.grip, change, self._now)
        if grip is held.grip:
            return False
        moved = self._gripped(held, grip)
        # While the cause goes on it may be free for a second at any time, which is no news.
        if held.grip.calm and held.grip.share >= 1.0:
            self._said.held(moved)
        return True

    def _most_important_first(self, these: Iterable[Held]) -> list[Held]:
        """Who was last to be cut comes first; what moves in steps is none of them."""
        latest_first = [h for h in these if not h.stepped][::-1]
        return sorted(latest_first, key=lambda h: self._levers.tenants[h.tenant].level)

    # -- when it has ended ---------------------------------------------------------------------------

    def ease(self, active: set[CauseKey]) -> None:
        """Let go, step by step, of what is held for causes that have ended or are unknown."""
        for held in list(self._held.values()):
            key = held.cause_key
            known = key in self._samples and self._state.tenants_known
            # A card that cannot be read is held where it is (DESIGN 2).
            if key not in active and (known or held.tenant != CARD):
                self._ease(held, known=known)
        self._helpless &= active

    def _ease(self, held: Held, *, known: bool) -> None:
        dwell = self._power_dwell if held.tenant == CARD else self._law.dwell
        value = self._samples.get(held.cause_key) if known else None
        grip = share.ease(held.grip, self._now, self._law, dwell=dwell, value=value)
        if not self._state.acts or share.forgotten(grip, self._now, self._law):
            del self._held[held.key]
        else:
            self._grip(held, grip)

    # -- what comes of it ----------------------------------------------------------------------------

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._said.events)

    def settings(self) -> tuple[Setting, ...]:
        wished = [s for h in self._held.values() for s in self._levers.settings(h)]
        for tenant in self._levers.tenants.values():
            mine = [h for h in self._held.values() if h.tenant == tenant.name]
            wished += beside(mine, tenant, self._state.inventory)
        wished = thawed(wished, self._state)
        known = {s.key for s in wished}
        return (*wished, *(s for s in self._blocked if s.key not in known))

    def _put(self, held: Held) -> None:
        self._held[held.key] = held

    def _grip(self, held: Held, grip: Grip) -> None:
        """Hold it like this, and say where that begins or ends."""
        now = self._gripped(held, grip)
        if held.grip.share >= 1.0 > grip.share:
            self._said.held(now)
        elif held.grip.share < 1.0 <= grip.share:
            self._said.released(now)

    def _gripped(self, held: Held, grip: Grip) -> Held:
        begins = held.grip.calm and grip.share < held.grip.share
        sample = self._samples.get(held.cause_key)
        now = msgspec.structs.replace(held, grip=grip)
        if begins:  # what came of it the last time was under another load
            self._levers.used(held)
            relief = None
            if sample is not None:
                relief = Relief.begun(sample.at, sample.effect, sample.plain_ratio)
            now = msgspec.structs.replace(now, relief=relief, kept_since=None)
        self._put(now)
        return now

    def holds(self) -> tuple[Hold, ...]:
        """Of each tenant and card the tightest grip."""
        tightest: dict[Subject, Held] = {}
        for held in self._held.values():
            known = tightest.get(held.who)
            if known is None or held.left < known.left:
                tightest[held.who] = held
        return tuple(
            Hold(
                subject=who,
                share=held.left,
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
        now = Before.of(self._state)
        return Memory(
            watch=watch,
            acts=self._state.acts,
            held=tuple(self._held.values()),
            origins=relied_on(self._levers.origins, (*in_use, *now.held), self._now),
            before=now,
            futile=self._levers.futile,
            cut_at={
                k: t
                for k, t in self._cut_at.items()
                if k in self._samples or self._now - t < self._law.dwell
            },
            pasts={k: p for k, p in self._pasts.items() if k in self._samples},
            helpless=tuple(sorted(self._helpless)),
            missed=self._levers.missed,
        )
