"""Hysteresis counts seconds and distinct samples, however often it is looked at."""

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.sustained import Sustained, Verdict

SPAN = {"hold": 2.0, "within": 3.0}


def feed(samples: list[tuple[float, Verdict]], looks: int = 1) -> list[bool]:
    held, seen = Sustained(), []
    for at, verdict in samples:
        for look in range(looks):
            held = held.seen(at + look * 0.01, at, verdict, **SPAN)
        seen.append(held.on)
    return seen


def test_on_after_two_seconds_and_off_after_two_more() -> None:
    high = [(float(t), Verdict.HIGH) for t in range(4)]
    clear = [(float(t), Verdict.CLEAR) for t in range(4, 8)]
    assert feed(high + clear) == [False, False, True, True, True, True, False, False]


def test_a_blip_is_not_a_cause() -> None:
    samples = [(0.0, Verdict.HIGH), (1.0, Verdict.HIGH), (1.5, Verdict.CLEAR), (2.5, Verdict.CLEAR)]
    assert not any(feed(samples))


def test_one_dip_within_three_seconds_is_forgiven() -> None:
    samples = [
        (0.0, Verdict.HIGH),
        (1.0, Verdict.HIGH),
        (1.6, Verdict.BETWEEN),
        (2.0, Verdict.HIGH),
        (2.5, Verdict.HIGH),
    ]
    assert feed(samples)[-1]


def test_a_gap_is_unknown_and_not_held() -> None:
    assert feed([(0.0, Verdict.HIGH), (60.0, Verdict.HIGH)]) == [False, False]


def test_one_sample_looked_at_for_long_is_still_one_sample() -> None:
    held = Sustained()
    for look in range(40):
        held = held.seen(look * 0.1, 0.0, Verdict.HIGH, **SPAN)
    assert not held.on


def test_it_says_when_it_will_be_complete() -> None:
    held = Sustained().seen(10.0, 10.0, Verdict.HIGH, **SPAN)
    held = held.seen(10.5, 10.5, Verdict.HIGH, **SPAN)
    assert held.complete_at(10.5, **SPAN) == 12.0
    assert held.seen(12.0, 11.9, Verdict.HIGH, **SPAN).on
    assert held.seen(11.0, 11.0, Verdict.CLEAR, **SPAN).complete_at(11.0, **SPAN) is None


VERDICTS = st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=40)


@given(VERDICTS, st.integers(2, 4))
def test_extra_looks_change_nothing(verdicts: list[Verdict], looks: int) -> None:
    samples = [(float(i), v) for i, v in enumerate(verdicts)]
    assert feed(samples, looks) == feed(samples)


@given(VERDICTS)
def test_memory_is_bounded_by_the_window(verdicts: list[Verdict]) -> None:
    held = Sustained()
    for i, verdict in enumerate(verdicts):
        held = held.seen(i * 0.2, i * 0.2, verdict, **SPAN)
    assert len(held.samples) <= 3.0 / 0.2 + 2
