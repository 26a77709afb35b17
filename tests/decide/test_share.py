"""The control law, alone and against a plant whose limit it does not know."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Backpressure
from gpuagent.decide.share import Grip, cut, ease, forgotten, judged, overdue

LAW = Backpressure()


class Seen(NamedTuple):
    """Whether there is ample room."""

    ample: bool = False


QUIET = Seen()


def drive(limit: float, seconds: int, *, lag: int = 2, floor: float = 0.2) -> list[float]:
    """Shares over time against a cause that holds, `lag` s late, while the share is over `limit`."""
    grip, shares = Grip(floor=floor), [1.0] * lag
    for now in range(seconds):
        trouble = shares[-lag] > limit
        if trouble:
            grip = cut(grip, now, LAW, dwell=LAW.dwell, shows=15)
        else:
            value = Seen(shares[-lag] < 0.8 * limit)
            grip = ease(grip, now, LAW, dwell=LAW.dwell, value=value)
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
    grip = cut(Grip(floor=0.2), 0, LAW, dwell=5, shows=15)
    shares = []
    for now in range(1, 120):
        grip = ease(grip, now, LAW, dwell=5, value=QUIET)
        shares.append(grip.share)
    assert 0.95 in shares
    first = shares.index(0.95)
    assert shares[first + 28] == 0.95, "it stays there for the first pause"
    assert shares[first + 31] == 1.0
    assert max(shares) == 1.0


def relapses(after: float) -> list[float]:
    """Pauses while trouble comes back again and again, so long after the last raise."""
    grip = Grip(floor=0.2)
    pauses = []
    now = 0.0
    for _ in range(8):
        grip = cut(grip, now, LAW, dwell=5, shows=15)
        pauses.append(grip.pause)
        grip, now = until_raised(grip, now + 10)
        now += after
    return pauses


def until_raised(grip: Grip, now: float) -> tuple[Grip, float]:
    """The trouble having ended now: the grip after the first step back, and when that came."""
    held = grip.share
    while grip.share <= held:
        grip = ease(grip, now, LAW, dwell=5, value=QUIET)
        now += 1
    return grip, now


def test_pauses_double_up_to_ten_minutes_where_more_share_brought_trouble_back() -> None:
    assert relapses(2) == [30, 60, 120, 240, 480, 600, 600, 600]


def test_where_it_saws_the_way_back_begins_later_so_that_it_reverses_once_a_minute_at_most() -> (
    None
):
    grip, now, waits, began = Grip(floor=0.2), 0.0, [], []
    for _ in range(6):
        grip = cut(grip, now, LAW, dwell=5, shows=15)
        grip, raised_at = until_raised(grip, now + 1)
        waits.append(raised_at - now)
        began.append(raised_at)
        now = raised_at + 2
    assert waits[0] < 10, "nothing is known against it yet"
    assert waits[1] == pytest.approx(60, abs=3)
    assert all(w == pytest.approx(120, abs=3) for w in waits[2:])
    assert 2 * len(began) <= (began[-1] - began[0]) / 60 + 4


def test_what_can_no_longer_be_read_is_let_go_without_waiting() -> None:
    grip = Grip(floor=0.2, share=0.3, trouble=0.9, pause=600.0, moved_at=0.0)
    assert ease(grip, 5, LAW, dwell=5, value=None).share == 0.5
    assert ease(grip, 5, LAW, dwell=5, value=QUIET).share == 0.3


def test_trouble_that_comes_by_itself_says_nothing_against_trying_more() -> None:
    assert relapses(20) == [30] * 8


def test_trouble_that_comes_back_is_met_with_what_ended_it_in_one_step() -> None:
    grip = Grip(floor=0.1)
    for now in (0.0, 5.0, 10.0, 15.0):
        grip = cut(grip, now, LAW, dwell=5, shows=15)
    ended = grip.share
    now = 20.0
    while grip.share < 0.9:
        grip = ease(grip, now, LAW, dwell=5, value=QUIET)
        now += 1
    assert cut(grip, now, LAW, dwell=5, shows=15).share == ended


def held_at_half(doubt: float = 10.0) -> Grip:
    """Calm for long; trouble began at 0.55 and ended at 0.4."""
    return Grip(
        floor=0.2,
        share=0.5,
        trouble=0.55,
        pause=600.0,
        eased=0.4,
        doubt=doubt,
        moved_at=100.0,
    )


def freed_after(grip: Grip, *, ample: bool = True, seconds: int = 300) -> int | None:
    """Seconds after which the share has left its ceiling by a whole step."""
    for now in range(101, 101 + seconds):
        grip = ease(grip, now, LAW, dwell=5, value=Seen(ample))
        if grip.share >= 0.7:
            return now - 100
    return None


def test_where_there_is_ample_room_a_step_more_is_given_whatever_is_remembered() -> None:
    assert freed_after(held_at_half()) == 11
    assert freed_after(held_at_half(), ample=False) is None
    assert freed_after(held_at_half(doubt=80.0)) == 81


def test_each_step_for_ample_room_waits_until_the_one_before_has_shown() -> None:
    grip, shares = held_at_half(), []
    for now in range(101, 150):
        grip = ease(grip, now, LAW, dwell=5, value=Seen(ample=True))
        shares.append(round(grip.share, 3))
    assert [shares.index(s) for s in (0.7, 0.9, 1.0)] == [10, 20, 30]


def test_one_sample_without_room_is_enough_for_doubt() -> None:
    grip = held_at_half()
    for now in range(101, 190):
        grip = ease(grip, now, LAW, dwell=5, value=Seen(now % 9 != 0))
    assert grip.share == 0.5


def test_room_that_the_lever_itself_has_made_is_doubted_longer_each_time() -> None:
    doubts = [10.0]
    for _ in range(8):
        grip, now = held_at_half(doubts[-1]), 101.0
        while grip.share < 0.7:
            grip = ease(grip, now, LAW, dwell=5, value=Seen(ample=True))
            now += 1
        doubts.append(cut(grip, now + 5, LAW, dwell=5, shows=15).doubt)
        assert cut(grip, now + 20, LAW, dwell=5, shows=15).doubt == grip.doubt, "not of that"
    assert doubts == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_unknown_cause_is_let_go_slowly_but_wholly() -> None:
    grip = cut(Grip(floor=0.2), 0, LAW, dwell=5, shows=15)
    shares = []
    for now in range(1, 30):
        grip = ease(grip, now, LAW, dwell=5, value=None)
        shares.append(grip.share)
    assert shares[0] == 0.7, "not at once"
    assert shares[-1] == 1.0


def test_relapse_at_the_floor_opens_a_new_time_box() -> None:
    grip = Grip(floor=0.7)
    grip = cut(grip, 0, LAW, dwell=5, shows=15)
    assert overdue(grip, 30, LAW)
    grip = ease(grip, 31, LAW, dwell=5, value=QUIET)
    assert not overdue(grip, 62, LAW)
    grip = cut(grip, 62, LAW, dwell=5, shows=15)
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


SAMPLES = st.sampled_from(["trouble", "calm", "ample", "unknown"])


@given(st.lists(st.tuples(SAMPLES, st.floats(0.05, 30)), max_size=60))
def test_invariants_for_any_sequence(steps: list[tuple[str, float]]) -> None:
    grip, now = Grip(floor=0.3), 0.0
    for sample, seconds in steps:
        now += seconds
        before = grip
        trouble = sample == "trouble"
        if trouble:
            grip = cut(grip, now, LAW, dwell=5, shows=15)
        else:
            value = None if sample == "unknown" else Seen(sample == "ample")
            grip = ease(grip, now, LAW, dwell=5, value=value)
        assert 0.3 <= grip.share <= 1.0
        if trouble:
            assert grip.share <= before.share
            least = min(before.share * LAW.cut, before.eased)
            assert grip.share >= min(before.share, max(0.3, least)) - 1e-9
        else:
            assert before.share <= grip.share <= before.share + LAW.recover + 1e-9
        assert grip.pause <= LAW.probe_max


# -- the time box ----------------------------------------------------------------------------------


def boxed(samples: list[bool]) -> float | None:
    """Seconds until a lever at its floor is overdue, with one sample a second; None if never."""
    grip = Grip(floor=0.2)
    while not grip.at_floor:
        grip = cut(grip, 0.0, LAW, dwell=0, shows=15)
    for second, over in enumerate(samples, 1):
        grip = judged(grip, float(second), float(second), over=over)
        if overdue(grip, float(second), LAW):
            return second
    return None


def test_a_lever_at_its_floor_has_its_time_box_while_the_value_stays_over_its_mark() -> None:
    assert boxed([True] * 100) == LAW.time_box


def test_one_good_sample_among_many_proves_nothing_and_most_of_them_do() -> None:
    assert boxed([True, True, True, True, False] * 40) == 48
    assert boxed([True, False] * 500) is None
    assert boxed([False] * 500) is None
    relapse = boxed([False] * 20 + [True] * 100)
    assert relapse == 20 + LAW.time_box, "good times are not saved up"


def test_the_same_sample_is_judged_once() -> None:
    grip = judged(Grip(floor=0.2, share=0.2), 0.0, 0.0, over=True)
    assert grip.floor_since == 0.0
    grip = judged(grip, 4.0, 4.0, over=False)
    assert judged(grip, 4.5, 4.0, over=False) is grip


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 9)), max_size=40))
def test_time_at_the_floor_is_never_more_than_there_was(steps: list[tuple[bool, float]]) -> None:
    now = 0.0
    grip = judged(Grip(floor=0.2, share=0.2, calm=False), now, now, over=True)
    for over, seconds in steps:
        now += seconds
        grip = judged(grip, now, now, over=over)
        assert grip.floor_since is not None
        assert 0.0 <= grip.floor_since <= now


def test_what_is_above_its_floor_again_and_under_its_mark_is_there_in_vain_no_longer() -> None:
    lifted = Grip(floor=0.2, share=0.3, calm=False, floor_since=0.0, judged_at=0.0)
    assert judged(lifted, 9.0, 9.0, over=True).floor_since == 0.0, "noise lifts it for a moment"
    assert judged(lifted, 9.0, 9.0, over=False).floor_since is None
