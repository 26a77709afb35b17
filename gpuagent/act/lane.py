"""A lane carries out the latest order for one target, one step at a time.

A step reads the real value and writes only a difference:

    look ─> ours? ─> encode ─> so already? ─> contested? ─> may it rise?
         ─> ledger.intend ─> look again ─> set ─> look ─> ledger.confirm

What somebody else wrote since our last write ends our hold: it becomes the original of the next
one, so that putting back never undoes another's change. What reads back right after our own write
counts as ours, since that is how a target rounds; a change by another within those milliseconds is
therefore taken for ours.
"""

from gpuagent.act.adopted import GRACE_SECONDS
from gpuagent.act.contest import Contest
from gpuagent.act.desk import Desk, Order, for_budget, said
from gpuagent.act.lingering import identified, let_go
from gpuagent.act.record import Entry, Target
from gpuagent.act.restore import believed, ends_with_its_target, return_original
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.audit import Action
from gpuagent.model.declare import Knob
from gpuagent.model.state import ActionResult, Outcome, Result
from gpuagent.ports import Actuator, Real

SLOW_SECONDS = 3.0
"""A step that takes longer is reported as in flight, whatever its target showed before."""
_TRIES = 3
_FLOAT_ERROR = 1e-6
_HELD = "held from before the crash"
_KEPT = (
    f"kept from before the crash until a first complete decision, for {GRACE_SECONDS:g} s at most"
)
_PAUSES: dict[type[AgentError], tuple[float, float]] = {
    Unavailable: (1.0, 10.0),
    Refused: (5.0, 60.0),
    Gone: (5.0, 60.0),
    Unsupported: (60.0, 600.0),
}
"""First and longest pause, in seconds, before a failed step is tried again; it doubles between."""


