"""What the cards of a host come to over a window."""

import pytest

from gpuagent.lab.peaks import FULL_RATIO, PeakMeter
from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost


def test_the_most_is_kept_and_time_is_counted() -> None:
    host = SimHost(scenario.named("power-budget-cut"), seed=1)
    card, other = host.cards
    meter = PeakMeter(host)
    for watts, celsius in ((100.0, 50.0), (250.0, 70.0), (150.0, 60.0)):
        card.watts, other.watts, card.celsius = watts, 50.0, celsius
        meter.see(180.0, 2.0)
    found = meter.read()
    assert (found.watts, found.celsius) == (300.0, 70.0)
    assert (found.over_budget_watts, found.over_budget_seconds) == (120.0, 4.0)
    assert found.memory_full_seconds == 0.0


def test_without_a_budget_nothing_is_over_it() -> None:
    host = SimHost(scenario.named("quiet-night"), seed=1)
    meter = PeakMeter(host)
    meter.see(None, 1.0)
    assert meter.read().over_budget_watts is None
    assert meter.read().over_budget_seconds is None


def test_a_card_that_is_full_is_told() -> None:
    host = SimHost(scenario.named("quiet-night"), seed=1)
    host.advance(20.0)
    meter, card = PeakMeter(host), host.cards[1]
    meter.see(None, 1.0)
    pid = next(iter(card.memory))
    card.memory[pid] += FULL_RATIO * card.memory_bytes - card.used_bytes
    meter.see(None, 1.0)
    assert meter.read().memory_full_seconds == 1.0
    assert meter.read().memory_bytes == pytest.approx(FULL_RATIO * card.memory_bytes)
