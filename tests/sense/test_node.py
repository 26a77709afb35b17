"""The sensor `node`: what is known becomes a reading, what is not stays away."""

from gpuagent.model.inventory import NODE
from gpuagent.model.state import Instant, NodeState
from gpuagent.ports import NodeFacts, Sensor
from gpuagent.sense.node import Host

NOW = Instant(5.0, 6.0)


class FakeNode:
    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts

    def read(self) -> NodeFacts:
        return self._facts


async def read(facts: NodeFacts) -> dict[str, float]:
    sensor: Sensor = Host(FakeNode(facts))
    sensed = await sensor.read(NOW, NodeState(NOW))
    assert {(r.subject, r.at) for r in sensed.readings} == {(NODE, 5.0)}
    return {r.signal.name: r.value for r in sensed.readings}


async def test_every_fact_is_a_reading() -> None:
    assert await read(NodeFacts(8, 0.5, 1000, 400, 0.1, 0.2, 0.3)) == {
        "node_cpus": 8,
        "node_cpu_busy_ratio": 0.5,
        "node_memory_total_bytes": 1000,
        "node_memory_available_bytes": 400,
        "node_cpu_pressure_ratio": 0.1,
        "node_memory_pressure_ratio": 0.2,
        "node_io_pressure_ratio": 0.3,
    }


async def test_unknown_is_absent_and_zero_is_not() -> None:
    known = await read(NodeFacts(8, None, 1000, 0, None, 0.0, None))
    assert known == {
        "node_cpus": 8,
        "node_memory_total_bytes": 1000,
        "node_memory_available_bytes": 0,
        "node_memory_pressure_ratio": 0,
    }
