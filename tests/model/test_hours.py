"""Spans of local time: what is one, what is in one, and nights in which the clocks are changed."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.model.hours import DAYS, parse, within

NIGHT = ("23:00-06:00",)
BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> float:
    """Seconds since the epoch of a moment written in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def in_berlin(hours: tuple[str, ...], utc: str) -> bool:
    moment = datetime.fromisoformat(utc).replace(tzinfo=UTC).astimezone(BERLIN)
    offset = moment.utcoffset()
    assert offset is not None
    return within(hours, moment.timestamp(), offset.total_seconds())


@pytest.mark.parametrize(
    ("hours", "moment", "inside"),
    [
        ("23:00-06:00", "2026-11-30T22:59:59", False),
        ("23:00-06:00", "2026-11-30T23:00:00", True),
        ("23:00-06:00", "2026-12-01T05:59:59", True),
        ("23:00-06:00", "2026-12-01T06:00:00", False),
        ("sat,sun 00:00-24:00", "2026-11-28T00:00:00", True),
        ("sat,sun 00:00-24:00", "2026-11-29T23:59:59", True),
        ("sat,sun 00:00-24:00", "2026-11-30T00:00:00", False),
        ("fri 22:00-04:00", "2026-11-28T03:00:00", True),  # the night that began on Friday
        ("fri 22:00-04:00", "2026-11-27T03:00:00", False),
        ("sun-tue 12:00-13:00", "2026-11-30T12:30:00", True),
        ("sun-tue 12:00-13:00", "2026-12-02T12:30:00", False),
    ],
)
def test_what_is_inside(hours: str, moment: str, *, inside: bool) -> None:
    assert within((hours,), at(moment), 0) is inside


def test_no_hours_are_all_hours_and_several_are_any_of_them() -> None:
    assert within((), at("2026-11-30T12:00:00"), 0)
    both = ("08:00-09:00", "20:00-21:00")
    assert [within(both, at(f"2026-11-30T{h:02}:30:00"), 0) for h in (8, 12, 20)] == [
        True,
        False,
        True,
    ]


def test_it_is_the_clock_on_the_wall_that_counts() -> None:
    assert not within(NIGHT, at("2026-11-30T22:30:00"), 0)
    assert within(NIGHT, at("2026-11-30T22:30:00"), 3600)
    assert within(NIGHT, at("2026-12-01T06:30:00"), -3600)


def test_a_night_with_a_change_of_clocks_begins_and_ends_by_the_wall() -> None:
    # 25 October 2026, 03:00 CEST is 02:00 CET again: the night has eight hours.
    assert [in_berlin(NIGHT, f"2026-10-24T{h:02}:59:00") for h in (20, 21)] == [False, True]
    assert [in_berlin(NIGHT, f"2026-10-25T{h:02}:59:00") for h in (0, 1, 4, 5)] == [
        True,
        True,
        True,
        False,
    ]
    # 28 March 2027, 02:00 CET is 03:00 CEST: it has six.
    assert [in_berlin(NIGHT, f"2027-03-27T{h:02}:59:00") for h in (21, 22)] == [False, True]
    assert [in_berlin(NIGHT, f"2027-03-28T{h:02}:59:00") for h in (3, 4)] == [True, False]


def test_an_hour_that_comes_twice_is_inside_twice_and_one_that_is_left_out_never() -> None:
    twice = ("02:00-03:00",)
    inside = [in_berlin(twice, f"2026-10-2{d}T{h:02}:30:00") for d, h in ((4, 23), (5, 0), (5, 1))]
    assert inside == [False, True, True]
    assert not any(in_berlin(twice, f"2027-03-28T{h:02}:30:00") for h in range(24))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "23:00",
        "23:00-",
        "25:00-26:00",
        "10:60-11:00",
        "12:00-12:00",
        "24:00-06:00",
        "monday 10:00-11:00",
        "mon- 10:00-11:00",
        "mon,,tue 10:00-11:00",
        "10:00-24:01",
        "1:00-2:00",
        "mon 10:00-11:00 ",
        "٢٣:00-06:00",
    ],
)
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_span_or_is_refused(text: str) -> None:
    try:
        span = parse(text)
    except ValueError:
        return
    assert span.days <= set(range(len(DAYS)))


minutes = st.integers(0, 24 * 60 - 1)


@given(start=minutes, end=minutes, moment=st.integers(0, 7 * 24 * 60 - 1))
def test_a_span_and_the_one_from_its_end_to_its_start_are_all_hours(
    start: int, end: int, moment: int
) -> None:
    if start == end:
        return
    text = f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    rest = f"{end // 60:02}:{end % 60:02}-{start // 60:02}:{start % 60:02}"
    wall = at("2026-11-30T00:00:00") + 60 * moment
    assert within((text,), wall, 0) is not within((rest,), wall, 0)
