"""How fast /metrics is, and how little a scrape holds up the agent's loop.

These are milliseconds, and whoever else uses the machine adds to them. So an empty event loop runs
beside what is measured, each window is measured in three rounds, and the round counts in which the
empty loop was served best: not the one with the best result.
"""

import time
from collections.abc import Iterator

import msgspec

from tests.bench import scrape
from tests.bench.lag import EVERY_SECONDS, Lagging, Lags
from tests.bench.pace import Pace
from tests.bench.rows import Row, p99
from tests.bench.scene import Scene, answers, scene
from tests.bench.scrape import Scrapes
from tests.stage.stage import until

_TICK = "250ms"
"""Four snapshots a second instead of one, so that every scrape has to have one rendered."""
_PER_SECOND = 3.0
_WARM_UP_SECONDS = 5.0
_ROUNDS = 3


class Round(msgspec.Struct, frozen=True):
    """Part of a window; monotonic seconds."""

    began: float
    ended: float
    scrapes: Scrapes

    def of(self, lags: Lags) -> list[float]:
        return [late for due, late in lags if self.began <= due < self.ended]


def measure(pace: Pace) -> Iterator[Row]:
    with scene(cards=8, tenants=20, tick=_TICK) as here:
        yield from _latency(here, "8 GPUs, 20 tenants", pace, budget=15.0, fails_above=50.0)
    with scene(cards=16, tenants=200, tick=_TICK) as here:
        yield from _latency(here, "16 GPUs, 200 tenants", pace, budget=100.0, fails_above=200.0)
    with scene(cards=16, tenants=200) as here:
        yield from _lag(here, pace)


def _rounds(here: Scene, pace: Pace, *, per_second: float, seconds: float) -> list[Round]:
    time.sleep(pace.seconds(_WARM_UP_SECONDS))
    found = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        scrapes = scrape.scrape(
            here.port, per_second=per_second, seconds=pace.seconds(seconds) / _ROUNDS
        )
        found.append(Round(began, time.monotonic(), scrapes))
    return found


def quietest(rounds: list[Round], machine: Lags) -> Round:
    return min(rounds, key=lambda r: p99(r.of(machine)))


def _latency(
    here: Scene, what: str, pace: Pace, *, budget: float, fails_above: float
) -> Iterator[Row]:
    with here.running(), Lagging(here.stage.folder) as alone:
        rounds = _rounds(here, pace, per_second=_PER_SECOND, seconds=21)
        machine = alone.end()
    quiet = quietest(rounds, machine)
    scrapes = quiet.scrapes
    yield Row(
        f"/metrics p99, {what}",
        1e3 * p99(scrapes.fresh),
        "ms",
        budget,
        fails_above,
        f"{len(scrapes.fresh)} scrapes that met a new snapshot, {_TICK} ticks, gzip; meanwhile "
        f"the machine served an empty loop within {1e3 * p99(quiet.of(machine)):.1f} ms",
    )
    yield Row(f"series, {what}", scrapes.series, note=f"{scrapes.size_bytes / 1e3:.0f} kB")


def _lag(here: Scene, pace: Pace) -> Iterator[Row]:
    """The whole agent with a task in its loop that is due every 5 ms, and an empty loop beside it."""
    folder = here.stage.folder
    with (
        Lagging(folder, str(here.stage.config), here.stage.driver.env) as agent,
        Lagging(folder) as alone,
    ):
        until("the agent answers", lambda: answers(here.port, "/readyz"))
        with here.working():
            rounds = _rounds(here, pace, per_second=1.0, seconds=21)
        seen, machine = agent.end(), alone.end()
    quiet = quietest(rounds, machine)
    late = quiet.of(seen)
    yield Row(
        "event-loop lag p99 while scraped 1/s, 16 GPUs, 200 tenants",
        1e3 * p99(late),
        "ms",
        10.0,
        25.0,
        f"{len(late)} turns of {1e3 * EVERY_SECONDS:.0f} ms, {len(quiet.scrapes.seconds)} scrapes",
    )
    yield Row("event-loop lag, worst", 1e3 * max(late), "ms")
    yield Row(
        "event-loop lag p99, an empty loop at the same time",
        1e3 * p99(quiet.of(machine)),
        "ms",
        note="what the machine adds",
    )
