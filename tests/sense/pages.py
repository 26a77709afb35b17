"""Pages of metrics as serving engines publish them, with as many requests as a test wants."""

import math
from collections.abc import Iterable, Mapping

VLLM_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Of vllm:e2e_request_latency_seconds (vllm/v1/metrics/loggers.py)."""


def cumulative(seconds: Iterable[float], bounds: Iterable[float]) -> dict[float, float]:
    """How many of these are up to each bound, and to +Inf."""
    listed = list(seconds)
    return {b: float(sum(s <= b for s in listed)) for b in (*bounds, math.inf)}


def histogram(
    name: str, counts: Mapping[float, float], labels: str = "", *, total: float = 1.0
) -> str:
    """Its samples, as prometheus_client writes them."""
    inside = f"{labels}," if labels else ""
    outside = f"{{{labels}}}" if labels else ""
    lines = [
        f'{name}_bucket{{{inside}le="{"+Inf" if math.isinf(b) else b}"}} {float(c)}'
        for b, c in counts.items()
    ]
    count = counts[math.inf]
    return "\n".join((*lines, f"{name}_count{outside} {count}", f"{name}_sum{outside} {total}", ""))


def vllm(seconds: Iterable[float] = (), *, model: str = "llama-3-8b") -> str:
    """A vLLM server after requests that took so long."""
    labels = f'engine="0",model_name="{model}"'
    e2e = "vllm:e2e_request_latency_seconds"
    first = "vllm:time_to_first_token_seconds"
    listed = list(seconds)
    return (
        "# HELP python_gc_objects_collected_total Objects collected during gc\n"
        "# TYPE python_gc_objects_collected_total counter\n"
        'python_gc_objects_collected_total{generation="0"} 11043.0\n'
        "# HELP process_open_fds Number of open file descriptors.\n"
        "# TYPE process_open_fds gauge\n"
        "process_open_fds 61.0\n"
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{{{labels}}} 3.0\n"
        "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0725\n"
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
        "# TYPE vllm:generation_tokens_total counter\n"
        f"vllm:generation_tokens_total{{{labels}}} 918273.0\n"
        f"# HELP {first} Histogram of time to first token in seconds.\n"
        f"# TYPE {first} histogram\n"
        + histogram(first, cumulative([s / 10 for s in listed], (0.001, 0.1, 1.0, 10.0)), labels)
        + f"# HELP {e2e} Histogram of e2e request latency in seconds.\n"
        f"# TYPE {e2e} histogram\n"
        + histogram(e2e, cumulative(listed, VLLM_BOUNDS), labels, total=sum(listed))
        + f"# HELP {e2e}_created Histogram of e2e request latency in seconds.\n"
        f"# TYPE {e2e}_created gauge\n"
        f"{e2e}_created{{{labels}}} 1.7512e+09\n"
    )


def triton(p99_us: Mapping[str, float], *, count: int = 100, summaries: bool = True) -> str:
    """A Triton server with these models; NaN where one is idle. Summaries are there on request only."""
    lines = [
        "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
        "# TYPE nv_inference_request_success counter",
        *(f'nv_inference_request_success{{model="{m}",version="1"}} {count}' for m in p99_us),
        "# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds",
        "# TYPE nv_inference_request_duration_us counter",
        *(f'nv_inference_request_duration_us{{model="{m}",version="1"}} 421500' for m in p99_us),
    ]
    if summaries:
        name = "nv_inference_request_summary_us"
        lines += [
            f"# HELP {name} Summary of inference request duration in microseconds",
            f"# TYPE {name} summary",
        ]
        for model, value in p99_us.items():
            labels = f'model="{model}",version="1"'
            lines += [f"{name}_count{{{labels}}} {count}", f"{name}_sum{{{labels}}} 421500"]
            for quantile, share in (("0.5", 0.5), ("0.9", 0.8), ("0.95", 0.9), ("0.99", 1.0)):
                said = "Nan" if math.isnan(value) else str(value * share)
                lines.append(f'{name}{{{labels},quantile="{quantile}"}} {said}')
    return "\n".join((*lines, "# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)", ""))
