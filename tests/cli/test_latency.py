"""How a latency looks beside its objective, and that `gpuagent status` tells it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.cli.client import Document
from gpuagent.cli.latency import OVER, against, at, known, latency, over
from tests.cli.stage import agent, run
from tests.expose import snapshots
from tests.expose.full import full


def row(
    seconds: float | str | None, objective: float | None = None, quantile: float | None = 0.99
) -> Document:
    return {
        "latency_seconds": seconds,
        "latency_objective_seconds": objective,
        "latency_quantile": quantile,
        "latency_estimated": False,
    }


@pytest.mark.parametrize(
    ("seconds", "objective", "text"),
    [
        (0.093, 0.1, "93/100 ms"),
        (0.1, 0.1, "100/100 ms"),
        (0.1004, 0.1, "100/100 ms!"),
        (0.12, 0.1, "120/100 ms!"),
        (2.5, 0.1, "2.5/0.1 s!"),
        (0.0051, 0.02, "5.1/20 ms"),
        (0.4, 2.0, "0.4/2 s"),
        (0.9996, None, "1 s"),
        (0.093, None, "93 ms"),
        (None, 0.1, "-/100 ms"),
        (None, None, "-"),
        ("+Inf", 0.1, "-/100 ms"),
    ],
)
def test_a_latency_and_its_objective_have_one_unit(
    seconds: float | str | None, objective: float | None, text: str
) -> None:
    assert latency(row(seconds, objective)) == text


@given(st.none() | st.floats(1e-4, 3600), st.none() | st.floats(1e-3, 3600))
def test_it_is_short_and_marked_where_it_is_over(
    seconds: float | None, objective: float | None
) -> None:
    told = row(seconds, objective)
    missed = seconds is not None and objective is not None and seconds > objective
    assert over(told) == missed
    assert latency(told).endswith(OVER) == missed
    assert len(latency(told)) <= 14
    assert known(told) == (latency(told) != "-")
    assert (against(told) is None) == (seconds is None or objective is None)


def test_the_quantile_is_in_the_words_of_people() -> None:
    assert at(row(1)) == "p99"
    assert at(row(1, quantile=0.999)) == "p99.9"
    assert at(row(None, quantile=None)) == "-"


def test_status_tells_latencies_with_the_worst_first() -> None:
    with agent(full()) as path:
        told = run("--socket", path, "status").stdout.splitlines()
    start = told.index(next(x for x in told if x.split() == ["Tenant", "Level", "Latency", "At"]))
    assert [x.split() for x in told[start + 1 : start + 4]] == [
        ["serve", "L1", "1/0.5", "s!", "p99"],
        ["train", "L3", "1/2", "s", "p99"],
        ["batch", "L2", "1", "s", "p99"],
    ]


def test_status_is_silent_about_latencies_that_nobody_has() -> None:
    with agent(snapshots.busy()) as path:
        assert "Latency" not in run("--socket", path, "status").stdout


def test_status_marks_a_simulated_host() -> None:
    posture = msgspec.structs.replace(snapshots.ENFORCING, simulated=True)
    with agent(snapshots.busy(posture=posture)) as path:
        told = run("--socket", path, "status").stdout
    assert told.startswith("gpuagent 1.2.3, SIMULATED HOST, mode enforce, acting\n")
    with agent(snapshots.busy()) as path:
        assert "SIMULATED" not in run("--socket", path, "status").stdout
