"""The control loop: read this first.

One pass senses, folds what was sensed into the state, lets every policy decide on that state, merges
the wishes into one plan, hands the plan to the lanes and publishes one immutable snapshot. A pass
comes every `tick` seconds, or sooner when something wakes it, never closer than 50 ms.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gpuagent.act.reconcile import Reconciler
from gpuagent.clock import Clock
from gpuagent.decide.merge import merge
from gpuagent.inbox import Inbox, Letter
from gpuagent.model.lease import Lease
from gpuagent.model.plan import Decision, LoopStats, Plan, Posture, Snapshot
from gpuagent.model.state import Frame, Instant, NodeState, fold
from gpuagent.ports import Policy
from gpuagent.sensing import Sensing

CLOSEST_SECONDS = 0.05


class Recorder(Protocol):
    """Keeps what led to a decision, for the day a policy fails."""

    def before(self, state: NodeState, memories: Mapping[str, Any], frame: Frame) -> None: ...


class Loop:
    """One per agent. Everything it does not compute is given to it."""

    def __init__(
        self,
        *,
        clock: Clock,
        sensing: Sensing,
        policies: Sequence[Policy[Any]],
        reconciler: Reconciler,
        posture: Posture,
        obey: Callable[[Letter], None],
        leases: Callable[[Instant], tuple[Lease, ...]],
        publish: Callable[[Snapshot], None],
        recorder: Recorder,
        tick_seconds: float,
    ) -> None:
        """`leases` are the overrides in force at an instant."""
        self.posture = posture
        self.policies = tuple(policies)
        self.tick_seconds = tick_seconds
        self.inbox = Inbox(self.wake)
        self._clock = clock
        self._sensing = sensing
        self._reconciler = reconciler
        self._obey = obey
        self._leases = leases
        self._publish = publish
        self._recorder = recorder
        self._state = NodeState(clock.now())
        self._memories: dict[str, Any] = {}
        self._woken = asyncio.Event()
        self._look_again: float | None = None
        self._stats = LoopStats()

    def wake(self, why: str) -> None:
        """Ask for a pass at once. `why` is for people reading the call."""
        self._woken.set()

    async def run(self) -> None:
        """Tick until cancelled. A policy that raises ends the process; the ledger makes that safe."""
        try:
            while True:
                began = self._clock.now()
                await self.tick()
                await self._rest(began.mono)
        finally:
            await self.close()

    async def close(self) -> None:
        """End the readings that are still going on. Part of `run`."""
        await self._sensing.close()

    async def tick(self) -> Snapshot:
        """One pass."""
        now = self._clock.now()
        for letter in self.inbox.drain():
            self._obey(letter)
        sensed = await self._sensing.read(now, self._state)
        frame = Frame(
            now,
            sensed,
            outcomes=self._reconciler.outcomes(),
            health=self._sensing.health,
            acts=self.posture.acts,
            leases=self._leases(now),
        )
        self._recorder.before(self._state, self._memories, frame)
        self._state = fold(self._state, frame)
        decisions = self._decide(self._state)
        plan = merge((s for d in decisions for s in d.settings), self._state)
        complete = self._state.cards_known and all(d.complete for d in decisions)
        await self._reconciler.drive(plan, posture=self.posture, now=now, complete=complete)
        return self._tell(now, plan, decisions)

    def _decide(self, state: NodeState) -> list[Decision]:
        decisions = []
        for policy in self.policies:
            memory = self._memories.get(policy.name, None)
            memory = policy.begin() if memory is None else memory
            self._memories[policy.name], decision = policy.decide(memory, state)
            decisions.append(decision)
        times = [d.look_again for d in decisions if d.look_again is not None]
        self._look_again = min(times, default=None)
        return decisions

    def _tell(self, now: Instant, plan: Plan, decisions: Sequence[Decision]) -> Snapshot:
        took = self._clock.now().mono - now.mono
        self._stats = msgspec.structs.replace(
            self._stats, ticks=self._stats.ticks + 1, tick_seconds=took
        )
        outcomes = {(o.knob, o.subject): o for o in self._reconciler.outcomes()}
        snapshot = Snapshot(
            state=self._state,
            posture=self.posture,
            plan=plan,
            outcomes=outcomes,
            holds=tuple(h.with_effect(outcomes) for d in decisions for h in d.holds),
            causes=tuple(c for d in decisions for c in d.causes),
            actions=dict(self._reconciler.actions),
            outside_changes=dict(self._reconciler.outside_changes),
            events=(*self._state.events, *(e for d in decisions for e in d.events)),
            stats=self._stats,
        )
        self._publish(snapshot)
        return snapshot

    async def _rest(self, began: float) -> None:
        """Until the next tick is due or something wakes us, but at least 50 ms after the last."""
        due = began + self.tick_seconds
        if self._look_again is not None:
            due = min(due, self._look_again)
        closest = began + CLOSEST_SECONDS
        now = self._clock.now().mono
        late = now - due
        due = max(due, closest, now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(due - now):
                await self._woken.wait()
        self._woken.clear()
        now = self._clock.now().mono
        # A tick that took longer than it may is as late as it overran, not on time again.
        lag = max(now - due, late, 0.0)
        self._stats = msgspec.structs.replace(self._stats, lag_seconds=lag)
        if now < closest:
            await self._clock.sleep(closest - now)
