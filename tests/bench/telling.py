"""How fast /metrics is, and how little a scrape holds up the agent's loop."""

import time
from collections.abc import Iterator

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


def measure(pace: Pace) -> Iterator[Row]:
    with scene(cards=8, tenants=20, tick=_TICK) as here, here.running():
        time.sleep(pace.seconds(_WARM_UP_SECONDS))
        scrapes = scrape.scrape(here.port, per_second=_PER_SECOND, seconds=pace.seconds(20))
        yield from _latency("8 GPUs, 20 tenants", scrapes, budget=15.0, fails_above=50.0)
    with scene(cards=16, tenants=200, tick=_TICK) as here, here.running():
        time.sleep(pace.seconds(_WARM_UP_SECONDS))
        scrapes = scrape.scrape(here.port, per_second=_PER_SECOND, seconds=pace.seconds(24))
        yield from _latency("16 GPUs, 200 tenants", scrapes, budget=100.0, fails_above=200.0)
    with scene(cards=16, tenants=200) as here:
        yield from _lag(here, pace)


def _latency(what: str, scrapes: Scrapes, *, budget: float, fails_above: float) -> Iterator[Row]:
    yield Row(
        f"/metrics p99, {what}",
        1e3 * p99(scrapes.fresh),
        "ms",
        budget,
        fails_above,
        f"{len(scrapes.fresh)} scrapes that met a new snapshot, {_TICK} ticks, gzip",
    )
    yield Row(f"series, {what}", scrapes.series, note=f"{scrapes.size_bytes / 1e3:.0f} kB")


def _lag(here: Scene, pace: Pace) -> Iterator[Row]:
    """The whole agent with a task in its loop that is due every 5 ms, and an empty loop beside it."""
    folder, seconds = here.stage.folder, pace.seconds(24)
    with (
        Lagging(folder, str(here.stage.config), here.stage.driver.env) as agent,
        Lagging(folder) as alone,
    ):
        until("the agent answers", lambda: answers(here.port, "/readyz"))
        with here.working():
            time.sleep(pace.seconds(_WARM_UP_SECONDS))
            began = time.monotonic()
            scrapes = scrape.scrape(here.port, per_second=1.0, seconds=seconds)
            ended = time.monotonic()
        seen, machine = agent.end(), alone.end()
    late, floor = _within(seen, began, ended), _within(machine, began, ended)
    yield Row(
        "event-loop lag p99 while scraped 1/s, 16 GPUs, 200 tenants",
        1e3 * p99(late),
        "ms",
        10.0,
        25.0,
        f"{len(late)} turns of {1e3 * EVERY_SECONDS:.0f} ms, {len(scrapes.seconds)} scrapes",
    )
    yield Row("event-loop lag, worst", 1e3 * max(late), "ms")
    yield Row(
        "event-loop lag p99, an empty loop at the same time",
        1e3 * p99(floor),
        "ms",
        note="the machine",
    )


def _within(lags: Lags, began: float, ended: float) -> list[float]:
    return [late for due, late in lags if began <= due < ended]
