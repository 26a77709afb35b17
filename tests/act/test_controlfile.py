"""A control file that a systemd unit manages: what is written, given back, and never taken for ours."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.controlfile import ControlFile, FileKnob
from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.act.hostmemory import HostMemory, memory_high, memory_max
from gpuagent.act.io import IoWeight
from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, put_back
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.unitfiles import kept, values
from gpuagent.model.inventory import Subject, on_cgroup
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, IO_WEIGHT, MEMORY_MAX
from gpuagent.ports import Lingering, Real
from tests.act.host import Agent, Clock, Disk, Inline, Tree, wish
from tests.act.units import FakeUnits

UNIT = "train.service"
PATH = "/system.slice/train.service"
FREE = "max 100000"


class Host:
    """One service, its control files in a folder, and a systemd that manages it."""

    def __init__(self, folder: Path, **files: str) -> None:
        self.tree = Tree(folder / "cg")
        self.units = FakeUnits(self.tree)
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.start(**files)

    def start(self, **files: str) -> None:
        self.units.start(UNIT, PATH, **(files or {"cpu_max": FREE, "cpu_weight": "100"}))

    @property
    def subject(self) -> Subject:
        return on_cgroup("train", PATH, self.tree.inode(PATH))

    @property
    def knobs(self) -> tuple[CpuWeight, CpuMax, IoWeight, HostMemory, HostMemory]:
        tree, units, inline = self.tree, self.units, Inline()
        return (
            CpuWeight(tree, inline, units=units),
            CpuMax(tree, period_seconds=0.02, executor=inline, units=units),
            IoWeight(tree, inline, units=units),
            memory_high(tree, inline, units=units),
            memory_max(tree, inline, units=units),
        )

    def agent(self) -> Agent:
        return Agent(self.state, *self.knobs)

    def reads(self, file: str = "cpu.max") -> str:
        return self.tree.read(PATH, file)

    def rival(self, text: str, file: str = "cpu.max") -> None:
        (self.tree.root / PATH[1:] / file).write_text(text + "\n")

    @property
    def clean(self) -> bool:
        """Nothing of ours is with systemd."""
        return not self.units.memory and not self.units.dropins


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_the_unit_is_told_and_given_back_without_a_trace(host: Host) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5), wish(CPU_WEIGHT, host.subject, 70))
        assert host.reads() == "10000 20000"
        assert host.reads("cpu.weight") == "70"
        assert host.units.dropins == {(UNIT, "cpu.max"): "10000 20000", (UNIT, "cpu.weight"): "70"}
        host.units.reload()
        assert host.reads() == "10000 20000"
        await agent.tick()
        assert (host.reads(), host.reads("cpu.weight")) == (FREE, "100")
        assert host.clean
        assert not agent.ledger.entries


async def test_what_somebody_set_before_us_is_there_again_after_us(host: Host) -> None:
    host.units.set_property(UNIT, "cpu.max", "80000 100000")
    async with host.agent() as agent:
        for cores in (0.5, 0.3):
            await agent.tick(wish(CPU_MAX, host.subject, cores))
        assert host.reads() == "6000 20000"
        await agent.tick()
    assert host.reads() == "80000 100000"
    assert host.units.dropins == {(UNIT, "cpu.max"): "80000 100000"} == host.units.memory


async def test_a_controller_that_is_not_enabled_reads_as_its_default(tmp_path: Path) -> None:
    host = Host(tmp_path, memory_current="1")
    weight, quota, io, high, most = host.knobs
    assert await quota.get(host.subject) == Real(math.inf, FREE)
    assert await weight.get(host.subject) == Real(100.0, "100")
    assert await io.get(host.subject) == Real(100.0, "default 100")
    assert await high.get(host.subject) == await most.get(host.subject) == Real(math.inf, "max")
    assert await quota.owner(host.subject) == 0
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        assert host.reads() == "10000 20000"
        await agent.tick()
    assert host.clean


async def test_without_a_unit_a_missing_file_is_unsupported(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    subject = on_cgroup("a", "/a", tree.make("/a"))
    for units in (None, FakeUnits()):
        knob = CpuWeight(tree, units=units)
        with pytest.raises(Unsupported):
            await knob.get(subject)
        with pytest.raises(Unsupported):
            await knob.owner(subject)


async def test_another_value_through_systemd_is_left_alone_and_only_it(host: Host) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5), wish(CPU_WEIGHT, host.subject, 70))
        host.units.set_property(UNIT, "cpu.max", "80000 100000")
        await agent.tick()
    assert host.reads() == "80000 100000"
    assert host.units.dropins == {(UNIT, "cpu.max"): "80000 100000"} == host.units.memory


async def test_another_value_in_the_file_is_left_alone_and_systemd_cleared(host: Host) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        host.rival("70000 100000")
        await agent.tick()
    assert host.reads() == "70000 100000"
    assert host.clean


async def test_a_restarted_unit_is_given_back_before_it_is_held_again(host: Host) -> None:
    async with host.agent() as agent:
        old = host.subject
        await agent.tick(wish(CPU_MAX, old, 0.5))
        host.start()
        assert host.reads() == "10000 20000", "systemd has written it into the new cgroup"
        said = await agent.tick(wish(CPU_MAX, host.subject, 0.4))
        assert said[CPU_MAX, host.subject].original in {None, math.inf}
        said = await agent.tick(wish(CPU_MAX, host.subject, 0.4), seconds=2)
        outcome = said[CPU_MAX, host.subject]
        assert (outcome.result, outcome.original) == ("applied", math.inf)
        assert host.reads() == "8000 20000"
        await agent.tick()
    assert host.reads() == FREE
    assert host.clean


async def test_until_it_is_given_back_nobody_holds_the_new_cgroup(host: Host) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        host.start()
        host.units.fails = Unavailable("systemd does not answer")
        for _ in range(5):
            said = await agent.tick(wish(CPU_MAX, host.subject, 0.4), seconds=5)
            outcome = said[CPU_MAX, host.subject]
            assert (outcome.result, outcome.original) == ("in flight", None)
        assert len(agent.ledger.entries) == 1
        host.units.fails = None
        for _ in range(3):
            await agent.tick(wish(CPU_MAX, host.subject, 0.4), seconds=20)
        assert host.reads() == "8000 20000"
        await agent.tick()
    assert host.reads() == FREE
    assert host.clean


async def test_a_stopped_unit_starts_again_without_our_limit(host: Host) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        host.units.stop(UNIT)
        await agent.tick()
        assert host.clean
        assert not agent.ledger.entries
        host.start()
    assert host.reads() == FREE


@pytest.mark.parametrize("restarted", [False, True])
async def test_after_a_crash_the_ledger_is_enough(host: Host, restarted: bool) -> None:
    host.units.set_property(UNIT, "cpu.weight", "90")
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5), wish(CPU_WEIGHT, host.subject, 70))
        await agent.die()
    if restarted:
        host.start()
    ledger = Ledger(str(host.state), boot="b1", executor=Inline())
    report = await put_back(
        ledger=ledger, actuators=host.knobs, occasion=Occasion.RESCUE, clock=Clock()
    )
    assert {i.what for i in report} == ({"gone"} if restarted else {"put back"})
    assert (host.reads(), host.reads("cpu.weight")) == (FREE, "90")
    assert host.units.dropins == {(UNIT, "cpu.weight"): "90"} == host.units.memory
    assert not ledger.entries
    await ledger.close()


async def test_while_systemd_does_not_answer_the_value_is_put_back_and_the_rest_later(
    host: Host,
) -> None:
    async with host.agent() as agent:
        await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        host.units.fails = Unavailable("systemd does not answer")
        await agent.tick()
        assert host.reads() == FREE, "the tenant does not wait for systemd"
        await agent.tick(seconds=20)
        assert len(agent.ledger.entries) == 1
        host.units.fails = None
        await agent.tick(seconds=20)
        assert host.clean
        assert not agent.ledger.entries


async def test_a_refusal_of_systemd_is_told(host: Host) -> None:
    host.units.fails = Refused("a container beside it would lose its devices")
    async with host.agent() as agent:
        said = await agent.tick(wish(CPU_MAX, host.subject, 0.5))
        outcome = said[CPU_MAX, host.subject]
        assert (outcome.result, outcome.why) == ("refused", str(host.units.fails))
        assert host.reads() == FREE


async def test_an_entry_of_an_earlier_version_is_put_back_through_the_file(host: Host) -> None:
    """It was written past systemd, and its identity names no unit."""
    ledger = Ledger(
        str(host.state), boot="b1", executor=Inline(), journal=Disk(str(host.state / "l"))
    )
    await ledger.intend(
        knob=CPU_MAX,
        subject=host.subject,
        identity=f"{host.tree.tree()}/{host.subject.inode}",
        original=Real(math.inf, FREE),
        write=Real(0.5, "10000 20000"),
        rule="r",
    )
    host.rival("10000 20000")
    [item] = await put_back(
        ledger=ledger, actuators=host.knobs, occasion=Occasion.CRASH, clock=Clock()
    )
    assert item.what == "put back"
    assert host.reads() == FREE
    await ledger.close()


@pytest.mark.parametrize("junk", ["{", '{"unit":1}', "[]", '{"unit":"a.service"}', "\x00"])
async def test_an_identity_that_is_not_understood_is_refused(host: Host, junk: str) -> None:
    _, quota, *_ = host.knobs
    place = f"{host.tree.tree()}/{host.subject.inode}"
    for call in (
        quota.verify(host.subject, f"{place} {junk}"),
        quota.let_go(host.subject, f"{place} {junk}", []),
    ):
        with pytest.raises(Refused):
            await call


async def test_without_systemd_what_was_set_through_it_is_kept_in_the_ledger(host: Host) -> None:
    _, quota, *_ = host.knobs
    identity = await quota.identity(host.subject)
    alone = CpuMax(host.tree, period_seconds=0.02, executor=Inline())
    await alone.verify(host.subject, identity)
    with pytest.raises(Unavailable):
        await alone.let_go(host.subject, identity, [])
    with pytest.raises(Gone):
        await alone.verify(on_cgroup("train", PATH, 1), identity)


def test_all_files_linger() -> None:
    knob = FileKnob(ControlFile(Tree(Path("/nowhere")), "cpu.max"))
    assert isinstance(knob, Lingering)


@given(
    st.floats(max_value=4096) | st.just(math.nan),
    st.floats(0.0001, 4096) | st.just(math.inf),
    st.floats(0, 2),
)
def test_a_quota_of_a_unit_survives_a_daemon_reload(
    cores: float, original: float, period: float
) -> None:
    """Its drop-in has whole percents only."""
    units = FakeUnits()
    units.units[UNIT] = PATH
    knob = CpuMax(Tree(Path("/nowhere")), period_seconds=period, units=units)
    new = knob.encode(on_cgroup("a", PATH, 1), cores, Real(original, "original"))
    assert new.value <= original
    if new.raw == "original":
        return
    assert new.value <= max(cores, 0.01) * (1 + 1e-9)
    assert new.value > min(cores, original) - 0.0101
    quota, period_us = map(int, new.raw.split())
    assert quota >= 1000
    assert 1000 <= period_us <= 1_000_000
    told = values("cpu.max", new.raw)
    assert all(kept(name, value) == value for name, value in told.items())
    assert told["CPUQuotaPerSecUSec"] * period_us == quota * 1_000_000


@pytest.mark.parametrize(
    ("text", "weight"),
    [("default 100", 100.0), ("default 50\n8:0 200\n8:16 10", 50.0), ("8:0 5\ndefault 7", 7.0)],
)
async def test_io_weight_leaves_the_lines_of_devices(
    tmp_path: Path, text: str, weight: float
) -> None:
    tree = Tree(tmp_path)
    subject = on_cgroup("a", "/a", tree.make("/a", io_weight=text))
    knob = IoWeight(tree, Inline())
    real = await knob.get(subject)
    assert real == Real(weight, f"default {weight:.0f}")
    assert knob.encode(subject, weight / 2, real).raw == f"default {max(1, int(weight / 2))}"
    assert knob.encode(subject, 5000, real) == real
    assert knob.encode(subject, math.nan, real) == real


@pytest.mark.parametrize("junk", ["", "100", "8:0 100", "default", "default x", "default 1 2"])
async def test_an_io_weight_that_is_not_understood_is_refused(tmp_path: Path, junk: str) -> None:
    tree = Tree(tmp_path)
    subject = on_cgroup("a", "/a", tree.make("/a", io_weight=junk))
    with pytest.raises(Refused, match="not understood"):
        await IoWeight(tree, Inline()).get(subject)


@pytest.mark.parametrize(
    ("original", "value", "written"),
    [
        ("max", 104857600.0, "104857600"),
        ("max", 104861695.0, "104857600"),
        ("max", 1.0, "4096"),
        ("max", -5.0, "4096"),
        ("max", math.nan, "max"),
        ("max", math.inf, "max"),
        ("8192", 8192.0, "8192"),
        ("8192", 9e9, "8192"),
        ("0", 4096.0, "0"),
    ],
)
async def test_host_memory_is_whole_pages_and_never_looser(
    tmp_path: Path, original: str, value: float, written: str
) -> None:
    tree = Tree(tmp_path)
    subject = on_cgroup("a", "/a", tree.make("/a", memory_high=original, memory_max=original))
    for knob in (memory_high(tree, Inline()), memory_max(tree, Inline())):
        real = await knob.get(subject)
        assert knob.encode(subject, value, real).raw == written


async def test_all_five_end_as_they_began(tmp_path: Path) -> None:
    host = Host(
        tmp_path,
        cpu_max=FREE,
        cpu_weight="100",
        io_weight="default 100",
        memory_high="max",
        memory_max="1073741824",
    )
    knobs = (CPU_MAX, CPU_WEIGHT, IO_WEIGHT, MEMORY_MAX)
    async with host.agent() as agent:
        wishes = [
            wish(knob, host.subject, value)
            for knob, value in zip(knobs, (0.5, 70, 60, 2.0**29), strict=True)
        ]
        await agent.tick(*wishes)
        assert host.reads("io.weight") == "default 60"
        assert host.reads("memory.max") == str(2**29)
        await agent.tick()
    assert host.reads("io.weight") == "default 100"
    assert host.reads("memory.max") == "1073741824"
    assert host.clean
