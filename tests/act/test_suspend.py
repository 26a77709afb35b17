"""Suspending processes: one at a time, in order, and resumed after every kind of end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.ledger import Ledger
from gpuagent.act.record import target_of
from gpuagent.act.restore import Occasion, Report, put_back
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Rank, Suspensions, Turns
from gpuagent.errors import AgentError, Gone, NoRoom, Refused, Unavailable
from gpuagent.model.inventory import (
    GpuProcess,
    Inventory,
    Level,
    Process,
    Subject,
    Tenant,
    on_cgroup,
    on_process,
)
from gpuagent.model.vocab import RUNNING, SUSPENDED, TERMINATED
from gpuagent.ports import CudaState, Freed, Keep, Real
from tests.act.host import Agent, Clock, Inline, wish
from tests.act.settings import Notes

LEVELS = {"serve": Level.L1, "batch": Level.L2, "train": Level.L3, "sweep": Level.L3}
TRAIN, SWEEP, BATCH = (
    on_process("train", 30, 1),
    on_process("sweep", 40, 1),
    on_process("batch", 20, 1),
)


class Gpu:
    """`ports.Checkpoint`, and the `Ender` that knows who lives. One call at a time, or it fails."""

    def __init__(self, *subjects: Subject) -> None:
        self.states: dict[int, CudaState] = {s.pid: "runs" for s in subjects}
        self.holds: dict[int, dict[str, int]] = {}
        """What processes hold while they run, by card; 10 bytes of GPU-1 where it does not say."""
        self.free: dict[str, int] = {}
        """Of cards that are too full to resume everything there."""
        self.errors: dict[str, AgentError] = {}
        """By "suspend 30" or "resume 30"."""
        self.overtaken: set[int] = set()
        """Those that somebody else suspends just before we do."""
        self.leaves: dict[int, CudaState] = {}
        """How an attempt that fails leaves a process."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.did: list[str] = []
        self._inside = False

    async def alive(self, pid: int, started: int) -> bool:
        return pid in self.states and started == 1

    async def state(self, pid: int, started: int) -> CudaState:
        with self._alone():
            await asyncio.sleep(0)
            if pid not in self.states:
                raise Gone(f"process {pid} has ended")
            return self.states[pid]

    async def suspend(self, pid: int, started: int, keep: Keep) -> None:
        with self._alone():
            if pid in self.overtaken:
                self.states[pid] = "suspended"
            if self.states.get(pid) == "suspended":
                raise Refused(f"somebody else has suspended process {pid}")
            await keep(self.holds.get(pid, {"GPU-1": 10}))
            await self._do("suspend", pid, "suspended")

    async def resume(self, pid: int, started: int, freed: Freed | None) -> None:
        with self._alone():
            if self.states.get(pid) == "suspended":
                if freed is None:
                    raise Unavailable(f"it is not known what process {pid} needs")
                if any(self.free.get(card, 99) < held for card, held in freed.items()):
                    self.did.append(f"no room {pid}")
                    raise NoRoom(f"process {pid} waits for device memory")
            await self._do("resume", pid, "runs")

    async def _do(self, what: str, pid: int, to: CudaState) -> None:
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


def queue(gpu: Gpu, clock: Clock | None = None, notes: Notes | None = None) -> Suspensions:
    return Suspensions(
        gpu,
        level=lambda name: LEVELS[name],
        clock=clock or Clock(),
        ledger=notes or Notes(),
        cgroup=lambda pid: f"/tenants/{pid}",
    )


def knob(
    gpu: Gpu,
    clock: Clock | None = None,
    seen: Inventory | None = None,
    notes: Notes | None = None,
) -> Suspend:
    suspensions = queue(gpu, clock, notes)
    return Suspend(suspensions, ender=gpu, seen=lambda: inventory() if seen is None else seen)


@contextlib.asynccontextmanager
async def running(folder: Path, gpu: Gpu, clock: Clock | None = None) -> AsyncIterator[Agent]:
    notes = Notes()
    async with Agent(folder, knob(gpu, clock, notes=notes), clock=clock) as agent:
        notes.ledger = agent.ledger
        yield agent


