"""When a tick comes, by the real clock: woken, asked for, or after a failure not at all."""

import asyncio
import time
from pathlib import Path
from typing import Self

import msgspec
import pytest

from gpuagent.clock import SystemClock
from gpuagent.loop import CLOSEST_SECONDS
from gpuagent.model.plan import Decision, Pause
from gpuagent.model.state import NodeState
from tests.fakes.host import Host, Scripted
from tests.rig import CONFIG, Rig


class Told:
    """A policy that asks for another look, or fails."""

    name = "told"

    def __init__(self) -> None:
        self.look_after: float | None = None
        self.fails: Exception | None = None

    def begin(self) -> tuple[()]:
        return ()

    def decide(self, memory: tuple[()], state: NodeState) -> tuple[tuple[()], Decision]:
        if self.fails is not None:
            raise self.fails
        look_again = None if self.look_after is None else state.now.mono + self.look_after
        return memory, Decision(look_again=look_again)


SLOW = msgspec.structs.replace(CONFIG, tick=3600.0)


class Running:
    """A loop by the real clock, with an hour between the ticks that nothing asks for."""

    def __init__(self, folder: Path) -> None:
        self.policy = Told()
        self.sensor = Scripted()
        host = Host(clock=SystemClock())
        self.rig = Rig(folder, host, SLOW, sensors=[self.sensor], policies=[self.policy])

    async def __aenter__(self) -> Self:
        await self.rig.__aenter__()
        self.task = asyncio.create_task(self.rig.loop.run())
        return self

    async def __aexit__(self, *args: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.rig.__aexit__()

    async def until(self, ticks: int, *, waking: bool = False) -> None:
        async with asyncio.timeout(30):
            while len(self.rig.snapshots) < ticks and not self.task.done():
                if waking:
                    self.rig.loop.wake("test")
                await asyncio.sleep(0.001)


async def test_a_wake_makes_a_tick_come_soon(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        await running.until(1)
        # Ticks that nobody asks for would come now; the check below is on when they came.
        await asyncio.sleep(4 * CLOSEST_SECONDS)
        woken = SystemClock().now().mono
        running.rig.loop.wake("test")
        await running.until(2)
        assert [s.state.now.mono >= woken for s in running.rig.snapshots] == [False, True]


async def test_a_flood_of_wakes_brings_ticks_no_closer_than_allowed(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        await running.until(13, waking=True)
        at = [s.state.now.mono for s in running.rig.snapshots]
        # Half of the least time they may take together: a busy machine shifts single ticks.
        assert at[12] - at[0] >= 12 * CLOSEST_SECONDS / 2


async def test_the_loop_looks_again_when_a_policy_asks(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        running.policy.look_after = 0.2
        await running.until(3)
        at = [s.state.now.mono for s in running.rig.snapshots]
        assert at[2] - at[0] >= 0.3
        running.policy.look_after = -5.0  # overdue already: still no closer than allowed
        await running.until(16)
        at = [s.state.now.mono for s in running.rig.snapshots]
        assert at[15] - at[3] >= 12 * CLOSEST_SECONDS / 2


async def test_a_command_is_obeyed_without_waiting_for_the_next_tick(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        await running.until(1)
        async with asyncio.timeout(30):
            assert "paused" in await running.rig.loop.inbox.submit(Pause("test"))
        await running.until(2)
        assert running.rig.snapshots[1].posture.paused


async def test_a_policy_that_fails_ends_the_run_and_the_sensors(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        await running.until(1)
        running.sensor.gate = asyncio.Event()
        running.policy.fails = ZeroDivisionError("a bug")
        running.rig.sensing._patience = 0.01
        running.rig.loop.wake("test")
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(asyncio.shield(running.task), 30)
        assert running.sensor.cancelled
        frames, memories = running.rig.recorder.dump()
        assert frames
        assert "told: ()" in memories


async def test_lag_is_how_late_the_last_tick_began(tmp_path: Path) -> None:
    async with Running(tmp_path) as running:
        running.policy.look_after = 0.1
        await running.until(2)
        running.policy.look_after = 0.3
        await running.until(3)
        running.policy.look_after = None
        time.sleep(0.8)  # noqa: ASYNC251  (somebody blocks the event loop)
        await running.until(4)
        assert running.rig.snapshots[3].stats.lag_seconds > 0.2
        running.rig.loop.wake("test")
        await running.until(5)
        assert running.rig.snapshots[4].stats.lag_seconds < 0.2
