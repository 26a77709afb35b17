"""What a card asks for: at once when it rises, after a while when it falls, and not by its phases."""

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.demand import HOLD_SECONDS, Appetite, seen
from gpuagent.model.inventory import Level, on_gpu
from gpuagent.model.vocab import GPU_POWER_INSTANT_WATTS, GPU_THROTTLED
from tests.decide.test_power import A, node
from tests.decide.world import tenant

CARD = on_gpu(A)
CAPPED = (GPU_THROTTLED, CARD, ("sw_power_cap",))


def fed(pairs: list[tuple[float, float]], tenants: tuple[str, ...] = ("a",)) -> Appetite:
    appetite = Appetite()
    for at, watts in pairs:
        appetite = appetite.after(at, watts, tenants=tenants, hidden=False)
    return appetite


@given(st.lists(st.tuples(st.floats(0.05, 20), st.floats(0, 700)), min_size=1, max_size=200))
def test_it_asks_for_the_most_seen_within_the_hold_and_remembers_little(
    steps: list[tuple[float, float]],
) -> None:
    now, pairs = 0.0, []
    for gap, watts in steps:
        now += gap
        pairs.append((now, watts))
    appetite = fed(pairs)
    asks = appetite.demand(now, cap=1000)
    assert asks is not None
    # A peak close behind a larger one is not remembered: two seconds are left to that.
    largest = max(w for at, w in pairs if now - at <= HOLD_SECONDS)
    recent = max((w for at, w in pairs if now - at <= HOLD_SECONDS - 4), default=0.0)
    assert recent <= asks <= largest
    assert asks >= pairs[-1][1]
    assert len(appetite.peaks) <= HOLD_SECONDS / 2 + 2


def test_other_tenants_are_other_work() -> None:
    appetite = fed([(0, 600)]).after(1, 100, tenants=("b",), hidden=False)
    assert appetite.demand(1, cap=1000) == 100


def test_a_limit_that_bites_hides_the_demand_for_a_moment() -> None:
    appetite = fed([(0, 300)]).after(1, 300, tenants=("a",), hidden=True)
    assert appetite.demand(1, cap=700) == 700
    assert appetite.demand(5, cap=700) == 700
    assert appetite.demand(7, cap=700) == 300


def test_what_is_not_known_asks_for_nothing() -> None:
    assert Appetite().demand(0, cap=700) is None


def look(limit: float, **readings: float) -> Appetite:
    w = node(1000)
    w.tenants = (tenant("serve", Level.L1, gpus=[A]),)
    w.card(A, watts=readings["watts"], limit=readings.get("as_set", limit))
    if "instant" in readings:
        w.values[GPU_POWER_INSTANT_WATTS, CARD] = readings["instant"]
    w.by_dims[CAPPED] = readings.get("capped", 0.0)
    w.run(3)
    return seen(Appetite(), w.state, CARD, limit=limit, dwell=10, headroom=0.1)


def test_a_card_that_computes_in_bursts_asks_for_what_a_burst_draws() -> None:
    assert look(700, watts=150, instant=400).demand(1003, cap=700) == 400
    assert look(700, watts=390, instant=400).demand(1003, cap=700) == 390 * 1.1


def test_a_card_that_the_driver_holds_down_for_our_limit_asks_for_all() -> None:
    assert look(300, watts=150, capped=1).demand(1003, cap=700) == 700
    assert look(300, watts=150, capped=0).demand(1003, cap=700) == 150 * 1.1


def test_but_not_for_a_lower_limit_of_somebody_else() -> None:
    assert look(300, watts=150, as_set=200, capped=1).demand(1003, cap=700) == 150 * 1.1