class Lane:
    """One target: its order, its outcome, and the memory of its failures and contests."""

    def __init__(self, target: Target, actuator: Actuator, desk: Desk) -> None:
        self.target = target
        self.order = Order()
        self.outcome: Outcome | None = None
        self.waits = False
        """Whether a raise stands back until the cuts of others are verified."""
        self.bound = float("inf")
        """The highest value the target may have now, writes not yet verified included."""
        self.busy_since: float | None = None
        self._actuator = actuator
        self._desk = desk
        self._contest = Contest()
        self._real: Real | None = None
        self._rounded: tuple[str, str] | None = None
        """Our last write and what it reads as, where the target rounds."""
        self._due_at = float("-inf")
        self._failures = 0
        self._told: tuple[Result | None, float | None] = (None, None)

    @property
    def knob(self) -> Knob:
        return self._actuator.knob

    @property
    def over(self) -> bool:
        """Whether the target may now have more than its order allows. Only for orders that write."""
        assert self.order.setting is not None
        # A float that is not quite a whole milliwatt would be over for ever.
        return self.bound > self.order.setting.value + _FLOAT_ERROR

    def give(self, order: Order) -> None:
        """Take the latest order; whatever was ordered before counts no more."""
        before, self.order = self.order, order
        if order.essence == before.essence:
            return
        if order.direction != before.direction:
            self._failures = 0
        if self._failures:
            return
        self._due_at = float("-inf")
        if order.writes or self._entry is not None:
            self.outcome = self._outcome(order, "in flight", "has just been ordered")

    def due(self, now: float) -> bool:
        return now >= self._due_at

    def forgettable(self, now: float) -> bool:
        """Nothing ordered, nothing held, and nothing that must be remembered."""
        idle = self.order.setting is None and self._entry is None and self.busy_since is None
        return idle and not self._contest.remembers(now)

    def told(self, now: float) -> Outcome | None:
        """The outcome as it stands at this moment."""
        late = 0.0 if self.busy_since is None else now - self.busy_since
        if late <= SLOW_SECONDS or (self.outcome is None and self._entry is None):
            return self.outcome
        return self._outcome(self.order, "in flight", f"no answer for {late:.0f} s")

    async def run(self) -> None:
        """Steps until the latest order has been dealt with. Bugs only are raised."""
        try:
            while True:
                order = self.order
                self.busy_since = self._now
                outcome = await self._step(order)
                if not self._superseded(order):
                    break
                if self._desk.closed or (
                    self._failures and self.order.direction == order.direction
                ):
                    break
        finally:
            self.busy_since = None
        self.outcome = outcome
        self._tell_change(self.order, outcome)

    # -- steps ---------------------------------------------------------------------------------------

    async def _step(self, order: Order) -> Outcome | None:
        self.waits = False
        try:
            outcome = await self._carry_out(order)
        except (Gone, Refused, Unsupported, Unavailable) as error:
            return self._failed(order, await believed(self._actuator, self._entry, error))
        self._failures = 0
        self._due_at = self._now + self.knob.verify_seconds
        return outcome

    async def _carry_out(self, order: Order) -> Outcome | None:
        if order.writes:
            return await self._apply(order)
        entry = self._entry
        if entry is not None and order.keep:
            entry = await self._entry_unless_changed(order, await self._look(order))
            if entry is not None and order.setting is None:
                return self._outcome(order, "applied", _KEPT if order.acts else _HELD)
        elif entry is not None:
            await self._put_back(order, entry)
            entry = None
        if order.setting is None:
            return None
        await self._look(order)
        blocked = order.setting.blocked
        if blocked is not None:
            return self._outcome(order, blocked.result, blocked.why)
        return self._outcome(
            order, "would", order.passive if entry is None else f"{order.passive}; it is {_HELD}"
        )

    async def _apply(self, order: Order) -> Outcome:
        for _ in range(_TRIES):
            real = await self._look(order)
            if not self.order.writes:
                break
            order, setting = self.order, self.order.setting  # it may have taken a while
            assert setting is not None
            entry = await self._entry_unless_changed(order, real)
            original = entry.original if entry is not None else real
            want = self._actuator.encode(setting.subject, setting.value, original)
            if self._is_so(real, want):
                return self._as_wished(order, real, want)
            if not self._contest.may_write(self._now, setting.rule):
                return self._outcome(order, *self._contest.says(real.raw))
            if self._looser(want, real) and (reason := self._must_not_rise_yet()):
                return self._outcome(order, "in flight", reason)
            if entry is not None and want.raw == original.raw:
                await self._put_back(order, entry)
                continue
            await self._announce(order, original, want)
            if self._overtaken(original, real, want):
                break
            if (await self._look(order)).raw != real.raw:
                continue
            if not (self._looser(want, real) and self._must_not_rise_yet()):
                return await self._write(order, real, want)
        return self._outcome(order, "in flight", "it changed while it was about to be written")

    async def _announce(self, order: Order, original: Real, want: Real) -> None:
        assert order.setting is not None
        subject = order.setting.subject
        identity = await identified(self._actuator, subject, self._entry)
        await self._desk.ledger.intend(
            knob=self.knob,
            subject=subject,
            identity=identity,
            original=original,
            write=want,
            rule=order.setting.purpose,
            budget=for_budget(self._actuator, order.setting, original),
        )

    async def _write(self, order: Order, real: Real, want: Real) -> Outcome:
        setting = order.setting
        assert setting is not None
        self._contest.writing(self._now)
        self._rounded = None
        self.bound = max(self.bound, want.value)
        await self._actuator.set(setting.subject, want.raw)
        back = await self._look(order)
        if back.raw == real.raw:
            # Some drivers take a moment; one that never takes it has refused without saying so.
            kind = Refused if self._failures else Unavailable
            raise kind(f"{want.raw} was written, but it still reads {back.raw}")
        self._desk.ledger.confirm(self.target, back)
        if not self._close(back, want):
            raise Refused(f"{want.raw} was written, but it reads back as {back.raw}")
        if back.raw != want.raw:
            self._rounded = (want.raw, back.raw)
        done: Result = "pending" if self.knob.launch else "applied"
        self._audit(order, "set", done, setting.why, before=real.raw, wrote=want.raw)
        return self._as_wished(order, back, want)

    async def _put_back(self, order: Order, entry: Entry) -> None:
        self.bound = max(self.bound, entry.original.value)
        returned = await return_original(self._actuator, entry, must_wait=self._must_not_rise_yet)
        self._real = returned.after
        self.bound = returned.after.value
        self._desk.ledger.done(self.target, returned.what, returned.why)
        self._audit(
            order,
            returned.what,
            returned.what,
            returned.why,
            before=returned.before.raw,
            wrote=entry.original.raw if returned.before != returned.after else "",
            entry=entry,
        )

    # -- judgements ----------------------------------------------------------------------------------

    async def _entry_unless_changed(self, order: Order, real: Real) -> Entry | None:
        """The entry while the value is ours. Somebody else's ends the hold, and is the original."""
        entry = self._entry
        if entry is None or entry.explains(real, self.knob.deadband):
            return entry
        await let_go(self._actuator, entry)
        owner = await self._actuator.owner(entry.subject)
        why = f"somebody else has set it to {real.raw}"
        self._contest.changed(owner)
        self._rounded = None
        self._desk.ledger.done(self.target, "left alone", why)
        self._audit(order, "left alone", "left alone", why, before=real.raw, entry=entry)
        return None

    def _is_so(self, real: Real, want: Real) -> bool:
        if real.raw == want.raw or self._rounded == (want.raw, real.raw):
            return True
        if self.knob.budgeted and self._looser(real, want):
            return False  # many small excesses add up to one over the budget
        return self._close(real, want)

    def _close(self, one: Real, other: Real) -> bool:
        return one.value == other.value or abs(one.value - other.value) < self.knob.deadband

    def _looser(self, one: Real, other: Real) -> bool:
        return one.value != other.value and (
            self.knob.safest(one.value, other.value) == other.value
        )

    def _must_not_rise_yet(self) -> str:
        """Why a raise must stand back, so that no sum exceeds its budget; empty if it need not."""
        reason = self._desk.must_wait(self.target) if self.knob.budgeted else ""
        self.waits = bool(reason)
        return reason

    def _overtaken(self, original: Real, real: Real, want: Real) -> bool:
        """Whether the latest order forbids the write that has just been announced.

        That it is another order alone does not: on a slow disk each would be overtaken by the next,
        and nothing would ever be written.
        """
        setting = self.order.setting
        if self._desk.closed or not self.order.writes or setting is None:
            return True
        most = self._actuator.encode(setting.subject, setting.value, original)
        return self._looser(want, real) and self._looser(want, most)

    def _superseded(self, order: Order) -> bool:
        return self._desk.closed or self.order.essence != order.essence

    def _as_wished(self, order: Order, real: Real, want: Real) -> Outcome:
        entry, setting, reads = self._entry, order.setting, said(self.knob, real)
        assert setting is not None
        if self._rounded == (want.raw, real.raw):
            self.bound = min(self.bound, want.value)
        if entry is not None:
            budget = for_budget(self._actuator, setting, entry.original)
            self._desk.ledger.serve(self.target, setting.purpose, budget)
        if self._contest.owner:
            return self._outcome(order, "applied", f"it reads {reads}; {self._contest.undone}")
        if self.knob.launch:
            later = f"the next launch gets {real.raw}; what runs keeps what it started with"
            return self._outcome(order, "pending", later)
        # Less than that is how the target rounds, which is nobody's concern.
        tighter = setting.value - want.value >= self.knob.deadband
        if tighter and want.value == real.value:
            return self._outcome(order, "applied", f"it reads {reads}, tighter than wished")
        return self._outcome(order, "applied", f"it reads {reads}")

    def _failed(self, order: Order, error: AgentError) -> Outcome | None:
        first, longest = next(p for kind, p in _PAUSES.items() if isinstance(error, kind))
        self._due_at = self._now + min(longest, first * 2.0 ** min(self._failures, 10))
        self._failures += 1
        entry = self._entry
        if isinstance(error, Gone):
            self.bound = float("-inf")
            if entry is not None and ends_with_its_target(entry):
                self._desk.ledger.done(self.target, "gone", str(error))
                if order.setting is None:
                    self._audit(order, "left alone", "gone", str(error), entry=entry)
            if self._entry is None and order.setting is None:
                return None
            return self._outcome(order, "gone", str(error))
        if isinstance(error, Unavailable):
            watches = entry is None and not order.writes and order.setting is not None
            return self._outcome(order, "would" if watches else "in flight", str(error))
        return self._outcome(order, "refused", str(error))

    # -- words ---------------------------------------------------------------------------------------

    async def _look(self, order: Order) -> Real:
        entry = self._entry
        subject = order.setting.subject if order.setting is not None else None
        self._real = await self._actuator.get(subject or (entry or self.target).subject)
        self.bound = self._real.value
        return self._real

    @property
    def _now(self) -> float:
        return self._desk.clock.now().mono

    @property
    def _entry(self) -> Entry | None:
        return self._desk.ledger.held(self.target)

    def _outcome(self, order: Order, result: Result, why: str) -> Outcome:
        entry, setting = self._entry, order.setting
        subject = setting.subject if setting is not None else (entry or self.target).subject
        putting_back = entry is not None and not order.writes and not order.keep
        return Outcome(
            knob=self.knob,
            subject=subject,
            wanted=None if setting is None or putting_back else setting.value,
            real=None if self._real is None else self._real.value,
            original=None if entry is None else entry.original.value,
            result=result,
            why=why,
            at=self._now,
        )

    def _tell_change(self, order: Order, outcome: Outcome | None) -> None:
        """Into the audit log: what did not come to a write, once for each change of it."""
        result, wanted = (None, None) if outcome is None else (outcome.result, outcome.wanted)
        before, self._told = self._told, (result, wanted)
        moved = wanted != before[1] and (
            wanted is None or before[1] is None or abs(wanted - before[1]) >= self.knob.deadband
        )
        if (
            outcome is None
            or result is None
            or result in {"applied", "in flight", "pending"}
            or (result == before[0] and not moved)
        ):
            return
        did = "would set" if result == "would" else "not set"
        self._audit(order, did, result, outcome.why)

    def _audit(
        self,
        order: Order,
        did: str,
        result: ActionResult,
        why: str,
        *,
        before: str = "",
        wrote: str = "",
        entry: Entry | None = None,
    ) -> None:
        """Count one action and write it down."""
        self._desk.count(self.knob.name, result)
        setting, entry = order.setting, entry or self._entry
        self._desk.audit.record(
            Action(
                wall=self._desk.clock.now().wall,
                knob=self.knob.name,
                subject=setting.subject if setting else (entry or self.target).subject,
                did=did,
                result=result,
                why=why,
                rule=setting.rule if setting else "",
                before=before,
                wrote=wrote,
                after=self._real.raw if self._real is not None else "",
                original=entry.was.raw if entry is not None else "",
                numbers=setting.numbers if setting else (),
            )
        )
