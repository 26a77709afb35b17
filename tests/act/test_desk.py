"""What a knob reads as, for people."""

import pytest

from gpuagent.act.desk import said
from gpuagent.model.declare import Knob
from gpuagent.model.vocab import CLOCK_LIMIT, CPU_MAX, POWER_LIMIT
from gpuagent.ports import Real


@pytest.mark.parametrize(
    ("knob", "real", "text"),
    [
        (POWER_LIMIT, Real(660.0, "660000"), "660 W"),
        (POWER_LIMIT, Real(333.94, "333940"), "334 W"),
        (CLOCK_LIMIT, Real(1.2e9, "1200"), "1200 MHz"),
        (CLOCK_LIMIT, Real(float("inf"), "none"), "none"),
        (CPU_MAX, Real(0.5, "50000 100000"), "50000 100000"),
    ],
)
def test_a_value_is_told_with_its_unit(knob: Knob, real: Real, text: str) -> None:
    assert said(knob, real) == text
