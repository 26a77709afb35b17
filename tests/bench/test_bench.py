"""The parts of the bench that do not measure: statistics, judgement, the table, the JSON."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.bench.__main__ import GROUPS
from tests.bench.pace import Pace
from tests.bench.rows import (
    Group,
    Row,
    document,
    figure,
    median,
    not_measured,
    p99,
    quantile,
    table,
    write,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1), st.floats(0, 1))
def test_a_quantile_is_a_value_that_was_seen_with_that_share_at_or_below(
    values: list[float], q: float
) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q * len(values)


def test_p99_of_few_is_the_worst_and_of_many_is_not() -> None:
    assert p99([1, 9, 2]) == 9
    assert p99([*range(1000), 10_000]) == 990
    assert median([3, 1, 2]) == 2
    with pytest.raises(ValueError, match="no values"):
        p99([])


@pytest.mark.parametrize(
    ("value", "verdict", "passes"),
    [(1.0, "ok", True), (2.0, "over budget", True), (3.01, "FAILS", False), (None, "FAILS", False)],
)
def test_a_row_is_judged_by_both_limits(value: float | None, verdict: str, passes: bool) -> None:
    row = Row("cpu", value, "%", 1.0, 3.0)
    assert (row.verdict, row.passes) == (verdict, passes)


def test_a_row_without_limits_is_for_comparison() -> None:
    assert (Row("a peer", 1e9).verdict, Row("a peer", None).passes) == ("", True)


def test_what_could_not_be_measured_fails() -> None:
    assert not not_measured("cost", "no library").passes


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.0123, "0.0123"), (1.5, "1.50"), (72, "72.0"), (3264, "3264")],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


GROUP = Group("cost", (Row("cpu", 2.5, "%", 1.0, 3.0, "how"), Row("peer", 9.0, "%")))


def test_the_document_has_what_later_readers_need(tmp_path: Path) -> None:
    out = tmp_path / "build" / "bench.json"
    write([GROUP], str(out))
    rows = json.loads(out.read_text())
    assert rows == document([GROUP])
    assert rows == [
        {
            "name": "cpu",
            "value": 2.5,
            "unit": "%",
            "budget": 1.0,
            "fails_above": 3.0,
            "pass": True,
        },
        {
            "name": "peer",
            "value": 9.0,
            "unit": "%",
            "budget": None,
            "fails_above": None,
            "pass": True,
        },
    ]


def test_the_table_says_everything_of_a_row() -> None:
    said = io.StringIO()
    Console(file=said, width=120).print(table([GROUP], "2 CPUs"))
    for word in ("cpu", "2.50", "1.00", "3.00", "over budget", "how", "peer", "2 CPUs"):
        assert word in said.getvalue()


def test_quick_is_shorter() -> None:
    quick, full = Pace(quick=True), Pace()
    assert quick.seconds(30) < full.seconds(30)
    assert quick.runs(5) < full.runs(5)
    assert GROUPS
