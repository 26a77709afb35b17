"""Units over a real bus with a systemd of the tests' own; and what is done where there is none."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host.units import SystemdUnits
from gpuagent.ports import Units
from tests.act.host import Clock
from tests.fakes.systemd import DAEMON, INFINITY, NONE_HERE, Bus, FakeSystemd, systemd

UNIT = "train.service"
PATH = "/system.slice/train.service"
bus_needed = pytest.mark.skipif(DAEMON is None, reason=NONE_HERE)


@dataclass
class World:
    bus: Bus
    systemd: FakeSystemd
    units: SystemdUnits
    clock: Clock
    root: Path

    def reads(self, file: str = "cpu.max") -> str:
        return (self.root / PATH[1:] / file).read_text().strip()


def made(folder: Path, clock: Clock, *, call_seconds: float = 20.0) -> SystemdUnits:
    root = str(folder / "cg")
    return SystemdUnits(
        clock=clock,
        own_slice="gpuagent-tenants.slice",
        cgroup_root=root,
        run=str(folder / "run"),
        hierarchy=root,
        call_seconds=call_seconds,
    )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with systemd(tmp_path) as (bus, fake):
        fake.make(UNIT, PATH, cpu_max="max 100000", cpu_weight="100")
        clock = Clock()
        units = made(tmp_path, clock)
        yield World(bus, fake, units, clock, tmp_path / "cg")
        units.close()


def there(folder: Path) -> SystemdUnits:
    """A host with systemd and a bus, neither of which is asked."""
    (folder / "cg").mkdir()
    (folder / "run/systemd/system").mkdir(parents=True)
    (folder / "run/dbus").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "run/dbus/system_bus_socket"))
    return made(folder, Clock())


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/train.service", "train.service"),
        ("/system.slice/a-b.slice/x@1.service", "x@1.service"),
        (r"/system.slice/system-a\x2db.slice/a\x2db.service", r"a\x2db.service"),
        ("/batch.slice", "batch.slice"),
        ("/batch.slice/batch-low.slice", "batch-low.slice"),
        ("/user.slice/user-1000.slice", "user-1000.slice"),
        ("/system.slice/_cpu.service", "cpu.service"),
        ("/system.slice/__a.service", "_a.service"),
        ("/gpuagent.slice/gpuagent-tenants.slice/run-1.scope", "run-1.scope"),
        # Containers' and others' scopes: the file.
        ("/system.slice/docker-0123abcd.scope", ""),
        ("/machine.slice/libpod-0123abcd.scope", ""),
        ("/user.slice/user-1000.slice/session-3.scope", ""),
        ("/kubepods.slice/kubepods-burstable.slice/cri-containerd-ab.scope", ""),
        ("/kubepods.slice/kubepods-burstable.slice", ""),
        ("/system.slice/node-kubepods.slice", ""),
        # Below a unit another manager is at work, or the unit itself.
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/x.service", ""),
        ("/system.slice/x.service/y.service", ""),
        ("/system.slice/x.service/sub", ""),
        ("/docker/0123abcd", ""),
        ("/docker/a.slice/b.service", ""),
        ("/slurm/uid_1000/job_1", ""),
        ("/", ""),
        ("", ""),
        ("/.service", ""),
        ("/system.slice/a b.service", ""),
        ("/system.slice/a\n.service", ""),
        ("/system.slice/../x.service", ""),
        (f"/system.slice/{'x' * 300}.service", ""),
    ],
)
def test_whose_files_are_set_through_systemd(tmp_path: Path, cgroup: str, unit: str) -> None:
    assert there(tmp_path).manages(cgroup) == unit


def test_without_systemd_bus_or_its_tree_there_are_files_only(tmp_path: Path) -> None:
    units = there(tmp_path)
    assert units.manages(PATH) == UNIT
    elsewhere = SystemdUnits(
        clock=Clock(), own_slice="a.slice", cgroup_root=str(tmp_path), run=str(tmp_path / "run")
    )
    assert elsewhere.manages(PATH) == "", "another tree than systemd's"
    (tmp_path / "run/dbus/system_bus_socket").unlink()
    assert units.manages(PATH) == ""
    (tmp_path / "run/dbus/system_bus_socket").write_text("")
    assert units.manages(PATH) == ""
    (tmp_path / "run/dbus/system_bus_socket").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "run/dbus/system_bus_socket"))
    assert units.manages(PATH) == UNIT
    (tmp_path / "run/systemd/system").rmdir()
    assert units.manages(PATH) == ""


async def test_a_host_that_never_asks_does_not_load_the_library(tmp_path: Path) -> None:
    code = (
        "import sys, gpuagent.host.units as u\n"
        "from gpuagent.clock import SystemClock\n"
        "x = u.SystemdUnits(clock=SystemClock(), own_slice='a.slice', cgroup_root='/none')\n"
        "x.manages('/system.slice/a.service')\n"
        "sys.exit('dbus_fast' in sys.modules)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@bus_needed
async def test_a_value_is_set_and_given_back_without_a_trace(world: World) -> None:
    before = await world.units.before(UNIT, PATH, "cpu.max")
    await world.units.write(UNIT, "cpu.max", "6600 20000")
    assert world.reads() == "6600 20000"
    assert world.systemd.units[UNIT].properties["CPUQuotaPerSecUSec"] == 330000
    assert len(world.systemd.dropins(UNIT)) == 2
    for _ in range(2):
        await world.units.give_back(UNIT, "cpu.max", before, ["6600 20000"])
        assert world.reads() == "max 100000"
        assert not world.systemd.folder(UNIT).exists()
    assert set(world.systemd.units[UNIT].properties.values()) == {INFINITY}


@bus_needed
@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("cpu.weight", "70", "CPUWeight"),
        ("io.weight", "default 60", "IOWeight"),
        ("memory.high", "104857600", "MemoryHigh"),
        ("memory.max", "104857600", "MemoryMax"),
    ],
)
async def test_every_file_has_its_property(world: World, file: str, text: str, name: str) -> None:
    (world.root / PATH[1:] / file).write_text("as it was\n")
    before = await world.units.before(UNIT, PATH, file)
    await world.units.write(UNIT, file, text)
    assert world.reads(file) == text
    assert str(world.systemd.units[UNIT].properties[name]) in text
    await world.units.give_back(UNIT, file, before, [text])
    assert world.systemd.units[UNIT].properties[name] == INFINITY
    assert not world.systemd.folder(UNIT).exists()


@bus_needed
async def test_what_was_set_before_us_is_put_back_as_it_was(world: World) -> None:
    world.systemd.set(UNIT, {"CPUQuotaPerSecUSec": 800000})
    theirs = world.systemd.dropins(UNIT)
    before = await world.units.before(UNIT, PATH, "cpu.max")
    await world.units.write(UNIT, "cpu.max", "6600 20000")
    await world.units.write(UNIT, "cpu.max", "3000 20000")
    await world.units.give_back(UNIT, "cpu.max", before, ["6600 20000", "3000 20000"])
    assert world.reads() == "80000 100000"
    assert world.systemd.dropins(UNIT) == theirs


@bus_needed
async def test_what_is_set_after_us_stays_and_ours_beside_it_goes(world: World) -> None:
    before = await world.units.before(UNIT, PATH, "cpu.max")
    await world.units.write(UNIT, "cpu.max", "6600 20000")
    world.systemd.set(UNIT, {"CPUQuotaPerSecUSec": 800000})
    await world.units.give_back(UNIT, "cpu.max", before, ["6600 20000"])
    assert world.reads() == "80000 100000"
    assert [*world.systemd.dropins(UNIT)] == ["50-CPUQuota.conf"]
    assert "CPUQuota=80%" in world.systemd.dropins(UNIT)["50-CPUQuota.conf"]


@bus_needed
async def test_a_value_cut_by_a_reload_is_still_ours(world: World) -> None:
    before = await world.units.before(UNIT, PATH, "cpu.max")
    await world.units.write(UNIT, "cpu.max", "6666 20000")
    world.systemd.units[UNIT].properties["CPUQuotaPerSecUSec"] = 330000
    await world.units.give_back(UNIT, "cpu.max", before, ["6666 20000"])
    assert world.reads() == "max 100000"
    assert not world.systemd.folder(UNIT).exists()


@bus_needed
async def test_a_unit_that_is_no_longer_loaded_has_only_its_drop_ins(world: World) -> None:
    before = await world.units.before(UNIT, PATH, "cpu.max")
    await world.units.write(UNIT, "cpu.max", "6600 20000")
    del world.systemd.units[UNIT]
    await world.units.give_back(UNIT, "cpu.max", before, ["6600 20000"])
    assert not world.systemd.folder(UNIT).exists()
    with pytest.raises(Gone):
        await world.units.before(UNIT, PATH, "cpu.max")
    with pytest.raises(Gone):
        await world.units.write(UNIT, "cpu.max", "6600 20000")


@bus_needed
async def test_a_unit_that_lives_elsewhere_is_refused(world: World) -> None:
    world.systemd.units[UNIT].cgroup = "/other.slice/train.service"
    with pytest.raises(Refused, match=r"other\.slice"):
        await world.units.before(UNIT, PATH, "cpu.max")


@bus_needed
async def test_a_file_without_a_property_is_unsupported(world: World) -> None:
    with pytest.raises(Unsupported):
        await world.units.write(UNIT, "cpu.idle", "1")


@bus_needed
@pytest.mark.parametrize("scope", ["docker-ab.scope", "libpod-ab.scope", "anything.scope"])
async def test_no_controller_is_enabled_beside_a_container(world: World, scope: str) -> None:
    (world.root / PATH[1:] / "cpu.max").unlink()
    (world.root / "system.slice" / scope).mkdir()
    with pytest.raises(Refused, match=scope):
        await world.units.before(UNIT, PATH, "cpu.max")
    (world.root / "system.slice/cgroup.subtree_control").write_text("cpu memory\n")
    await world.units.before(UNIT, PATH, "cpu.max")


@bus_needed
async def test_a_controller_is_enabled_where_no_container_is(world: World) -> None:
    (world.root / PATH[1:] / "cpu.max").unlink()
    for harmless in ("session-3.scope", "init.scope", "x.service"):
        (world.root / "system.slice" / harmless).mkdir()
    await world.units.before(UNIT, PATH, "cpu.max")


@bus_needed
async def test_scopes_of_our_own_making_are_no_obstacle(world: World) -> None:
    place = "/gpuagent.slice/gpuagent-tenants.slice"
    for name in ("run-1.scope", "run-2.scope"):
        world.systemd.make(name, f"{place}/{name}")
    assert world.units.manages(f"{place}/run-1.scope") == "run-1.scope"
    before = await world.units.before("run-1.scope", f"{place}/run-1.scope", "cpu.weight")
    await world.units.write("run-1.scope", "cpu.weight", "50")
    assert "[Scope]" in world.systemd.dropins("run-1.scope")["50-CPUWeight.conf"]
    await world.units.give_back("run-1.scope", "cpu.weight", before, ["50"])
    assert not world.systemd.folder("run-1.scope").exists()


@bus_needed
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("org.freedesktop.DBus.Error.AccessDenied", Refused),
        ("org.freedesktop.DBus.Error.InvalidArgs", Refused),
        ("org.freedesktop.DBus.Error.PropertyReadOnly", Refused),
        ("org.freedesktop.DBus.Error.UnknownMethod", Unsupported),
        ("org.freedesktop.systemd1.NoSuchUnit", Gone),
        ("org.freedesktop.DBus.Error.LimitsExceeded", Unavailable),
        ("org.example.Unheard", Unavailable),
    ],
)
async def test_errors_of_systemd_are_ours(world: World, name: str, kind: type[AgentError]) -> None:
    world.systemd.error = (name, "so it is")
    with pytest.raises(kind, match="so it is"):
        await world.units.write(UNIT, "cpu.weight", "50")


@bus_needed
async def test_a_systemd_that_does_not_answer_is_given_up_and_asked_again(
    world: World, tmp_path: Path
) -> None:
    units = made(tmp_path, world.clock, call_seconds=0.2)
    world.systemd.silent = True
    with pytest.raises(Unavailable, match=r"0\.2 s"):
        await units.write(UNIT, "cpu.weight", "50")
    asked = len(world.systemd.calls)
    with pytest.raises(Unavailable, match="asked again soon"):
        await units.write(UNIT, "cpu.weight", "50")
    assert len(world.systemd.calls) == asked, "it was not asked again at once"
    world.systemd.silent = False
    world.clock.mono += 60
    await made(tmp_path, world.clock).write(UNIT, "cpu.weight", "50")
    assert world.reads("cpu.weight") == "50"
    units.close()


@bus_needed
async def test_a_lost_bus_is_connected_to_again(world: World) -> None:
    await world.units.write(UNIT, "cpu.weight", "50")
    await world.bus.kill()
    world.systemd.stop()
    pauses = []
    for _ in range(5):
        with pytest.raises(Unavailable):
            await world.units.write(UNIT, "cpu.weight", "60")
        began = world.clock.mono
        while True:
            world.clock.mono += 0.25
            with pytest.raises(Unavailable) as seen:
                await world.units.write(UNIT, "cpu.weight", "60")
            if "asked again soon" not in str(seen.value):
                break
        pauses.append(world.clock.mono - began)
        world.clock.mono += 100
    assert pauses[0] < pauses[2] <= 8.5
    await world.bus.start()
    await world.systemd.start(f"unix:path={world.bus.socket}")
    world.clock.mono += 100
    await world.units.write(UNIT, "cpu.weight", "60")
    assert world.reads("cpu.weight") == "60"


@bus_needed
async def test_a_bus_without_systemd_is_unavailable(world: World) -> None:
    world.systemd.stop()
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await world.units.write(UNIT, "cpu.weight", "60")


@bus_needed
async def test_many_at_once_share_one_connection(world: World) -> None:
    for n in range(20):
        world.systemd.make(f"t{n}.service", f"/system.slice/t{n}.service")
    await asyncio.gather(
        *(world.units.write(f"t{n}.service", "cpu.weight", str(n + 1)) for n in range(20))
    )
    for n in range(20):
        assert world.systemd.units[f"t{n}.service"].properties["CPUWeight"] == n + 1


@bus_needed
@pytest.mark.parametrize(
    "junk",
    [
        "",
        "{}",
        "[]",
        '{"properties":{},"dropins":{}}',
        '{"properties":{"CPUWeight":5},"dropins":{}}',
        '{"properties":{"CPUQuotaPerSecUSec":"x","CPUQuotaPeriodUSec":1},"dropins":{}}',
    ],
)
async def test_a_ledger_that_is_not_understood_changes_nothing(world: World, junk: str) -> None:
    await world.units.write(UNIT, "cpu.max", "6600 20000")
    with pytest.raises(Refused):
        await world.units.give_back(UNIT, "cpu.max", junk, ["6600 20000"])
    assert world.reads() == "6600 20000"


@bus_needed
async def test_what_stood_before_is_text_for_the_ledger(world: World) -> None:
    world.systemd.set(UNIT, {"CPUWeight": 70})
    before = json.loads(await world.units.before(UNIT, PATH, "cpu.weight"))
    assert before["properties"] == {"CPUWeight": 70}
    assert before["dropins"]["CPUWeight"].endswith("CPUWeight=70\n")


def _fits(units: SystemdUnits) -> Units:
    """It is what the protocol asks for: mypy looks."""
    return units
