"""Judgements: the best static shares, where levers act, and when a goal counts as reached."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.lab.evaluate import Run
from gpuagent.lab.verdict import (
    Judgement,
    Met,
    Runs,
    best_static,
    by_policy,
    floor_of,
    judge,
    regime_of,
    rows,
    together,
)
from tests.lab.made import run

SEEDS = (1, 2, 3, 4, 5)
LOAD = {1: 0.98, 2: 1.0, 3: 1.01, 4: 0.99, 5: 1.02}


def runs(name: str, **figures: Any) -> list[Run]:
    """One policy under five seeds, of which some have more to do than others."""
    missed, p99 = figures.pop("missed", 0.1), figures.pop("p99", 1.4)
    kept = {"training": figures.pop("training", 1.0)}
    return [
        run(name, s, missed=missed * LOAD[s], p99=p99 * LOAD[s], kept=kept, **figures)
        for s in SEEDS
    ]


def collected(*policies: Iterable[Run]) -> Runs:
    return by_policy(r for policy in policies for r in policy)


FREE = runs("none")
HALF = runs("static 0.5", missed=0.06, p99=1.3, training=0.85)
FIFTH = runs("static 0.2", missed=0.01, p99=0.9, training=0.4)
STATICS = ("static 0.5", "static 0.2")
GOOD = runs("mine", missed=0.02, p99=1.0, training=0.83)


def judged(*policies: Iterable[Run], **changes: Any) -> Judgement:
    options = {"statics": STATICS, "variation": "as modelled", "allowed": 0.01, **changes}
    return judge(collected(FREE, *policies), candidate="mine", free="none", **options)


def checks(judgement: Judgement) -> dict[str, Met]:
    return {c.name: c.met for c in judgement.checks}


# -- figures --------------------------------------------------------------------------------------------


def test_work_is_measured_by_the_run_of_the_same_seed_without_control() -> None:
    free = [run("none", 1), run("none", 2, kept={"training": 2.0, "batch": 0.0})]
    mine = [run("mine", 1, kept={"training": 0.5}), run("mine", 2, kept={"training": 1.5})]
    _, row = rows(collected(free, mine), "none")
    assert row.kept_ratio["L3"].value == pytest.approx((0.5 + 0.75) / 2)
    assert row.kept_ratio["L2"].count == 1, "of what did nothing there is no part"
    assert row.throughput_ratio is not None
    assert row.throughput_ratio.value == pytest.approx(((1 + 1 + 0.5) / 3 + (1 + 0.75) / 2) / 2)


def test_the_frontier_is_what_nothing_beats() -> None:
    worse = runs("worse", missed=0.07, p99=1.3, training=0.8)
    found = {r.policy: r.frontier for r in rows(collected(FREE, HALF, FIFTH, worse), "none")}
    assert found == {"none": True, "static 0.5": True, "static 0.2": True, "worse": False}


def test_the_best_static_shares_leave_l3_enough() -> None:
    table = rows(collected(FREE, HALF, FIFTH), "none")
    best = best_static(table[1:])
    assert best is not None
    assert (best[0].policy, best[1]) == ("static 0.5", True)


def test_where_none_leaves_it_enough_the_one_that_leaves_most_counts() -> None:
    less = runs("static 0.4", missed=0.03, training=0.7)
    best = best_static(rows(collected(FREE, less, FIFTH), "none")[1:])
    assert best is not None
    assert (best[0].policy, best[1]) == ("static 0.4", False)


def test_static_shares_of_one_seed_only_are_not_the_best() -> None:
    lucky = [run("static 0.9", 1, missed=0.0)]
    best = best_static(rows(collected(FREE, HALF, lucky), "none")[1:])
    assert best is not None
    assert best[0].policy == "static 0.5"
    assert best_static([]) is None


# -- regimes --------------------------------------------------------------------------------------------


def test_where_levers_act() -> None:
    def regime(*policies: Iterable[Run]) -> str:
        return regime_of(collected(*policies), "none", 0.01, "static 0.2")

    assert regime(FREE, FIFTH) == "levers act"
    same = runs("static 0.2", missed=0.095)
    assert regime(FREE, same) == "no lever acts"
    calm = runs("none", missed=0.009)
    assert regime(calm, FIFTH) == "nothing to protect"


def test_one_seed_of_the_tightest_shares_is_enough_to_see_it() -> None:
    same = runs("static 0.5", missed=0.1)
    found = collected(FREE, same, FIFTH[:1])
    assert floor_of(found, STATICS) == "static 0.2"
    assert regime_of(found, "none", 0.01, "static 0.2") == "levers act"


def test_a_candidate_is_no_witness_of_its_own_case() -> None:
    same = runs("static 0.5"), runs("static 0.2", training=0.4)
    good = runs("mine", missed=0.02, p99=1.0)
    assert judged(*same, good).regime == "no lever acts"
    idle = judged(runs("mine"), statics=())
    assert (idle.regime, idle.met) == ("levers act", "yes")
    other = runs("other", missed=0.03, p99=1.1, training=0.84)
    assert judged(other, runs("mine"), statics=(), baseline="other").met == "no"


def test_of_many_shares_that_do_nothing_one_by_chance_is_no_witness() -> None:
    lucky, same = runs("static 0.5", missed=0.08), runs("static 0.2", training=0.4)
    assert judged(lucky, same, runs("mine")).regime == "no lever acts"


# -- goals ----------------------------------------------------------------------------------------------


def test_all_goals_reached() -> None:
    found = judged(HALF, FIFTH, GOOD)
    assert (found.against, found.static, found.enough) == ("static 0.5", True, True)
    assert set(checks(found).values()) == {"yes"}
    assert found.met == "yes"
    by_name = {c.name: c.found for c in found.checks}
    misses = by_name["misses"]
    assert misses is not None
    assert misses.value == pytest.approx(0.02 / 0.06 - 1, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"missed": 0.05}, "misses"),
        ({"p99": 1.2}, "p99"),
        ({"training": 0.6}, "total throughput"),
        ({"training": 0.78}, "L3 keeps"),
    ],
)
def test_one_goal_missed(changes: dict[str, float], name: str) -> None:
    mine = runs("mine", **{"missed": 0.02, "p99": 1.0, "training": 0.83, **changes})
    found = judged(HALF, FIFTH, mine)
    assert checks(found)[name] == "no"
    assert found.met == "no"


def test_a_goal_within_the_interval_is_not_clear() -> None:
    spread = dict(zip(SEEDS, (0.01, 0.07, 0.02, 0.06, 0.03), strict=True))
    mine = [run("mine", s, missed=m, p99=1.0, kept={"training": 0.83}) for s, m in spread.items()]
    assert checks(judged(HALF, FIFTH, mine))["misses"] == "unclear"
    assert judged(HALF, FIFTH, mine).met == "unclear"


def test_one_seed_can_show_that_a_goal_is_missed_but_never_that_it_is_reached() -> None:
    one = collected(FREE[:1], HALF[:1], GOOD[:1])
    found = judge(
        one, candidate="mine", free="none", statics=STATICS, variation="as modelled", allowed=0.01
    )
    assert set(checks(found).values()) == {"unclear"}
    bad = collected(FREE[:1], HALF[:1], [run("mine", missed=0.09, kept={"training": 0.5})])
    found = judge(
        bad, candidate="mine", free="none", statics=STATICS, variation="as modelled", allowed=0.01
    )
    assert checks(found)["misses"] == checks(found)["L3 keeps"] == "no"


def test_where_no_lever_acts_it_must_do_no_harm() -> None:
    same = runs("static 0.5"), runs("static 0.2")
    good = judged(*same, runs("mine", training=0.99))
    assert (good.regime, good.against, good.met) == ("no lever acts", None, "yes")
    assert [c.name for c in good.checks] == ["total throughput", "let go at the end", "put back"]
    lossy = judged(*same, runs("mine", training=0.9))
    assert checks(lossy)["total throughput"] == "no"
    holding = judged(*same, runs("mine", held=("training",)))
    assert checks(holding)["let go at the end"] == "no"
    leaving = judged(*same, runs("mine", left=("cpu.max",)))
    assert checks(leaving)["put back"] == "no"
    assert leaving.checks[-1].text == "not in 5 of 5 runs: cpu.max"


def test_where_nothing_needs_protection_it_may_hold_but_not_cost() -> None:
    calm = runs("none", missed=0.001)
    statics = runs("static 0.5", missed=0.0005, training=0.85)
    mine = runs("mine", missed=0.0004, training=0.95, held=("training",))
    found = judge(
        collected(calm, statics, mine),
        candidate="mine", free="none", statics=STATICS, variation="x", allowed=0.01,
    )  # fmt: skip
    assert found.regime == "nothing to protect"
    assert found.met == "yes"
    assert "L3 keeps" in checks(found)


def test_without_static_shares_another_control_is_compared_with() -> None:
    other = runs("other", missed=0.03, p99=1.1, training=0.84)
    found = judged(other, GOOD, statics=(), baseline="other")
    assert (found.against, found.static) == ("other", False)
    assert [c.goal for c in found.checks[:2]] == [0.0, 0.0]
    assert found.met == "yes"


@given(st.lists(st.sampled_from(["yes", "no", "unclear"])))
def test_all_together_are_as_good_as_the_worst(these: list[Met]) -> None:
    order = ["yes", "unclear", "no"]
    assert together(these) == max(these, key=order.index, default="yes")
