"""Suspending a living process by the fake cuda-checkpoint: killed in the midst, and put back."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, put_back
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Suspensions
from gpuagent.clock import SystemClock
from gpuagent.config import Suspend as Settings
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.checkpoint import CudaCheckpoint
from gpuagent.host.ender import ProcessEnder
from gpuagent.host.procfs import ProcTable
from gpuagent.model.inventory import Inventory, Level, on_process
from gpuagent.model.vocab import SUSPENDED
from tests.act.host import Agent, Clock, Inline, wish
from tests.act.settings import Notes
from tests.fakes.checkpoint import FakeCheckpoint, How, Step
from tests.host.nvml_rig import until
from tests.host.test_checkpoint import GIB, Driver


def dial(tool: FakeCheckpoint, child: int, notes: Notes) -> Suspend:
    driver = Driver(tool)
    driver.held[child] = 20 * GIB
    processes = ProcTable()
    checkpoint = CudaCheckpoint(
        Settings(command=tool.program, lock_timeout=5.0, deadline=30.0),
        processes=processes,
        frozen=lambda _pid: False,
        memory=driver,
        clock=SystemClock(),
    )
    return Suspend(
        Suspensions(
            checkpoint,
            level=lambda _name: Level.L3,
            clock=Clock(),
            ledger=notes,
            cgroup=processes.cgroup,
        ),
        ender=ProcessEnder(CgroupTree("/nowhere")),
        seen=lambda: Inventory(tenants=()),
    )


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
@pytest.mark.parametrize("how", ["hangs", "hangs after"])
async def test_killed_in_the_midst_of_a_step_a_new_process_makes_it_run_again(
    tmp_path: Path, child: int, step: Step, how: How
) -> None:
    tool = FakeCheckpoint(tmp_path)
    subject = on_process("train", child, ProcTable().read(child).started)
    tool.add(child)
    tool.on(child, step, how)
    notes = Notes()
    knob = dial(tool, child, notes)
    async with Agent(tmp_path, knob) as agent:
        notes.ledger = agent.ledger
        await agent.tick(wish(SUSPENDED, subject, 1))
        await until(lambda: step in tool.actions)
        await agent.die()
    # The tool may outlive the agent by a moment, or be killed with it: here it is.
    under_way = knob._suspensions._under_way
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    tool.heal(child)
    ledger = Ledger(str(tmp_path), boot="b1", executor=Inline())
    (item,) = await put_back(
        ledger=ledger,
        actuators=[dial(tool, child, Notes(ledger))],
        occasion=Occasion.CRASH,
        clock=Clock(),
    )
    await ledger.close()
    assert (item.what, item.why, tool.state(child))[::2] == ("put back", "running"), item.why
