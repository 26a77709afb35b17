"""Ending a process: in which order, what of it is told, and whom it never meets."""

import signal
from pathlib import Path

import pytest

from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, put_back
from gpuagent.act.terminate import RUNS, Terminated
from gpuagent.errors import AgentError, Gone, Refused, Unavailable
from gpuagent.model.inventory import Inventory, Level, Tenant, on_process
from gpuagent.model.vocab import TERMINATED
from gpuagent.ports import Actuator
from tests.act.host import Agent, Clock, Inline, wish
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


class Stage:
    def __init__(self) -> None:
        self.processes = FakeProcesses(PROCESS)
        self.ender = FakeEnder(self.processes)
        self.mps = Clients()
        self.seen = Inventory(tenants=(Tenant("train", Level.L3),))
        self.knob = Terminated(
            self.ender, self.mps, grace_seconds=lambda: 30.0, seen=lambda: self.seen
        )


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
