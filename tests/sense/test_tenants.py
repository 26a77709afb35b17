"""The sensor `tenants` on a host of values: who comes, who goes, and what is read when."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config, Found, Match, TenantRule
from gpuagent.errors import Unavailable
from gpuagent.model.inventory import (
    GpuProcess,
    Inventory,
    Level,
    Tenant,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.state import Event, Health, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    TENANT_GPU_MEMORY_BYTES,
    TENANT_GPU_PROCESSES,
    TENANT_GPU_UTILIZATION_RATIO,
    TENANT_PROCESSES,
)
from gpuagent.ports import Sensor
from gpuagent.sense.tenants import Tenants
from tests.sense.fakes import FakeCgroups, FakeEvents, FakeProcesses, process

TRAIN = "/batch.slice/train.service"
SERVE = "/batch.slice/serve.service"
CONFIG = Config(
    tenants=(
        TenantRule("serve", Level.L1, Match(unit="serve.service")),
        TenantRule("train", Level.L3, Match(unit="train.service")),
    )
)


class Host:
    """A sensor with its host, and the state that the loop would keep."""

    def __init__(self, config: Config = CONFIG, *, with_events: bool = True) -> None:
        self.processes = FakeProcesses(process(1, "/init.scope", ppid=0))
        self.cgroups = FakeCgroups()
        self.cgroups.make(TRAIN)
        self.cgroups.make(SERVE)
        self.events = FakeEvents()
        self.sensor = Tenants(
            processes=self.processes,
            cgroups=self.cgroups,
            config=config,
            agent_pid=4000,
            events=self.events if with_events else None,
        )
        self.at = 100.0
        self.listed: tuple[GpuProcess, ...] | None = None
        self.tenants: tuple[Tenant, ...] = ()

    async def read(self, after: float = 0.0) -> Sensed:
        self.at += after
        now = Instant(self.at, 0.0)
        inventory = Inventory(gpu_processes=self.listed, tenants=self.tenants)
        sensed = await self.sensor.read(now, NodeState(now, inventory=inventory))
        if sensed.tenants is not None:
            self.tenants = sensed.tenants
        return sensed

    def names(self) -> dict[str, list[int]]:
        return {t.name: [p.pid for p in t.processes] for t in self.tenants}


def on_gpu(pid: int, gpu: str = "GPU-a", memory: int | None = 100, **fields: object) -> GpuProcess:
    listed = GpuProcess(pid, gpu, "compute", memory)
    return msgspec.structs.replace(listed, **fields)


def texts(events: tuple[Event, ...]) -> list[str]:
    return [e.text for e in events]


def values(readings: tuple[Reading, ...]) -> dict[str, float]:
    return {f"{r.signal.name} {r.subject}": r.value for r in readings}


async def test_a_tenant_appears_with_its_first_process_and_leaves_with_its_last() -> None:
    host = Host()
    assert (await host.read()).tenants == ()
    host.processes.put(process(10, TRAIN))
    sensed = await host.read(after=10)
    assert host.names() == {"train": [10]}
    assert texts(sensed.events) == ["tenant train: first process"]
    assert values(sensed.readings) == {f"{TENANT_PROCESSES.name} tenant:train": 1}
    host.listed = (on_gpu(10),)
    sensed = await host.read(after=1)
    (event,) = sensed.events
    assert (event.kind, event.text) == (
        "tenant-appeared",
        "tenant train: first process on GPU-a",
    )
    assert event.subject == on_tenant_gpu("train", "GPU-a")
    host.listed = ()
    assert texts((await host.read(after=1)).events) == ["tenant train: no process left on GPU-a"]
    del host.processes.all[10]
    sensed = await host.read(after=10)
    assert [(e.kind, e.text, e.subject) for e in sensed.events] == [
        ("tenant-left", "tenant train: has ended", on_tenant("train"))
    ]
    assert sensed.tenants == ()


def test_it_is_a_sensor_of_every_tick() -> None:
    sensor: Sensor = Host().sensor
    assert (sensor.name, sensor.interval) == ("tenants", 0)


async def test_nothing_new_costs_nothing() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.listed = (on_gpu(10),)
    before = await host.read()
    again = await host.read(after=1)
    assert again == Sensed(tenants=before.tenants)
    assert again.tenants is before.tenants, "said again, so that it counts as known"
    assert host.processes.tables == 1


async def test_an_unchanged_host_is_not_told_again() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.listed = (on_gpu(10),)
    before = await host.read()
    host.listed = (on_gpu(10, memory=200),)
    sensed = await host.read(after=10)
    assert sensed.tenants is before.tenants
    assert sensed.events == ()
    assert values(sensed.readings)[f"{TENANT_GPU_MEMORY_BYTES.name} tenant_gpu:train:GPU-a"] == 200


async def test_a_process_new_on_a_card_is_found_at_once() -> None:
    host = Host()
    await host.read()
    host.processes.put(process(10, "/tenants/a"))
    host.listed = (on_gpu(10),)
    await host.read(after=0.1)
    assert host.names() == {"cgroup:/tenants/a": [10]}
    assert host.processes.tables == 1


async def test_since_is_kept() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    await host.read()
    host.processes.put(process(11, TRAIN))
    await host.read(after=10)
    assert [(t.since, len(t.processes)) for t in host.tenants] == [(100.0, 2)]


async def test_readings_join_the_drivers_list_with_tenants() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN), process(11, TRAIN), process(12, SERVE))
    host.listed = (
        on_gpu(10, memory=100, utilization_ratio=0.75),
        on_gpu(10, memory=100, kind="graphics"),
        on_gpu(11, memory=50, utilization_ratio=0.5),
        on_gpu(11, gpu="GPU-b", memory=None),
        on_gpu(12, gpu="GPU-b", memory=7),
        on_gpu(77, gpu="GPU-b", memory=1 << 40),
    )
    sensed = await host.read()
    readings = values(tuple(r for r in sensed.readings if r.signal is not TENANT_PROCESSES))
    assert readings == {
        f"{TENANT_GPU_PROCESSES.name} tenant_gpu:train:GPU-a": 2,
        f"{TENANT_GPU_MEMORY_BYTES.name} tenant_gpu:train:GPU-a": 150,
        f"{TENANT_GPU_UTILIZATION_RATIO.name} tenant_gpu:train:GPU-a": 1.0,
        f"{TENANT_GPU_PROCESSES.name} tenant_gpu:train:GPU-b": 1,
        f"{TENANT_GPU_PROCESSES.name} tenant_gpu:serve:GPU-b": 1,
        f"{TENANT_GPU_MEMORY_BYTES.name} tenant_gpu:serve:GPU-b": 7,
    }


async def test_utilisation_known_of_some_is_an_estimate() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN), process(11, TRAIN))
    host.listed = (on_gpu(10, utilization_ratio=0.25), on_gpu(11))
    sensed = await host.read()
    (reading,) = [r for r in sensed.readings if r.signal is TENANT_GPU_UTILIZATION_RATIO]
    assert (reading.value, reading.exact) == (0.25, False)


async def test_a_number_that_is_anothers_now_is_not_on_the_card() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.listed = (on_gpu(10),)
    await host.read()
    assert host.tenants[0].gpus == ("GPU-a",)
    host.processes.put(process(10, SERVE, started=5))
    host.events.queue = [(10, "exit")]
    await host.read(after=0.1)
    assert [(t.name, t.gpus) for t in host.tenants] == [("serve", ())]


async def test_an_exit_is_noticed_by_its_event() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN), process(11, SERVE))
    host.listed = (on_gpu(10),)
    await host.read()
    assert host.events.pids == {10, 11}
    del host.processes.all[10]
    host.events.queue = [(10, "exit")]
    sensed = await host.read(after=0.1)
    assert host.names() == {"serve": [11]}
    assert texts(sensed.events) == ["tenant train: has ended"]
    assert host.processes.tables == 1


async def test_only_the_first_process_of_a_tenant_matters_as_an_exec() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    await host.read()
    matters = host.events.matters
    assert matters is not None
    host.processes.put(process(11, TRAIN), process(12, SERVE), process(13, "/x.service"))
    assert [matters(pid) for pid in (11, 12, 13, 99)] == [False, True, False, False]
    host.events.queue = [(12, "exec")]
    await host.read(after=0.1)
    assert host.names() == {"serve": [12], "train": [10]}
    assert host.events.matters is None


async def test_of_a_crowd_only_exits_on_a_card_are_listened_for() -> None:
    host = Host()
    host.processes.put(*(process(10 + i, TRAIN) for i in range(20)))
    host.listed = (on_gpu(12),)
    await host.read()
    assert host.events.pids == {12}


async def test_after_silence_the_table_is_read_again() -> None:
    host = Host()
    await host.read()
    host.events.health = Health("process_events", up=False, why="a storm")
    await host.read(after=1)
    host.events.health = Health("process_events", up=True)
    await host.read(after=1)
    assert host.processes.tables == 2


async def test_an_exec_elsewhere_costs_one_small_file() -> None:
    host = Host()
    await host.read()
    host.processes.put(process(11, "/system.slice/ssh.service"), process(12, TRAIN))
    matters = host.events.matters
    assert matters is not None
    host.processes.reads = 0
    assert not matters(11)
    assert host.processes.reads == 0
    assert matters(12)
    assert host.processes.reads == 1


async def test_only_whom_the_driver_lists_anew_is_looked_at_again() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN), process(11, SERVE))
    unchanged = on_gpu(11, "GPU-b")
    host.listed = (on_gpu(10), unchanged)
    await host.read()
    host.processes.looked_at.clear()
    host.listed = (on_gpu(10), unchanged)
    sensed = await host.read(after=1)
    assert host.processes.looked_at == [10]
    assert values(sensed.readings)[f"{TENANT_GPU_PROCESSES.name} tenant_gpu:serve:GPU-b"] == 1
    assert host.processes.reads == 0


async def test_without_events_the_table_is_polled() -> None:
    host = Host(with_events=False)
    await host.read()
    host.processes.put(process(10, TRAIN))
    assert await host.read(after=9) == Sensed(tenants=())
    await host.read(after=1)
    assert host.names() == {"train": [10]}


async def test_a_removed_rule_takes_its_tenant_with_it() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.listed = (on_gpu(10),)
    await host.read()
    host.sensor.configure(Config(found=Found(sla=Level.L2)))
    sensed = await host.read(after=1)
    assert [(t.name, t.level, t.rule) for t in host.tenants] == [
        ("unit:train.service", Level.L2, "")
    ]
    assert sorted(texts(sensed.events)) == [
        "tenant train: has ended",
        "tenant unit:train.service: first process on GPU-a",
    ]


async def test_seats_follow_the_cgroups_that_are_there() -> None:
    host = Host()
    host.cgroups.remove(TRAIN)
    host.processes.put(process(10, TRAIN))
    await host.read()
    assert host.tenants[0].seats[0].refusal
    host.cgroups.make(TRAIN)
    await host.read(after=10)
    (seat,) = host.tenants[0].seats
    assert (seat.inode, seat.refusal) == (host.cgroups.inodes[TRAIN], "")


async def test_without_a_cgroup_tree_it_is_known_who_is_whose_but_nobody_has_a_seat() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.cgroups.broken = "paths.cgroup_root /none is no cgroup tree"
    await host.read()
    assert host.names()["train"] == [10]
    (seat,) = next(t for t in host.tenants if t.name == "train").seats
    assert seat.inode == 0
    assert "cgroup_root" in seat.refusal


async def test_a_table_that_cannot_be_read_is_an_error_and_then_forgotten() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    host.processes.broken = "/proc: not mounted"
    with pytest.raises(Unavailable, match="not mounted"):
        await host.read()
    host.processes.broken = ""
    await host.read(after=1)
    assert host.names() == {"train": [10]}


async def test_unknown_lists_say_nothing_of_cards() -> None:
    host = Host()
    host.processes.put(process(10, TRAIN))
    sensed = await host.read()
    assert [r.signal for r in sensed.readings] == [TENANT_PROCESSES]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "end", "list", "wait"]),
        st.integers(10, 16),
        st.sampled_from([TRAIN, SERVE, "/tenants/a", "/"]),
    ),
    max_size=25,
)


@given(STEPS)
async def test_events_balance_and_the_tenants_are_those_of_the_last_look(
    steps: list[tuple[str, int, str]],
) -> None:
    host = Host()
    there: set[str] = set()
    for what, pid, cgroup in steps:
        if what == "start":
            host.processes.put(process(pid, cgroup, started=int(host.at * 10)))
        elif what == "end":
            host.processes.all.pop(pid, None)
            host.events.queue.append((pid, "exit"))
        elif what == "list":
            host.listed = (*(host.listed or ())[-3:], on_gpu(pid))
        sensed = await host.read(after=10 if what == "wait" else 0.2)
        for event in sensed.events:
            if event.subject is not None and event.kind == "tenant-left" and not event.subject.gpu:
                there.remove(event.subject.tenant)
            elif event.subject is not None and event.kind == "tenant-appeared":
                there.add(event.subject.tenant)
        assert there == set(host.names())
    await host.read(after=10)
    living = {pid for pids in host.names().values() for pid in pids}
    assert living <= set(host.processes.all)
