"""CPU time is shared out as the kernel does: nothing is made up, nothing is left lying, weights count."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.cgroups import SimCgroups
from gpuagent.sim.cpu import Cpus, Group

STEP = 0.05

LEAVES = st.lists(
    st.tuples(
        st.sampled_from(("/a", "/b", "/b/c")),
        st.floats(0, 20),
        st.integers(1, 10_000),
        st.one_of(st.just(math.inf), st.floats(0.01, 20)),
    ),
    min_size=1,
    max_size=8,
)


def tree(*leaves: tuple[str, float, int, float]) -> tuple[SimCgroups, list[Group]]:
    cgroups = SimCgroups()
    made = []
    for i, (above, demand, weight, quota) in enumerate(leaves):
        group = cgroups.make(f"{above}/leaf-{i}")
        group.demand, group.weight, group.quota = demand, weight, quota
        made.append(group)
    return cgroups, made


def shared(cgroups: SimCgroups, cpus: int, steps: int = 1) -> Cpus:
    host = Cpus(profiles.host(), cgroups.root, cpus=cpus, step=STEP)
    for _ in range(steps):
        host.share()
    return host


@given(LEAVES, st.integers(1, 16), st.one_of(st.just(math.inf), st.floats(0.1, 20)))
def test_what_is_given_is_there_and_nobody_gets_too_much(
    leaves: list[tuple[str, float, int, float]], cpus: int, inner: float
) -> None:
    cgroups, made = tree(*leaves)
    cgroups.make("/b").quota = inner
    shared(cgroups, cpus)
    total = sum(g.given for g in made)
    assert total <= cpus + 1e-9
    assert total == pytest.approx(min(cpus, cgroups.root.want), abs=1e-6)
    for group in made:
        assert -1e-12 <= group.given <= min(group.demand, group.quota) + 1e-9
        assert 0 <= group.ratio <= 1 + 1e-9
        assert 0 <= group.pressure.averages[0] <= 1
        assert group.usage_seconds == pytest.approx(group.given * STEP)
    assert cgroups.make("/b").given <= inner + 1e-9


def test_weights_count_among_siblings_and_only_while_cpus_are_short() -> None:
    cgroups, (light, heavy) = tree(("/a", 8, 100, math.inf), ("/a", 8, 300, math.inf))
    shared(cgroups, 8)
    assert (light.given, heavy.given) == pytest.approx((2, 6))
    shared(cgroups, 16)
    assert (light.given, heavy.given) == pytest.approx((8, 8))


def test_a_weight_says_nothing_to_those_in_another_branch() -> None:
    cgroups, (one, other) = tree(("/a", 8, 1, math.inf), ("/b", 8, 10_000, math.inf))
    shared(cgroups, 8)
    assert one.given == pytest.approx(other.given)


def test_what_one_leaves_over_goes_to_the_others() -> None:
    cgroups, made = tree(*(("/a", d, 100, math.inf) for d in (0.5, 4, 4)))
    shared(cgroups, 4)
    assert [g.given for g in made] == pytest.approx([0.5, 1.75, 1.75])


def test_a_quota_is_seen_in_the_counters_and_in_the_pressure_of_the_whole_host() -> None:
    cgroups, (held, free) = tree(("/a", 3, 100, 0.6), ("/a", 1, 100, math.inf))
    host = shared(cgroups, 16, steps=2000)
    stat = dict(line.split() for line in cgroups.read(held.path, "cpu.stat").splitlines())
    assert int(stat["usage_usec"]) == pytest.approx(60e6, rel=1e-6)
    assert int(stat["nr_throttled"]) == int(stat["nr_periods"]) == pytest.approx(1000, abs=1)
    assert held.pressure.averages[0] == pytest.approx(0.8, abs=0.01)
    assert free.pressure.averages[0] == 0
    assert host.pressure.averages[0] == pytest.approx(2.4 / 4, abs=0.01)


def test_no_pressure_without_contention() -> None:
    cgroups, _ = tree(("/a", 3, 100, math.inf), ("/b", 4, 100, math.inf))
    assert shared(cgroups, 8, steps=200).pressure.averages == [0, 0, 0]


def test_pressure_of_a_host_that_is_asked_for_twice_what_it_has() -> None:
    cgroups, made = tree(*(("/a", 8, 100, math.inf) for _ in range(2)))
    host = shared(cgroups, 8, steps=1000)
    assert host.pressure.averages[0] == pytest.approx(1.0, abs=0.01)
    assert made[0].pressure.averages[0] == pytest.approx(0.5, abs=0.01)
    assert host.busy_seconds == pytest.approx(8 * 50)
