"""Hours of a simulated life with churn, faults and operators; `make bench` lives a whole week."""

from pathlib import Path

import pytest

from tests.lab.week import Week, trend


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_invariant_holds_and_nothing_grows(seed: int, tmp_path: Path) -> None:
    week = Week(3600.0, seed=seed, folder=tmp_path)
    await week.run(every=200.0)
    assert week.applied > 10, "a life in which nothing is done shows nothing"
    for name in ("readings", "history", "series", "lanes", "ledger_bytes", "files"):
        assert trend([getattr(size, name) for size in week.sizes]) <= 1.1, name
    assert max(s.ledger_bytes for s in week.sizes) < 256 * 1024
