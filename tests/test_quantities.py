"""Quantities: what is read, what is refused and how, and that showing and reading are inverse."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.quantities import (
    QUANTITIES,
    QuantityError,
    bytes_,
    ratio,
    seconds,
    show_bytes,
    show_ratio,
    show_seconds,
    show_watts,
    shown,
    split_address,
    watts,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200ms", 0.2),
        ("5s", 5),
        ("10min", 600),
        ("1h", 3600),
        ("2d", 172800),
        ("1.5 s", 1.5),
        ("0s", 0),
        (0, 0),
        (0.0, 0),
    ],
)
def test_durations_are_read_in_seconds(text: object, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", 8 * 1024**3),
        ("8 GiB", 8 * 1024**3),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 1024**2),
        ("1TiB", 1024**4),
        ("4kB", 4000),
        ("4KiB", 4096),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("17B", 17),
        (0, 0),
    ],
)
def test_sizes_are_read_in_whole_bytes(text: object, value: float) -> None:
    read = bytes_(text)
    assert read == value
    assert isinstance(read, int)


@pytest.mark.parametrize(("text", "value"), [("250W", 250), ("1.5kW", 1500), ("3 kW", 3000)])
def test_powers_are_read_in_watts(text: object, value: float) -> None:
    assert watts(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("40%", 0.4), ("85 %", 0.85), ("12.5%", 0.125), (0.4, 0.4), (0, 0), (1, 1), ("100%", 1)],
)
def test_shares_are_read_as_ratios(text: object, value: float) -> None:
    assert ratio(text) == value


@pytest.mark.parametrize(
    ("parse", "value", "text"),
    [
        (bytes_, "8 GB/s", '"8 GB/s" is not a size; write 8GiB or 8GB'),
        (bytes_, "16gb", '"16gb" is not a size; write 16GiB or 16GB'),
        (bytes_, 8, "8 has no unit; write 8GiB or 8GB, in quotes"),
        (bytes_, "0.1B", '"0.1B" is not a size; write 0.1GiB or 0.1GB'),
        (bytes_, [], "an array is not a size; write 8GiB or 8GB"),
        (bytes_, "9999TiB", '"9999TiB" is more than 1024TiB, the most accepted'),
        (seconds, "5m", '"5m" is not a duration; write 5s or 5min'),
        (seconds, 2.5, "2.5 has no unit; write 2.5s or 2.5min, in quotes"),
        (seconds, "", '"" is not a duration; write 5s or 5min'),
        (seconds, "400d", '"400d" is more than 365d, the most accepted'),
        (seconds, {}, "a table is not a duration; write 5s or 5min"),
        (watts, 250, "250 has no unit; write 250W or 250kW, in quotes"),
        (watts, True, "true is not a power; write 250W or 250kW"),
        (watts, math.nan, "nan is not a power; write 250W or 250kW"),
        (watts, -250, "-250 is not a power; write 250W or 250kW"),
        (watts, 2**100, "a number of more than 64 bits is not a power; write 250W or 250kW"),
        (ratio, 40, '40 is more than 1; write "40%"'),
        (ratio, "0.4", '"0.4" is not a share; write a percentage such as 40%, or 0.4'),
        (ratio, "140%", '"140%" is more than 100%, the most accepted'),
        (ratio, math.inf, "inf is not a share; write a percentage such as 40%, or 0.4"),
    ],
)
def test_a_refusal_says_what_to_write_instead(
    parse: Callable[[object], float], value: object, text: str
) -> None:
    with pytest.raises(QuantityError) as caught:
        parse(value)
    assert str(caught.value) == text


_ANYTHING = st.one_of(
    st.text(),
    st.text(alphabet="0123456789. %KMGTiBkWsmhdn-+e_٣", max_size=8),
    st.integers(),
    st.integers(min_value=10**4000, max_value=10**4400),
    st.floats(),
    st.booleans(),
    st.dates(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.integers()),
)


@pytest.mark.parametrize("name", sorted(QUANTITIES))
@settings(deadline=None)
@given(value=_ANYTHING)
def test_anything_is_a_sane_value_or_a_refusal_on_one_line(name: str, value: object) -> None:
    try:
        read = QUANTITIES[name].parse(value)
    except QuantityError as error:
        said = str(error)
    else:
        said = str(read)
        assert 0 <= read <= 2**50  # Neither nan nor inf.
        assert not isinstance(value, bool)
    assert said.isprintable()
    assert len(said) < 600


@settings(deadline=None)
@given(st.floats(min_value=1e-9, max_value=365 * 86400) | st.integers(0, 365 * 86400).map(float))
def test_a_duration_shown_reads_back_exactly(value: float) -> None:
    assert seconds(show_seconds(value)) == value


@settings(deadline=None)
@given(st.integers(0, 2**50) | st.integers(0, 2**20).map(lambda n: n * 1024**2))
def test_a_size_shown_reads_back_exactly(value: int) -> None:
    assert bytes_(show_bytes(value)) == value


@settings(deadline=None)
@given(st.floats(min_value=1e-9, max_value=1e6) | st.integers(0, 10**6).map(float))
def test_a_power_shown_reads_back_exactly(value: float) -> None:
    assert watts(show_watts(value)) == value


@settings(deadline=None)
@given(st.floats(min_value=1e-9, max_value=1) | st.sampled_from([0.0, 1.0]))
def test_a_share_shown_reads_back_exactly(value: float) -> None:
    assert ratio(show_ratio(value)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (show_seconds(0.2), "200ms"),
        (show_seconds(90), "90s"),
        (show_seconds(1.5), "1.5s"),
        (show_seconds(600), "10min"),
        (show_seconds(86400), "1d"),
        (show_bytes(32 * 1024**2), "32MiB"),
        (show_bytes(8 * 10**9), "8GB"),
        (show_bytes(1234567), "1234567B"),
        (show_bytes(0), "0B"),
        (show_watts(250), "250W"),
        (show_watts(1500), "1.5kW"),
        (show_watts(0), "0W"),
        (show_ratio(0.85), "85%"),
        (show_ratio(0.125), "12.5%"),
    ],
)
def test_quantities_are_shown_as_a_person_would_write_them(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9485", ("127.0.0.1", 9485)),
        ("127.1.2.3:0", ("127.1.2.3", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_a_loopback_address_is_split(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "9485", ":9485", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"),
        *("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "::1:80", "[127.0.0.1]:1", "[::1:80", "host:1"),
        *("127.0.0.1:\u0663", "127.0.0.1:9485\n", 9485, None),
    ],
)
def test_every_other_address_is_refused_with_the_remedy(text: object) -> None:
    with pytest.raises(QuantityError, match=r"127\.0\.0\.1:9485"):
        split_address(text)


@settings(deadline=None)
@given(_ANYTHING)
def test_what_is_shown_is_short_and_printable(value: object) -> None:
    assert shown(value).isprintable()
    assert len(shown(value)) < 500


def test_a_terminal_escape_in_a_value_is_shown_harmless() -> None:
    assert shown("\x1b[31m\u202e") == '"\\u001b[31m\\u202e"'
    assert shown("Größe") == '"Größe"'
