"""Ending a process: in which order, what of it is told, and whom it never meets."""

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from gpuagent.act.ledger import Ledger
from gpuagent.act.record import Target, target_of
from gpuagent.act.restore import Occasion, failed, put_back
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Suspensions
from gpuagent.act.terminate import RUNS, Terminated
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.inventory import GpuProcess, Inventory, Level, Tenant, on_process
from gpuagent.model.vocab import SUSPENDED, TERMINATED
from gpuagent.ports import Actuator
from tests.act.host import Agent, Clock, Inline, wish
from tests.act.settings import Notes
from tests.act.test_suspend import Gpu
from tests.fakes.levers import FakeEnder
from tests.sense.fakes import FakeProcesses, process

PID = 4000
PROCESS = process(PID, "/train")
SUBJECT = on_process("train", PID, PROCESS.started)
_fits: type[Actuator] = Terminated


class Clients:
    """MPS with nothing but its clients."""

    def __init__(self, *pids: int) -> None:
        self.pids = set(pids)
        self.fails: AgentError | None = None
        self.asked: list[int] = []

    async def terminate_client(self, pid: int) -> bool:
        self.asked.append(pid)
        if self.fails is not None:
            raise self.fails
        found = pid in self.pids
        self.pids.discard(pid)
        return found


class Ends(FakeEnder):
    """Processes that take their grace: until `gate` is open."""

    def __init__(self, processes: FakeProcesses, gpu: Gpu) -> None:
        super().__init__(processes)
        self._gpu = gpu
        self.gate = asyncio.Event()
        self.gate.set()
        self.states: list[str] = []
        """How its CUDA state was when each signal came."""

    async def send(self, pid: int, started: int, signal: int) -> None:
        self.states.append(self._gpu.states.get(pid, "none"))
        await super().send(pid, started, signal)
        if pid not in self._processes.all:
            self._gpu.states.pop(pid, None)

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        await self.gate.wait()
        return await super().ended(pid, started, seconds)


class Stage:
    def __init__(self) -> None:
        self.processes = FakeProcesses(PROCESS)
        self.gpu = Gpu(SUBJECT)
        self.ender = Ends(self.processes, self.gpu)
        self.mps = Clients()
        self.seen = Inventory(tenants=(Tenant("train", Level.L3),))
        self.held: set[Target] = set()
        self.notes = Notes()
        suspensions = Suspensions(
            self.gpu,
            level=lambda _name: Level.L3,
            clock=Clock(),
            ledger=self.notes,
            cgroup=lambda _pid: "/train",
        )
        self.suspend = Suspend(suspensions, ender=self.ender, seen=lambda: self.seen)
        self.knob = Terminated(
            self.ender,
            self.mps,
            suspensions=suspensions,
            held=self.held.__contains__,
            grace_seconds=lambda: 30.0,
            seen=lambda: self.seen,
        )

    async def resumed(self) -> None:
        await self.suspend.set(SUBJECT, "suspended")
        await self.suspend.set(SUBJECT, "runs")
        self.gpu.did.clear()


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_process_is_ended_as_an_mps_client_first(stage: Stage) -> None:
    stage.mps.pids.add(PID)
    await stage.knob.set(SUBJECT, "ended")
    assert stage.mps.asked == [PID]
    assert not stage.mps.pids
    assert stage.ender.sent == [(PID, signal.SIGTERM)]
    assert not stage.processes.all


async def test_one_that_does_not_listen_is_killed_after_its_grace(stage: Stage) -> None:
    stage.ender.deaf.add(PID)
    await stage.knob.set(SUBJECT, "ended")
    assert stage.ender.sent == [(PID, signal.SIGTERM), (PID, signal.SIGKILL)]


async def test_one_that_hangs_in_the_kernel_is_not_said_to_have_ended(stage: Stage) -> None:
    stage.ender.deaf.add(PID)
    stage.ender.stuck.add(PID)
    with pytest.raises(Unavailable, match="hangs in the kernel"):
        await stage.knob.set(SUBJECT, "ended")
    assert await stage.knob.get(SUBJECT) == RUNS


