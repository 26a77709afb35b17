"""The clock that only `advance_to` moves."""

import asyncio

from gpuagent.sim.clock import VirtualClock


def test_wall_and_monotonic_time_go_together_and_never_back() -> None:
    clock = VirtualClock(utc_offset=3600.0)
    before = clock.now()
    clock.advance_to(before.mono + 12.5)
    clock.advance_to(before.mono + 3.0)
    after = clock.now()
    assert after.mono - before.mono == after.wall - before.wall == 12.5
    assert after.utc_offset == 3600.0


async def test_sleepers_wake_in_order_when_their_time_has_come() -> None:
    clock = VirtualClock()
    began = clock.mono
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, seconds in (("late", 2.0), ("soon", 1.0), ("now", 0.0)):
            tasks.create_task(sleep(name, seconds))
        for at, expected in ((0.0, "now"), (1.0, "now soon"), (2.0, "now soon late")):
            clock.advance_to(began + at)
            for _ in range(5):
                await asyncio.sleep(0)
            assert woken == expected.split()
