"""The search over power limits, against exhaustive search over valleys of every kind."""

import random

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.search import Point, best, feasible, following

FLOOR = 0.35


class Load:
    """Work on a card: clocks follow the limit, power rises steeply with them, some time is the host's."""

    def __init__(self, idle: float, knee: float, order: float, host: float, draw: float) -> None:
        self.idle, self.knee, self.order, self.host, self.draw = idle, knee, order, host, draw

    def dynamic(self, clock: float) -> float:
        steep: float = clock**self.order
        return (1 - self.knee) * clock + self.knee * steep

    def clock(self, share: float) -> float:
        if share >= self.draw:
            return 1.0
        wanted = max((share - self.idle) / (self.draw - self.idle), 0.02)
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.dynamic(middle) < wanted else (low, middle)
        return max(high, 0.02)

    def measured(self, share: float, noise: random.Random | None = None) -> Point:
        seconds = self.host + (1 - self.host) / self.clock(share)
        busy = 1 - self.host / seconds
        watts = self.idle + busy * (min(share, self.draw) - self.idle)
        rate = 1 / seconds
        if noise is not None:
            rate, watts = rate * noise.gauss(1, 0.001), watts * noise.gauss(1, 0.001)
        return Point(share, rate, watts, self.draw)


LOADS = st.builds(
    Load,
    idle=st.floats(0.1, 0.25),
    knee=st.floats(0.2, 0.9),
    order=st.floats(2, 24),
    host=st.floats(0, 0.6),
    draw=st.floats(0.4, 1.2),
)


def searched(
    load: Load, slowdown: float, noise: random.Random | None = None
) -> tuple[Point, list[Point]]:
    points = [load.measured(1.0, noise)]
    while (share := following(points, floor=FLOOR, slowdown=slowdown)) is not None:
        assert FLOOR <= share < 1
        assert share not in {p.share for p in points}
        points.append(load.measured(share, noise))
        assert len(points) < 25, "it comes to an end"
    return best(points, slowdown), points


def exhaustive(load: Load, slowdown: float) -> float:
    """The least cost at any limit that is fast enough, thousandth by thousandth."""
    base = load.measured(1.0)
    tried = (load.measured(FLOOR + (1 - FLOOR) * i / 650) for i in range(651))
    return min(p.cost for p in tried if p.rate >= base.rate * (1 - slowdown))


@given(LOADS, st.floats(0.03, 0.3))
def test_it_is_within_five_percent_of_the_best_and_never_too_slow(
    load: Load, slowdown: float
) -> None:
    found, points = searched(load, slowdown)
    # What is left to noise is no part of the search: on the steepest cards it costs some percent more.
    left = min(0.1 * slowdown, 0.01)
    assert found.cost <= 1.05 * exhaustive(load, slowdown - left)
    assert found.cost <= 1.10 * exhaustive(load, slowdown)
    assert found.rate >= points[0].rate * (1 - slowdown)


@given(LOADS, st.floats(0.03, 0.3), st.integers(0, 2**32))
def test_noise_costs_little(load: Load, slowdown: float, seed: int) -> None:
    found, points = searched(load, slowdown, random.Random(seed))
    still = load.measured(found.share)
    assert still.cost <= 1.12 * exhaustive(load, slowdown)
    assert still.cost <= 1.07 * exhaustive(load, slowdown - min(0.1 * slowdown, 0.01))
    assert still.rate >= load.measured(1.0).rate * (1 - slowdown) - 0.004
    assert len(points) < 25


def test_a_card_that_draws_less_than_any_limit_is_left_at_once() -> None:
    points = [Point(1.0, 1.0, 50.0, peak=0.3)]
    assert following(points, floor=FLOOR, slowdown=0.05) is None


def test_limits_above_the_draw_are_not_tried() -> None:
    assert following([Point(1.0, 1.0, 50.0, peak=0.6)], floor=FLOOR, slowdown=0.05) == 0.52


def test_what_is_too_slow_is_never_best_however_cheap() -> None:
    points = [Point(1.0, 1.0, 100), Point(0.9, 0.97, 90), Point(0.8, 0.5, 10)]
    assert best(points, 0.05).share == 0.9
    assert [p.share for p in feasible(points, 0.05)] == [1.0, 0.9]
