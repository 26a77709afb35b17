"""Suspending processes: one at a time, in order, and resumed after every kind of end."""

import asyncio
import contextlib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, Report, put_back
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Rank, Suspensions, Turns
from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.model.inventory import Inventory, Level, Process, Subject, Tenant, on_process
from gpuagent.model.vocab import SUSPENDED
from gpuagent.ports import Real
from tests.act.host import Agent, Clock, Inline, wish

LEVELS = {"serve": Level.L1, "batch": Level.L2, "train": Level.L3, "sweep": Level.L3}
TRAIN, SWEEP, BATCH = (
    on_process("train", 30, 1),
    on_process("sweep", 40, 1),
    on_process("batch", 20, 1),
)


class Gpu:
    """`ports.Checkpoint`, and the `Ender` that knows who lives. One call at a time, or it fails."""

    def __init__(self, *subjects: Subject) -> None:
        self.states: dict[int, Literal["runs", "locked", "suspended"]] = {
            s.pid: "runs" for s in subjects
        }
        self.errors: dict[str, AgentError] = {}
        """By "suspend 30" or "resume 30"."""
        self.leaves: dict[int, Literal["runs", "locked", "suspended"]] = {}
        """How an attempt that fails leaves a process."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.did: list[str] = []
        self._inside = False

    async def alive(self, pid: int, started: int) -> bool:
        return pid in self.states and started == 1

    async def state(self, pid: int, started: int) -> Literal["runs", "locked", "suspended"]:
        with self._alone():
            await asyncio.sleep(0)
            if pid not in self.states:
                raise Gone(f"process {pid} has ended")
            return self.states[pid]

    async def suspend(self, pid: int, started: int) -> None:
        await self._do("suspend", pid, "suspended")

    async def resume(self, pid: int, started: int) -> None:
        await self._do("resume", pid, "runs")

    async def _do(self, what: str, pid: int, to: Literal["runs", "suspended"]) -> None:
        with self._alone():
            await self.gate.wait()
            self.did.append(f"{what} {pid}")
            if error := self.errors.get(f"{what} {pid}"):
                self.states[pid] = self.leaves.get(pid, self.states[pid])
                raise error
            self.states[pid] = to

    def _alone(self) -> "contextlib._GeneratorContextManager[None]":
        return self._enter()

    @contextlib.contextmanager
    def _enter(self):  # type: ignore[no-untyped-def]
        assert not self._inside, "two calls at once"
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    # What else an Ender can do is none of this knob's business.
    async def catches(self, pid: int, started: int, signal: int) -> bool:
        return False

    async def send(self, pid: int, started: int, signal: int) -> None:
        raise Refused("not here")

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        return False

    async def run_as(self, uid: int, command: object, seconds: float, **more: object) -> None:
        raise Refused("not here")


def inventory(*l1: int) -> Inventory:
    processes = tuple(Process(pid, 1, 1, 0, "u", "p", "/p", "") for pid in l1)
    return Inventory(tenants=(Tenant("serve", Level.L1, processes=processes),))


def knob(gpu: Gpu, clock: Clock | None = None, seen: Inventory | None = None) -> Suspend:
    suspensions = Suspensions(gpu, level=lambda name: LEVELS[name], clock=clock or Clock())
    return Suspend(suspensions, ender=gpu, seen=lambda: inventory() if seen is None else seen)


async def test_a_process_is_suspended_and_resumed(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        await agent.reconciler.settled()
        assert gpu.states == {30: "suspended"}
        told = await agent.tick(wish(SUSPENDED, TRAIN, 1))
        assert told[SUSPENDED, TRAIN].result == "applied"
        await agent.tick()
        await agent.reconciler.settled()
        assert gpu.states == {30: "runs"}
        assert not agent.ledger.entries
    assert gpu.did == ["suspend 30", "resume 30"]


async def test_a_renamed_tenant_changes_nothing(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with Agent(tmp_path, knob(gpu)) as agent:
        for subject in (TRAIN, on_process("sweep", 30, 1)):
            await agent.tick(wish(SUSPENDED, subject, 1))
            await agent.reconciler.settled()
    assert gpu.did == ["suspend 30"]


async def after_a_crash(folder: Path, gpu: Gpu, occasion: Occasion = Occasion.CRASH) -> Report:
    ledger = Ledger(str(folder), boot="b1", executor=Inline())
    try:
        return await put_back(
            ledger=ledger, actuators=[knob(gpu)], occasion=occasion, clock=Clock()
        )
    finally:
        await ledger.close()


@pytest.mark.parametrize("occasion", [Occasion.CRASH, Occasion.RESCUE, Occasion.BY_HAND])
async def test_after_kill_9_a_new_process_resumes_all_in_order(
    tmp_path: Path, occasion: Occasion
) -> None:
    gpu = Gpu(TRAIN, SWEEP, BATCH)
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(*(wish(SUSPENDED, s, 1) for s in (TRAIN, SWEEP, BATCH)))
        await agent.reconciler.settled()
        assert set(gpu.states.values()) == {"suspended"}
        await agent.die()
    gpu.did.clear()
    report = await after_a_crash(tmp_path, gpu, occasion)
    assert [i.what for i in report] == ["put back"] * 3
    assert gpu.did == ["resume 20", "resume 30", "resume 40"]
    assert set(gpu.states.values()) == {"runs"}


@pytest.mark.parametrize("left", ["runs", "locked", "suspended"])
async def test_a_crash_within_the_suspension_is_undone(
    tmp_path: Path, left: Literal["runs", "locked", "suspended"]
) -> None:
    gpu = Gpu(TRAIN)
    gpu.gate.clear()
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        await agent.die()
    gpu.gate.set()
    await asyncio.sleep(0)
    gpu.states[30] = left
    (item,) = await after_a_crash(tmp_path, gpu)
    assert (item.what, gpu.states[30]) == ("put back", "runs")


async def test_one_that_has_ended_or_is_another_is_gone(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        await agent.reconciler.settled()
        await agent.die()
    del gpu.states[30]
    (item,) = await after_a_crash(tmp_path, gpu)
    assert item.what == "gone"
    assert await after_a_crash(tmp_path, gpu) == ()


async def test_what_somebody_else_has_suspended_stays_so(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN, SWEEP)
    gpu.states = {30: "suspended", 40: "locked"}
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, SWEEP, 1))
        await agent.tick()
        await agent.reconciler.settled()
    assert (gpu.did, gpu.states) == ([], {30: "suspended", 40: "locked"})


async def test_a_lock_that_an_attempt_has_left_is_undone_when_it_is_let_go(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    gpu.errors["suspend 30"], gpu.leaves[30] = Unavailable("it is locked"), "locked"
    async with Agent(tmp_path, knob(gpu)) as agent:
        told = await agent.tick(wish(SUSPENDED, TRAIN, 1))
        assert (told[SUSPENDED, TRAIN].result, gpu.states[30]) == ("in flight", "locked")
        await agent.tick(seconds=15)
        await agent.reconciler.settled()
        assert gpu.states[30] == "runs"
        assert not agent.ledger.entries
        assert not agent.reconciler.outside_changes[SUSPENDED.name]


async def test_a_resumption_without_room_is_tried_again_and_keeps_its_place(tmp_path: Path) -> None:
    gpu, clock = Gpu(TRAIN, SWEEP, BATCH), Clock()
    async with Agent(tmp_path, knob(gpu, clock), clock=clock) as agent:
        await agent.tick(*(wish(SUSPENDED, s, 1) for s in (TRAIN, SWEEP, BATCH)))
        await agent.reconciler.settled()
        gpu.errors["resume 20"] = Unavailable("waits for device memory")
        gpu.did.clear()
        for _ in range(20):
            told = await agent.tick()
            await agent.reconciler.settled()
        assert told[SUSPENDED, BATCH].result == "in flight"
        assert "waits for device memory" in told[SUSPENDED, BATCH].why
        assert "process 20 is to be resumed first" in told[SUSPENDED, TRAIN].why
        assert set(gpu.did) == {"resume 20"}
        assert len(gpu.did) > 2
        del gpu.errors["resume 20"]
        for _ in range(20):
            await agent.tick()
            await agent.reconciler.settled()
        assert set(gpu.states.values()) == {"runs"}
        assert gpu.did[-3] == "resume 20"


async def test_one_that_wants_room_and_ends_makes_way(tmp_path: Path) -> None:
    gpu, clock = Gpu(TRAIN, BATCH), Clock()
    dial = knob(gpu, clock)
    gpu.states = {30: "suspended", 20: "suspended"}
    gpu.errors["resume 20"] = Unavailable("no room")
    with pytest.raises(Unavailable, match="no room"):
        await dial.set(BATCH, "runs")
    with pytest.raises(Unavailable, match="process 20 is to be resumed first"):
        await dial.set(TRAIN, "runs")
    gpu.errors["resume 20"] = Gone("process 20 has ended")
    with pytest.raises(Gone):
        await dial.set(BATCH, "runs")
    await dial.set(TRAIN, "runs")
    assert gpu.states[30] == "runs"


async def test_a_place_is_not_kept_for_ever() -> None:
    gpu, clock = Gpu(TRAIN, BATCH), Clock()
    dial = knob(gpu, clock)
    gpu.errors["resume 20"] = Unavailable("no room")
    with pytest.raises(Unavailable, match="no room"):
        await dial.set(BATCH, "runs")
    clock.mono += 31
    await dial.set(TRAIN, "runs")
    assert gpu.did == ["resume 20", "resume 30"]


async def test_a_caller_that_no_longer_waits_stops_nothing(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    dial = knob(gpu)
    gpu.gate.clear()
    task = asyncio.create_task(dial.set(TRAIN, "suspended"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asked = asyncio.create_task(dial.get(TRAIN))
    await asyncio.sleep(0)
    assert not asked.done()
    gpu.gate.set()
    assert await asked == Real(1.0, "suspended")


async def test_a_stop_waits_for_what_is_under_way_and_resumes_it(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    gpu.gate.clear()
    async with Agent(tmp_path, knob(gpu)) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        closing = asyncio.create_task(agent.reconciler.close(0.01))
        await asyncio.sleep(0.05)
        assert not closing.done()
        gpu.gate.set()
        assert await closing == frozenset()
        report = await put_back(
            ledger=agent.ledger,
            actuators=agent.actuators,
            occasion=Occasion.STOP,
            clock=agent.clock,
            busy=agent.reconciler.busy,
        )
    assert [i.what for i in report] == ["put back"]
    assert gpu.did == ["suspend 30", "resume 30"]


async def test_suspensions_come_first_and_from_below() -> None:
    gpu = Gpu(TRAIN, SWEEP, BATCH)
    gpu.states = {30: "runs", 40: "runs", 20: "suspended", 10: "runs"}
    dial = knob(gpu)
    gpu.gate.clear()
    holding = asyncio.create_task(dial.set(on_process("batch", 10, 1), "runs"))
    await asyncio.sleep(0)
    rest = [
        asyncio.create_task(dial.set(subject, raw))
        for subject, raw in (
            (BATCH, "runs"),
            (on_process("batch", 10, 1), "suspended"),
            (SWEEP, "suspended"),
            (TRAIN, "suspended"),
        )
    ]
    await asyncio.sleep(0.01)
    gpu.gate.set()
    await asyncio.gather(holding, *rest)
    assert gpu.did == ["resume 10", "suspend 30", "suspend 40", "suspend 10", "resume 20"]


async def test_an_l1_process_is_never_suspended_but_may_be_resumed() -> None:
    gpu = Gpu(TRAIN)
    dial = knob(gpu, seen=inventory(30))
    with pytest.raises(Refused, match="process of serve"):
        await dial.set(TRAIN, "suspended")
    await dial.set(TRAIN, "runs")
    assert gpu.did == ["resume 30"]
    with pytest.raises(Unavailable, match="not known yet"):
        await knob(gpu, seen=Inventory()).set(TRAIN, "suspended")


@pytest.mark.parametrize("raw", ["", "locked", "1", "ended", "x" * 500])
async def test_what_is_no_value_is_refused(raw: str) -> None:
    with pytest.raises(Refused):
        await knob(Gpu(TRAIN)).set(TRAIN, raw)


@given(st.floats(), st.sampled_from([(0.0, "runs"), (0.5, "locked"), (1.0, "suspended")]))
def test_no_encoding_changes_what_another_has_done(value: float, was: tuple[float, str]) -> None:
    original = Real(*was)
    new = knob(Gpu()).encode(TRAIN, value, original)
    assert new == (Real(1.0, "suspended") if value >= 0.5 and was[0] == 0 else original)


async def test_identity_is_number_and_start() -> None:
    dial = knob(Gpu(TRAIN))
    assert await dial.identity(TRAIN) == "30:1"
    await dial.verify(TRAIN, "30:1")
    for subject, identity in ((TRAIN, "30:2"), (on_process("train", 30, 2), "30:2")):
        with pytest.raises(Gone):
            await dial.verify(subject, identity)
    assert await dial.owner(TRAIN) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3), st.integers(1, 5)), max_size=12))
def test_turns_go_by_rank_and_never_to_two(ranks: list[Rank]) -> None:
    async def scene() -> list[Rank]:
        turns, order = Turns(), []
        inside = 0

        async def one(rank: Rank) -> None:
            nonlocal inside
            async with turns.take(rank):
                inside += 1
                assert inside == 1
                order.append(rank)
                await asyncio.sleep(0)
                inside -= 1

        async with turns.take((0, 0, 0)):
            tasks = [asyncio.create_task(one(r)) for r in ranks]
            await asyncio.sleep(0)
            cancelled = tasks[::3]
            for task in cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.take((2, 9, 9)):
            pass
        return order

    left = [r for n, r in enumerate(ranks) if n % 3]
    assert asyncio.run(scene()) == sorted(left)
