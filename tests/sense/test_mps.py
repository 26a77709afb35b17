"""Sensor `mps`: when it asks, whose the clients are, and what is said once."""

import msgspec

from gpuagent.model.inventory import (
    GpuProcess,
    Inventory,
    Level,
    Limits,
    MpsDaemon,
    MpsServer,
    Tenant,
    on_mps,
    on_tenant,
)
from gpuagent.model.state import Event, Instant, NodeState, Sensed
from gpuagent.model.vocab import (
    MPS_CLIENTS,
    MPS_FAULTED_SERVERS,
    MPS_SERVERS,
    MPS_UP,
    TENANT_MPS_CLIENTS,
)
from gpuagent.ports import Sensor
from gpuagent.sense.mps import MpsWatch
from tests.fakes.mps.values import FakeMps, daemon
from tests.sense.fakes import process

CARD = "GPU-1"


class Bench:
    """The sensor, in a state that the test makes."""

    def __init__(self, *daemons: MpsDaemon) -> None:
        self.mps = FakeMps(*daemons)
        self.sensor: Sensor = MpsWatch(self.mps)
        self.tenants: tuple[Tenant, ...] = ()
        self.listed: tuple[int, ...] = ()
        self.now = 100.0
        self.sensed = Sensed()

    def tenant(self, name: str, level: Level, *pids: int, contexts: int | None = None) -> None:
        here = tuple(process(pid) for pid in pids)
        found = Tenant(name, level, processes=here, limits=Limits(mps_contexts=contexts))
        self.tenants = (*(t for t in self.tenants if t.name != name), found)

    async def read(self, seconds: float = 5.0) -> list[Event]:
        self.now += seconds
        state = NodeState(
            Instant(self.now, 1e9),
            inventory=Inventory(
                tenants=self.tenants,
                gpu_processes=tuple(GpuProcess(p, CARD, "mps", None) for p in self.listed),
            ),
        )
        self.sensed = await self.sensor.read(state.now, state)
        return list(self.sensed.events)

    async def kinds(self, seconds: float = 31.0) -> list[str]:
        return [e.kind for e in await self.read(seconds)]

    def values(self) -> dict[tuple[object, object], float]:
        return {(r.signal, r.subject): r.value for r in self.sensed.readings}


async def test_what_is_read_of_a_daemon_and_of_tenants() -> None:
    bench = Bench(daemon(clients={20: 7, 21: 7, 30: 8, 99: 8}, states={8: "FAULT"}))
    bench.tenant("train", Level.L3, 20, 21)
    bench.tenant("serve", Level.L1, 30)
    bench.tenant("other", Level.L2, 40)
    await bench.read()
    assert bench.sensed.mps == tuple(bench.mps.all.values())
    assert bench.values() == {
        (MPS_UP, on_mps("g")): 1,
        (MPS_SERVERS, on_mps("g")): 2,
        (MPS_CLIENTS, on_mps("g")): 4,
        (MPS_FAULTED_SERVERS, on_mps("g")): 1,
        (TENANT_MPS_CLIENTS, on_tenant("train")): 2,
        (TENANT_MPS_CLIENTS, on_tenant("serve")): 1,
        (TENANT_MPS_CLIENTS, on_tenant("other")): 0,
    }


async def test_what_is_not_known_is_absent() -> None:
    bench = Bench(MpsDaemon("down", up=False, why="no"), daemon(clients={20: 7}, states={7: ""}))
    bench.tenant("train", Level.L3, 20)
    bench.tenant("other", Level.L2, 40)
    await bench.read()
    values = bench.values()
    assert values[MPS_UP, on_mps("down")] == 0
    assert (MPS_CLIENTS, on_mps("down")) not in values
    assert (MPS_FAULTED_SERVERS, on_mps("g")) not in values
    assert values[TENANT_MPS_CLIENTS, on_tenant("train")] == 1
    # The daemon that is down may have a client of its.
    assert (TENANT_MPS_CLIENTS, on_tenant("other")) not in values


async def test_what_could_not_be_read_is_not_counted() -> None:
    """What is seen of such a daemon are some of its servers and clients, or none: no number is true."""
    here = daemon(clients={20: 7, 30: 8}, states={8: "FAULT"})
    bench = Bench(here, daemon("h", clients={21: 9}))
    bench.tenant("train", Level.L3, 20, 21)
    bench.tenant("serve", Level.L1, 30)
    bench.tenant("other", Level.L2, 40)
    await bench.read()
    assert bench.values()[TENANT_MPS_CLIENTS, on_tenant("train")] == 2
    bench.mps.put(
        msgspec.structs.replace(here, why="server 7 has not answered", servers=(), clients=())
    )
    await bench.read(31)
    assert bench.values() == {
        (MPS_UP, on_mps("g")): 1,
        (MPS_UP, on_mps("h")): 1,
        (MPS_SERVERS, on_mps("h")): 1,
        (MPS_CLIENTS, on_mps("h")): 1,
        (MPS_FAULTED_SERVERS, on_mps("h")): 0,
    }


async def test_what_could_not_be_read_for_a_while_is_not_said_anew() -> None:
    here = daemon(clients={20: 7, 30: 7}, states={7: "FAULT"})
    bench = Bench(here)
    bench.tenant("train", Level.L3, 20, contexts=0)
    bench.tenant("serve", Level.L1, 30)
    bench.listed = (20, 30)
    assert await bench.kinds() == ["mps-fault", "mps-shared-with-l1", "mps-contexts-over"]
    bench.mps.put(msgspec.structs.replace(here, why="it hangs", servers=(), clients=()))
    assert await bench.kinds() == []
    bench.mps.put(here)
    assert await bench.kinds() == []
    # Seen to be otherwise it is news again.
    bench.mps.put(msgspec.structs.replace(here, servers=(), clients=()))
    assert await bench.kinds() == []
    bench.mps.put(here)
    assert await bench.kinds() == ["mps-fault", "mps-shared-with-l1", "mps-contexts-over"]


