"""Intervals hold what they promise, and move with what they measure."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.lab.stats import Interval, mean, ratio, student

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)
POSITIVE = st.floats(1e-3, 1e3)
PAIRS = st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert student(degrees) == pytest.approx(expected, abs=6e-4)


def test_many_degrees_come_near_the_normal() -> None:
    assert student(5000) == pytest.approx(1.96, abs=1e-3)
    assert all(student(n) > student(n + 1) for n in range(1, 40))


def inside(found: Interval | None, truth: float) -> bool:
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return found.low <= truth <= found.high


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_nineteen_in_twenty_intervals_of_a_mean_hold_it(seeds: int) -> None:
    draw = random.Random(seeds)
    held = sum(inside(mean([draw.gauss(7.0, 2.0) for _ in range(seeds)]), 7.0) for _ in range(2000))
    assert 0.935 < held / 2000 < 0.965


@pytest.mark.parametrize("seeds", [5, 10])
def test_nineteen_in_twenty_intervals_of_a_ratio_hold_it(seeds: int) -> None:
    draw = random.Random(seeds)
    held = 0
    for _ in range(2000):
        load = [draw.gauss(0.06, 0.006) for _ in range(seeds)]  # common to both of a pair
        these = [0.6 * v + draw.gauss(0.0, 0.003) for v in load]
        held += inside(ratio(these, load), 0.6)
    assert 0.925 < held / 2000 < 0.97


def test_pairs_make_a_comparison_sharper_than_the_figures_are() -> None:
    load = [0.02, 0.05, 0.09]
    found = ratio([0.5 * v for v in load], load)
    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.high == pytest.approx(0.5)


@given(VALUES, st.floats(-1e6, 1e6))
def test_a_shift_moves_a_mean_and_its_interval(values: list[float], by: float) -> None:
    one, other = mean(values), mean([v + by for v in values])
    assert one is not None
    assert other is not None
    moved = one.shifted(by)
    assert other.value == pytest.approx(moved.value, abs=1e-6)
    assert other.low == pytest.approx(moved.low, rel=1e-6, abs=1e-5)
    assert other.high == pytest.approx(moved.high, rel=1e-6, abs=1e-5)


@given(PAIRS, POSITIVE, POSITIVE)
def test_units_scale_a_ratio_and_its_interval(
    pairs: list[tuple[float, float]], up: float, down: float
) -> None:
    one = ratio([a for a, _ in pairs], [b for _, b in pairs])
    other = ratio([a * up for a, _ in pairs], [b * down for _, b in pairs])
    assert one is not None
    assert other is not None
    for mine, theirs in ((one.value, other.value), (one.low, other.low), (one.high, other.high)):
        assert mine is not None
        assert theirs == pytest.approx(mine * up / down, rel=1e-6, abs=1e-6 * up / down)


@given(PAIRS, st.randoms())
def test_the_order_of_the_seeds_is_nothing(
    pairs: list[tuple[float, float]], shuffle: random.Random
) -> None:
    mixed = list(pairs)
    shuffle.shuffle(mixed)
    one = ratio([a for a, _ in pairs], [b for _, b in pairs])
    other = ratio([a for a, _ in mixed], [b for _, b in mixed])
    assert one is not None
    assert other is not None
    assert other.value == pytest.approx(one.value)
    assert other.high == pytest.approx(one.high, rel=1e-6, abs=1e-6)


def test_what_is_not_known_is_left_out() -> None:
    assert mean([None, None]) is None
    assert mean([1.0, None]) == Interval(1.0, None, None, 1)
    assert ratio([None, 3.0], [1.0, 4.0]) == Interval(0.75, None, None, 1)
    assert ratio([1.0, 2.0], [0.0, 0.0]) is None
    assert ratio([], []) is None


def test_none_missed_is_a_ratio_too() -> None:
    assert ratio([0.0, 0.0], [0.1, 0.2]) == Interval(0.0, 0.0, 0.0, 2)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])
