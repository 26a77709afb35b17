"""Whether a lever has plainly done something, told from noise and from a load that rises."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.relief import Relief


def course(errors: list[float], settled_after: int = 0, begun: float | None = None) -> Relief:
    """One error a second; the lever has had its full effect after so many."""
    relief = Relief.begun(0.0, errors[0] if begun is None else begun, 0.15)
    for second, error in enumerate(errors, 1):
        relief = relief.after(float(second), error, settled=second > settled_after)
    return relief


def test_a_value_that_stays_is_no_relief() -> None:
    assert not course([0.5] * 60).plain


@pytest.mark.parametrize("before", [0.05, 0.3, 1.0, 3.0])
def test_a_seventh_of_the_value_is(before: float) -> None:
    assert course([before] * 10 + [0.84 * (1 + before) - 1] * 90).plain
    slightly = max(0.93 * (1 + before) - 1, min(before / 2 + 0.01, 0.86 * (1 + before) - 1))
    assert not course([before] * 10 + [slightly] * 90).plain


def test_what_a_rising_load_was_at_its_beginning_says_little() -> None:
    rising = [0.1 * second for second in range(30)]
    assert course([*rising, *[1.5] * 60], settled_after=30).plain
    assert not course([*rising, *[1.5] * 60], settled_after=0).plain


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_relief_for_long(seed: int) -> None:
    random = Random(seed)
    relief, plain = Relief.begun(0.0, 0.5, 0.15), 0
    for second in range(1, 601):
        relief = relief.after(second, 1.5 * random.gauss(1.0, 0.08) - 1, settled=second > 30)
        plain += relief.plain
    assert plain < 60


def test_doing_without_it_is_regretted_where_the_value_rises_plainly() -> None:
    held = course([1.0] * 5 + [0.3] * 60, settled_after=20)
    without = held.let_go()
    assert not without.regretted
    assert not without.after(66.0, 0.9, settled=True).regretted, "one sample is no proof"
    for second in range(66, 100):
        without = without.after(float(second), 0.9, settled=True)
    assert without.regretted


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_hardly_ever_regretted(seed: int) -> None:
    random = Random(seed)
    without = course([0.5] * 40, settled_after=30).let_go()
    for second in range(41, 641):
        without = without.after(second, 1.5 * random.gauss(1.0, 0.08) - 1, settled=True)
        assert not without.regretted


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(-1, 10)), max_size=50))
def test_the_worst_is_never_less_than_it_was_nor_more_than_what_was_seen(
    samples: list[tuple[float, float]],
) -> None:
    relief, at, most = Relief.begun(0.0, 0.5, 0.15), 0.0, 0.5
    for seconds, error in samples:
        before, at, most = relief, at + seconds, max(most, error)
        relief = relief.after(at, error, settled=False)
        assert before.worst <= relief.worst <= most + 1e-9
        assert relief.after(at, error + 1, settled=False) == relief, "a sample counts once"