async def test_a_process_is_suspended_and_resumed(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with running(tmp_path, gpu) as agent:
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
    async with running(tmp_path, gpu) as agent:
        for subject in (TRAIN, on_process("sweep", 30, 1)):
            await agent.tick(wish(SUSPENDED, subject, 1))
            await agent.reconciler.settled()
    assert gpu.did == ["suspend 30"]


async def after_a_crash(folder: Path, gpu: Gpu, occasion: Occasion = Occasion.CRASH) -> Report:
    ledger = Ledger(str(folder), boot="b1", executor=Inline())
    try:
        return await put_back(
            ledger=ledger,
            actuators=[knob(gpu, notes=Notes(ledger))],
            occasion=occasion,
            clock=Clock(),
        )
    finally:
        await ledger.close()


@pytest.mark.parametrize("occasion", [Occasion.CRASH, Occasion.RESCUE, Occasion.BY_HAND])
async def test_after_kill_9_a_new_process_resumes_all_in_order(
    tmp_path: Path, occasion: Occasion
) -> None:
    gpu = Gpu(TRAIN, SWEEP, BATCH)
    async with running(tmp_path, gpu) as agent:
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
async def test_a_crash_within_the_suspension_is_undone(tmp_path: Path, left: CudaState) -> None:
    gpu = Gpu(TRAIN)
    gpu.gate.clear()
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        await agent.die()
    gpu.gate.set()
    await asyncio.sleep(0)
    gpu.states[30] = left
    (item,) = await after_a_crash(tmp_path, gpu)
    assert (item.what, gpu.states[30]) == ("put back", "runs")


async def test_one_that_has_ended_or_is_another_is_gone(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with running(tmp_path, gpu) as agent:
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
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, SWEEP, 1))
        await agent.tick()
        await agent.reconciler.settled()
    assert (gpu.did, gpu.states) == ([], {30: "suspended", 40: "locked"})


async def test_a_lock_that_an_attempt_has_left_is_undone_when_it_is_let_go(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    gpu.errors["suspend 30"], gpu.leaves[30] = Unavailable("it is locked"), "locked"
    async with running(tmp_path, gpu) as agent:
        told = await agent.tick(wish(SUSPENDED, TRAIN, 1))
        assert (told[SUSPENDED, TRAIN].result, gpu.states[30]) == ("in flight", "locked")
        await agent.tick(seconds=15)
        await agent.reconciler.settled()
        assert gpu.states[30] == "runs"
        assert not agent.ledger.entries
        assert not agent.reconciler.outside_changes[SUSPENDED.name]


# -- room ---------------------------------------------------------------------------------------------


async def test_a_resumption_without_room_keeps_its_place_on_its_cards_for_a_while(
    tmp_path: Path,
) -> None:
    gpu, clock = Gpu(TRAIN, SWEEP, BATCH), Clock()
    gpu.holds = {20: {"GPU-1": 30, "GPU-2": 1}, 30: {"GPU-1": 5}, 40: {"GPU-3": 5}}
    async with running(tmp_path, gpu, clock) as agent:
        await agent.tick(*(wish(SUSPENDED, s, 1) for s in (TRAIN, SWEEP, BATCH)))
        await agent.reconciler.settled()
        gpu.free["GPU-1"] = 20
        await agent.tick(wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, SWEEP, 1))
        await agent.reconciler.settled()
        told = await agent.tick()
        await agent.reconciler.settled()
        assert gpu.states == {20: "suspended", 30: "suspended", 40: "runs"}, "another card is free"
        assert "waits for device memory" in told[SUSPENDED, BATCH].why
        assert "process 20 is to be resumed first" in told[SUSPENDED, TRAIN].why
        for _ in range(45):  # It is tried again all the time, and its place lapses all the same.
            await agent.tick()
            await agent.reconciler.settled()
        assert gpu.did.count("no room 20") > 3
        assert gpu.states == {20: "suspended", 30: "runs", 40: "runs"}
        del gpu.free["GPU-1"]
        for _ in range(20):
            await agent.tick()
            await agent.reconciler.settled()
        assert set(gpu.states.values()) == {"runs"}


