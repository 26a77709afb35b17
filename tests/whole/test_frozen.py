"""kill -9 in the middle of a freeze, with everything real but the clock: nothing stays frozen."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpuagent.act.freeze import Running
from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Item, Occasion, put_back
from gpuagent.act.suspensions import Suspensions
from gpuagent.clock import SystemClock
from gpuagent.config import Freeze
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.freezer import CgroupFreezer
from gpuagent.model.inventory import Inventory, Level, on_cgroup
from gpuagent.model.vocab import RUNNING
from tests.act.host import Agent, Clock, wish
from tests.act.settings import Checkpoints, Notes
from tests.host.test_freezer import Cage, until
from tests.stage.cgroups import cgroup2_mount

HOLDS = """
import asyncio, sys
from pathlib import Path
from tests.whole.test_frozen import held
async def main():
    async with held(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])) as guard:
        print(guard, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def knob(mount: str, freezer: CgroupFreezer) -> Running:
    suspensions = Suspensions(
        Checkpoints(),
        level=lambda _name: Level.L3,
        clock=Clock(),
        ledger=Notes(),
        cgroup=lambda _pid: "",
    )
    return Running(
        freezer, CgroupTree(mount), seen=lambda: Inventory(tenants=()), suspensions=suspensions
    )


@contextlib.asynccontextmanager
async def held(folder: Path, mount: str, path: str, inode: int) -> AsyncIterator[int | None]:
    """An agent that lets a cgroup run a fifth of the time, by the ledger in this folder."""
    freezer = CgroupFreezer(CgroupTree(mount), Freeze(pulse=2.0))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(freezer.run())
        async with Agent(folder, knob(mount, freezer)) as agent:
            while freezer.guard_pid is None:
                await agent.tick(wish(RUNNING, on_cgroup("train", path, inode), 0.2))
            await agent.reconciler.settled()
            yield freezer.guard_pid
        task.cancel()


@pytest.fixture
def cage() -> Iterator[Cage]:
    mount = cgroup2_mount()
    if mount is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    made = Cage(mount)
    try:
        yield made
    finally:
        made.close()


async def restored(folder: Path, cage: Cage) -> Item:
    freezer = CgroupFreezer(CgroupTree(str(cage.mount)), Freeze())
    ledger = Ledger(str(folder), boot="b1")
    try:
        (item,) = await put_back(
            ledger=ledger,
            actuators=[knob(str(cage.mount), freezer)],
            occasion=Occasion.RESCUE,
            clock=SystemClock(),
        )
        assert not ledger.entries
        return item
    finally:
        await ledger.close()


@pytest.mark.parametrize("whom", ["the agent", "both"])
async def test_nothing_stays_frozen(tmp_path: Path, cage: Cage, whom: str) -> None:
    words = [str(tmp_path), str(cage.mount), cage.path, str(cage.inode)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS, *words, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    guard = int(await process.stdout.readline())
    await until(cage.is_frozen)
    if whom == "both":
        process.send_signal(signal.SIGSTOP)  # so that it sees nothing of the other's death
        os.kill(guard, signal.SIGKILL)
    process.kill()
    await process.wait()
    await until(lambda: not Path(f"/proc/{guard}/fd/0").exists())
    assert cage.is_frozen() is (whom == "both")
    began = time.monotonic()
    item = await restored(tmp_path, cage)
    assert item.what == "put back"
    assert (item.before, item.after) == ("frozen" if whom == "both" else "1", "1")
    await until(lambda: not cage.is_frozen())
    assert time.monotonic() - began < 5
