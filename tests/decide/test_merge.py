"""Merging: the safer wish wins, ranges hold, an L1 tenant's knobs are never in a plan."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.merge import Violation, merge
from gpuagent.model.inventory import Inventory, Level, on_cgroup, on_gpu
from gpuagent.model.plan import Blocked, Setting
from gpuagent.model.state import Instant, NodeState
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from tests.decide.world import CARD, gpu, tenant

STATE = NodeState(
    Instant(0, 0),
    inventory=Inventory(gpus=(gpu(),), tenants=(tenant("serve", Level.L1), tenant("train"))),
)
SEAT = tenant("train").seats[0]
TRAIN = on_cgroup("train", SEAT.path, SEAT.inode)


def wish(value: float, *, blocked: Blocked | None = None) -> Setting:
    return Setting(CPU_MAX, TRAIN, value, why="w", rule="r", blocked=blocked)


def test_the_safer_wish_wins_with_its_own_reason() -> None:
    soft = Setting(CPU_MAX, TRAIN, 2.0, why="soft", rule="a")
    hard = Setting(CPU_MAX, TRAIN, 1.0, why="hard", rule="b")
    for wishes in ([soft, hard], [hard, soft]):
        [won] = merge(wishes, STATE).settings
        assert (won.value, won.why, won.rule, won.also) == (1.0, "hard", "b", ("a",))


def test_a_limit_that_serves_the_budget_too_is_treated_as_one_that_does() -> None:
    heat = Setting(POWER_LIMIT, on_gpu(CARD), 300, why="hot", rule="backpressure/temperature")
    budget = Setting(POWER_LIMIT, on_gpu(CARD), 400, why="budget", rule="power/budget")
    [won] = merge([heat, budget], STATE).settings
    assert (won.value, won.rule, won.purpose) == (300, "backpressure/temperature", "power/budget")
    assert merge([heat], STATE).settings[0].purpose == "backpressure/temperature"


def test_what_the_budget_alone_asks_for_is_kept_beside_what_passes() -> None:
    def on_card(watts: float, rule: str) -> Setting:
        return Setting(POWER_LIMIT, on_gpu(CARD), watts, why="w", rule=rule)

    budget = on_card(900, "power/budget")
    quiet, heat = on_card(250, "override/quiet"), on_card(300, "backpressure/temperature")
    for wishes in permutations([budget, quiet, heat]):
        [won] = merge(wishes, STATE).settings
        assert (won.value, won.budget_value) == (250, 700), "in the range of the card, both"
    assert merge([quiet, heat], STATE).settings[0].budget_value is None
    [won] = merge([on_card(300, "power/budget"), on_card(500, "override/quiet")], STATE).settings
    assert (won.value, won.budget_value) == (300, None)


def test_a_wish_that_can_be_tried_wins_over_one_that_cannot() -> None:
    stuck = wish(0.1, blocked=Blocked("refused", "shared"))
    assert merge([stuck, wish(1.0)], STATE).settings == (wish(1.0),)
    assert merge([stuck], STATE).settings == (stuck,)


@pytest.mark.parametrize(("asked", "given_"), [(100.0, 200.0), (450.0, 450.0), (900.0, 700.0)])
def test_power_limits_stay_in_the_cards_range(asked: float, given_: float) -> None:
    asked_for = Setting(POWER_LIMIT, on_gpu(CARD), asked, why="w", rule="r")
    assert merge([asked_for], STATE).settings[0].value == given_


def test_a_plan_that_touches_level_one_is_a_violation() -> None:
    place = tenant("serve").seats[0]
    subject = on_cgroup("serve", place.path, place.inode)
    with pytest.raises(Violation, match="L1"):
        merge([Setting(CPU_MAX, subject, 1.0, why="w", rule="bug")], STATE)


@pytest.mark.parametrize("path", ["/system.slice", "/system.slice/serve.service"])
def test_nor_may_it_touch_an_ancestor_of_level_one(path: str) -> None:
    with pytest.raises(Violation, match="L1"):
        merge([Setting(CPU_MAX, on_cgroup("train", path, 1), 1.0, why="w", rule="bug")], STATE)


@given(st.permutations([0.3, 0.5, 0.9, 1.4]))
def test_order_of_wishes_does_not_matter(values: list[float]) -> None:
    assert merge([wish(v) for v in values], STATE).settings == (wish(0.3),)
