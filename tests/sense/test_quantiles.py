"""Quantiles from buckets: against the true ones, over a window, across resets; and summaries."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sense.exposition import Histogram, Key, Summary
from gpuagent.sense.quantiles import Estimate, Measured, Meter, Window, quantile
from tests.prometheus import NONE_HERE, PROMETHEUS, watching
from tests.sense.pages import cumulative, histogram

BOUNDS = (0.1, 0.5, 1.0, 2.5)
ONE: Key = ()


def each(counts: Mapping[float, float]) -> dict[float, float]:
    """Cumulative counts as those of each bucket alone."""
    found, before = {}, 0.0
    for bound, count in counts.items():
        found[bound] = count - before
        before = count
    return found


def counted(*seconds: float) -> dict[float, float]:
    return cumulative(seconds, BOUNDS)


def true_quantile(wanted: float, seconds: Sequence[float]) -> float:
    return sorted(seconds)[max(math.ceil(wanted * len(seconds) - 1e-9), 1) - 1]


# -- one distribution --------------------------------------------------------------------------------

LATENCIES = st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=60)
QUANTILES = st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 0.999]) | st.floats(0.001, 0.999)


@given(LATENCIES, QUANTILES, st.sets(st.floats(0.001, 4.0), min_size=1, max_size=12))
def test_the_true_quantile_is_in_the_same_bucket(
    seconds: list[float], wanted: float, bounds: set[float]
) -> None:
    found = quantile(wanted, each(cumulative(seconds, sorted(bounds))))
    assert found is not None
    true = true_quantile(wanted, seconds)
    lower = max((b for b in bounds if b < true), default=0.0)
    upper = min((b for b in bounds if b >= true), default=math.inf)
    assert found.beyond == (upper == math.inf)
    if found.beyond:
        assert found.value == lower < true
    else:
        assert lower <= found.value <= upper


@given(LATENCIES, QUANTILES, QUANTILES)
def test_a_higher_quantile_is_no_lower(seconds: list[float], one: float, other: float) -> None:
    counts = each(counted(*seconds))
    low, high = (quantile(q, counts) for q in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low.value <= high.value


def test_it_is_linear_within_a_bucket_the_lowest_of_which_begins_at_zero() -> None:
    assert quantile(0.5, {1.0: 4, math.inf: 0}) == Estimate(0.5)
    assert quantile(0.75, {1.0: 2, 3.0: 2, math.inf: 0}) == Estimate(2.0)
    assert quantile(0.5, {-1.0: 4, 1.0: 0, math.inf: 0}) == Estimate(-1.0)


def test_above_the_last_bound_it_is_at_least_that_and_without_requests_nothing() -> None:
    assert quantile(0.99, {0.1: 9, 0.5: 0, math.inf: 1}) == Estimate(0.5, beyond=True)
    assert quantile(0.99, {0.1: 0.0, math.inf: 0.0}) is None
    assert quantile(0.99, {}) is None


CASES: list[tuple[float, ...]] = [
    (0.05,),
    (0.1, 0.1),
    (3.0, 4.0),
    (0.05, 0.2, 0.3, 0.7, 0.9, 2.0),
    (0.01, *(0.2,) * 98, 9.0),
    (0.01, *(0.2,) * 90, *(2.4,) * 9),
    (*(0.05,) * 7, *(0.6,) * 11, 3.0),
]


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_it_is_what_prometheus_says(tmp_path: Path) -> None:
    page = "# TYPE x histogram\n" + "".join(
        histogram("x", counted(*case), f'case="{n}"') for n, case in enumerate(CASES)
    )
    app = web.Application()

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=page, headers={"Content-Type": "text/plain; version=0.0.4"})

    app.router.add_get("/metrics", answer)
    app.router.add_get("/metrics/dcgm", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with watching(port, tmp_path) as prometheus:
            for wanted in (0.1, 0.5, 0.9, 0.95, 0.99):
                text = f'histogram_quantile({wanted}, x_bucket{{job="gpuagent"}})'
                said = await prometheus.query(text)
                theirs = {int(s["metric"]["case"]): float(s["value"][1]) for s in said}
                ours = {}
                for number, case in enumerate(CASES):
                    found = quantile(wanted, each(counted(*case)))
                    assert found is not None
                    ours[number] = found.value
                assert ours == pytest.approx(theirs)
    finally:
        await runner.cleanup()


# -- a window ----------------------------------------------------------------------------------------


def test_only_what_was_counted_since_the_first_scrape_and_within_the_window_counts() -> None:
    window = Window(10.0)
    window.add(100.0, {ONE: counted(*(2.0,) * 50)})
    assert sum(window.counts().values()) == 0
    window.add(102.0, {ONE: counted(*(2.0,) * 50, 0.05)})
    assert window.counts() == each(counted(0.05))
    for at in (104.0, 106.0, 108.0, 110.0):
        window.add(at, {ONE: counted(*(2.0,) * 50, 0.05, 0.7)})
    assert window.counts() == each(counted(0.05, 0.7))
    window.add(112.5, {ONE: counted(*(2.0,) * 50, 0.05, 0.7)})
    assert window.counts() == each(counted(0.7))
    window.add(115.0, {ONE: counted(*(2.0,) * 50, 0.05, 0.7)})
    assert sum(window.counts().values()) == 0


def test_a_counter_that_has_fallen_began_anew() -> None:
    window = Window(30.0)
    window.add(0.0, {ONE: counted(*(0.05,) * 9)})
    window.add(2.0, {ONE: counted(*(0.05,) * 9, 2.0)})
    window.add(4.0, {ONE: counted(0.2, 0.2)})
    assert window.counts() == each(counted(2.0, 0.2, 0.2))


def test_series_come_and_go_one_by_one() -> None:
    one, two = ((("m", "1"),), (("m", "2"),))
    window = Window(30.0)
    window.add(0.0, {one: counted(0.05)})
    window.add(2.0, {one: counted(0.05), two: counted(*(2.0,) * 8)})
    assert sum(window.counts().values()) == 0, "how old these requests are is not known"
    window.add(4.0, {two: counted(*(2.0,) * 8, 0.7)})
    window.add(6.0, {one: counted(0.05, 0.05), two: counted(*(2.0,) * 8, 0.7)})
    assert window.counts() == each(counted(0.7))


def test_series_of_other_bounds_begin_to_be_counted() -> None:
    window = Window(30.0)
    window.add(0.0, {ONE: counted(0.05)})
    window.add(2.0, {ONE: cumulative([0.05, 0.3], (0.2, 0.4))})
    assert sum(window.counts().values()) == 0
    window.add(4.0, {ONE: cumulative([0.05, 0.3, 0.3], (0.2, 0.4))})
    assert window.counts() == {0.2: 0.0, 0.4: 1.0, math.inf: 0.0}


def test_series_of_different_bounds_are_summed_by_bound() -> None:
    one, two = ((("m", "1"),), (("m", "2"),))
    window = Window(30.0)
    for at, more in ((0.0, ()), (2.0, (0.9,))):
        window.add(at, {one: cumulative(more, (1.0,)), two: cumulative(more, (0.5, 2.0))})
    assert window.counts() == {0.5: 0.0, 1.0: 1.0, 2.0: 1.0, math.inf: 0.0}


def test_after_a_gap_longer_than_the_window_it_begins_anew() -> None:
    window = Window(10.0)
    window.add(0.0, {ONE: counted()})
    window.add(2.0, {ONE: counted(0.05)})
    window.add(8.0, {ONE: counted(0.05, 0.7)})
    assert sum(window.counts().values()) == 2
    window.add(24.0, {ONE: counted(0.05, 0.7, 2.0)})
    assert sum(window.counts().values()) == 0
    window.add(26.0, {ONE: counted(0.05, 0.7, 2.0, 0.2)})
    assert window.counts() == each(counted(0.2))


def test_buckets_that_are_not_counted_at_once_do_no_harm() -> None:
    window = Window(10.0)
    window.add(0.0, {ONE: {0.1: 0, 0.5: 0, math.inf: 0}})
    window.add(2.0, {ONE: {0.1: 3, 0.5: 2, math.inf: 4}})
    assert window.counts() == {0.1: 3.0, 0.5: 0.0, math.inf: 1.0}


SCRAPES = st.lists(
    st.tuples(
        st.floats(0.01, 20.0),
        st.dictionaries(
            st.sampled_from(["a", "b"]),
            st.lists(st.integers(0, 1000), min_size=3, max_size=3).map(sorted),
        ),
    ),
    max_size=60,
)


@given(SCRAPES, st.floats(2.0, 60.0))
def test_whatever_is_scraped_counts_stay_counts_and_memory_bounded(
    scrapes: list[tuple[float, dict[str, list[int]]]], seconds: float
) -> None:
    window, at, most = Window(seconds), 0.0, 0
    for pause, series in scrapes:
        at += pause
        window.add(
            at,
            {
                (("m", name),): dict(zip((0.1, 1.0, math.inf), map(float, counts), strict=True))
                for name, counts in series.items()
            },
        )
        most += sum(counts[-1] for counts in series.values())
        counts = window.counts()
        assert all(c >= 0 for c in counts.values())
        assert sum(counts.values()) <= most
        assert all(p.ends > at - 1.5 * seconds for p in window._parts)


def test_a_long_window_scraped_often_is_kept_in_few_parts() -> None:
    window, total = Window(600.0), 0
    for number in range(3000):
        total += number % 2
        window.add(number * 0.5, {ONE: {0.1: 0.0, 0.5: float(total), math.inf: float(total)}})
    assert len(window._parts) <= 70
    assert sum(window.counts().values()) == pytest.approx(600, rel=0.05)


# -- a latency ---------------------------------------------------------------------------------------


def meter(*, objective: float | None = None, unit: float = 1.0, window: float = 10.0) -> Meter:
    return Meter(quantile=0.99, unit_seconds=unit, window=window, objective=objective)


def test_a_histogram_gives_an_estimate_in_seconds_from_the_second_scrape_on() -> None:
    one = meter(unit=1e-3)
    first = one.after(0.0, Histogram({ONE: counted(0.05)}))
    assert first == Measured(None, why="p99 is counted since this scrape only")
    second = one.after(2.0, Histogram({ONE: counted(0.05, 0.3)}))
    assert second.seconds == pytest.approx(0.000496)
    assert not second.exact
    idle = one.after(20.0, Histogram({ONE: counted(0.05, 0.3)}))
    assert idle.seconds is None
    one.begin()
    assert one.after(21.0, Histogram({ONE: counted(0.05, 0.3, 0.3)})).seconds is None


def test_without_requests_in_the_window_nothing_is_known() -> None:
    one = meter()
    for at in (0.0, 2.0):
        said = one.after(at, Histogram({ONE: counted(0.05)}))
    assert said == Measured(None, why="p99 is not known: no request within 10 s")


@pytest.mark.parametrize(("objective", "known"), [(None, True), (2.0, True), (3.0, False)])
def test_above_the_last_bound_it_is_told_only_where_that_misses_the_objective(
    objective: float | None, known: bool
) -> None:
    one = meter(objective=objective)
    one.after(0.0, Histogram({ONE: counted()}))
    said = one.after(2.0, Histogram({ONE: counted(60.0)}))
    if known:
        assert said == Measured(2.5)
    else:
        assert said.seconds is None
        assert "above its highest bucket (2.5 s), which is below the objective (3 s)" in said.why


def test_a_summary_is_the_services_own_word_and_of_several_the_worst() -> None:
    one = meter(unit=1e-6)
    a, b = ((("m", "a"),), (("m", "b"),))
    alone = one.after(0.0, Summary({a: 5200.0}, {}))
    assert alone.seconds == pytest.approx(0.0052)
    assert alone.exact
    both = one.after(1.0, Summary({a: 5200.0, b: 9000.0}, {}))
    assert both.seconds == pytest.approx(0.009)
    assert not both.exact
    assert one.after(2.0, Summary({}, {})).seconds is None


def test_a_summary_that_counts_no_more_requests_says_nothing_of_now() -> None:
    one = meter()
    for at in (0.0, 5.0, 10.0):
        assert one.after(at, Summary({ONE: 0.2}, {ONE: 7.0})).seconds == 0.2
    assert one.after(10.5, Summary({ONE: 0.2}, {ONE: 7.0})).seconds is None
    assert one.after(11.0, Summary({ONE: 0.2}, {ONE: 8.0})).seconds == 0.2
