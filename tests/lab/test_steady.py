"""Under a steady load the agent does not saw: how often a tenant's share turns round, in simulated time."""

from pathlib import Path

import msgspec

from gpuagent.lab.trial import Trial
from gpuagent.sim import scenario

SETTLE_SECONDS = 300.0
WATCHED_SECONDS = 900.0
PLAIN = 0.02
"""A move of less is none."""


def reversals(shares: list[float]) -> int:
    """How often the direction of plain moves changes."""
    turns, direction, last = 0, 0, shares[0]
    for share in shares:
        if abs(share - last) <= PLAIN:
            continue
        now = 1 if share > last else -1
        turns += direction == -now
        direction, last = now, share
    return turns


def test_a_turn_is_a_change_of_direction() -> None:
    assert reversals([1.0, 0.7, 0.5, 0.7, 0.9, 0.89, 0.9, 0.4]) == 2


async def test_at_most_one_reversal_a_minute_for_each_tenant(tmp_path: Path) -> None:
    calm = scenario.named("co-location")
    busy = tuple(
        msgspec.structs.replace(t, set={**t.set, "rate": 65.0}) if t.name == "chat" else t
        for t in calm.tenants
    )
    steady = msgspec.structs.replace(calm, timeline=(), tenants=busy)
    seen: dict[str, list[float]] = {"batch": [], "training": []}
    async with Trial(steady, seed=3, folder=str(tmp_path)) as trial:
        async for snapshot in trial.follow(SETTLE_SECONDS + WATCHED_SECONDS):
            for name, shares in seen.items():
                held = [h.share for h in snapshot.holds if h.subject.tenant == name]
                if trial.host.elapsed > SETTLE_SECONDS:
                    shares.append(min(held, default=1.0))
    assert min(seen["training"]) < 0.5, "a life in which nothing is held shows nothing"
    for name, shares in seen.items():
        assert reversals(shares) <= WATCHED_SECONDS / 60, name
