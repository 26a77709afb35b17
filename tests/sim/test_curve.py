"""Clocks, speed and power under a limit, for any curve and any work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.curve import Curve, Shape

CURVES = st.builds(
    Curve, idle_watts=st.floats(10, 80), knee=st.floats(0.05, 0.9), order=st.floats(2, 30)
)
LIMITS = st.floats(100, 400)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    host = draw(st.floats(0, 0.9))
    return Shape(
        busy_watts=draw(st.floats(90, 400)),
        host=host,
        memory=draw(st.floats(0, 0.99 - host)),
        source="drawn",
    )


@given(CURVES, shapes(), LIMITS)
def test_power_keeps_to_the_limit_and_the_clock_is_none_too_low(
    curve: Curve, shape: Shape, limit: float
) -> None:
    clock = curve.clock(limit, shape.busy_watts)
    assert curve.LOWEST_CLOCK <= clock <= 1.0
    if clock > curve.LOWEST_CLOCK:
        drawn = curve.busy_watts(clock, shape.busy_watts)
        assert drawn <= limit + 1e-6 or clock == 1.0
        if clock < 1.0:
            assert drawn >= 0.97 * limit, "a higher clock would have kept to the limit"


@given(CURVES, shapes(), LIMITS, LIMITS)
def test_a_lower_limit_is_never_faster_and_never_draws_more(
    curve: Curve, shape: Shape, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    slow, little = curve.predict(low, shape)
    fast, much = curve.predict(high, shape)
    assert fast <= slow + 1e-9
    assert little <= much + 1e-6
    assert curve.idle_watts - 1e-9 <= little <= max(low, curve.idle_watts) + 1e-6


@given(CURVES, shapes())
def test_without_a_limit_that_binds_work_runs_at_full_clock(curve: Curve, shape: Shape) -> None:
    seconds, watts = curve.predict(shape.busy_watts, shape)
    assert seconds == pytest.approx(1.0)
    assert watts <= shape.busy_watts + 1e-9


@pytest.mark.parametrize("kind", profiles.cards())
def test_work_bound_by_memory_or_host_hardly_feels_a_limit(kind: str) -> None:
    card = profiles.card(kind)
    top = card.power_max_watts.value
    bound, free = card.shapes["bert"], card.shapes["ncf"]
    assert card.curve.predict(0.5 * top, bound)[0] > 1.3
    assert card.curve.predict(0.5 * top, free)[0] < 1.05
    assert card.curve.predict(top, card.shapes["decode"])[1] < 0.45 * top
