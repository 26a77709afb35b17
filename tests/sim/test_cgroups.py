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
    assert cgroups.read(PATH, "cgroup.freeze") == "0"
    assert cgroups.read(PATH, "cgroup.events") == "populated 0\nfrozen 0"
    for path, file in ((PATH, "memory.high"), ("/", "cgroup.freeze"), ("/", "cgroup.events")):
        with pytest.raises(Unsupported):
            cgroups.read(path, file)


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
        ("cgroup.freeze", ""),
        ("cgroup.freeze", "2"),
        ("cgroup.freeze", "-1"),
        ("cgroup.freeze", "on"),
        ("cgroup.freeze", "1\n\n"),
        ("cgroup.events", "frozen 1"),
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
    try:
        cgroups.write(PATH, inode, "cgroup.freeze", text)
    except Refused:
        assert cgroups.read(PATH, "cgroup.freeze") == "0"
    else:
        assert text.strip() in {"0", "1"}


def test_freezing_reaches_all_below_and_thawing_only_what_nothing_else_freezes() -> None:
    cgroups, inode = made()
    below = cgroups.make(f"{PATH}/worker")
    below.processes = 1

    def said(path: str) -> tuple[str, str]:
        return cgroups.read(path, "cgroup.freeze"), cgroups.read(path, "cgroup.events")

    cgroups.write(PATH, inode, "cgroup.freeze", "1\n")
    assert said(PATH) == ("1", "populated 1\nfrozen 1")
    assert said(below.path) == ("0", "populated 1\nfrozen 1")
    assert said("/system.slice") == ("0", "populated 1\nfrozen 0")
    assert cgroups.make(f"{PATH}/later").frozen
    cgroups.write(below.path, below.inode, "cgroup.freeze", "1")
    cgroups.write(PATH, inode, "cgroup.freeze", "0")
    assert said(PATH) == ("0", "populated 1\nfrozen 0")
    assert said(below.path) == ("1", "populated 1\nfrozen 1")
    cgroups.write(below.path, below.inode, "cgroup.freeze", "0\n")
    assert not below.frozen
    with pytest.raises(Unsupported):
        cgroups.write("/", cgroups.inode("/"), "cgroup.freeze", "1")


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20))
def test_a_group_is_frozen_if_it_or_one_above_was_told_to(turns: list[tuple[int, bool]]) -> None:
    cgroups = SimCgroups()
    groups = [cgroups.make(p) for p in ("/a", "/a/b", "/a/b/c", "/a/d", "/e")]
    for i, freeze in turns:
        cgroups.write(groups[i].path, groups[i].inode, "cgroup.freeze", str(int(freeze)))
        for group in groups:
            told = {g.path: g.freeze for g in groups}
            assert group.frozen == any(
                f and f"{group.path}/".startswith(f"{p}/") for p, f in told.items()
            )


def test_a_path_made_again_is_another_group() -> None:
    cgroups, inode = made()
    cgroups.remove(cgroups.make(PATH))
    with pytest.raises(Gone):
        cgroups.read(PATH, "cpu.max")
    cgroups.make(PATH)
    assert cgroups.inode(PATH) != inode
    with pytest.raises(Gone):
        cgroups.write(PATH, inode, "cpu.max", "max")