async def test_one_that_mps_does_not_let_go_is_not_signalled(stage: Stage) -> None:
    stage.mps.fails = Unavailable("client 4000 is still there")
    with pytest.raises(Unavailable, match="still there"):
        await stage.knob.set(SUBJECT, "ended")
    assert not stage.ender.sent


async def test_a_client_of_a_daemon_that_nobody_has_named_is_not_signalled(stage: Stage) -> None:
    """It would die as a client, which can take the others on its server with it."""
    stage.seen = msgspec.structs.replace(
        stage.seen, gpu_processes=(GpuProcess(PID, "GPU-1", "mps", None),)
    )
    for _ in range(2):
        with pytest.raises(Refused, match=r"name its daemon in \[\[mps.groups\]\]"):
            await stage.knob.set(SUBJECT, "ended")
    assert not stage.ender.sent
    stage.mps.pids.add(PID)
    await stage.knob.set(SUBJECT, "ended")
    assert not stage.processes.all


async def test_one_whose_client_work_has_been_ended_before_is_none_any_more(stage: Stage) -> None:
    """The driver may list it as one for some time yet, and its daemon knows it no longer."""
    listed = (GpuProcess(PID, "GPU-1", "mps", None), GpuProcess(1, "GPU-1", "compute", None))
    stage.seen = msgspec.structs.replace(stage.seen, gpu_processes=listed)
    stage.mps.pids.add(PID)
    stage.ender.deaf.add(PID)
    stage.ender.stuck.add(PID)
    with pytest.raises(Unavailable, match="hangs in the kernel"):
        await stage.knob.set(SUBJECT, "ended")
    stage.ender.deaf.clear()
    stage.ender.stuck.clear()
    await stage.knob.set(SUBJECT, "ended")
    assert stage.mps.asked == [PID, PID]
    assert not stage.processes.all


async def test_a_process_of_an_l1_tenant_is_never_ended(stage: Stage) -> None:
    serve = Tenant("serve", Level.L1, processes=(PROCESS,))
    stage.seen = Inventory(tenants=(serve,))
    with pytest.raises(Refused, match=r"serve \(L1\)"):
        await stage.knob.set(SUBJECT, "ended")
    stage.seen = Inventory()
    with pytest.raises(Unavailable, match="not known yet"):
        await stage.knob.set(SUBJECT, "ended")
    assert not stage.mps.asked
    assert not stage.ender.sent


async def test_another_with_its_number_is_gone(stage: Stage) -> None:
    other = on_process("train", PID, PROCESS.started + 1)
    with pytest.raises(Gone):
        await stage.knob.get(other)
    with pytest.raises(Gone):
        await stage.knob.set(other, "ended")
    with pytest.raises(Gone):
        await stage.knob.verify(other, await stage.knob.identity(SUBJECT))
    assert not stage.ender.sent


@pytest.mark.parametrize("raw", ["runs", "", "1"])
async def test_nothing_else_can_be_made_of_a_process(stage: Stage, raw: str) -> None:
    with pytest.raises(Refused):
        await stage.knob.set(SUBJECT, raw)


@pytest.mark.parametrize(
    ("value", "raw"), [(1.0, "ended"), (0.0, "runs"), (0.5, "runs"), (float("nan"), "runs")]
)
def test_what_is_written(stage: Stage, value: float, raw: str) -> None:
    assert stage.knob.encode(SUBJECT, value, RUNS).raw == raw


# -- what cuda-checkpoint has touched (cuda-checkpoint#53) -----------------------------------------------


async def test_one_that_was_resumed_is_suspended_before_any_signal(stage: Stage) -> None:
    await stage.resumed()
    stage.ender.deaf.add(PID)
    await stage.knob.set(SUBJECT, "ended")
    assert stage.gpu.did == [f"suspend {PID}"]
    assert stage.ender.states == ["suspended", "suspended"]
    assert not stage.processes.all


