"""The control law, alone and against a plant whose limit it does not know."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Backpressure
from gpuagent.decide.share import Grip, cut, ease, forgotten, overdue

LAW = Backpressure()


def drive(limit: float, seconds: int, *, lag: int = 2, floor: float = 0.2) -> list[float]:
    """Shares over time against a cause that holds, `lag` s late, while the share is over `limit`."""
    grip, shares = Grip(floor=floor), [1.0] * lag
    for now in range(seconds):
        trouble = shares[-lag] > limit
        if trouble:
            grip = cut(grip, now, LAW, dwell=LAW.dwell)
        else:
            grip = ease(grip, now, LAW, dwell=LAW.dwell)
        shares.append(grip.share)
    return shares[lag:]


def reversals(shares: list[float]) -> int:
    steps = [b - a for a, b in pairwise(shares) if abs(b - a) > 1e-9]
    return sum(1 for a, b in pairwise(steps) if (a > 0) != (b > 0))


def test_cuts_by_factor_once_per_dwell_down_to_the_floor() -> None:
    shares = drive(0.0, 60)
    assert shares[0] == 0.7
    assert shares[4] == 0.7
    assert abs(shares[5] - 0.49) < 1e-9
    assert shares[-1] == 0.2


def test_comes_back_to_just_under_where_trouble_began_and_then_to_all() -> None:
    grip = cut(Grip(floor=0.2), 0, LAW, dwell=5)
    shares = []
    for now in range(1, 120):
        grip = ease(grip, now, LAW, dwell=5)
        shares.append(grip.share)
    assert 0.95 in shares
    first = shares.index(0.95)
    assert shares[first + 28] == 0.95, "it stays there for the first pause"
    assert shares[first + 31] == 1.0
    assert max(shares) == 1.0


def test_pauses_double_up_to_ten_minutes() -> None:
    grip = Grip(floor=0.2)
    pauses = []
    now = 0.0
    for _ in range(8):
        grip = cut(grip, now, LAW, dwell=5)
        pauses.append(grip.pause)
        grip = ease(grip, now + 10, LAW, dwell=5)
        now += 20
    assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]


def test_unknown_cause_is_let_go_slowly_but_wholly() -> None:
    grip = cut(Grip(floor=0.2), 0, LAW, dwell=5)
    shares = []
    for now in range(1, 30):
        grip = ease(grip, now, LAW, dwell=5, known=False)
        shares.append(grip.share)
    assert shares[0] == 0.7, "not at once"
    assert shares[-1] == 1.0


def test_relapse_at_the_floor_opens_a_new_time_box() -> None:
    grip = Grip(floor=0.7)
    grip = cut(grip, 0, LAW, dwell=5)
    assert overdue(grip, 30, LAW)
    grip = ease(grip, 31, LAW, dwell=5)
    assert not overdue(grip, 62, LAW)
    grip = cut(grip, 62, LAW, dwell=5)
    assert not overdue(grip, 70, LAW)
    assert overdue(grip, 92, LAW)


def test_forgotten_only_after_long_freedom() -> None:
    grip = Grip(floor=0.2, share=1.0, trouble=1.05, pause=30, cut_at=0, moved_at=100)
    assert not forgotten(grip, 600, LAW)
    assert forgotten(grip, 701, LAW)


@given(st.floats(0.2, 0.99), st.integers(2, 4), st.floats(0.05, 0.5))
def test_steady_state_has_at_most_one_reversal_a_minute(
    limit: float, lag: int, floor: float
) -> None:
    shares = drive(limit, 3600, lag=lag, floor=floor)
    late = shares[900:]
    assert reversals(late) <= len(late) / 60


@given(st.floats(0.25, 1.0), st.floats(0.05, 0.2))
def test_holds_within_the_bounds_and_wastes_little(limit: float, floor: float) -> None:
    shares = drive(limit, 3600, floor=floor)
    assert all(floor <= s <= 1.0 for s in shares)
    late = shares[1800:]
    assert sum(late) / len(late) >= 0.55 * limit


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 30)), max_size=60))
def test_invariants_for_any_sequence(steps: list[tuple[bool, float]]) -> None:
    grip, now = Grip(floor=0.3), 0.0
    for trouble, seconds in steps:
        now += seconds
        before = grip
        grip = cut(grip, now, LAW, dwell=5) if trouble else ease(grip, now, LAW, dwell=5)
        assert 0.3 <= grip.share <= 1.0
        if trouble:
            assert grip.share <= before.share
            assert grip.share >= min(before.share, max(0.3, before.share * LAW.cut)) - 1e-9
        else:
            assert before.share <= grip.share <= before.share + LAW.recover + 1e-9
        assert grip.pause <= LAW.probe_max
