"""What is measured at one limit: enough samples, the middle of them, and nothing of a gap."""

from typing import Any

from gpuagent.config import Config
from gpuagent.decide.efficiency import Efficiency
from gpuagent.decide.tally import BY_CLOCK, MOST_SAMPLES, Tally
from gpuagent.model.inventory import on_gpu
from gpuagent.model.vocab import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_POWER_WATTS,
    GPU_UTILIZATION_RATIO,
)
from tests.decide.world import CARD, World, gpu

ON = on_gpu(CARD)
SPAN = 60.0


class Card(World):
    def __init__(self) -> None:
        super().__init__(Efficiency(Config()), gpus=[gpu()])
        self.tally = Tally(self.now)
        self.joules: float | None = 0.0

    def live(self, seconds: int, *, step: float = 1.0, read: bool = True, **now: Any) -> "Card":
        for _ in range(round(seconds / step)):
            watts, used, clock = now.get("watts", 300.0), now.get("used", 0.9), 1.5e9
            if self.joules is not None:
                self.joules += now.get("really", watts) * step
                self.values[GPU_ENERGY_JOULES, ON] = self.joules
            self.values[GPU_POWER_WATTS, ON] = watts
            self.values[GPU_UTILIZATION_RATIO, ON] = used
            self.by_dims[GPU_CLOCK_HERTZ, ON, ("sm",)] = now.get("clock", clock)
            self.step(step, read=read)
            self.tally = self.tally.after(self.state, [CARD], measure=BY_CLOCK, span=SPAN)
        return self

    @property
    def complete(self) -> bool:
        return self.tally.complete(self.now, SPAN)


def test_progress_is_utilisation_times_clock_and_energy_is_counted() -> None:
    w = Card().live(60, watts=300.0, really=280.0)
    assert w.complete
    point = w.tally.point(1.0, [700.0])
    assert point is not None
    assert point.rate == 0.9 * 1.5e9
    assert round(point.watts, 6) == 280
    assert point.peak == 300 / 700


def test_without_an_energy_counter_the_draw_counts() -> None:
    w = Card()
    w.joules = None
    point = w.live(60).tally.point(1.0, [700.0])
    assert point is not None
    assert point.watts == 300


def test_a_short_phase_does_not_count() -> None:
    w = Card().live(42).live(18, watts=120.0, used=0.4)
    point = w.tally.point(1.0, [700.0])
    assert point is not None
    assert point.rate == 0.9 * 1.5e9
    assert round(point.watts, 6) == 300


def test_a_long_one_makes_it_unsteady() -> None:
    w = Card().live(30).live(30, used=0.4)
    assert w.tally.point(1.0, [700.0]) is None


def test_it_takes_its_time_and_a_bounded_number_of_samples_however_often_it_looks() -> None:
    w = Card().live(59, step=0.1)
    assert not w.complete
    assert w.live(2, step=0.1).complete
    assert len(w.tally.samples) <= MOST_SAMPLES + 1


def test_a_gap_begins_it_anew() -> None:
    w = Card().live(30).live(25, read=False).live(30)
    assert not w.complete
    assert w.live(32).complete


def test_a_driver_loaded_anew_does_no_harm() -> None:
    w = Card().live(30)
    w.joules = 0.0
    point = w.live(30).tally.point(1.0, [700.0])
    assert point is not None
    assert round(point.watts, 6) == 300
