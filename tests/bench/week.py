"""What grows over a simulated week: nothing may. Tenants come and go, cards hang, operators interfere."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpuagent import log
from tests.bench.pace import Pace
from tests.bench.rows import Row
from tests.lab.week import HOUR, Week, trend

_WEEK_SECONDS = 7 * 24 * HOUR
_QUICK_SECONDS = 2 * HOUR
_TICK = "2s"
"""The longest there is: half as many passes of the loop, and as much of a life."""
_WHAT = {
    "resident_bytes": "memory",
    "readings": "readings",
    "history": "history",
    "series": "series in /metrics",
    "lanes": "lanes",
    "ledger_bytes": "ledger",
    "files": "open files",
}


def measure(pace: Pace) -> Iterator[Row]:
    """Largest of the last third by the largest of what was before; 0 % is no growth."""
    log.setup(level="error")
    seconds = _QUICK_SECONDS if pace.quick else _WEEK_SECONDS
    with tempfile.TemporaryDirectory(prefix="gpuagent-week-") as folder:
        week = Week(seconds, seed=1, folder=Path(folder), tick=_TICK)
        asyncio.run(week.run(every=seconds / 42))
    how = f"{seconds / HOUR:.0f} simulated hours, {week.applied} settings applied, invariants held"
    for name, what in _WHAT.items():
        grown = trend([getattr(size, name) for size in week.sizes]) - 1.0
        # A larger peak by chance is no trend; twice the noise of a short life is.
        yield Row(f"growth: {what}", 100 * max(grown, 0.0), "%", 2.0, 10.0, note=how)
    books = max(size.books_bytes for size in week.sizes) / 2**20
    yield Row("state directory, most", books, "MiB", 45.0, 60.0, note="5 audit files of 8 MiB")