async def test_without_groups_nothing_is_said() -> None:
    bench = Bench()
    bench.tenant("train", Level.L3, 20)
    assert await bench.read() == []
    assert (bench.sensed.readings, bench.sensed.mps) == ((), ())


async def test_it_is_asked_when_there_is_reason_to() -> None:
    bench = Bench(daemon())
    for _ in range(6):
        await bench.read(5)
    assert bench.mps.asked == 1
    assert {r.at for r in bench.sensed.readings} == {105.0}, "as old as the answer is"
    await bench.read(5)
    assert bench.mps.asked == 2
    bench.listed = (20,)
    await bench.read(5)
    await bench.read(5)
    assert bench.mps.asked == 3


async def test_a_daemon_that_dies_is_said_once_in_each_direction() -> None:
    bench = Bench(daemon())
    assert await bench.kinds() == []
    bench.mps.put(MpsDaemon("g", up=False, why="no MPS control daemon runs in /mps/g"))
    (event,) = await bench.read(31)
    assert (event.kind, event.subject, event.alert) == ("mps-down", on_mps("g"), True)
    assert "no MPS control daemon runs in /mps/g" in event.text
    assert await bench.kinds() == []
    bench.mps.put(daemon())
    assert await bench.kinds() == ["mps-up"]
    assert await bench.kinds() == []


async def test_one_that_is_about_to_be_started_is_not_missed() -> None:
    bench = Bench(MpsDaemon("g", up=False, why="no"))
    assert await bench.kinds() == []
    assert await bench.kinds() == ["mps-down"]
    bench = Bench(MpsDaemon("g", up=False, why="no"))
    assert await bench.kinds() == []
    bench.mps.put(daemon())
    assert await bench.kinds() == []


async def test_a_fault_names_everybody_who_shares_the_server() -> None:
    bench = Bench(daemon(clients={20: 7, 21: 7, 30: 7, 99: 7, 50: 8}))
    bench.tenant("train", Level.L3, 20, 21)
    bench.tenant("infer", Level.L2, 30)
    bench.tenant("apart", Level.L2, 50)
    assert await bench.kinds() == []
    # By the time it is seen some have gone already.
    bench.mps.put(daemon(clients={30: 7, 50: 8}, states={7: "FAULT"}))
    (event,) = await bench.read(31)
    assert (event.kind, event.alert) == ("mps-fault", True)
    assert "train (L3), pid 20, 21; infer (L2), pid 30; of no known tenant, pid 99" in event.text
    assert "apart" not in event.text
    assert await bench.kinds() == []
    bench.mps.put(daemon(clients={30: 7}))
    assert await bench.kinds() == []
    bench.mps.put(daemon(clients={30: 7}, states={7: "FAULT"}))
    assert await bench.kinds() == ["mps-fault"], "it has been well in between"


async def test_a_server_that_is_shut_down_without_clients_has_no_fault() -> None:
    """A daemon calls that FAULT as well."""
    quiet = msgspec.structs.replace(daemon(), servers=(MpsServer(7, "FAULT"),))
    bench = Bench(quiet)
    assert await bench.kinds() == []


async def test_an_l1_tenant_that_shares_a_server_is_a_warning_once() -> None:
    bench = Bench(daemon(clients={20: 7, 30: 7, 40: 8}))
    bench.tenant("train", Level.L3, 20)
    bench.tenant("serve", Level.L1, 30)
    bench.tenant("apart", Level.L3, 40)
    (event,) = await bench.read()
    assert (event.kind, event.subject, event.alert) == (
        "mps-shared-with-l1",
        on_tenant("serve"),
        True,
    )
    assert "serve (L1) shares MPS server 7 of g with train (L3)" in event.text
    assert await bench.kinds() == []
    bench.tenant("more", Level.L2, 25)
    bench.mps.put(daemon(clients={20: 7, 25: 7, 30: 7}))
    (event,) = await bench.read(31)
    assert "with more (L2), train (L3)" in event.text
    bench.mps.put(daemon(clients={30: 7}))
    assert await bench.kinds() == []
    bench.mps.put(daemon(clients={20: 7, 30: 7}))
    assert await bench.kinds() == ["mps-shared-with-l1"]


async def test_tenants_that_are_not_l1_may_share() -> None:
    bench = Bench(daemon(clients={20: 7, 30: 7}))
    bench.tenant("train", Level.L3, 20)
    bench.tenant("infer", Level.L2, 30)
    assert await bench.read() == []


async def test_more_contexts_than_were_agreed_on_are_said_once() -> None:
    bench = Bench(daemon(clients={20: 7, 21: 7, 22: 7}))
    bench.tenant("train", Level.L3, 20, 21, 22, contexts=2)
    bench.listed = (20, 21)
    assert await bench.read() == []
    bench.listed = (20, 21, 22)
    (event,) = await bench.read()
    assert (event.kind, event.subject, event.numbers) == (
        "mps-contexts-over",
        on_tenant("train"),
        (("contexts", 3.0), ("limit", 2.0)),
    )
    assert await bench.read() == []
    bench.listed = (20, 21)
    assert await bench.read() == []
    bench.listed = (20, 21, 22)
    assert [e.kind for e in await bench.read()] == ["mps-contexts-over"]
