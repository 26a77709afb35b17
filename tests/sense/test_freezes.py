"""Sensor `freezes`: counts that never fall, whatever becomes of the control groups."""

import pytest

from gpuagent.errors import Gone, Unavailable
from gpuagent.model.inventory import Inventory, Level, Subject, Tenant, on_cgroup, on_tenant
from gpuagent.model.state import Instant, NodeState, Outcome
from gpuagent.model.vocab import RUNNING, TENANT_FREEZES, TENANT_FROZEN_SECONDS
from gpuagent.ports import FreezeState, Sensor
from gpuagent.sense.freezes import Freezes

A, B = on_cgroup("train", "/a", 1), on_cgroup("train", "/b", 2)
TENANTS = (
    Tenant("train", Level.L3, levers=("freeze",)),
    Tenant("sweep", Level.L3, levers=("freeze",)),
    Tenant("batch", Level.L3),
)


class Pulses:
    """`ports.Freezer` with counts by inode."""

    least_ratio = 0.04

    def __init__(self) -> None:
        self.states: dict[int, FreezeState] = {}
        self.dead = False
        self.asked: list[int] = []

    async def state(self, path: str, inode: int) -> FreezeState:
        self.asked.append(inode)
        if self.dead:
            raise Unavailable("the guard has died")
        if inode not in self.states:
            raise Gone(f"{path} is gone")
        return self.states[inode]

    async def set(self, path: str, inode: int, ratio: float) -> None:
        raise NotImplementedError


def node(*held: Subject, tenants: tuple[Tenant, ...] | None = TENANTS) -> NodeState:
    outcomes = {(RUNNING, s): Outcome(RUNNING, s, 0.5, 0.5, 1.0, "applied", "", 0.0) for s in held}
    inventory = Inventory(tenants=tenants)
    return NodeState(Instant(5.0, 5.0), inventory=inventory, outcomes=outcomes)


async def counts(sensor: Freezes, state: NodeState) -> dict[str, tuple[float, float]]:
    read = (await sensor.read(state.now, state)).readings
    by = {(r.signal, r.subject): r.value for r in read}
    return {
        t.name: (
            by[TENANT_FREEZES, on_tenant(t.name)],
            by[TENANT_FROZEN_SECONDS, on_tenant(t.name)],
        )
        for t in TENANTS
        if (TENANT_FREEZES, on_tenant(t.name)) in by
    }


def us(pulses: int, seconds: float) -> FreezeState:
    return FreezeState(0.5, "us", pulses, seconds)


async def test_who_may_be_frozen_has_counts_from_the_start() -> None:
    freezer = Pulses()
    assert await counts(Freezes(freezer), node()) == {"train": (0, 0.0), "sweep": (0, 0.0)}
    assert freezer.asked == []


async def test_counts_go_on_over_groups_and_holds() -> None:
    freezer = Pulses()
    sensor = Freezes(freezer)
    freezer.states = {1: us(3, 1.5)}
    assert (await counts(sensor, node(A)))["train"] == (3, 1.5)
    freezer.states = {1: us(5, 2.5), 2: us(1, 0.5)}
    assert (await counts(sensor, node(A, B)))["train"] == (6, 3.0)
    # Let go: what came between the last look and the thaw is counted, then it is left alone.
    freezer.states[1] = FreezeState(1.0, "nobody", 7, 3.5)
    assert (await counts(sensor, node(B)))["train"] == (8, 4.0)
    freezer.asked.clear()
    await counts(sensor, node(B))
    assert freezer.asked == [2]
    del freezer.states[2]
    assert (await counts(sensor, node(B)))["train"] == (8, 4.0)
    freezer.states = {1: us(9, 4.5)}
    assert (await counts(sensor, node(A)))["train"] == (10, 5.0)


async def test_a_dead_guard_is_the_sensors_health_and_nothing_is_lost() -> None:
    freezer = Pulses()
    sensor = Freezes(freezer)
    freezer.states = {1: us(3, 1.5)}
    await counts(sensor, node(A))
    freezer.dead = True
    with pytest.raises(Unavailable, match="guard has died"):
        await counts(sensor, node(A))
    freezer.dead, freezer.states = False, {1: us(4, 2.0)}
    assert (await counts(sensor, node(A)))["train"] == (4, 2.0)


async def test_without_known_tenants_nothing_is_said() -> None:
    sensor: Sensor = Freezes(Pulses())
    state = node(tenants=None)
    assert (await sensor.read(state.now, state)).readings == ()
