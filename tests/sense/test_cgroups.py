"""The sensor `cgroups` on a tree of values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Unavailable
from gpuagent.model.declare import Signal
from gpuagent.model.inventory import Inventory, Level, Seat, Tenant, on_cgroup
from gpuagent.model.state import NodeState, Reading
from gpuagent.model.vocab import (
    CGROUP_CPU_CORES,
    CGROUP_CPU_MAX_CORES,
    CGROUP_CPU_WEIGHT,
    TENANT_CPU_CORES,
    TENANT_CPU_PRESSURE_RATIO,
    TENANT_CPU_THROTTLED_RATIO,
    TENANT_HOST_MEMORY_BYTES,
)
from gpuagent.ports import Sensor
from gpuagent.sense.cgroups import CgroupUse, parse_flat, parse_max, parse_pressure, parse_weight
from tests.act.units import FakeUnits
from tests.sense.fakes import FakeCgroups, OwnClock

PATH = "/batch.slice/train.service"
ABOVE = "/batch.slice"
PRESSURE = "some avg10=12.50 avg60=0.00 avg300=0.00 total=9\nfull avg10=99.00 total=1"


def stat(usage: int, periods: int = 0, throttled: int = 0) -> str:
    return (
        f"usage_usec {usage}\nuser_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\n"
        "throttled_usec 77"
    )


class Host:
    """One tenant with one seat, alone in its slice."""

    def __init__(self) -> None:
        self.cgroups = FakeCgroups()
        self.clock = OwnClock()
        self.sensor: Sensor = CgroupUse(self.cgroups, self.clock)
        self.cgroups.make(
            PATH,
            cpu_stat=stat(1_000_000),
            cpu_weight="100",
            cpu_max="max 100000",
            cpu_pressure=PRESSURE,
            memory_current="4096",
        )
        self.cgroups.make(ABOVE, cpu_stat=stat(0), cpu_weight="50", cpu_max="50000 100000")
        self.tenant = self.having(Seat(PATH, self.cgroups.inode(PATH), "", (self.above(),)))

    def above(self, refusal: str = "") -> Seat:
        return Seat(ABOVE, self.cgroups.inode(ABOVE), refusal)

    def having(self, *seats: Seat) -> Tenant:
        self.tenant = Tenant("train", Level.L3, seats=seats)
        return self.tenant

    async def read(self, after: float = 0.0) -> tuple[Reading, ...]:
        self.clock.mono += after
        now = self.clock.now()
        state = NodeState(now, inventory=Inventory(tenants=(self.tenant,)))
        return (await self.sensor.read(now, state)).readings


def value(readings: tuple[Reading, ...], signal: Signal, path: str = "") -> float | None:
    found = [
        r.value
        for r in readings
        if r.signal is signal and (r.subject.cgroup == path if path else not r.subject.cgroup)
    ]
    assert len(found) <= 1
    return found[0] if found else None


async def test_without_a_tree_the_sensor_says_so_with_and_without_tenants() -> None:
    host = Host()
    host.cgroups.broken = "paths.cgroup_root /none is no cgroup tree"
    now = host.clock.now()
    for tenants in ((host.tenant,), ()):
        with pytest.raises(Unavailable, match="no cgroup tree"):
            await host.sensor.read(now, NodeState(now, inventory=Inventory(tenants=tenants)))
    host.cgroups.broken = ""
    assert await host.read()


async def test_rates_need_two_readings_and_the_rest_one() -> None:
    host = Host()
    first = await host.read()
    assert value(first, TENANT_CPU_CORES) is None
    assert value(first, TENANT_CPU_THROTTLED_RATIO) is None
    assert value(first, TENANT_HOST_MEMORY_BYTES) == 4096
    assert value(first, TENANT_CPU_PRESSURE_RATIO) == 0.125
    host.cgroups.files[PATH]["cpu.stat"] = stat(4_000_000, periods=100, throttled=25)
    second = await host.read(after=2)
    assert value(second, TENANT_CPU_CORES) == 1.5
    assert value(second, CGROUP_CPU_CORES, PATH) == 1.5
    assert value(second, CGROUP_CPU_CORES, ABOVE) == 0
    assert value(second, TENANT_CPU_THROTTLED_RATIO) == 0.25
    assert {r.at for r in second} == {host.clock.mono}


async def test_knobs_of_the_seat_and_of_an_exclusive_ancestor() -> None:
    host = Host()
    readings = await host.read()
    assert value(readings, CGROUP_CPU_WEIGHT, PATH) == 100
    assert value(readings, CGROUP_CPU_MAX_CORES, PATH) == math.inf
    assert value(readings, CGROUP_CPU_WEIGHT, ABOVE) == 50
    assert value(readings, CGROUP_CPU_MAX_CORES, ABOVE) == 0.5
    subjects = {r.subject for r in readings if r.signal is CGROUP_CPU_WEIGHT}
    assert on_cgroup("train", PATH, host.cgroups.inode(PATH)) in subjects


async def test_an_ancestor_of_others_is_not_read() -> None:
    host = Host()
    host.having(Seat(PATH, host.cgroups.inode(PATH), "", (host.above("also home of sshd"),)))
    assert value(await host.read(), CGROUP_CPU_WEIGHT, ABOVE) is None


async def test_what_a_shared_cgroup_used_is_nobodys() -> None:
    host = Host()
    host.having(Seat(PATH, host.cgroups.inode(PATH), "also home of tenant serve"))
    await host.read()
    readings = await host.read(after=2)
    assert value(readings, TENANT_CPU_CORES) is None
    assert value(readings, TENANT_HOST_MEMORY_BYTES) is None
    assert value(readings, CGROUP_CPU_WEIGHT, PATH) == 100


async def test_one_seat_unknown_makes_the_sum_unknown() -> None:
    host = Host()
    host.having(Seat(PATH, host.cgroups.inode(PATH)), Seat("/", 0, "the root cgroup"))
    assert value(await host.read(), TENANT_HOST_MEMORY_BYTES) is None


async def test_several_seats_are_added_and_the_worst_pressure_counts() -> None:
    host = Host()
    other = "/batch.slice/more.service"
    host.cgroups.make(other, cpu_stat=stat(0), cpu_pressure="some avg10=50.00", memory_current="4")
    host.having(*(Seat(p, host.cgroups.inode(p)) for p in (PATH, other)))
    await host.read()
    host.cgroups.files[PATH]["cpu.stat"] = stat(2_000_000)
    host.cgroups.files[other]["cpu.stat"] = stat(1_000_000)
    readings = await host.read(after=1)
    assert value(readings, TENANT_CPU_CORES) == 2
    assert value(readings, TENANT_HOST_MEMORY_BYTES) == 4100
    assert value(readings, TENANT_CPU_PRESSURE_RATIO) == 0.5


async def test_a_cgroup_that_has_gone_or_was_replaced_is_left_out() -> None:
    host = Host()
    host.cgroups.inodes[PATH] += 1000
    assert {r.subject.cgroup for r in await host.read()} == {ABOVE}
    host.cgroups.remove(PATH)
    assert {r.subject.cgroup for r in await host.read()} == {ABOVE}


async def test_a_counter_that_runs_backwards_is_no_rate() -> None:
    host = Host()
    host.cgroups.files[PATH]["cpu.stat"] = stat(5_000_000, periods=10, throttled=5)
    await host.read()
    host.cgroups.files[PATH]["cpu.stat"] = stat(1, periods=1, throttled=1)
    readings = await host.read(after=2)
    assert value(readings, TENANT_CPU_CORES) is None
    assert value(readings, TENANT_CPU_THROTTLED_RATIO) is None


async def test_files_without_a_controller_are_unknown_not_zero() -> None:
    host = Host()
    host.cgroups.files[PATH].clear()
    host.having(Seat(PATH, host.cgroups.inode(PATH)))
    assert await host.read() == ()


async def test_no_tenants_known_is_no_reading() -> None:
    host = Host()
    now = host.clock.now()
    assert (await host.sensor.read(now, NodeState(now))).readings == ()


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", math.inf),
        ("20000 100000", 0.2),
        ("150000 100000", 1.5),
        ("", None),
        ("max", None),
        ("max 0", None),
        ("-1 100000", None),
        ("nan 100000", None),
        ("²0000 100000", None),
    ],
)
def test_cpu_max(text: str, cores: float | None) -> None:
    assert parse_max(text) == cores


def test_weight() -> None:
    assert parse_weight("100") == 100
    assert parse_weight("idle") is None


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        (PRESSURE, 0.125),
        ("full avg10=9.00", None),
        ("some avg60=9.00", None),
        ("some avg10=x", None),
        ("some avg10=nan", None),
        ("some avg10=250.0", 1.0),
        ("", None),
    ],
)
def test_pressure(text: str, ratio: float | None) -> None:
    assert parse_pressure(text) == ratio


@given(st.text())
def test_junk_in_a_control_file_is_unknown(text: str) -> None:
    cores, ratio = parse_max(text), parse_pressure(text)
    assert cores is None or cores >= 0
    assert ratio is None or 0 <= ratio <= 1
    assert all(v >= 0 for v in parse_flat(text).values())
    weight = parse_weight(text)
    assert weight is None or weight >= 0


async def test_a_unit_without_a_weight_has_the_default_as_an_estimate() -> None:
    host = Host()
    units = FakeUnits()
    host.sensor = CgroupUse(host.cgroups, host.clock, units)
    del host.cgroups.files[PATH]["cpu.weight"]
    assert value(await host.read(), CGROUP_CPU_WEIGHT, PATH) is None
    units.units["train.service"] = PATH
    readings = await host.read()
    assert value(readings, CGROUP_CPU_WEIGHT, PATH) == 100
    assert [r.exact for r in readings if r.signal is CGROUP_CPU_WEIGHT and r.value == 100] == [
        False
    ]
