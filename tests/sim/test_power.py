"""The power budget on real timescales: limits follow the load, and do not swing."""

from itertools import pairwise
from pathlib import Path

import pytest

from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from tests.sim.rig import SimRig

LEAST_SECONDS = 60.0
"""Between two changes of direction of one card's limit in steady state."""


def turns(trail: list[tuple[float, float]]) -> list[float]:
    """When a limit went the other way than before: (seconds, watts) as they were set."""
    moves = [(b[0], b[1] - a[1]) for a, b in pairwise(trail) if a[1] != b[1]]
    return [at for (_, before), (at, moved) in pairwise(moves) if (before > 0) != (moved > 0)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_limits_do_not_swing_while_the_load_is_steady(seed: int, tmp_path: Path) -> None:
    host = SimHost(scenario.named("power-budget-cut"), seed=seed)
    trails: list[list[tuple[float, float]]] = [[] for _ in host.cards]
    async with SimRig(tmp_path, host, mode="enforce") as rig:
        for second in range(900):
            await rig.follow(1.0)
            for card, trail in zip(host.cards, trails, strict=True):
                trail.append((float(second), card.limit_watts))
    for trail in trails:
        # The budget changes at 120 and at 420 s: what follows these at once is no steady state.
        steady = [t for t in turns(trail) if not any(0 <= t - at < 15 for at in (120, 420))]
        assert all(b - a >= LEAST_SECONDS for a, b in pairwise(steady))
        assert len(steady) <= 3
        cut = [watts for at, watts in trail if 140 <= at < 415]
        assert max(cut) - min(cut) < 15, "tens of watts would be a swing"


async def test_an_l1_card_is_hardly_held_down_where_there_is_power_for_its_bursts(
    tmp_path: Path,
) -> None:
    """Its average draw is below what it draws while kernels run, which is what a limit bounds."""
    host = SimHost(scenario.named("power-budget-cut"), seed=1)
    async with SimRig(tmp_path, host, mode="enforce") as rig:
        await rig.follow(140.0)
        held = 0
        for _ in range(260):
            await rig.follow(1.0)
            held += host.cards[1].power_capped
        assert host.cards[0].power_capped, "that of L3 is"
        assert held <= 13
