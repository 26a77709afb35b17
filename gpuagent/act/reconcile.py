"""Hands the latest plan to the lanes and tells what became of it.

Level-triggered: what counts is the difference between the latest plan and the host, never the
history of plans. Every target has a lane; a lane that has something to do is one task, and a lane
whose target is slow holds up nobody, except that where a budget bounds the sum over all targets
(`Knob.budgeted`), a raise waits until every cut of the plan has been read back.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from gpuagent.act.adopted import GRACE_SECONDS, Adopted
from gpuagent.act.audit import AuditLog
from gpuagent.act.desk import Desk, Order, Reach
from gpuagent.act.lane import Lane
from gpuagent.act.ledger import Ledger
from gpuagent.act.record import Target, target_of
from gpuagent.act.restore import Report
from gpuagent.clock import Clock, patiently
from gpuagent.model.plan import Plan, Posture, Setting
from gpuagent.model.state import Instant, Outcome
from gpuagent.ports import Actuator, Wake

_BROKEN_OFF_SECONDS = 1.0
QUICK_SECONDS = 0.02
"""How long `drive` waits for lanes, so that plain file writes are done within their tick."""


class Reconciler:
    """The only one who changes the host while the daemon runs. A `Service`: `run` owns the lanes."""

    def __init__(
        self,
        *,
        actuators: Sequence[Actuator],
        ledger: Ledger,
        audit: AuditLog,
        clock: Clock,
        wake: Wake,
    ) -> None:
        self._actuators = {a.knob.name: a for a in actuators}
        self._desk = Desk(ledger=ledger, audit=audit, clock=clock, must_wait=self._must_wait)
        self._wake = wake
        self._lanes: dict[Target, Lane] = {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._driving = False
        self._unturnable: tuple[Outcome, ...] = ()
        self._adopted = Adopted()
        self.reach = Reach()
        """Taken into account from the next `drive` on."""

    @property
    def actions(self) -> Mapping[tuple[str, str], int]:
        """Actions since start by knob and result: every pair of `KNOBS` and `ACTION_RESULTS`."""
        return MappingProxyType(self._desk.actions)

    @property
    def outside_changes(self) -> Mapping[str, int]:
        """How often somebody else has changed a value of ours, by knob."""
        return MappingProxyType(self._desk.outside_changes)

    async def run(self) -> None:
        """Until cancelled. An error that is none of `errors.py` is a bug, and raised."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for lane in self._lanes.values():
                    self._start(lane)
                await asyncio.Event().wait()
            finally:
                self._group = None

    # -- what the loop asks --------------------------------------------------------------------------

    async def drive(
        self, plan: Plan, *, posture: Posture, now: Instant, complete: bool = False
    ) -> tuple[Outcome, ...]:
        """Make the host as the plan says, or, unless the posture acts, only say what would be done.

        What is held and no longer wished is put back, and all that is held unless the posture acts;
        but see `adopt`. `complete` says that the plan was made in view of all cards, so that what it
        does not wish is not wished. Waits at most `QUICK_SECONDS`; what takes longer goes on and
        wakes the loop. Returns `outcomes()`.
        """
        if self._desk.closed:
            return self.outcomes()
        if self._group is None:
            await asyncio.sleep(0)  # `run` was asked for a moment ago and has not begun yet
        self._give(plan, posture=posture, now=now, complete=complete)
        busy = set(self._tasks.values())
        for lane in list(self._lanes.values()):
            if lane.due(now.mono):
                self._start(lane)
        await self._quick(busy)
        for target in [t for t, lane in self._lanes.items() if lane.forgettable(now.mono)]:
            if target not in self._tasks:
                del self._lanes[target]
        return self.outcomes()

    def outcomes(self) -> tuple[Outcome, ...]:
        """One for every target that is wished or held, as it stands now."""
        now = self._desk.clock.now().mono
        told = (lane.told(now) for lane in self._lanes.values())
        return (*(o for o in told if o is not None), *self._unturnable)

    def adopt(self, report: Report, *, now: Instant) -> None:
        """Take over what `put_back` kept at the start, and count what it did.

        A value that was kept stays until a plan wishes it, a complete one does not, or
        `GRACE_SECONDS` have passed. While the agent only observes because it has crashed too often
        it stays for as long as it is wished. A pause, or being told to observe, puts it back.
        """
        kept = [i.entry.target for i in report if i.what in {"adopted", "held"}]
        self._adopted = Adopted(kept, acting_until=now.mono + GRACE_SECONDS)
        for target in kept:
            # Told from now on, so that the first decision knows the originals.
            if (lane := self._lane(target)) is not None:
                lane.give(Order(keep=True))
        for item in report:
            self._desk.count(item.entry.knob, item.ended)

    async def settled(self) -> None:
        """Until no lane has anything to do, as far as nothing new is ordered."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self, seconds: float = 5.0) -> frozenset[Target]:
        """Begin nothing more, and wait at most so long for what has begun.

        Then what nothing undoes is broken off, and what may take longer to be put back
        (`Knob.put_back_seconds`) is waited for. Returns `busy`.
        """
        self._desk.closed = True
        await patiently(self.settled(), seconds)
        knobs = {task: self._actuators[target.knob].knob for target, task in self._tasks.items()}
        for task in (final := {task for task, knob in knobs.items() if knob.final}):
            task.cancel()
        if final:
            await asyncio.wait(final, timeout=_BROKEN_OFF_SECONDS)
        slow = {task for task, k in knobs.items() if k.put_back_seconds > seconds and not k.final}
        if slow:
            await asyncio.wait(slow, timeout=max(knobs[task].put_back_seconds for task in slow))
        return self.busy

    @property
    def busy(self) -> frozenset[Target]:
        """The targets whose lanes have not come back: for `put_back(busy=...)`."""
        return frozenset(self._tasks)

    # -- orders --------------------------------------------------------------------------------------

    def _give(self, plan: Plan, *, posture: Posture, now: Instant, complete: bool) -> None:
        wishes, unturnable = self._by_target(plan.settings)
        self._unturnable = tuple(self._cannot(s, now) for s in unturnable)
        kept = self._adopted.kept(wishes.keys(), posture=posture, complete=complete, now=now.mono)
        for target in {*wishes, *self._lanes, *self._desk.ledger.entries}:
            if (lane := self._lane(target)) is not None:
                lane.give(self._order(wishes.get(target), posture, keep=target in kept))

    def _order(self, setting: Setting | None, posture: Posture, *, keep: bool) -> Order:
        beyond = self.reach.beyond(setting)
        if posture.acts and beyond:
            return Order(setting, acts=False, keep=keep, passive=beyond)
        return Order(setting, acts=posture.acts, keep=keep)

    def _lane(self, target: Target) -> Lane | None:
        """The target's lane; None for an entry of another version, which `put_back` reports."""
        actuator = self._actuators.get(target.knob)
        if target not in self._lanes and actuator is not None:
            self._lanes[target] = Lane(target, actuator, self._desk)
        return self._lanes.get(target)

    def _by_target(
        self, settings: Iterable[Setting]
    ) -> tuple[dict[Target, Setting], list[Setting]]:
        """At most one setting a target, the safer one; and those that no actuator here can turn."""
        wishes: dict[Target, Setting] = {}
        unturnable = []
        for setting in settings:
            if setting.knob.name not in self._actuators:
                unturnable.append(setting)
                continue
            target = target_of(setting.knob, setting.subject)
            other = wishes.get(target)
            if other is None or setting.knob.safest(setting.value, other.value) != other.value:
                wishes[target] = setting
        return wishes, unturnable

    def _cannot(self, setting: Setting, now: Instant) -> Outcome:
        return Outcome(
            knob=setting.knob,
            subject=setting.subject,
            wanted=setting.value,
            real=None,
            original=None,
            result="refused",
            why="nothing here can turn this knob",
            at=now.mono,
        )

    # -- lanes ---------------------------------------------------------------------------------------

    def _start(self, lane: Lane) -> "asyncio.Task[None] | None":
        """Let a lane run, unless it does already: then it sees its latest order by itself."""
        if self._group is None or lane.target in self._tasks or self._desk.closed:
            return None
        task = self._group.create_task(self._run(lane), name=str(lane.target))
        self._tasks[lane.target] = task
        return task

    async def _run(self, lane: Lane) -> None:
        before = lane.outcome
        try:
            await lane.run()
        finally:
            del self._tasks[lane.target]
        self._kick_waiting(lane)
        after = lane.outcome
        if not self._driving and _essence(before) != _essence(after):
            self._wake(f"{lane.target}: {'put back' if after is None else after.result}")

    async def _quick(self, busy: set["asyncio.Task[None]"]) -> None:
        """Wait a moment for the lanes that are not `busy` since before, freed raises included."""
        loop = asyncio.get_running_loop()
        until = loop.time() + QUICK_SECONDS
        self._driving = True
        try:
            while fresh := set(self._tasks.values()) - busy:
                left = until - loop.time()
                if left <= 0:
                    break
                await asyncio.wait(fresh, timeout=left)
        finally:
            self._driving = False

    def _kick_waiting(self, done: Lane) -> None:
        """Raises that wait look again whenever another lane of their knob has finished."""
        if not done.knob.budgeted:
            return
        for lane in self._lanes.values():
            alike = lane.knob is done.knob and lane is not done
            if alike and lane.waits and not self._must_wait(lane.target):
                self._start(lane)

    def _must_wait(self, target: Target) -> str:
        """For which cut a raise of this target waits; empty for none.

        A put-back is a raise too: while the plan serves a budget it waits as well, else it does not,
        so that no cut that fails can keep us from letting go.
        """
        cuts = [
            lane
            for lane in self._lanes.values()
            if lane.target.knob == target.knob and lane.target != target and lane.order.writes
        ]
        if not self._lanes[target].order.writes and not any(c.order.budgets for c in cuts):
            return ""
        over = next((c for c in cuts if c.over), None)
        return f"waits for the cut of {over.target.subject} to be verified" if over else ""


def _essence(outcome: Outcome | None) -> tuple[object, ...]:
    return () if outcome is None else (outcome.result, outcome.wanted, outcome.why)
