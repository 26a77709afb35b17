"""Control files as the kernel writes and reads them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.errors import Gone, Refused, Unsupported
from gpuagent.model.inventory import on_cgroup
from gpuagent.sense.cgroups import parse_max, parse_pressure, parse_weight
from gpuagent.sim.cgroups import SimCgroups
from tests.act.host import Inline

PATH = "/system.slice/train.service"


def made() -> tuple[SimCgroups, int]:
    cgroups = SimCgroups()
    return cgroups, cgroups.make(PATH).inode


def test_a_new_group_reads_as_the_kernel_makes_it() -> None:
    cgroups, _ = made()
    assert cgroups.read(PATH, "cpu.max") == "max 100000"
    assert cgroups.read(PATH, "cpu.weight") == "100"
    assert cgroups.read(PATH, "memory.current") == "0"
    assert parse_pressure(cgroups.read(PATH, "cpu.pressure")) == 0
    with pytest.raises(Unsupported):
        cgroups.read(PATH, "cgroup.freeze")


async def test_the_agents_levers_reach_it_and_can_be_put_back() -> None:
    cgroups, inode = made()
    subject = on_cgroup("train", PATH, inode)
    lever = CpuMax(cgroups, period_seconds=0.02, executor=Inline())
    before = await lever.get(subject)
    await lever.set(subject, lever.encode(subject, 1.5, before).raw)
    assert cgroups.read(PATH, "cpu.max") == "30000 20000"
    assert cgroups.make(PATH).quota == 1.5
    await lever.set(subject, before.raw)
    assert cgroups.read(PATH, "cpu.max") == "max 100000"
    weight = CpuWeight(cgroups, Inline())
    await weight.set(subject, "37")
    assert cgroups.make(PATH).weight == 37


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cpu.max", ""),
        ("cpu.max", "999 100000"),
        ("cpu.max", "5000 999"),
        ("cpu.max", "5000 1000001"),
        ("cpu.max", "-1 100000"),
        ("cpu.max", "max max"),
        ("cpu.max", "1 2 3"),
        ("cpu.weight", "0"),
        ("cpu.weight", "10001"),
        ("cpu.weight", "1.5"),
        ("cpu.stat", "usage_usec 0"),
    ],
)
def test_what_the_kernel_refuses_is_refused_and_changes_nothing(file: str, text: str) -> None:
    cgroups, inode = made()
    before = cgroups.read(PATH, file)
    with pytest.raises(Refused):
        cgroups.write(PATH, inode, file, text)
    assert cgroups.read(PATH, file) == before


@given(st.text(max_size=20))
def test_any_text_is_taken_or_refused(text: str) -> None:
    cgroups, inode = made()
    for file, parse in (("cpu.max", parse_max), ("cpu.weight", parse_weight)):
        try:
            cgroups.write(PATH, inode, file, text)
        except Refused:
            continue
        value = parse(cgroups.read(PATH, file))
        assert value is not None
        assert value > 0 or math.isinf(value)


def test_a_path_made_again_is_another_group() -> None:
    cgroups, inode = made()
    cgroups.remove(cgroups.make(PATH))
    with pytest.raises(Gone):
        cgroups.read(PATH, "cpu.max")
    cgroups.make(PATH)
    assert cgroups.inode(PATH) != inode
    with pytest.raises(Gone):
        cgroups.write(PATH, inode, "cpu.max", "max")