@pytest.mark.parametrize("asked", [False, True])
async def test_one_that_wants_room_and_ends_makes_way(asked: bool) -> None:
    gpu = Gpu(TRAIN, BATCH)
    dial = knob(gpu)
    for subject in (TRAIN, BATCH):
        await dial.set(subject, "suspended")
    gpu.errors["resume 20"] = NoRoom("no room")
    with pytest.raises(Unavailable, match="no room"):
        await dial.set(BATCH, "runs")
    with pytest.raises(Unavailable, match="process 20 is to be resumed first"):
        await dial.set(TRAIN, "runs")
    if asked:
        del gpu.states[20]
    gpu.errors["resume 20"] = Gone("process 20 has ended")
    with pytest.raises(Gone):
        await (dial.get(BATCH) if asked else dial.set(BATCH, "runs"))
    await dial.set(TRAIN, "runs")
    assert gpu.states[30] == "runs"


async def test_a_tool_that_hangs_for_one_keeps_nobody_else_suspended() -> None:
    gpu = Gpu(TRAIN, BATCH)
    dial = knob(gpu)
    for subject in (TRAIN, BATCH):
        await dial.set(subject, "suspended")
    gpu.errors["resume 20"] = Unavailable("cuda-checkpoint did not say within 10 s")
    with pytest.raises(Unavailable, match="did not say"):
        await dial.set(BATCH, "runs")
    await dial.set(TRAIN, "runs")
    assert gpu.states[30] == "runs"


async def test_where_all_is_put_back_nobody_waits_for_another(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN, BATCH)
    gpu.holds[20] = {"GPU-1": 30}
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, BATCH, 1))
        await agent.reconciler.settled()
        gpu.free["GPU-1"] = 20
        report = await put_back(
            ledger=agent.ledger,
            actuators=agent.actuators,
            occasion=Occasion.STOP,
            clock=agent.clock,
        )
    assert {(i.entry.subject.pid, i.what) for i in report} == {(20, "failed"), (30, "put back")}
    assert gpu.states == {20: "suspended", 30: "runs"}


@pytest.mark.parametrize("occasion", [Occasion.CRASH, Occasion.RESCUE, Occasion.BY_HAND])
async def test_a_later_run_knows_what_room_is_needed(tmp_path: Path, occasion: Occasion) -> None:
    gpu = Gpu(TRAIN)
    gpu.holds[30] = {"GPU-1": 30, "GPU-2": 4}
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        await agent.reconciler.settled()
        await agent.die()
    gpu.free["GPU-2"] = 3
    (item,) = await after_a_crash(tmp_path, gpu, occasion)
    assert (item.what, gpu.did[-1]) == ("failed", "no room 30")
    assert gpu.states == {30: "suspended"}
    del gpu.free["GPU-2"]
    (item,) = await after_a_crash(tmp_path, gpu, occasion)
    assert (item.what, gpu.states) == ("put back", {30: "runs"})


async def test_nothing_is_given_up_that_cannot_be_recorded(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
    with pytest.raises(Refused, match="not in the ledger"):
        await knob(gpu, notes=Notes(ledger)).set(TRAIN, "suspended")
    assert gpu.did == []
    await ledger.close()


async def test_what_is_suspended_to_be_ended_is_resumed_by_what_that_entry_says() -> None:
    gpu, notes = Gpu(TRAIN), Notes()
    suspensions = queue(gpu, notes=notes)
    await suspensions.suspend(TRAIN, see=lambda: None)
    await suspensions.resume(TRAIN)
    del notes.own[target_of(SUSPENDED, TRAIN)]
    notes.hold(target_of(TERMINATED, TRAIN))
    gpu.holds[30] = {"GPU-1": 70}
    async with suspensions.ending(TRAIN) as suspended:
        assert suspended
    gpu.free["GPU-1"] = 60
    with pytest.raises(NoRoom):
        await suspensions.resume(TRAIN)
    gpu.free["GPU-1"] = 70
    await suspensions.resume(TRAIN)
    assert gpu.states == {30: "runs"}


# -- what is not ours, and what is frozen ----------------------------------------------------------------


async def test_one_that_somebody_else_suspends_while_ours_queues_stays_so(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN, SWEEP)
    gpu.overtaken.add(40)
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, SWEEP, 1))
        await agent.reconciler.settled()
        assert gpu.states == {30: "suspended", 40: "suspended"}
        both = (wish(SUSPENDED, TRAIN, 1), wish(SUSPENDED, SWEEP, 1))
        told = await agent.tick(*both)
        assert told[SUSPENDED, SWEEP].result == "refused"
        told = await agent.tick(*both, seconds=70)
        assert told[SUSPENDED, SWEEP].why == "it reads suspended by somebody else"
        assert [e.subject.pid for e in agent.ledger.entries.values()] == [30], "it is not ours"
        await agent.tick(seconds=70)
        await agent.reconciler.settled()
        assert not agent.ledger.entries
    assert gpu.states == {30: "runs", 40: "suspended"}
    assert gpu.did == ["suspend 30", "resume 30"]


