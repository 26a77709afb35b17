"""The PI law, alone and against plants that it does not know."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.config import Backpressure
from gpuagent.decide.pi import Past, moved, step
from gpuagent.decide.share import Grip, ease

LAW = Backpressure(control="pi")
ERRORS = st.floats(-1.0, 50.0)


def drive(
    plant: list[float], seconds: int, *, lag: int = 3, law: Backpressure = LAW, floor: float = 0.2
) -> list[tuple[float, float]]:
    """(share, error) over time: the error is `plant[0] + plant[1] * share`, so many seconds late."""
    grip, past, seen = Grip(floor=floor), Past(), [(1.0, plant[0] + plant[1])] * lag
    for second in range(seconds):
        error = plant[0] + plant[1] * seen[-lag][0]
        past, change = step(past, float(second), error, law)
        grip = moved(grip, change, float(second))
        seen.append((grip.share, error))
    return seen[lag:]


@pytest.mark.parametrize("slope", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("lag", [1, 3, 8])
def test_it_settles_where_the_value_is_at_the_middle_of_its_marks(slope: float, lag: int) -> None:
    wanted = 0.55
    seen = drive([-slope * wanted, slope], 600, lag=lag)
    assert all(share == pytest.approx(wanted, abs=0.02) for share, _ in seen[-50:])
    assert min(share for share, _ in seen) > 0.2, "nor does it overshoot to the floor"


def test_what_no_share_can_help_ends_at_the_floor_and_comes_back_at_once() -> None:
    grip, past = Grip(floor=0.2), Past()
    for second in range(2000):
        past, change = step(past, float(second), 0.8, LAW)
        grip = moved(grip, change, float(second))
    assert grip.share == 0.2
    past, change = step(past, 2000.0, -0.1, LAW)
    assert moved(grip, change, 2000.0).share > 0.4, "2000 s at the floor have wound nothing up"


@settings(max_examples=60)
@given(st.lists(st.tuples(ERRORS, st.floats(0.0, 30.0)), max_size=40), st.floats(0.05, 1.0))
def test_a_share_keeps_its_range_and_nothing_winds_up(
    samples: list[tuple[float, float]], floor: float
) -> None:
    grip, past, now = Grip(floor=floor), Past(), 0.0
    for error, wait in samples:
        now += wait
        past, change = step(past, now, error, LAW)
        grip = moved(grip, change, now)
        assert floor <= grip.share <= 1.0
        assert -1.0 <= past.error <= 1.0
        assert abs(change) <= LAW.pi_gain * (2.0 + 5.0 / LAW.pi_time)
    # Whatever was before: one quiet sample and 2.5 times the integral time set it free.
    for second in range(1, 120):
        past, change = step(past, now + second, -0.5, LAW)
        grip = moved(grip, change, now + second)
    assert grip.share == 1.0


@given(ERRORS, ERRORS, st.floats(0.0, 0.99))
def test_a_sample_counts_once_and_those_too_close_do_not(
    first: float, second: float, sooner: float
) -> None:
    past, _ = step(Past(), 10.0, first, LAW)
    assert step(past, 10.0, second, LAW) == (past, 0.0)
    assert step(past, 10.0 + sooner, second, LAW) == (past, 0.0)
    assert step(past, 9.0, second, LAW) == (past, 0.0)


def test_the_first_step_takes_by_gain_and_goes_on_by_time() -> None:
    past, change = step(Past(), 5.0, 0.5, LAW)
    assert change == pytest.approx(-0.3 * (0.5 + 0.5 / 15))
    past, change = step(past, 7.0, 0.5, LAW)
    assert change == pytest.approx(-0.3 * 0.5 * 2 / 15)
    _, change = step(past, 8.0, 0.1, LAW)
    assert change == pytest.approx(-0.3 * (-0.4 + 0.1 / 15)), "gives back as the value falls"


def test_a_gap_between_samples_is_not_filled_with_the_last_one() -> None:
    past, _ = step(Past(), 0.0, 0.5, LAW)
    assert step(past, 14.0, 0.5, LAW)[1] == step(past, 5.0, 0.5, LAW)[1]


def test_a_grip_knows_what_was_done_to_it() -> None:
    free = Grip(floor=0.2)
    assert moved(free, 0.3, 1.0) is free
    held = moved(free, -2.0, 4.0)
    assert (held.share, held.cut_at, held.moved_at, held.calm) == (0.2, 4.0, 4.0, False)
    assert moved(held, -0.1, 5.0) is held
    eased = moved(held, 5.0, 6.0)
    assert (eased.share, eased.cut_at, eased.calm) == (1.0, 4.0, False), "the cause goes on"


def test_when_the_cause_has_ended_the_way_back_is_that_of_the_other_law() -> None:
    grip, shares = moved(Grip(floor=0.2), -2.0, 0.0), []
    for now in range(1, 40):
        grip = ease(grip, now, LAW, dwell=5, value=None)
        shares.append(round(grip.share, 2))
    assert sorted(set(shares)) == [0.2, 0.4, 0.6, 0.8, 1.0]
