"""Hours of a simulated life with churn, faults and operators; `make bench` lives a whole week."""

from pathlib import Path

import msgspec
import pytest

from gpuagent.lab.trial import Trial
from gpuagent.sim import scenario
from gpuagent.sim.vary import VARIATIONS, varied
from tests.lab.week import Week, trend


@pytest.mark.parametrize(("seed", "control"), [(1, "aimd"), (2, "pi")])
async def test_every_invariant_holds_and_nothing_grows(
    seed: int, control: str, tmp_path: Path
) -> None:
    week = Week(1200.0, seed=seed, folder=tmp_path, control=control)
    await week.run(every=60.0)
    assert week.applied > 10, "a life in which nothing is done shows nothing"
    assert week.crashes > 1
    assert week.overridden > 100
    assert week.tokens > 1
    # The ledger is rewritten now and then, and in a life this short at no time that is its own.
    most = {"readings": 1.1, "history": 1.1, "series": 1.1, "lanes": 1.1, "files": 1.1}
    for name, ratio in {**most, "ledger_bytes": 1.3}.items():
        assert trend([getattr(size, name) for size in week.sizes]) <= ratio, name
    assert max(s.ledger_bytes for s in week.sizes) < 256 * 1024


@pytest.mark.parametrize("control", ["aimd", "pi"])
async def test_a_lever_without_effect_is_let_go(control: str, tmp_path: Path) -> None:
    """A service that nothing can bring near its objective, beside tenants whom no quota slows."""
    useless = next(v for v in VARIATIONS if v.name == "cpu.max does not work")
    calm = msgspec.structs.replace(scenario.named("co-location"), timeline=())
    rules = [
        {**rule, **({"latency_slo": "30ms"} if rule["name"] == "chat" else {})}
        for rule in msgspec.convert(calm.agent["tenants"], list[dict[str, object]])
    ]
    law = {"mode": "enforce", "backpressure": {"control": control}, "tenants": rules}
    held, let_go = set[str](), set[str]()
    async with Trial(varied(calm.with_agent(law), useless), seed=3, folder=str(tmp_path)) as trial:
        async for snapshot in trial.follow(600.0):
            now = {h.subject.tenant for h in snapshot.holds if h.share < 1.0}
            held |= now
            if any(c.kind == "latency" for c in snapshot.causes):
                let_go |= held - now
        assert [c.kind for c in snapshot.causes] == ["latency"], "nothing has helped"
        assert await trial.stop() == ()
    assert held == {"batch", "training"}
    assert let_go == held
