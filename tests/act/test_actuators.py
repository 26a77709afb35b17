"""Knobs on control files and cards: what is read, what would be written, never looser."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act import ACTUATORS, Means, actuators
from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.act.power import PowerLimit
from gpuagent.act.suspensions import Suspensions
from gpuagent.errors import Gone, Refused, Unsupported
from gpuagent.model.inventory import Inventory, Level, on_cgroup
from gpuagent.model.state import Sensed
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, KNOBS, POWER_LIMIT
from gpuagent.ports import Actuator, Real
from tests.act.host import Agent, Clock, Tree, card, seat, wish
from tests.act.settings import Cards as CardValues
from tests.act.settings import Checkpoints, Notes, Slices
from tests.act.units import FakeUnits
from tests.fakes.levers import FakeEnder, FakeFreezer
from tests.fakes.mps.values import FakeMps
from tests.sense.fakes import FakeProcesses


class Cards:
    """`ports.Gpus` with nothing but power limits."""

    def __init__(self, **watts: float) -> None:
        self.watts = {f"GPU-{k[1:]}": v for k, v in watts.items()}

    def drain(self) -> Sensed:
        return Sensed()

    def watch(self, marks: object) -> None:
        return None

    async def power_limit(self, uuid: str) -> float:
        if uuid not in self.watts:
            raise Gone(f"{uuid} is gone")
        return self.watts[uuid]

    async def set_power_limit(self, uuid: str, watts: float) -> None:
        if not 100 <= watts <= 700:
            raise Refused(f"{watts} W is outside 100 to 700 W")
        self.watts[uuid] = watts

    async def release(self) -> None:
        return None

    async def resume(self) -> None:
        return None


def anything(folder: Path, **cards: float) -> tuple[Actuator, ...]:
    tree = Tree(folder)
    means = Means(
        cgroups=tree,
        units=FakeUnits(),
        gpus=Cards(**cards),
        cpu_period_seconds=0.02,
        freezer=FakeFreezer(tree),
        ender=FakeEnder(FakeProcesses()),
        grace_seconds=lambda: 30.0,
        seen=Inventory,
        mps=FakeMps(),
        suspensions=Suspensions(
            Checkpoints(),
            level=lambda _name: Level.L3,
            clock=Clock(),
            ledger=Notes(),
            cgroup=lambda _pid: "",
        ),
        card_settings=CardValues(*(f"GPU-{k[1:]}" for k in cards)),
        time_slices=Slices(*(f"GPU-{k[1:]}" for k in cards)),
        clock_unlocked=lambda _uuid: True,
        held=lambda _target: False,
    )
    return actuators(means)


def test_every_knob_has_its_actuator(tmp_path: Path) -> None:
    assert tuple(a.knob for a in anything(tmp_path)) == KNOBS
    assert len(ACTUATORS) == len(KNOBS)


@pytest.mark.parametrize(
    ("original", "cores", "written"),
    [
        ("max 100000", 0.5, "10000 20000"),
        ("max 100000", 4, "80000 20000"),
        ("max 100000", 0.05, "1000 20000"),
        ("max 100000", 0.01, "1000 100000"),
        ("max 100000", 0.0, "1000 1000000"),
        ("max 100000", -3, "1000 1000000"),
        ("max 100000", math.inf, "max 100000"),
        ("max 100000", math.nan, "max 100000"),
        ("50000 100000", 0.5, "50000 100000"),
        ("50000 100000", 2, "50000 100000"),
        ("50000 250000", 0.1, "2000 20000"),
        ("1000 1000000", 0.0, "1000 1000000"),
    ],
)
def test_cpu_max_is_encoded_never_looser(
    tmp_path: Path, original: str, cores: float, written: str
) -> None:
    knob = CpuMax(Tree(tmp_path), period_seconds=0.02)
    quota, period = original.split()
    was = Real(math.inf if quota == "max" else int(quota) / int(period), original)
    assert knob.encode(seat("a"), cores, was).raw == written


@given(
    st.floats(),
    st.floats(0.0001, 2) | st.just(math.inf),
    st.floats(0, 10),
)
def test_no_encoding_is_looser_than_asked_or_than_the_original(
    value: float, original: float, period: float
) -> None:
    for knob in (
        CpuMax(Tree(Path("/nowhere")), period_seconds=period),
        CpuWeight(Tree(Path("/nowhere"))),
        PowerLimit(Cards()),
    ):
        scale = 100 if not isinstance(knob, CpuMax) else 1
        was = Real(original * scale, "original")
        new = knob.encode(seat("a"), value * scale, was)
        assert new.value <= was.value
        if new.raw == "original":
            continue
        floor = {CpuMax: 0.001, CpuWeight: 1.0}.get(type(knob), 0.0)
        assert new.value <= max(value * scale, floor) * (1 + 1e-9)
        if isinstance(knob, CpuMax):
            quota, period_us = map(int, new.raw.split())
            assert quota >= 1000
            assert 1000 <= period_us <= 1_000_000


@pytest.mark.parametrize(
    ("original", "value", "written"),
    [(100, 25.9, "25"), (100, 0, "1"), (100, -math.inf, "1"), (100, 100, "100"), (0, 5, "0")],
)
def test_cpu_weight_is_encoded(tmp_path: Path, original: int, value: float, written: str) -> None:
    was = Real(float(original), str(original))
    assert CpuWeight(Tree(tmp_path)).encode(seat("a"), value, was).raw == written


@pytest.mark.parametrize(
    ("watts", "raw"), [(300.0, "300000"), (412.7, "412700"), (0.0, "700000"), (-1, "700000")]
)
def test_power_is_whole_milliwatts(watts: float, raw: str) -> None:
    assert PowerLimit(Cards()).encode(card(1), watts, Real(700.0, "700000")).raw == raw


@given(st.integers(1, 10**6))
def test_milliwatts_survive_watts(milliwatts: int) -> None:
    new = PowerLimit(Cards()).encode(card(1), milliwatts / 1000, Real(math.inf, "x"))
    assert new.raw == str(milliwatts)


async def test_files_are_read_written_and_identified(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    inode = tree.make("/a", cpu_max="max 100000", cpu_weight="100")
    subject = on_cgroup("a", "/a", inode)
    weight, quota, *_ = anything(tmp_path)
    assert await quota.get(subject) == Real(math.inf, "max 100000")
    assert await weight.get(subject) == Real(100.0, "100")
    await quota.set(subject, "10000 20000")
    assert await quota.get(subject) == Real(0.5, "10000 20000")
    assert await quota.identity(subject) == f"{tree.tree()}/{inode}"
    assert await quota.owner(subject) == await weight.owner(subject) == os.geteuid()
    another = on_cgroup("a", "/a", inode + 1)
    for call in (
        quota.verify(subject, f"{tree.tree()}/{inode + 1}"),
        quota.verify(another, f"{tree.tree()}/{inode}"),
        quota.get(another),
        quota.identity(another),
        quota.owner(another),
        weight.set(another, "1"),
    ):
        with pytest.raises(Gone):
            await call
    (tmp_path / "a/cpu.weight").unlink()
    with pytest.raises(Unsupported):
        await weight.get(subject)


@pytest.mark.parametrize("junk", ["", "max", "1 0", "a b", "1 2 3", "\x1b[2J", "9" * 5000])
async def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, junk: str) -> None:
    inode = Tree(tmp_path).make("/a", cpu_max=junk, cpu_weight=junk + "x")
    weight, quota, *_ = anything(tmp_path)
    for knob in (quota, weight):
        with pytest.raises(Refused, match="not understood"):
            await knob.get(on_cgroup("a", "/a", inode))


async def test_a_card_s_limit_round_trips(tmp_path: Path) -> None:
    cards = Cards(_1=700.0)
    power = PowerLimit(cards)
    assert await power.get(card(1)) == Real(700.0, "700000")
    await power.set(card(1), "412700")
    assert cards.watts["GPU-1"] == 412.7
    assert await power.identity(card(1)) == "GPU-1"
    await power.verify(card(1), "GPU-1")
    with pytest.raises(Gone):
        await power.verify(card(1), "GPU-2")
    assert await power.owner(card(1)) == 0
    with pytest.raises(Refused):
        await power.set(card(1), "12")
    with pytest.raises(Refused, match="milliwatts"):
        await power.set(card(1), "max 100000")
    with pytest.raises(Gone):
        await power.get(card(2))


async def test_real_files_end_as_they_began(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "cg")
    inodes = {n: tree.make(f"/{n}", cpu_max="max 100000", cpu_weight="100") for n in "ab"}
    (tmp_path / "state").mkdir()
    hands = anything(tmp_path / "cg", _1=700.0)
    subjects = {n: on_cgroup(n, f"/{n}", i) for n, i in inodes.items()}
    async with Agent(tmp_path / "state", *hands) as agent:
        wishes = [wish(CPU_MAX, s, 0.3) for s in subjects.values()]
        wishes += [wish(CPU_WEIGHT, s, 20) for s in subjects.values()]
        await agent.tick(*wishes, wish(POWER_LIMIT, card(1), 300.0))
        await agent.reconciler.settled()
        assert tree.read("/a", "cpu.max") == "6000 20000"
        assert tree.read("/b", "cpu.weight") == "20"
        assert len(agent.ledger.entries) == 5
        await agent.tick()
        await agent.reconciler.settled()
        assert tree.read("/a", "cpu.max") == "max 100000"
        assert tree.read("/b", "cpu.weight") == "100"
        power = next(hand for hand in hands if hand.knob is POWER_LIMIT)
        assert (await power.get(card(1))).raw == "700000"
        assert not agent.ledger.entries
