"""Locked clocks where no power limits keep the budget: when, whose, how far, and that they are let go."""

import pytest

from gpuagent.config import Card, Config, Power
from gpuagent.decide.clocks import CLOCK_RULE, LOWEST_RATIO
from gpuagent.decide.power import PowerBudget
from gpuagent.model.declare import Fate
from gpuagent.model.inventory import Level, on_gpu
from gpuagent.model.vocab import CLOCK_LIMIT, GPU_CLOCK_HERTZ
from tests.decide.world import World, gpu, tenant

TOP = 1.8e9
FULL = {"GPU-a": 290.0, "GPU-b": 280.0, "GPU-c": 270.0}
IDLE = 80.0


class Decoding(World):
    """Three cards of L1, L2 and L3 whose lowest limit is 300 W; their draw follows their clocks."""

    def __init__(self, budget: float, *, unlocked: str = "*", deaf: str = "") -> None:
        cards = [gpu(uuid, i, low=300) for i, uuid in enumerate(FULL)]
        tenants = [
            tenant(name, level, gpus=[uuid])
            for name, level, uuid in zip(("one", "two", "three"), Level, FULL, strict=True)
        ]
        self.config = Config(
            power=Power(budget=budget), cards=(Card(unlocked, clock_unlocked=True),)
        )
        super().__init__(PowerBudget(self.config), gpus=cards, tenants=tenants)
        self.deaf = deaf
        self.lowest: dict[str, float] = {}

    @property
    def locks(self) -> dict[str, float]:
        return {s.subject.gpu: s.value for s in self.decision.settings if s.knob is CLOCK_LIMIT}

    @property
    def draws(self) -> dict[str, float]:
        locks = {} if self.deaf == "*" else self.locks
        return {
            u: IDLE + (w - IDLE) * (locks.get(u, TOP) / TOP) ** 2 if u != self.deaf else w
            for u, w in FULL.items()
        }

    def live(self, seconds: int) -> "Decoding":
        for _ in range(seconds):
            for uuid, watts in self.draws.items():
                self.card(uuid, watts=watts)
                clock = TOP if uuid == self.deaf else self.locks.get(uuid, TOP)
                self.by_dims[GPU_CLOCK_HERTZ, on_gpu(uuid), ("sm",)] = clock
            self.step()
            for uuid, hertz in self.locks.items():
                self.lowest[uuid] = min(hertz, self.lowest.get(uuid, TOP))
        return self


def test_clocks_bring_the_draw_under_a_budget_that_limits_cannot_keep() -> None:
    w = Decoding(800).live(180)
    assert sum(w.draws.values()) <= 800
    assert sum(w.draws.values()) >= 760, "no more than needed"
    assert set(w.locks) == {"GPU-c"}, "L3 first, and it is enough"
    [setting] = [s for s in w.decision.settings if s.knob is CLOCK_LIMIT]
    assert setting.rule == CLOCK_RULE
    assert CLOCK_LIMIT.fates_under(CLOCK_RULE).stop is Fate.PUT_BACK


def test_l1_comes_last_and_with_an_alert() -> None:
    w = Decoding(480).live(60)
    assert set(w.locks) == {"GPU-c"}
    w.live(600)
    assert w.lowest["GPU-c"] == pytest.approx(LOWEST_RATIO * TOP)
    assert w.lowest["GPU-b"] == pytest.approx(LOWEST_RATIO * TOP)
    assert LOWEST_RATIO * TOP < w.lowest["GPU-a"] < TOP
    assert w.events.count("l1-card-limited") >= 1
    assert sum(w.draws.values()) <= 480


def test_a_budget_that_limits_keep_needs_no_clocks() -> None:
    w = Decoding(905).live(60)
    assert w.locks == {}
    assert sum(FULL.values()) < 905


def test_a_draw_within_the_budget_needs_none_although_the_floors_do_not_fit() -> None:
    assert Decoding(850).live(60).locks == {}


def test_only_declared_cards_are_locked() -> None:
    w = Decoding(800, unlocked="GPU-b").live(120)
    assert set(w.locks) == {"GPU-b"}
    assert Decoding(800, unlocked="GPU-x").live(60).locks == {}


def test_locks_are_let_go_step_by_step_with_the_need_and_at_once_with_the_cause() -> None:
    w = Decoding(750).live(180)
    held = dict(w.locks)
    assert held
    w.policy = PowerBudget(Config(power=Power(budget=830), cards=w.config.cards))
    w.live(200)
    assert sum(w.locks.values()) > sum(held.values())
    assert sum(w.draws.values()) <= 830
    w.policy = PowerBudget(Config(power=Power(budget=1000), cards=w.config.cards))
    assert w.live(2).locks == {}


def test_a_lock_that_does_nothing_is_let_go_and_the_next_card_is_tried() -> None:
    w = Decoding(800, deaf="GPU-c").live(200)
    assert set(w.lowest) == {"GPU-c", "GPU-b"}
    assert set(w.locks) == {"GPU-b"}
    assert sum(w.draws.values()) <= 800


def test_it_does_not_saw() -> None:
    w = Decoding(800).live(300)
    seen = set()
    for _ in range(300):
        w.live(1)
        seen.add(tuple(w.locks.items()))
    assert len(seen) <= 1


def test_without_readings_nothing_moves() -> None:
    w = Decoding(800).live(180)
    held = dict(w.locks)
    for _ in range(60):
        w.step(read=False)
    assert w.locks in (held, {})
