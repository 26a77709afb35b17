"""The shipped coefficients are those of the fit, and the fit predicts what it has not seen."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuagent.sim import fit, profiles
from gpuagent.sim.simplex import lowest

P90 = {"v100": 0.12, "a40": 0.18}
LEFT_OUT = {"v100": (125, 200), "a40": (125, 175, 225, 275)}
"""Some of them: the bench leaves out each in turn."""


@pytest.mark.parametrize("card", fit.CARDS)
def test_the_profile_holds_what_the_fit_finds(card: str, data: Path) -> None:
    fitted, shapes = fit.shipped(fit.read(str(data / "zeus-nsdi23"), card), card)
    profile = profiles.card(card)
    for name in ("idle_watts", "knee", "order"):
        assert getattr(profile, name).value == pytest.approx(getattr(fitted, name), rel=1e-3)
    for name, shape in shapes.items():
        shipped = profile.shapes[name]
        assert shipped.source == shape.source
        for key in ("busy_watts", "host", "memory"):
            assert getattr(shipped, key) == pytest.approx(getattr(shape, key), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("card", fit.CARDS)
def test_it_predicts_limits_that_were_left_out(card: str, data: Path) -> None:
    jobs = fit.read(str(data / "zeus-nsdi23"), card)
    errors = fit.score(jobs, limits=LEFT_OUT[card])
    for seen in (errors.throughput, errors.power):
        assert len(seen) > 130
        assert statistics.median(seen) <= 0.04
        assert fit.quantile(seen, 0.9) <= P90[card]


def test_a_shape_is_found_again_in_what_it_predicts() -> None:
    card = profiles.card("a40")
    true = card.shapes["resnet"]
    seen = {}
    for limit in range(100, 301, 25):
        seconds, watts = card.curve.predict(limit, true)
        seen[limit] = (700 * seconds, watts)
    shape, full = fit.fit_shape(card.curve, seen)
    assert full == pytest.approx(700, rel=0.03)
    for limit in range(100, 301, 25):
        assert full * card.curve.predict(limit, shape)[0] == pytest.approx(seen[limit][0], rel=0.03)


def test_the_simplex_finds_the_lowest_point_of_a_bent_valley() -> None:
    def valley(at: Sequence[float]) -> float:
        return (1 - at[0]) ** 2 + 100 * (at[1] - at[0] * at[0]) ** 2

    found = lowest(valley, (-1.2, 1.0), (0.5, 0.5), rounds=200)
    assert found.at == pytest.approx((1.0, 1.0), abs=1e-3)