@pytest.mark.parametrize(
    "error", [Unavailable("it did not come to rest"), Unsupported("no tool"), Refused("it failed")]
)
async def test_one_that_was_resumed_and_cannot_be_suspended_is_not_ended(
    stage: Stage, error: AgentError
) -> None:
    await stage.resumed()
    stage.gpu.errors[f"suspend {PID}"] = error
    with pytest.raises(Refused, match=f"can hang the host: {error}"):
        await stage.knob.set(SUBJECT, "ended")
    assert not stage.ender.sent
    assert not stage.mps.asked
    stage.gpu.errors.clear()
    await stage.knob.set(SUBJECT, "ended")
    assert stage.ender.states == ["suspended"]


async def test_one_that_the_tool_never_touched_needs_none(stage: Stage) -> None:
    stage.gpu.states.clear()
    await stage.knob.set(SUBJECT, "ended")
    assert stage.ender.sent == [(PID, signal.SIGTERM)]
    assert not stage.gpu.did


async def test_one_that_could_not_be_suspended_and_never_was_can_be_ended(stage: Stage) -> None:
    stage.gpu.errors[f"suspend {PID}"] = Unsupported("no such tool")
    with pytest.raises(Unsupported):
        await stage.suspend.set(SUBJECT, "suspended")
    await stage.knob.set(SUBJECT, "ended")
    assert stage.ender.states == ["runs"]


async def test_a_suspended_one_is_ended_as_it_is_and_never_resumed_meanwhile(stage: Stage) -> None:
    await stage.suspend.set(SUBJECT, "suspended")
    stage.ender.gate.clear()
    stage.ender.deaf.add(PID)
    ending = asyncio.create_task(stage.knob.set(SUBJECT, "ended"))
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="is being ended"):
        await stage.suspend.set(SUBJECT, "runs")
    stage.ender.gate.set()
    await ending
    assert stage.ender.states == ["suspended", "suspended"]
    with pytest.raises(Gone):
        await stage.suspend.get(SUBJECT)


async def test_a_resumption_that_came_first_is_waited_for_and_undone(stage: Stage) -> None:
    await stage.suspend.set(SUBJECT, "suspended")
    stage.gpu.did.clear()
    stage.gpu.gate.clear()
    resuming = asyncio.create_task(stage.suspend.set(SUBJECT, "runs"))
    await asyncio.sleep(0)
    ending = asyncio.create_task(stage.knob.set(SUBJECT, "ended"))
    await asyncio.sleep(0.01)
    assert not stage.ender.sent
    stage.gpu.gate.set()
    await asyncio.gather(resuming, ending)
    assert stage.gpu.did == [f"resume {PID}", f"suspend {PID}"]
    assert stage.ender.states == ["suspended"]


@pytest.mark.parametrize("first", [SUSPENDED, TERMINATED])
async def test_the_ladder_goes_from_suspended_to_terminated(tmp_path: Path, first: object) -> None:
    """Both lanes get their orders in one tick, whichever is begun first."""
    stage = Stage()
    knobs = (stage.suspend, stage.knob) if first is SUSPENDED else (stage.knob, stage.suspend)
    async with Agent(tmp_path, *knobs) as agent:
        await agent.tick(wish(SUSPENDED, SUBJECT, 1))
        await agent.reconciler.settled()
        assert stage.gpu.states == {PID: "suspended"}
        for _ in range(15):
            await agent.tick(wish(TERMINATED, SUBJECT, 1))
            await agent.reconciler.settled()
        assert set(stage.ender.states) == {"suspended"}
        assert not stage.processes.all
        assert [t.knob for t in agent.ledger.entries] == [TERMINATED.name]


async def test_one_that_was_suspended_for_its_end_and_lives_on_is_resumed(
    stage: Stage, tmp_path: Path
) -> None:
    await stage.resumed()
    stage.mps.fails = Unavailable("client 4000 is still there")
    async with Agent(tmp_path, stage.knob) as agent:
        told = await agent.tick(wish(TERMINATED, SUBJECT, 1))
        assert told[TERMINATED, SUBJECT].result == "in flight"
        assert stage.gpu.states == {PID: "suspended"}
        await agent.tick(seconds=15)
        await agent.reconciler.settled()
        assert stage.gpu.states == {PID: "runs"}
        assert not agent.ledger.entries


