"""Efficiency mode as a policy: what it waits for, what ends it, and what it says."""

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpuagent.config import Config
from gpuagent.config import Efficiency as Law
from gpuagent.decide.efficiency import EFFICIENCY_RULE, Efficiency
from gpuagent.model.inventory import Level, on_gpu
from gpuagent.model.state import Outcome
from gpuagent.model.vocab import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_UTILIZATION_RATIO,
    POWER_LIMIT,
)
from tests.decide.test_crew import training
from tests.decide.test_search import Load
from tests.decide.world import World, gpu

A, B = "GPU-a", "GPU-b"
TOP = 700.0
LOAD = Load(idle=0.12, knee=0.5, order=8, host=0.1, draw=0.9)


class Bench(World):
    """Cards with one load each, whose limits do as the policy wishes a second later."""

    def __init__(self, *cards: str, noise: float = 0.005, **law: Any) -> None:
        law = {"enabled": True, "settle": 20.0, **law}
        tenants = [training("job", *cards)]
        gpus = [gpu(c, i) for i, c in enumerate(cards)]
        super().__init__(Efficiency(Config(efficiency=Law(**law))), gpus=gpus, tenants=tenants)
        self.cards = cards
        self.load = LOAD
        self.random = random.Random(3)
        self.noise = noise
        self.others: dict[str, float] = {}
        """Limits that somebody else wishes."""
        self.joules = dict.fromkeys(cards, 0.0)
        self.stuck = False
        """Whether the card stays where it is, whatever is wished."""
        self.trail: list[float] = []

    @property
    def wished(self) -> dict[str, float]:
        return {s.subject.gpu: s.value for s in self.decision.settings}

    def share(self, card: str) -> float:
        wishes = [w[card] for w in (self.wished, self.others) if card in w]
        return min(wishes, default=TOP) / TOP if self.acts and not self.stuck else 1.0

    def live(self, seconds: int) -> "Bench":
        for _ in range(seconds):
            for card in self.cards:
                self._read(card)
            self.outcomes = [
                Outcome(
                    POWER_LIMIT,
                    on_gpu(c),
                    min(w[c] for w in (self.wished, self.others) if c in w),
                    self.share(c) * TOP,
                    TOP if self.acts else None,
                    "applied" if self.acts else "would",
                    "",
                    self.now,
                )
                for c in self.cards
                if c in self.wished or c in self.others
            ]
            self.step()
            self.trail.append(min(self.wished.values(), default=TOP) / TOP)
        return self

    def _read(self, card: str) -> None:
        share, on = self.share(card), on_gpu(card)
        point = self.load.measured(share)
        clock = self.load.clock(share)
        gauss = self.random.gauss
        self.joules[card] += point.watts * TOP
        self.values[GPU_UTILIZATION_RATIO, on] = (
            point.rate / clock * (1 - self.load.host) * gauss(1, self.noise)
        )
        self.values[GPU_POWER_WATTS, on] = point.watts * TOP * gauss(1, self.noise)
        self.values[GPU_POWER_LIMIT_WATTS, on] = share * TOP
        self.values[GPU_ENERGY_JOULES, on] = self.joules[card]
        self.by_dims[GPU_CLOCK_HERTZ, on, ("sm",)] = round(clock * 1.8e9, -6)


def best(load: Load, slowdown: float = 0.05) -> float:
    base = load.measured(1.0)
    points = [load.measured(0.3 + i / 1000) for i in range(701)]
    return min(p.cost for p in points if p.rate >= base.rate * (1 - slowdown))


def test_it_settles_within_five_percent_of_the_best_and_within_the_bound() -> None:
    w = Bench(A).live(600)
    found = w.load.measured(w.share(A))
    assert found.cost <= 1.05 * best(w.load)
    assert found.rate >= 0.95 * w.load.measured(1.0).rate
    assert w.events == ["efficiency-settled"]
    [setting] = w.decision.settings
    assert setting.rule == EFFICIENCY_RULE
    assert "proxy" in setting.why
    numbers = dict(setting.numbers)
    assert 0 < numbers["slowdown"] <= 0.05
    assert numbers["energy_saved"] > 0.05
    [hold] = w.decision.holds
    assert (hold.subject, hold.cause) == (on_gpu(A), "efficiency")


