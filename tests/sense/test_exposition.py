"""One metric out of pages of strangers: what engines write, what no page should hold, and garbage."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gpuagent.errors import Refused
from gpuagent.sense.exposition import (
    MOST_BOUNDS,
    MOST_LINE_BYTES,
    MOST_LINES,
    MOST_SERIES,
    Histogram,
    Sieve,
    Summary,
    Wanted,
)
from tests.sense.pages import VLLM_BOUNDS, cumulative, triton, vllm

E2E = "vllm:e2e_request_latency_seconds"
TRITON = "nv_inference_request_summary_us"


def read(page: str, metric: str, *labels: tuple[str, str], q: float = 0.99) -> Histogram | Summary:
    sieve = Sieve(Wanted(metric, q, labels))
    sieve.feed(page.encode())
    return sieve.end()


def buckets(page: str, metric: str = "x", *labels: tuple[str, str]) -> list[dict[float, float]]:
    found = read(page, metric, *labels)
    assert isinstance(found, Histogram)
    return [dict(counts) for counts in found.series.values()]


def refusal(page: str, metric: str = "x", *labels: tuple[str, str], q: float = 0.99) -> str:
    with pytest.raises(Refused) as refused:
        read(page, metric, *labels, q=q)
    return str(refused.value)


# -- what engines write ------------------------------------------------------------------------------


def test_a_histogram_of_vllm() -> None:
    seconds = [0.2, 0.4, 0.4, 3.0, 70.0]
    [counts] = buckets(vllm(seconds), E2E)
    assert counts == cumulative(seconds, VLLM_BOUNDS)
    assert list(counts) == sorted(counts)


def test_a_summary_of_triton_leaves_out_models_that_are_idle() -> None:
    page = triton({"bert": 5200.0, "resnet": math.nan})
    found = read(page, TRITON)
    assert isinstance(found, Summary)
    assert list(found.values.values()) == [5200.0]
    assert sorted(found.counts.values()) == [100.0, 100.0]


def test_only_series_with_the_labels_count() -> None:
    page = vllm([0.1], model="a") + vllm([0.2, 0.3], model="b")
    assert len(buckets(page, E2E)) == 2
    [counts] = buckets(page, E2E, ("model_name", "b"), ("engine", "0"))
    assert counts[math.inf] == 2
    said = refusal(page, E2E, ("model_name", "c"))
    assert said == f'no series of {E2E} has the labels "model_name=c"'


def test_labels_are_unescaped_and_times_and_exemplars_left_out() -> None:
    page = (
        r'x_bucket{path="C:\\a\"b}\n",le="1"} 1 1700000000000' + "\n"
        r'x_bucket { path = "C:\\a\"b}\n" , le = "+Inf", } 2 # {trace_id="} 9"} 0.7 1.5' + "\r\n"
    )
    assert buckets(page, "x", ("path", 'C:\\a"b}\n')) == [{1.0: 1.0, math.inf: 2.0}]


def test_both_formats_of_the_client_library_are_read_alike() -> None:
    registry = CollectorRegistry()
    seen = ClientHistogram("x", "Requests", ["m"], registry=registry, buckets=(0.1, 1, 5))
    for value in (0.05, 0.5, 0.7, 60):
        seen.labels("one").observe(value, {"trace_id": "abc"})
    expected = [{0.1: 1.0, 1.0: 3.0, 5.0: 3.0, math.inf: 4.0}]
    assert buckets(generate_latest(registry).decode()) == expected
    said: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    assert buckets(said.decode()) == expected


def test_a_metric_without_requests_so_far_is_none_that_is_missing() -> None:
    assert read("# TYPE x histogram\n", "x") == Histogram({})
    assert read("# TYPE x summary\n", "x") == Summary({}, {})


def test_a_last_line_without_its_newline_counts() -> None:
    assert buckets('x_bucket{le="1"} 1\nx_bucket{le="+Inf"} 1') == [{1.0: 1.0, math.inf: 1.0}]


# -- what no quantile follows from -------------------------------------------------------------------


def test_a_counter_is_refused_with_what_to_do() -> None:
    said = refusal(triton({"bert": 1.0}), "nv_inference_request_duration_us")
    assert said.startswith("nv_inference_request_duration_us is a counter, from which no quantile")
    assert "--metrics-config summary_latencies=true" in said


@pytest.mark.parametrize(
    ("page", "metric", "why"),
    [
        ("# TYPE x gauge\nx 0.2\n", "x", "x is a gauge"),
        ("# TYPE x gaugehistogram\n", "x", "x is a gaugehistogram"),
        ("x 0.2\n", "x", "x has neither buckets nor quantiles"),
        (vllm([1]), f"{E2E}_sum", "name the histogram or summary itself, without _sum"),
        (vllm([1]), f"{E2E}_bucket", "without _bucket"),
        (vllm([1]), "vllm:e2e", "the page has no metric vllm:e2e"),
        ("<html>404</html>", "x", "the page has no metric x"),
        ("", "x", "the page has no metric x"),
        (triton({"m": 1.0}, summaries=False), TRITON, f"the page has no metric {TRITON}"),
        ('x_bucket{le="1"} 1\n', "x", "x needs a bucket of +Inf"),
        ('x_bucket{le="+Inf"} 1\n', "x", "and one below it"),
    ],
)
def test_what_is_no_histogram_or_summary_is_refused(page: str, metric: str, why: str) -> None:
    assert why in refusal(page, metric)


def test_a_quantile_that_is_not_there_is_refused_with_those_that_are() -> None:
    said = refusal(triton({"m": 1.0}), TRITON, q=0.999)
    assert "has no quantile 0.999, only 0.5, 0.9, 0.95, 0.99: set latency_quantile" in said


# -- what no page should hold ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('x_bucket{le="1"} -1', "-1 is no count of requests"),
        ('x_bucket{le="1"} NaN', "nan is no count"),
        ('x_bucket{le="1"} +Inf', "inf is no count"),
        ('x_bucket{le="1"} 1e300', "is no count"),
        ('x_bucket{le="nan"} 1', '"nan" is no bound'),
        ('x_bucket{le="-Inf"} 1', '"-Inf" is no bound'),
        ('x_bucket{le="one"} 1', '"one" is no number'),
        ('x_bucket{le="1"} one', '"one" is no number'),
        ('x_bucket{le="1" 1', "is no sample"),
        ('x_bucket{le="1} 1', "is no sample"),
        ('x_bucket{le="1"', "is no sample"),
        ("x_bucket{", "is no sample"),
        ('x_bucket{9="1"} 1', "is no sample"),
        ("x_bucket }1", "is no sample"),
        ('x_bucket{le="1"} ' + "9" * 65, "is no sample"),
        ('x_bucket{a="' + "b" * MOST_LINE_BYTES + '",le="1"} 1', "longer than 8192 bytes"),
    ],
)
def test_a_line_that_cannot_be_is_refused(line: str, why: str) -> None:
    said = refusal(f"{line}\n")
    assert why in said
    assert len(said) < 200


def test_a_line_without_end_is_refused_where_it_is_ours_and_skipped_where_not() -> None:
    sieve = Sieve(Wanted("x", 0.99))
    sieve.feed(b"# HELP y ")
    for _ in range(10):
        sieve.feed(b'x_bucket{le="1"} 1 ' * 1000)
    sieve.feed(b'\nx_bucket{le="1"} 1\nx_bucket{le="+Inf"} 1\n')
    assert sieve.end() == Histogram({(): {1.0: 1.0, math.inf: 1.0}})
    sieve.feed(b"x_bucket{a=")
    with pytest.raises(Refused, match="longer than"):
        sieve.feed(b'"' * MOST_LINE_BYTES)


def test_series_bounds_and_lines_are_bounded() -> None:
    series = "".join(f'x_bucket{{m="{n}",le="1"}} 1\n' for n in range(MOST_SERIES + 1))
    assert "more than 64 series of x: say which by `labels`" in refusal(series)
    bounds = "".join(f'x_bucket{{le="{n}"}} 1\n' for n in range(MOST_BOUNDS + 1))
    assert "more than 256 bounds" in refusal(bounds)
    assert "more than 5000 lines" in refusal("x_other 1\n" * (MOST_LINES + 1))
    many = "".join(f'x{{m="{n}",quantile="0.99"}} 1\n' for n in range(MOST_SERIES + 1))
    assert "more than 64 series" in refusal(many)
    counts = "".join(f'x_count{{m="{n}"}} 1\n' for n in range(MOST_SERIES + 1))
    assert "more than 64 series" in refusal(counts)


# -- anything ----------------------------------------------------------------------------------------

NAMES = st.sampled_from(["m", "model_name", "zone"])
VALUES = st.text(max_size=8).filter(lambda t: "\r" not in t and t.isprintable()) | st.sampled_from(
    ["a\\b", 'say "x"', "two\nlines", "}", "a,b"]
)
COUNTS = st.lists(st.integers(0, 50), min_size=4, max_size=4)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@given(st.dictionaries(NAMES, VALUES, max_size=3), COUNTS, st.integers(1, 64))
def test_it_reads_what_the_client_library_reads(
    labels: dict[str, str], counts: list[int], cut: int
) -> None:
    inside = "".join(f'{n}="{escaped(v)}",' for n, v in labels.items())
    bounds = ["0.1", "1.0", "2.5", "+Inf"]
    page = "# TYPE x histogram\n" + "".join(
        f'x_bucket{{{inside}le="{b}"}} {c}\n' for b, c in zip(bounds, counts, strict=True)
    )
    sieve, data = Sieve(Wanted("x", 0.99)), page.encode()
    for at in range(0, len(data), cut):  # in whatever pieces it comes
        sieve.feed(data[at : at + cut])
    [family] = text_string_to_metric_families(page)
    expected: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for sample in family.samples:
        rest = {n: v for n, v in sample.labels.items() if n != "le"}
        key = tuple(sorted(rest.items()))
        expected.setdefault(key, {})[float(sample.labels["le"])] = sample.value
    assert sieve.end() == Histogram(expected)


LINES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([vllm([0.1, 5.0]).encode(), triton({"m": math.nan}).encode()]),
    st.builds(
        lambda suffix, labels, value: f"x{suffix}{labels} {value}".encode(),
        st.sampled_from(["", "_bucket", "_count", "_sum", "_y"]),
        st.sampled_from(["", '{le="1"}', '{le="+Inf"}', '{quantile="0.99"}', '{le="', "{", "{}"])
        | st.text(max_size=12),
        st.floats() | st.text(max_size=12),
    ),
    st.sampled_from([b"# TYPE x histogram", b"# TYPE x summary", b"# TYPE x", b"# TYPE x \xff y"]),
)


@given(st.lists(LINES, max_size=30), st.sampled_from(["x", E2E]))
def test_of_whatever_comes_only_sensible_numbers_are_taken(lines: list[bytes], metric: str) -> None:
    sieve = Sieve(Wanted(metric, 0.99))
    with contextlib.suppress(Refused):
        for line in lines:
            sieve.feed(line + b"\n")
        found = sieve.end()
        if isinstance(found, Summary):
            assert not any(math.isnan(v) for v in found.values.values())
            return
        for counts in found.series.values():
            assert list(counts) == sorted(counts)
            assert math.inf in counts
            assert len(counts) > 1
            assert all(0 <= c < 2**54 for c in counts.values())