async def test_after_a_crash_it_is_resumed_unless_it_was_suspended_for_itself(
    stage: Stage, tmp_path: Path
) -> None:
    await stage.resumed()
    stage.mps.fails = Unavailable("client 4000 is still there")
    async with Agent(tmp_path, stage.knob) as agent:
        stage.notes.ledger = agent.ledger
        await agent.tick(wish(TERMINATED, SUBJECT, 1))
        await agent.die()
    for held, state in ((True, "suspended"), (False, "runs")):
        later = Stage()
        later.gpu.states[PID] = "suspended"
        if held:
            later.held.add(target_of(SUSPENDED, SUBJECT))
        ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
        later.notes.ledger = ledger
        (entry,) = ledger.entries.values()
        await later.knob.let_go(SUBJECT, entry.identity, [k.raw for k in entry.wrote])
        assert later.gpu.states == {PID: state}
        await ledger.close()


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_stop_within_the_grace_breaks_it_off(
    stage: Stage, tmp_path: Path, suspended: bool
) -> None:
    if suspended:
        await stage.resumed()
    stage.ender.deaf.add(PID)
    stage.ender.gate.clear()
    async with Agent(tmp_path, stage.knob) as agent:
        await agent.tick(wish(TERMINATED, SUBJECT, 1))
        assert stage.ender.sent == [(PID, signal.SIGTERM)]
        assert await agent.reconciler.close(0.05) == frozenset()
        report = await put_back(
            ledger=agent.ledger,
            actuators=agent.actuators,
            occasion=Occasion.STOP,
            clock=agent.clock,
            busy=agent.reconciler.busy,
        )
        assert not failed(report)
        assert not agent.ledger.entries
    # One that nobody would ever resume is not left behind; the other has its signal.
    assert bool(stage.processes.all) is not suspended


# -- in a lane -------------------------------------------------------------------------------------------


async def test_a_lane_tells_that_it_has_ended_and_then_that_it_is_gone(
    stage: Stage, tmp_path: Path
) -> None:
    async with Agent(tmp_path, stage.knob) as agent:
        for _ in range(3):
            outcomes = await agent.tick(wish(TERMINATED, SUBJECT, 1))
            outcome = outcomes[TERMINATED, SUBJECT]
            assert (outcome.result, outcome.why, outcome.real) == (
                "applied",
                "it reads ended",
                1.0,
            )
        assert stage.ender.sent == [(PID, signal.SIGTERM)]
        assert not await agent.tick()
        last = agent.audit.latest()[-1]
        assert (last.did, last.result) == ("left alone", "gone")
        assert "nothing brings it back" in last.why
        assert not agent.ledger.entries
        assert not await agent.tick(seconds=70)


async def test_one_that_went_by_itself_is_gone_and_no_error(stage: Stage, tmp_path: Path) -> None:
    stage.processes.all.clear()
    async with Agent(tmp_path, stage.knob) as agent:
        outcomes = await agent.tick(wish(TERMINATED, SUBJECT, 1))
        assert outcomes[TERMINATED, SUBJECT].result == "gone"
        assert not agent.ledger.entries


@pytest.mark.parametrize("occasion", list(Occasion))
async def test_a_restore_says_that_it_is_gone_and_forgets_it(
    stage: Stage, tmp_path: Path, occasion: Occasion
) -> None:
    async with Agent(tmp_path, stage.knob) as agent:
        await agent.tick(wish(TERMINATED, SUBJECT, 1))
    later = Stage()
    later.processes.all.clear()
    ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
    (item,) = await put_back(
        ledger=ledger, actuators=[later.knob], occasion=occasion, clock=Clock()
    )
    assert item.what == "gone"
    assert not ledger.entries
    await ledger.close()