def test_once_settled_it_stays_where_it_is() -> None:
    w = Bench(A).live(600)
    w.trail.clear()
    w.live(3600)
    assert len(set(w.trail)) == 1
    assert w.events == ["efficiency-settled"]


def test_off_it_does_nothing() -> None:
    w = Bench(A, enabled=False).live(300)
    assert set(w.trail) == {1.0}
    assert w.events == []


def test_the_limit_as_it_was_is_measured_first_and_each_step_takes_its_time() -> None:
    w = Bench(A).live(20)
    assert set(w.trail) == {1.0}
    w.live(400)
    steps = [i for i, (a, b) in enumerate(pairwise(w.trail)) if a != b]
    assert min(b - a for a, b in pairwise(steps)) >= 20


def test_cards_of_one_job_move_as_one() -> None:
    w = Bench(A, B)
    for _ in range(600):
        w.live(1)
        assert len(set(w.wished.values())) <= 1
        assert len(w.wished) in (0, 2)
    assert w.events == ["efficiency-settled"]
    assert w.share(A) < 1


def test_while_somebody_else_acts_on_the_card_it_stands_back_and_begins_anew() -> None:
    w = Bench(A).live(600)
    w.others[A] = 400.0
    w.live(5)
    assert w.wished == {}
    assert w.events == ["efficiency-settled", "efficiency-ended"]
    w.live(300)
    assert w.wished == {}
    w.others.clear()
    w.live(600)
    assert w.wished
    assert w.events[2:] == ["efficiency-settled"]


def test_another_load_is_measured_anew() -> None:
    w = Bench(A).live(600)
    before = w.share(A)
    w.load = Load(idle=0.12, knee=0.5, order=8, host=0.5, draw=0.6)
    w.live(100)
    assert w.events[1:] == ["efficiency-ended"]
    w.live(600)
    assert w.events[2:] == ["efficiency-settled"]
    assert w.share(A) < before
    found = w.load.measured(w.share(A))
    assert found.cost <= 1.05 * best(w.load)


@pytest.mark.parametrize("level", [Level.L1, Level.L2])
def test_a_neighbour_ends_it_at_once_unless_it_trains_too(level: Level) -> None:
    w = Bench(A).live(600)
    w.tenants = (*w.tenants, training("other", A, level=level, kind="inference"))
    w.live(1)
    assert w.wished == {}
    assert w.events[1:] == ["efficiency-ended"]


def test_a_load_too_unsteady_to_be_measured_is_left_alone() -> None:
    w = Bench(A, noise=0.5).live(600)
    assert set(w.trail) == {1.0}
    assert w.events == []


def test_a_limit_that_is_not_in_force_is_doubted() -> None:
    w = Bench(A).live(60)
    assert w.wished
    w.stuck = True
    w.live(70)
    assert w.wished == {}
    w.trail.clear()
    w.live(90)
    assert set(w.trail) == {1.0}, "and nothing is tried for a while"


def test_a_pause_outlasts_a_limit_that_reads_low_for_a_moment() -> None:
    w = Bench(A).live(60)
    w.stuck = True
    w.live(70)
    assert w.wished == {}
    w.stuck = False
    w.values[GPU_POWER_LIMIT_WATTS, on_gpu(A)] = 500.0
    w.outcomes = []
    w.step()
    w.trail.clear()
    w.live(60)
    assert set(w.trail) == {1.0}


def test_readings_that_end_change_nothing_and_what_they_missed_does_not_count() -> None:
    w = Bench(A).live(600)
    held = w.wished
    for _ in range(10):
        w.step(read=False)
    assert w.wished == held


def test_in_observe_the_first_limit_to_try_is_all_there_is() -> None:
    w = Bench(A)
    w.acts = False
    w.live(600)
    assert len(set(w.trail)) == 2
    assert w.events == []


def test_a_card_without_a_valley_stays_as_it_was() -> None:
    w = Bench(A)
    w.load = Load(idle=0.05, knee=0.2, order=2, host=0.0, draw=0.25)
    w.live(300)
    assert w.wished == {}
    assert w.events == ["efficiency-settled"]


def test_the_same_states_lead_to_the_same_memory() -> None:
    one, two = Bench(A).live(200), Bench(A).live(200)
    assert one.memory == two.memory
    assert msgspec.to_builtins(one.decision.holds[0].share) == two.decision.holds[0].share
