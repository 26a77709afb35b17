"""Sensors are run when they are due, measured, contained, and waited for no longer than a moment."""

import asyncio
import time

import pytest

from gpuagent.errors import Gone, Unavailable
from gpuagent.model.inventory import NODE
from gpuagent.model.state import Health, NodeState, Reading, Sensed
from gpuagent.model.vocab import NODE_CPU_COUNT
from gpuagent.sensing import Sensing
from tests.act.host import Clock
from tests.fakes.host import Scripted


class Bench:
    """Sensors under a clock of the test's own."""

    def __init__(self, *sensors: Scripted, patience: float = 30.0) -> None:
        self.clock = Clock()
        self.sensing = Sensing(sensors, self.clock, patience=patience)

    async def read(self, after: float = 1.0) -> tuple[Sensed, ...]:
        self.clock.mono += after
        now = self.clock.now()
        return await self.sensing.read(now, NodeState(now))

    def health(self, name: str = "scripted") -> Health:
        return {h.name: h for h in self.sensing.health}[name]


def cpus(value: float) -> Sensed:
    return Sensed((Reading(NODE_CPU_COUNT, NODE, value, 0.0),))


def values(sensed: tuple[Sensed, ...]) -> list[float]:
    return [r.value for s in sensed for r in s.readings]


async def test_each_is_asked_when_it_is_due() -> None:
    often, seldom = Scripted("often"), Scripted("seldom", interval=2.0)
    bench = Bench(often, seldom)
    for _ in range(8):
        await bench.read(after=0.5)
    assert len(often.asked_at) == 8
    assert [t - 1000 for t in seldom.asked_at] == [0.5, 2.5]


async def test_a_millisecond_early_is_on_time() -> None:
    sensor = Scripted(interval=1.0)
    bench = Bench(sensor)
    await bench.read()
    await bench.read(after=0.9995)
    assert len(sensor.asked_at) == 2


async def test_before_it_has_been_asked_nothing_is_known_of_its_health() -> None:
    bench = Bench(Scripted())
    assert bench.health() == Health("scripted", None)


async def test_what_comes_too_late_is_taken_by_the_next_tick() -> None:
    late, quick = Scripted("late", interval=60.0), Scripted("quick")
    late.gate, late.says, quick.says = asyncio.Event(), cpus(1), cpus(2)
    bench = Bench(late, quick, patience=0.05)
    assert values(await bench.read()) == [2]
    assert bench.health("late").up is None
    late.gate.set()
    await asyncio.sleep(0)
    assert sorted(values(await bench.read())) == [1, 2]
    assert bench.health("late").up
    assert len(late.asked_at) == 1


async def test_one_that_hangs_is_waited_for_once_only() -> None:
    stuck = Scripted("stuck")
    stuck.gate = asyncio.Event()
    bench = Bench(stuck, Scripted("quick"), patience=0.5)
    began = time.monotonic()
    for _ in range(40):
        await bench.read()
    assert time.monotonic() - began < 15, "forty times half a second would be twenty"
    assert len(stuck.asked_at) == 1
    await bench.sensing.close()


async def test_one_that_is_silent_for_long_is_down_until_it_answers() -> None:
    stuck = Scripted(interval=4.0)
    bench = Bench(stuck, patience=0.01)
    await bench.read()
    stuck.gate = asyncio.Event()
    await bench.read(after=4.0)
    await bench.read(after=19.0)
    assert bench.health().up, "five of its intervals may pass"
    await bench.read(after=1.0)
    assert bench.health().up is False
    assert bench.health().why == "has not answered for 20 s"
    assert bench.health().last_success == 1001.0
    stuck.gate.set()
    await asyncio.sleep(0)
    await bench.read()
    assert bench.health().up
    assert bench.health().why == ""


async def test_a_reading_is_as_long_as_it_took_not_as_late_as_it_was_collected() -> None:
    sensor = Scripted(interval=60.0)
    sensor.gate = asyncio.Event()
    bench = Bench(sensor, patience=0.01)
    await bench.read()
    bench.clock.mono += 0.25
    sensor.gate.set()
    await asyncio.sleep(0.01)
    await bench.read(after=5.0)
    assert bench.health().seconds == 0.25
    assert bench.health().last_success == 1001.25


@pytest.mark.parametrize("error", [Unavailable("the worker is down"), Gone("it is gone")])
async def test_an_error_of_ours_is_its_health(error: Exception) -> None:
    sensor = Scripted()
    bench = Bench(sensor)
    await bench.read()
    sensor.says = error
    assert await bench.read() == ()
    assert bench.health().why == str(error)
    assert (bench.health().up, bench.health().failures) == (False, 1)
    assert bench.health().last_success == 1001.0
    await bench.read()
    assert bench.health().failures == 2
    sensor.says = cpus(3)
    assert values(await bench.read()) == [3]
    assert (bench.health().up, bench.health().why) == (True, "")
    assert (bench.health().failures, bench.health().last_success) == (2, 1004.0)


@pytest.mark.parametrize("bug", [ValueError("x"), KeyError(), asyncio.CancelledError()])
async def test_a_bug_of_a_sensor_is_contained(bug: BaseException) -> None:
    buggy, well = Scripted("buggy"), Scripted("well")
    buggy.says, well.says = bug, cpus(4)
    bench = Bench(buggy, well)
    assert values(await bench.read()) == [4]
    assert bench.health("buggy").up is False
    assert type(bug).__name__ in bench.health("buggy").why
    assert bench.health("well").up
    buggy.says = cpus(5)
    assert sorted(values(await bench.read())) == [4, 5]


async def test_closing_ends_what_is_going_on() -> None:
    stuck, failing = Scripted("stuck"), Scripted("failing")
    stuck.gate = failing.gate = asyncio.Event()
    failing.says = ValueError("never seen")
    bench = Bench(stuck, failing, patience=0.01)
    await bench.read()
    await bench.sensing.close()
    assert stuck.cancelled
    assert failing.cancelled
    await bench.sensing.close()


async def test_without_sensors_nothing_is_sensed() -> None:
    bench = Bench()
    assert await bench.read() == ()
    assert bench.sensing.health == ()
