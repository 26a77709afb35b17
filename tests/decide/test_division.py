"""The limits of all cards together: their sum, when they move, and how seldom they turn round."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuagent.decide.allocate import Claim
from gpuagent.decide.claims import Rank
from gpuagent.decide.division import REVERSAL_SECONDS, ROUNDING_WATTS, Division
from gpuagent.decide.powersaid import starved

DWELL = 10.0


def after(division: Division, claims: list[Claim], now: float, budget: float = 1000) -> Division:
    return division.after(claims, budget, budget=budget, dwell=DWELL, now=now)


def pair(one: float, two: float, rank: Rank = Rank.L3) -> list[Claim]:
    return [Claim("a", rank, 100, 700, one), Claim("b", Rank.L3, 100, 700, two)]


def test_a_limit_that_has_turned_round_waits_before_it_turns_again() -> None:
    d = after(Division(), pair(700, 200), 0)
    turns = {"a": [], "b": []}  # type: dict[str, list[float]]
    rising: dict[str, bool] = {}
    for second in range(1, 1200):
        high = second // 15 % 2 == 0
        new = after(d, pair(*((700, 200) if high else (200, 700))), second)
        for card, limit in new.limits.items():
            moved = limit - d.limits[card]
            if abs(moved) > ROUNDING_WATTS:
                if card in rising and rising[card] != (moved > 0):
                    turns[card].append(second)
                rising[card] = moved > 0
        d = new
    for times in turns.values():
        assert len(times) >= 3, "it does follow, if seldom"
        assert min(b - a for a, b in pairwise(times)) >= REVERSAL_SECONDS


def test_an_l1_card_that_is_starved_waits_for_nobody() -> None:
    d = after(Division(), pair(300, 700, Rank.L1), 0)
    d = after(d, pair(600, 700, Rank.L1), 11)
    d = after(d, pair(300, 700, Rank.L1), 22)
    d = after(d, pair(600, 700, Rank.L1), 33)
    assert d.limits["a"] == 600


def test_a_cut_of_the_budget_waits_for_nothing() -> None:
    d = after(Division(), pair(700, 200), 0)
    d = after(d, pair(200, 700), 11)
    d = after(d, pair(700, 200), 12, budget=500)
    assert sum(d.limits.values()) <= 500 + ROUNDING_WATTS


CARDS = st.lists(
    st.tuples(st.sampled_from(Rank), st.floats(50, 300), st.floats(0, 500)), min_size=1, max_size=8
)


@given(st.data(), CARDS)
def test_the_sum_never_exceeds_the_budget_and_nothing_turns_round_too_soon(
    data: st.DataObject, cards: list[tuple[Rank, float, float]]
) -> None:
    d, now, budget = Division(), 0.0, data.draw(st.floats(100, 6000))
    floors = sum(floor for _, floor, _ in cards)
    turned: dict[str, float] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.floats(0.1, 40))
        forced = data.draw(st.booleans()) and data.draw(st.booleans())
        if forced:
            budget = data.draw(st.floats(100, 6000))
        claims = [
            Claim(str(i), rank, floor, floor + room, floor + room * data.draw(st.floats(0, 1)))
            for i, (rank, floor, room) in enumerate(cards)
        ]
        new = after(d, claims, now, budget)
        assert set(new.limits) == {c.card for c in claims}
        assert sum(new.limits.values()) <= max(budget, floors) + 1e-5
        for claim in claims:
            assert claim.floor - 1e-6 <= new.limits[claim.card] <= claim.cap + 1e-6
        urgent = forced or any(
            c.rank.is_l1 and starved(c, d.limits.get(c.card, 0.0))  # type: ignore[attr-defined]
            for c in claims
        )
        for card, course in new.courses.items():
            if course.turned_at == now and not urgent:
                assert now - turned.get(card, float("-inf")) >= REVERSAL_SECONDS
            turned[card] = course.turned_at
        d = new


def test_nothing_moves_within_the_dwell() -> None:
    d = after(Division(), pair(700, 200), 0)
    assert after(d, pair(200, 700), 9) == d
