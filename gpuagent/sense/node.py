"""Sensor `node`: CPUs, memory and pressure of the host."""

import asyncio

from gpuagent.model.inventory import NODE
from gpuagent.model.state import Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    NODE_CPU_BUSY_RATIO,
    NODE_CPU_COUNT,
    NODE_CPU_PRESSURE_RATIO,
    NODE_IO_PRESSURE_RATIO,
    NODE_MEMORY_AVAILABLE_BYTES,
    NODE_MEMORY_PRESSURE_RATIO,
    NODE_MEMORY_TOTAL_BYTES,
)
from gpuagent.ports import Node


class Host:
    """Facts about the host, each as a reading; what the kernel does not say is left out."""

    name = "node"
    interval = 1.0

    def __init__(self, node: Node) -> None:
        self._node = node

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Readings of the node. Raises what `Node.read` does."""
        facts = await asyncio.to_thread(self._node.read)
        values = (
            (NODE_CPU_COUNT, facts.cpus),
            (NODE_CPU_BUSY_RATIO, facts.cpu_busy_ratio),
            (NODE_CPU_PRESSURE_RATIO, facts.cpu_pressure_ratio),
            (NODE_IO_PRESSURE_RATIO, facts.io_pressure_ratio),
            (NODE_MEMORY_PRESSURE_RATIO, facts.memory_pressure_ratio),
            (NODE_MEMORY_TOTAL_BYTES, facts.memory_total_bytes),
            (NODE_MEMORY_AVAILABLE_BYTES, facts.memory_available_bytes),
        )
        return Sensed(
            readings=tuple(
                Reading(signal, NODE, value, now.mono)
                for signal, value in values
                if value is not None
            )
        )
