"""How far the simulated cards' power curves are off, at power limits left out of their fit."""

import os
import statistics
from collections.abc import Iterator

from gpuagent.sim import fit
from tests.bench.pace import Pace
from tests.bench.rows import Row, not_measured, quantile

_MEDIAN_PERCENT = 4.0
_P90_PERCENT = {"v100": 12.0, "a40": 18.0}


def measure(pace: Pace) -> Iterator[Row]:
    data = os.environ.get("GPUAGENT_DATA", "")
    if not data:
        yield not_measured("power curves", "GPUAGENT_DATA is not set: the traces are not at hand")
        return
    folder = os.path.join(data, "zeus-nsdi23")
    for card in fit.CARDS:
        yield from _card(card, folder, pace)


def _card(card: str, folder: str, pace: Pace) -> Iterator[Row]:
    jobs = fit.read(folder, card)
    errors = fit.score(jobs, limits=(150,) if pace.quick else None)
    for what, seen in (("throughput", errors.throughput), ("power", errors.power)):
        how = f"{len(seen)} runs of Zeus, each limit left out in turn"
        name = f"{card.upper()} {what} at limits left out"
        median, worst = _MEDIAN_PERCENT, _P90_PERCENT[card]
        yield Row(f"{name}, median error", 100 * statistics.median(seen), "%", median, median, how)
        yield Row(f"{name}, p90 error", 100 * quantile(seen, 0.9), "%", worst, worst)
