"""The sensor `process_events`: its health is all it has to say."""

import pytest

from gpuagent.errors import Unavailable
from gpuagent.model.state import Health, Instant, NodeState, Sensed
from gpuagent.ports import Sensor
from gpuagent.sense.process_events import Hearing
from tests.sense.fakes import FakeEvents

NOW = Instant(1.0, 1.0)


@pytest.mark.parametrize("up", [None, True])
async def test_hearing_is_up_while_nothing_is_wrong(up: bool | None) -> None:
    events = FakeEvents()
    events.health = Health("process_events", up=up)
    assert await Hearing(events).read(NOW, NodeState(NOW)) == Sensed()


async def test_hearing_is_down_with_the_reason_and_up_again() -> None:
    events = FakeEvents()
    sensor: Sensor = Hearing(events)
    events.health = Health("process_events", up=False, why="a storm: polling for 30 s")
    with pytest.raises(Unavailable, match="a storm"):
        await sensor.read(NOW, NodeState(NOW))
    events.health = Health("process_events", up=True)
    assert await sensor.read(NOW, NodeState(NOW)) == Sensed()
