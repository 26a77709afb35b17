"""What came of a run, counted over a window of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.lab.outcome import Did, Meter, kept_ratio, load_begins
from gpuagent.model.inventory import Level
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from gpuagent.sim.scenario import Objective

CO_LOCATION = scenario.named("co-location")


def did(*latencies: float, work: float = 1.0, name: str = "chat") -> Did:
    return Did(name, Level.L1, work, tuple(sorted(latencies)), Objective(0.1))


def test_too_few_requests_have_no_p99() -> None:
    assert did(*[0.1] * 99).quantile(0.99) is None
    assert did(*[0.1] * 100).quantile(0.99) == 0.1


@given(st.lists(st.floats(0.001, 10), min_size=100, max_size=400))
def test_a_quantile_is_a_nearest_rank(latencies: list[float]) -> None:
    found = did(*latencies).quantile(0.99)
    assert found is not None
    over = sum(1 for s in latencies if s > found)
    assert over <= len(latencies) * 0.01 < sum(1 for s in latencies if s >= found) + 1e-9


def test_what_was_missed_is_what_took_longer() -> None:
    assert did(0.05, 0.1, 0.2, 0.3).missed_ratio == 0.5
    assert did().missed_ratio is None
    assert Did("x", None, 0.0, (0.2,)).missed_ratio is None


def test_work_is_compared_tenant_by_tenant() -> None:
    mine = [did(work=50, name="a"), did(work=30, name="b")]
    other = [did(work=100, name="a"), did(work=30, name="b")]
    assert kept_ratio(mine, other) == 0.75
    assert kept_ratio(mine, [did(work=0, name="a")]) is None


def test_a_meter_counts_from_where_it_was_put() -> None:
    host = SimHost(CO_LOCATION, seed=1)
    assert load_begins(CO_LOCATION) == 30.0
    host.advance(90.0)
    meter = Meter(host, {"chat": Level.L1, "training": Level.L3})
    before = host.progress("training").iterations
    joules = sum(c.joules for c in host.cards)
    host.advance(60.0)
    outcome = meter.read()
    assert outcome.seconds == pytest.approx(60.0)
    assert outcome.joules == pytest.approx(sum(c.joules for c in host.cards) - joules)
    assert outcome.of("training").work == host.progress("training").iterations - before > 0
    chat = outcome.of("chat")
    assert len(chat.latencies) == len(host.latencies("chat", host.clock.mono - 60.0))
    assert list(chat.latencies) == sorted(chat.latencies)
    assert outcome.at(Level.L3) == (outcome.of("training"),)
    assert outcome.of("batch").level is None
