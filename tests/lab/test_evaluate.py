"""Runs: the same wherever they are made, what is counted in them, and what breaks them."""

import multiprocessing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import ConfigError
from gpuagent.lab.evaluate import (
    EDGES,
    POINTS,
    Failed,
    Job,
    Pool,
    counted,
    jobs_of,
    measured_from,
    play,
)
from gpuagent.lab.outcome import Meter
from gpuagent.lab.policies import Member, named, parse
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from gpuagent.sim.scenario import Scenario
from tests.lab.made import LEVELS

SECONDS = 120.0
_SHIPPED = scenario.named("co-location")
CO_LOCATION = msgspec.structs.replace(
    _SHIPPED,
    timeline=(),
    tenants=tuple(
        msgspec.structs.replace(t, set={"rate": 45.0}, objective=scenario.Objective(0.1))
        if t.name == "chat"
        else t
        for t in _SHIPPED.tenants
    ),
)
"""With a load that is always high."""


def member(name: str) -> Member:
    return named(name).members()[0]


def job(one: Member, seed: int = 1, at: Scenario = CO_LOCATION) -> Job:
    return Job(one, at, "as modelled", seed, SECONDS)


def test_the_window_begins_a_minute_after_the_load() -> None:
    assert measured_from(CO_LOCATION, SECONDS) == 90.0
    with pytest.raises(ConfigError, match="119 s are too few; its load needs 120 s at least"):
        measured_from(CO_LOCATION, 119.0)


def test_without_control_it_is_the_host_alone() -> None:
    host = SimHost(CO_LOCATION, 3)
    host.advance(90.0)
    meter = Meter(host, LEVELS)
    host.advance(SECONDS - 90.0)
    outcome = meter.read()
    found = play(job(member("none"), seed=3))
    assert found.work() == {t.name: t.work for t in outcome.tenants}
    assert found.missed_ratio == outcome.of("chat").missed_ratio
    assert found.joules == pytest.approx(outcome.joules)
    assert sum(found.latencies["chat"]) == len(outcome.of("chat").latencies)
    assert found.held_at_end == found.left == ()


def test_an_agent_that_only_observes_changes_nothing() -> None:
    text = 'name = "watch"\nabout = "."\ncontrol = "agent"\n[agent]\nmode = "observe"'
    [watch] = parse(text, source="").members()
    free, watched = play(job(member("none"))), play(job(watch))
    assert watched.tenants == free.tenants
    assert watched.latencies == free.latencies
    assert set(watched.shares["training"]) == {None, 1.0}


def test_a_share_is_seen_in_what_it_does() -> None:
    [half] = [m for m in named("static").members() if m.shares == {"L3": 0.2, "L2": 1.0}]
    found, free = play(job(half)), play(job(member("none")))
    assert found.work()["training"] < 0.7 * free.work()["training"]
    assert (found.missed_ratio or 0.0) < (free.missed_ratio or 0.0)
    shares = found.shares["training"]
    assert len(shares) == POINTS
    assert shares[0] is None, "it has not come yet"
    assert shares[-1] == pytest.approx(0.2)
    assert found.held_at_end == ("training",)
    assert found.left == ()
    assert {t.name: t.mean_share for t in found.tenants} == pytest.approx(
        {"chat": 1.0, "batch": 1.0, "training": 0.2}
    )


def test_runs_are_the_same_however_many_make_them() -> None:
    jobs = list(
        jobs_of(
            [member("none"), member("aimd")], CO_LOCATION, "as modelled", seeds=(1, 2), seconds=SECONDS
        )
    )  # fmt: skip
    told: list[tuple[int, int]] = []
    with Pool(2) as pool:
        found = pool.play(jobs, lambda done, total: told.append((done, total)))
    assert found == [play(one) for one in jobs]
    assert [(r.policy, r.seed) for r in found] == [
        ("none", 1), ("none", 2), ("aimd", 1), ("aimd", 2)
    ]  # fmt: skip
    assert told[-1] == (4, 4)
    assert multiprocessing.active_children() == []


def test_a_run_that_breaks_is_named_and_ends_the_rest() -> None:
    broken = msgspec.structs.replace(CO_LOCATION, agent={"mode": "maybe"})
    with Pool(1) as pool, pytest.raises(Failed, match=r"aimd, seed 7, as modelled: .*mode"):
        pool.play([job(member("aimd"), 7, broken), *(job(member("none"), s) for s in range(50))])
    assert multiprocessing.active_children() == []


def test_a_bug_in_a_run_is_named_too(tmp_path: Path) -> None:
    bad = msgspec.structs.replace(member("static"), shares={"L9": 0.5})
    with Pool(1) as pool, pytest.raises(Failed, match=r"static.*seed 1, as modelled: KeyError"):
        pool.play([job(bad)])


@given(st.lists(st.floats(0.0, 1e4)))
def test_every_latency_is_counted_once_in_its_bucket(latencies: list[float]) -> None:
    counts = counted(latencies)
    assert len(counts) == len(EDGES) + 1
    for i, edge in enumerate(EDGES):
        assert sum(counts[: i + 1]) == sum(1 for s in latencies if s <= edge)
    assert sum(counts) == len(latencies)