async def test_what_is_pulsed_is_not_touched_and_what_is_suspended_is_not_pulsed() -> None:
    gpu, notes = Gpu(TRAIN, SWEEP), Notes()
    suspensions = queue(gpu, notes=notes)
    inside, around, beside = (
        on_cgroup("train", path, 1) for path in ("/tenants/30", "/tenants", "/tenants/3")
    )
    for group in (inside, around, beside):
        notes.hold(target_of(RUNNING, group))
    for group in (inside, around):
        await suspensions.freeze(group)
        with pytest.raises(Unavailable, match=r"waits until /tenants.* is thawed"):
            await suspensions.suspend(TRAIN, see=lambda: None)
        suspensions.thawed(group)
    await suspensions.freeze(beside)
    await suspensions.suspend(TRAIN, see=lambda: None)
    for group in (inside, around):
        with pytest.raises(Unavailable, match="is not frozen while process 30 in it is suspended"):
            await suspensions.freeze(group)
    await suspensions.resume(TRAIN)
    assert gpu.did == ["suspend 30", "resume 30"]


async def test_what_queues_for_the_tool_is_not_pulsed_either() -> None:
    gpu = Gpu(TRAIN, SWEEP)
    suspensions, group = queue(gpu), on_cgroup("sweep", "/tenants/40", 1)
    gpu.gate.clear()
    waiting = [
        asyncio.create_task(suspensions.suspend(subject, see=lambda: None))
        for subject in (TRAIN, SWEEP)
    ]
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="process 40 in it"):
        await suspensions.freeze(group)
    gpu.gate.set()
    await asyncio.gather(*waiting)
    assert gpu.did == ["suspend 30", "suspend 40"]


async def test_a_cgroup_that_is_pulsed_no_longer_holds_nobody_up() -> None:
    gpu, notes = Gpu(TRAIN), Notes()
    suspensions, group = queue(gpu, notes=notes), on_cgroup("train", "/tenants/30", 1)
    notes.hold(target_of(RUNNING, group))
    await suspensions.freeze(group)
    del notes.own[target_of(RUNNING, group)]  # It has gone, and nobody has said that it is thawed.
    await suspensions.suspend(TRAIN, see=lambda: None)
    assert gpu.states == {30: "suspended"}


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (GpuProcess(30, "GPU-1", "mps", 1), "client of MPS"),
        (GpuProcess(30, "GPU-1", "compute", 1, mig="MIG-1"), "does not support MIG"),
    ],
)
async def test_whom_the_tool_does_not_fit_is_refused(process: GpuProcess, why: str) -> None:
    gpu = Gpu(TRAIN, SWEEP)
    dial = knob(gpu, seen=Inventory(gpu_processes=(process,), tenants=()))
    with pytest.raises(Refused, match=why):
        await dial.set(TRAIN, "suspended")
    await dial.set(SWEEP, "suspended")
    assert gpu.did == ["suspend 40"]


async def test_memory_that_was_not_seen_freed_is_said(tmp_path: Path) -> None:
    gpu = Gpu(TRAIN)
    async with running(tmp_path, gpu) as agent:
        await agent.tick(wish(SUSPENDED, TRAIN, 1))
        gpu.states[30] = "unconfirmed"
        told = await agent.tick(wish(SUSPENDED, TRAIN, 1), seconds=40)
        assert "as the tool says; the driver has not confirmed" in told[SUSPENDED, TRAIN].why
        gpu.states[30] = "suspended"
        told = await agent.tick(wish(SUSPENDED, TRAIN, 1), seconds=40)
        assert told[SUSPENDED, TRAIN].why == "it reads suspended"
        assert gpu.did == ["suspend 30"]


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
    async with running(tmp_path, gpu) as agent:
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
    gpu.states[10] = "runs"
    dial = knob(gpu)
    await dial.set(BATCH, "suspended")
    gpu.did.clear()
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
