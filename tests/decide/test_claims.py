"""Who is served first and cut last, and what a card may have."""

from itertools import pairwise

import msgspec
import pytest

from gpuagent.decide.allocate import allocate
from gpuagent.decide.claims import Rank, claim, holds_anyhow, rank_of
from gpuagent.model.inventory import Gpu, Level, Tenant
from gpuagent.model.vocab import GPU_POWER_LIMIT_WATTS
from tests.decide.test_power import A, B, node
from tests.decide.world import gpu, tenant

L1, L2, L3 = Level.L1, Level.L2, Level.L3


@pytest.mark.parametrize(
    ("levels", "rank"),
    [
        ((), Rank.NOBODY),
        ((L3,), Rank.L3),
        ((L3, L3), Rank.L3),
        ((L2, L3), Rank.L2_SHARED),
        ((L2, L2), Rank.L2),
        ((L1, L3), Rank.L1_SHARED),
        ((L1, L2), Rank.L1_SHARED),
        ((L1, L1), Rank.L1),
    ],
)
def test_a_card_counts_by_who_is_on_it(levels: tuple[Level, ...], rank: Rank) -> None:
    assert rank_of([tenant(str(i), level) for i, level in enumerate(levels)]) is rank
    assert rank.is_l1 == (L1 in levels)


def six() -> tuple[list[Gpu], list[Tenant]]:
    """A card of every rank, in that order."""
    cards = [gpu(f"GPU-{r.value}", r.value) for r in Rank]
    on = {Rank.L1: (L1,), Rank.L1_SHARED: (L1, L3), Rank.L2: (L2,), Rank.L2_SHARED: (L2, L3)}
    tenants = [
        tenant(f"t{rank.value}{i}", level, gpus=[f"GPU-{rank.value}"])
        for rank in Rank
        for i, level in enumerate(on.get(rank, (L3,) if rank is Rank.L3 else ()))
    ]
    return cards, tenants


def test_the_less_important_is_cut_to_its_floor_before_the_more_important_loses_anything() -> None:
    w = node(4200)
    cards, tenants = six()
    w.gpus, w.tenants = tuple(cards), tuple(tenants)
    for card in cards:
        w.card(card.uuid, watts=690, limit=700)
    w.step()
    made = [c for g in cards if (c := claim(w.state, g, limit=700, appetite=None)) is not None]
    assert [c.rank for c in made] == list(Rank)
    for budget in range(1200, 4200, 50):
        given = list(allocate(made, budget).values())
        for more, less in pairwise(given):
            assert more >= less
            assert less == pytest.approx(200) or more == pytest.approx(700)


def test_a_declared_cap_bounds_what_a_card_asks_for_but_not_what_it_may_draw() -> None:
    w = node(1000)
    capped = tenant("train", gpus=[B])
    capped = msgspec.structs.replace(
        capped, limits=msgspec.structs.replace(capped.limits, power_cap_watts=250)
    )
    w.tenants = (w.tenants[0], capped)
    w.step()
    made = claim(w.state, w.gpus[1], limit=None, appetite=None)
    assert made is not None
    assert (made.cap, made.top) == (250, 700)
    assert not holds_anyhow([made], 600), "the cap is another's wish, which may fail"
    assert holds_anyhow([made], 700)


def test_a_card_that_cannot_be_read_stays_where_it_is() -> None:
    w = node(1000)
    for uuid in (A, B):
        w.values = {k: v for k, v in w.values.items() if k[0] is not GPU_POWER_LIMIT_WATTS}
        assert uuid
    w.run(30)
    held = claim(w.state, w.gpus[0], limit=420, appetite=None)
    assert held is not None
    assert held.frozen
    assert (held.floor, held.cap) == (420, 420)
    assert claim(w.state, w.gpus[0], limit=None, appetite=None) is None
