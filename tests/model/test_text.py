"""Numbers that name things."""

import pytest

from gpuagent.model.text import quantile_text


@pytest.mark.parametrize(
    ("quantile", "text"),
    [(0.5, "0.5"), (0.95, "0.95"), (0.99, "0.99"), (0.999, "0.999"), (1e-05, "1e-05")],
)
def test_a_quantile_is_written_as_prometheus_does(quantile: float, text: str) -> None:
    assert quantile_text(quantile) == text
    assert float(text) == quantile
