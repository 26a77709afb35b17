"""Rules on where a tenant's latency is read from, each told with its line and its remedy."""

import pytest

from gpuagent.configfile import parse
from gpuagent.errors import ConfigError

TENANT = """\
[[tenants]]
name = "chat"
sla = "L1"
match = { unit = "chat.service" }
[tenants.latency_from]
url = "http://127.0.0.1:8000/metrics"
metric = "vllm:e2e_request_latency_seconds"
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="f")
    return [problem.removeprefix("f:") for problem in caught.value.problems]


def test_a_source_that_is_right_is_read() -> None:
    text = TENANT + 'labels = ["model_name=llama=2"]\nunit = "milliseconds"\nwindow = "10s"\n'
    source = parse(text, source="f").tenants[0].latency_from
    assert source is not None
    assert source.labels == ("model_name=llama=2",)
    assert (source.window, source.interval) == (10.0, 2.0)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            'interval = "8s"\nwindow = "5s"',
            "8: tenants[0].latency_from.interval: 8s must not be more than window (5s)",
        ),
        ('interval = "20s"', '8: tenants[0].latency_from.interval: "20s" is out of range'),
        (
            'labels = ["model"]',
            'latency_from.labels[0]: "model" is not a label; write "model_name=llama"',
        ),
        ('labels = ["9a=b"]', '"9a=b" is not a label'),
    ],
)
def test_a_problem_is_told_once(line: str, told: str) -> None:
    [problem] = problems(TENANT + line + "\n")
    assert told in problem


@pytest.mark.parametrize(
    "url",
    ["ftp://h/metrics", "127.0.0.1:8000", "http://", "http://h:0/", "http://h/a b", "http://["],
)
def test_an_address_that_cannot_be_asked_is_refused(url: str) -> None:
    [problem] = problems(TENANT.replace("http://127.0.0.1:8000/metrics", url))
    assert "is not an address of metrics; write http://127.0.0.1:8000/metrics" in problem


@pytest.mark.parametrize("of", ["request", "queue", "compute_infer"])
def test_a_sum_of_tritons_is_no_latency(of: str) -> None:
    metric = f"nv_inference_{of}_duration_us"
    [problem] = problems(TENANT.replace("vllm:e2e_request_latency_seconds", metric))
    assert problem == (
        f"7: tenants[0].latency_from.metric: {metric} is a sum, of which no quantile can be had; start "
        "Triton with --metrics-config summary_latencies=true and write "
        f"nv_inference_{of}_summary_us"
    )


@pytest.mark.parametrize("metric", ["{a=1}", "vllm:x_seconds{a='b'}", "9a"])
def test_what_is_no_name_of_a_metric(metric: str) -> None:
    [problem] = problems(TENANT.replace("vllm:e2e_request_latency_seconds", metric))
    assert problem.endswith(
        "is not the name of a metric; write it as the page has it, without { } and labels"
    )


def test_a_secret_in_the_address_is_refused_and_not_repeated() -> None:
    [problem] = problems(TENANT.replace("127.0.0.1", "me:hunter2@127.0.0.1"))
    assert "has a user name or password in it" in problem
    assert "hunter2" not in problem
