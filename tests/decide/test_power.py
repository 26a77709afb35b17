"""The node's power budget: who gets what, and that the sum is kept."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config, Power
from gpuagent.decide.allocate import Claim, allocate
from gpuagent.decide.power import PowerBudget
from gpuagent.model.inventory import Gpu, Level, Tenant, on_gpu
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS, GPU_POWER_WATTS, POWER_LIMIT
from tests.decide.world import World, gpu, tenant

A, B = "GPU-a", "GPU-b"


def node(budget: float | None) -> World:
    cards = [gpu(A, 0), gpu(B, 1)]
    tenants = [tenant("serve", Level.L1, gpus=[A]), tenant("train", gpus=[B])]
    power = Power(budget=budget)
    w = World(PowerBudget(Config(power=power)), gpus=cards, tenants=tenants)
    w.memory = msgspec.structs.replace(w.memory, ready=True)
    return w


def limits(w: World) -> dict[str, float]:
    return {s.subject.gpu: s.value for s in w.decision.settings}


def test_without_a_budget_nothing_is_limited() -> None:
    assert node(None).step().settings == ()


def test_a_budget_that_holds_anyhow_limits_nothing() -> None:
    assert node(1400).step().settings == ()


def test_nothing_is_decided_before_it_is_known_whose_cards_they_are() -> None:
    w = node(1000)
    w.memory = w.policy.begin()
    w.says_tenants, w.listed = False, None
    assert w.run(5).settings == ()
    w.listed = ()
    assert w.step().settings == ()
    w.says_tenants = True
    assert w.step().settings


def test_but_it_is_not_waited_for_for_ever() -> None:
    w = node(1000)
    w.memory = w.policy.begin()
    w.listed = None
    w.run(9)
    assert w.decision.settings == ()
    w.run(3)
    assert w.decision.settings


def test_level_one_gets_its_demand_before_level_three() -> None:
    w = node(1000)
    w.card(A, watts=500)
    w.card(B, watts=690)
    w.step()
    assert limits(w) == {A: pytest.approx(550), B: pytest.approx(450)}
    assert "1000 W node budget" in w.decision.settings[0].why


def test_a_card_at_its_limit_may_want_more_than_it_shows() -> None:
    w = node(1000)
    w.card(A, watts=500)
    w.card(B, watts=690)
    w.step()
    w.card(A, watts=548)
    w.card(B, watts=450)
    w.run(11)
    assert limits(w) == {A: pytest.approx(700), B: pytest.approx(300)}


def test_limits_stand_for_the_dwell_whatever_the_draw() -> None:
    w = node(1000)
    seen = []
    for i in range(10):
        w.card(A, watts=100 + 50 * (i % 7))
        w.step()
        seen.append(tuple(limits(w).values()))
    assert len(set(seen)) == 1


def test_a_new_card_is_answered_at_once() -> None:
    w = node(1000)
    w.step()
    before = sum(limits(w).values())
    third = gpu("GPU-c", 2)
    w.gpus = (*w.gpus, third)
    w.card("GPU-c", watts=80, limit=700)
    w.step()
    assert len(limits(w)) == 3
    assert sum(limits(w).values()) <= 1000 + 1e-6
    assert before <= 1000 + 1e-6


def test_floors_over_the_budget_are_an_alert_said_once() -> None:
    w = node(300)
    w.run(30)
    assert limits(w) == {A: 200, B: 200}
    assert w.events.count("power-budget-unreachable") == 1
    [cause] = w.decision.causes
    assert cause.kind == "power"
    assert w.now - cause.since == 29, "it says since when"


def test_a_starved_level_one_card_is_an_alert_said_once() -> None:
    w = node(600)
    w.card(A, watts=690)
    w.run(30)
    assert limits(w)[A] == pytest.approx(400)
    assert w.events.count("l1-card-limited") == 1


def told(w: World) -> list[str]:
    """Kinds of the events so far that are about budget and limits, in order."""
    return [kind for kind in w.events if kind.startswith(("l1-", "power-budget", "would-limit"))]


def budget(w: World, watts: float | None) -> None:
    w.policy = PowerBudget(Config(power=Power(budget=watts)))


def test_the_limit_of_a_level_one_card_is_an_event_when_it_begins_deepens_and_ends() -> None:
    w = node(1400)
    w.card(A, watts=300)
    w.card(B, watts=690)
    w.run(30)
    assert told(w) == []
    budget(w, 1200)  # A keeps more than it asks for: no alert, but news
    w.run(30)
    assert told(w) == ["power-budget-changed", "l1-card-limited"]
    budget(w, 1190)
    w.run(30)
    assert told(w)[2:] == ["power-budget-changed"], "ten watts are no news of the card"
    budget(w, 1050)
    w.run(30)
    assert told(w)[3:] == ["power-budget-changed", "l1-card-limited"]
    budget(w, 1400)
    w.run(29)
    assert told(w)[5:] == ["power-budget-changed"]
    w.run(5)
    assert told(w)[6:] == ["l1-card-limit-ended"]
    w.run(400)
    assert len(told(w)) == 7


def test_without_a_budget_the_limits_end_at_once() -> None:
    w = node(1000)
    w.card(A, watts=300)
    w.card(B, watts=690)
    w.run(3)
    budget(w, None)
    w.run(3)
    assert told(w) == ["l1-card-limited", "power-budget-changed", "l1-card-limit-ended"]
    budget(w, 1000)
    w.memory = msgspec.structs.replace(w.memory, ready=True)
    w.run(3)
    assert told(w)[3:] == ["power-budget-changed", "l1-card-limited"]


def test_a_card_that_is_limited_now_and_then_is_not_said_to_be_free_each_time() -> None:
    w = node(1100)
    w.card(A, watts=300)
    for second in range(600):
        w.card(B, watts=690 if second % 40 < 20 else 250)
        w.step()
    assert told(w) == ["l1-card-limited"]


def test_an_agent_that_begins_to_act_says_it_again() -> None:
    w = node(1000)
    w.acts = False
    w.card(A, watts=300)
    w.card(B, watts=690)
    w.run(30)
    w.acts = True
    w.run(30)
    assert told(w) == ["would-limit-l1-card", "l1-card-limited"]


def test_unknown_draw_keeps_what_the_card_has() -> None:
    w = node(1000)
    w.card(A, watts=500)
    w.card(B, watts=690)
    w.step()
    kept = limits(w)
    for key in [k for k in w.values if k[0] is GPU_POWER_WATTS]:
        w.values[key] = None
    w.run(40)
    assert limits(w) == kept


def test_a_card_that_can_no_longer_be_read_is_held_where_it_is() -> None:
    w = node(1000)
    w.card(A, watts=500)
    w.card(B, watts=690)
    w.step()
    kept = limits(w)
    for key in list(w.values):
        w.values[key] = None
    w.run(60)
    assert limits(w) == kept


def test_a_card_that_cannot_be_limited_counts_with_its_limit() -> None:
    w = node(1000)
    w.gpus = (gpu(A, 0), gpu(B, 1, low=None))  # type: ignore[arg-type]
    w.step()
    assert limits(w) == {A: 300}


def test_what_the_operator_set_is_never_exceeded() -> None:
    w = node(900)
    w.card(A, watts=390, limit=400)
    w.run(30)
    assert limits(w)[A] <= 400


def test_the_original_survives_our_own_limit() -> None:
    w = node(1000)
    w.step()
    w.outcomes = [
        Outcome(POWER_LIMIT, on_gpu(u), v, v, 700.0, "applied", "", w.now)
        for u, v in limits(w).items()
    ]
    for uuid, watts in limits(w).items():
        w.values[GPU_POWER_LIMIT_WATTS, on_gpu(uuid)] = watts
    w.run(12)
    caps = {s.subject.gpu: dict(s.numbers)["cap_watts"] for s in w.decision.settings}
    assert caps == {A: 700, B: 700}


def test_noise_moves_no_limit() -> None:
    rng = random.Random(7)
    w = node(1000)
    changes = 0
    last: dict[str, float] = {}
    for second in range(3600):
        w.card(A, watts=480 * rng.gauss(1, 0.03))
        w.card(B, watts=300 * rng.gauss(1, 0.03))
        w.step()
        changes += second > 60 and limits(w) != last
        last = limits(w)
    assert changes <= 6


def test_tenants_that_come_and_go_wait_for_the_dwell() -> None:
    w = node(1000)
    w.card(A, watts=100)
    w.card(B, watts=650)
    w.run(11)
    seen = set()
    for second in range(9):
        w.tenants = w.tenants[::-1] if second % 2 else (w.tenants[0],)
        w.step()
        seen.add(tuple(limits(w).items()))
    assert len(seen) <= 2


def test_a_card_beyond_control_counts_with_the_most_it_may_draw() -> None:
    w = node(1000)
    w.gpus = (gpu(A, 0), gpu(B, 1, low=None))  # type: ignore[arg-type]
    seen = set()
    for second in range(60):
        w.card(B, watts=100 + 10 * second)
        w.step()
        seen.add(tuple(limits(w).items()))
    assert seen == {((A, 300.0),)}


def test_a_card_of_which_nothing_is_known_counts_like_the_largest_and_is_an_alert() -> None:
    w = node(1000)
    w.gpus = (gpu(A, 0), Gpu("unknown-1", 1, "", blind="a call hangs"))
    w.run(30)
    assert limits(w) == {A: 300}
    assert w.events.count("power-unknown") == 1


def test_an_alert_that_comes_and_goes_is_said_once() -> None:
    w = node(600)
    for second in range(1200):
        w.card(A, watts=690 if second % 20 < 10 else 380)
        w.step()
    assert w.events.count("l1-card-limited") == 1


def test_in_observe_nothing_is_said_to_be_limited() -> None:
    w = node(600)
    w.acts = False
    w.card(A, watts=690)
    w.run(30)
    assert "l1-card-limited" not in w.events
    assert "would-limit-l1-card" in w.events


def test_panel_and_fraction_make_a_budget() -> None:
    assert Power(panel=5000, budget_fraction=0.8).budget_watts == 4000


CLAIMS = st.lists(
    st.tuples(st.integers(1, 6), st.floats(50, 300), st.floats(0, 500), st.floats(0, 1)),
    min_size=1,
    max_size=16,
).map(
    lambda rows: [
        Claim(str(i), rank, floor, floor + room, floor + room * part)
        for i, (rank, floor, room, part) in enumerate(rows)
    ]
)


@given(CLAIMS, st.floats(0, 10_000))
def test_allocation_keeps_budget_floors_and_caps(claims: list[Claim], budget: float) -> None:
    given_ = allocate(claims, budget)
    floors = sum(c.floor for c in claims)
    assert sum(given_.values()) <= max(budget, floors) + 1e-6
    for claim in claims:
        assert claim.floor - 1e-9 <= given_[claim.card] <= claim.cap + 1e-6


@given(CLAIMS, st.floats(0, 10_000))
def test_allocation_wastes_nothing_and_honours_levels(claims: list[Claim], budget: float) -> None:
    given_ = allocate(claims, budget)
    want = min(max(budget, sum(c.floor for c in claims)), sum(c.cap for c in claims))
    assert math.isclose(sum(given_.values()), want, abs_tol=1e-5)
    short = {c.rank for c in claims if given_[c.card] < c.demand - 1e-6}
    for claim in claims:
        if short and claim.rank > min(short):
            assert given_[claim.card] <= claim.floor + 1e-6, "a lower level got more than its floor"


@given(
    st.lists(st.tuples(st.floats(0, 700), st.floats(0, 700)), min_size=1, max_size=40),
    st.floats(400, 1400),
)
def test_the_sum_is_kept_over_any_history(draws: list[tuple[float, float]], budget: float) -> None:
    w = node(budget)
    for a, b in draws:
        w.card(A, watts=a)
        w.card(B, watts=b)
        w.step(3.0)
        assert sum(limits(w).values()) <= budget + 1e-6


LEVELS = st.lists(st.sampled_from(Level), max_size=3)
NODES = st.lists(
    st.tuples(st.floats(50, 300), st.floats(0, 500), LEVELS, st.none() | st.floats(20, 900)),
    min_size=1,
    max_size=6,
)


@given(st.data(), NODES)
def test_our_own_limits_never_sum_over_the_budget(
    data: st.DataObject, cards: list[tuple[float, float, list[Level], float | None]]
) -> None:
    """Whatever the cards draw, may have, who is on them, what is declared, and what cannot be read."""
    names = [f"GPU-{i}" for i in range(len(cards))]
    w = node(data.draw(st.floats(100, 4000)))
    w.gpus = tuple(
        gpu(n, i, low=c[0], high=c[0] + c[1])
        for i, (n, c) in enumerate(zip(names, cards, strict=True))
    )
    w.tenants = tuple(
        capped(tenant(f"{n}-{i}", level, gpus=[n]), cap)
        for n, (_, _, levels, cap) in zip(names, cards, strict=True)
        for i, level in enumerate(levels)
    )
    w.values.clear()
    for name, (low, room, _, _) in zip(names, cards, strict=True):
        w.card(name, limit=low + room)
    for step in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 4)) == 0:
            budget(w, data.draw(st.floats(100, 4000)))
        for name, (low, room, _, _) in zip(names, cards, strict=True):
            w.card(name, watts=data.draw(st.floats(0, low + room)))
        unread = step > 0 and data.draw(st.integers(0, 5)) == 0
        stands = dict(w.memory.division.limits)
        w.step(data.draw(st.floats(0.5, 70)), read=not unread)
        wished = [s for s in w.decision.settings if s.knob is POWER_LIMIT]
        assert w.memory.budget is not None
        # A card that cannot be read is held where it is, which is then the least it can have.
        floors = sum(
            max(c[0], stands.get(n, 0.0)) if unread else c[0]
            for n, c in zip(names, cards, strict=True)
        )
        assert sum(s.value for s in wished) <= max(w.memory.budget, floors) + 1e-5
        if not wished and w.memory.ready:
            assert sum(c[0] + c[1] for c in cards) <= w.memory.budget + 1e-5
        w.answer("applied")


def capped(one: Tenant, watts: float | None) -> Tenant:
    limits = msgspec.structs.replace(one.limits, power_cap_watts=watts)
    return msgspec.structs.replace(one, limits=limits)


def test_a_plan_says_its_stages() -> None:
    w = node(1000)
    w.card(A, watts=500)
    w.card(B, watts=690)
    w.step()
    for uuid, watts in limits(w).items():
        w.values[GPU_POWER_LIMIT_WATTS, on_gpu(uuid)] = watts
    w.outcomes = [
        Outcome(POWER_LIMIT, on_gpu(u), v, v, 700.0, "applied", "", w.now)
        for u, v in limits(w).items()
    ]
    w.step()
    assert [dict(s.numbers)["stage"] for s in w.decision.settings] == [0, 0]
    w.card(A, watts=548)
    w.card(B, watts=450)
    w.run(11)
    first, second = sorted(w.decision.settings, key=lambda s: dict(s.numbers)["stage"])
    assert (first.subject.gpu, second.subject.gpu) == (B, A)
    assert "first stage, a cut from 450 W" in first.why
    assert "second stage, raised from 550 W once cuts are verified" in second.why


def test_phases_of_a_steady_load_move_no_limit() -> None:
    """A training that evaluates for 12 s in 140 s, beside a service."""
    w = node(1000)
    w.card(A, watts=480)
    seen = set()
    for second in range(1800):
        w.card(B, watts=300 if second % 140 > 128 else 510)
        w.step()
        if second > 60:
            seen.add(tuple(round(v) for v in limits(w).values()))
    assert len(seen) == 1


def hungry(w: World, seconds: int, b_watts: float) -> None:
    """A would draw all it may have, B so much."""
    for _ in range(seconds):
        w.card(A, watts=min(690, limits(w).get(A, 690)))
        w.card(B, watts=min(b_watts, limits(w).get(B, b_watts)))
        w.step()


def test_but_a_load_that_has_ended_gives_its_watts_up_soon() -> None:
    w = node(800)
    w.tenants = (tenant("other", gpus=[A]), tenant("train", gpus=[B]))
    hungry(w, 120, 390)
    assert limits(w) == {A: 400, B: 400}
    hungry(w, 85, 100)
    assert limits(w) == {A: 600, B: 200}
    hungry(w, 70, 300)
    assert limits(w) == {A: pytest.approx(470), B: pytest.approx(330)}
    w.tenants = w.tenants[:1]
    hungry(w, 25, 60)
    assert limits(w) == {A: 600, B: 200}, "who has left asks for nothing, at once"
