"""An evaluation: which runs it makes, and what it refuses to begin."""

from collections.abc import Mapping

import msgspec
import pytest

from gpuagent.errors import ConfigError
from gpuagent.lab.evaluate import Job
from gpuagent.lab.policies import PolicyFile, named, parse
from gpuagent.lab.study import BASE, SWEEP_SEEDS, Report, Study
from gpuagent.sim import scenario
from tests.lab.made import Made

CO_LOCATION = scenario.named("co-location")
UNJUDGED = msgspec.structs.replace(
    CO_LOCATION,
    tenants=tuple(msgspec.structs.replace(t, objective=None) for t in CO_LOCATION.tenants),
)
GRID = parse(
    'name = "static"\nabout = "."\ncontrol = "static"\n'
    "[shares]\nL3 = [0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0]",
    source="",
)


HARDER = {
    "cpu.max works half as well": 1.1,
    "weak contention": 0.9,
    "strong contention": 1.2,
    "more requests": 1.3,
}
"""Where the law is another; nothing else has any influence."""


def world(job: Job) -> Mapping[str, float]:
    """A law of shares, under which `aimd` is better than any fixed one, and `pi` holds too much."""
    if job.variation == "cpu.max does not work":
        return {"missed": 0.1, "p99": 1.4, "training": 1.0}
    if job.variation == "fewer requests":
        return {"missed": 0.002, "p99": 0.7, "training": 1.0}
    worse = HARDER.get(job.variation, 1.0)
    match job.member.name:
        case "aimd":
            return {"missed": 0.01 * worse, "p99": 0.9, "training": 0.9}
        case "pi":
            return {"missed": 0.005 * worse, "p99": 0.8, "training": 0.5}
        case "none":
            return {"missed": 0.1 * worse, "p99": 1.4, "training": 1.0}
    share = job.member.shares.get("L3", 0.7)
    return {"missed": 0.1 * share * worse, "p99": 0.5 + share, "training": 0.5 + share / 2}


def files(*names: str) -> list[PolicyFile]:
    return [GRID if name == "static" else named(name) for name in names]


def study(*names: str, seeds: int = 3, sweep: bool = False, judged: str = "aimd") -> Study:
    chosen = files(*names)
    return Study(CO_LOCATION, chosen, candidates=judged.split(), seeds=seeds, sweep=sweep)


def report(*names: str, seeds: int = 3, sweep: bool = False, judged: str = "aimd") -> Report:
    return study(*names, seeds=seeds, sweep=sweep, judged=judged).run(Made(world))


def test_no_control_is_always_among_them() -> None:
    made = Made(world)
    found = study("aimd").run(made)
    assert [r.policy for r in found.rows] == ["none", "aimd"]
    assert len(made.jobs) == 6
    assert {j.variation for j in made.jobs} == {BASE}
    assert found.best_static is None
    assert [j.against for j in found.judgements] == [None]


def test_the_best_static_shares_are_found_and_beaten() -> None:
    found = report("none", "static", "aimd", "pi", judged="aimd pi")
    assert found.best_static == "static L3=0.6"
    good, bad = found.judgements
    assert (good.candidate, good.met) == ("aimd", "yes")
    assert (bad.candidate, bad.met) == ("pi", "no")
    assert found.sweep == ()


def test_a_sweep_tries_everything_once_and_what_matters_with_all_seeds() -> None:
    made = Made(world)
    told: list[tuple[int, int]] = []
    found = study("none", "static", "tgs", "aimd", seeds=10, sweep=True).run(
        made, lambda done, total: told.append((done, total))
    )
    assert found.sweep_seeds == tuple(range(1, SWEEP_SEEDS + 1))
    swept = [j for j in made.jobs if j.variation == "strong contention"]
    assert {j.seed for j in swept if j.member.control == "static"} == set(found.sweep_seeds)
    every = {j.member.name for j in swept if j.seed == 1}
    assert len([n for n in every if n.startswith("static")]) == 7
    again = {j.member.name for j in swept if j.seed == 2}
    assert "static L3=0.6" in again
    assert "static L3=0.2" not in again, "L3 keeps far too little under it"
    assert "tgs" not in every, "it is no candidate"
    assert told[-1] == (len(made.jobs), len(made.jobs))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({(j.variation, j.member.name, j.seed) for j in made.jobs}) == len(made.jobs)


def test_a_sweep_finds_where_levers_act() -> None:
    found = report("static", "aimd", sweep=True)
    regimes = {j.variation: j.regime for j in found.sweep}
    assert regimes["cpu.max does not work"] == "no lever acts"
    assert regimes["fewer requests"] == "nothing to protect"
    assert regimes["strong contention"] == "levers act"
    assert "strong MPS interference" in found.not_swept
    assert "noisy power readings" in found.not_swept, "no run of the first seed was another"
    assert set(regimes) == {*HARDER, "cpu.max does not work", "fewer requests"}
    assert set(regimes).isdisjoint(found.not_swept)
    assert set(found.swept_rows) == set(regimes)


def test_each_variation_is_of_the_scenario_that_it_says() -> None:
    made = Made(world)
    study("aimd", sweep=True).run(made)
    at = {j.variation: j.scenario for j in made.jobs}
    assert at[BASE] == CO_LOCATION
    assert len({msgspec.json.encode(s) for s in at.values()}) == len(at)


def test_another_control_is_compared_with_where_there_are_no_static_shares() -> None:
    found = report("tgs", "aimd", sweep=True)
    assert found.judgements[0].against == "tgs"
    assert {j.against for j in found.sweep if j.regime == "levers act"} == {"tgs"}


def test_a_report_reads_back_from_its_json() -> None:
    found = report("static", "aimd", "pi", judged="aimd pi", sweep=True)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Report)
    assert again == found


def test_what_cannot_be_compared_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="aimd: is the name of two policies"):
        study("aimd", "aimd")
    with pytest.raises(ConfigError, match="no L1 tenant has an objective"):
        Study(UNJUDGED, files("aimd"), candidates=["aimd"], seeds=1)
    with pytest.raises(ConfigError, match="are too few"):
        Study(CO_LOCATION, files("aimd"), candidates=["aimd"], seeds=1, seconds=60.0)
    wrong = msgspec.structs.replace(
        files("aimd")[0], name="x", agent={"backpressure": {"cut": 3, "speed": 1}}
    )
    with pytest.raises(ConfigError) as caught:
        Study(CO_LOCATION, [wrong], candidates=["x"], seeds=1)
    assert len(caught.value.problems) == 2
    assert all("co-location under x" in p for p in caught.value.problems)
