"""An inference service: who comes is served once, in order, no sooner than it can be."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.jobs import Turn
from gpuagent.sim.serving import ServingJob
from gpuagent.sim.work import Inference

SHAPE = profiles.card("a40").shapes["serving"]
STEP = 0.05


def service(seed: str = "s", **changes: Any) -> ServingJob:
    made = profiles.work("chat", changes, where="test")
    assert isinstance(made, Inference)
    return ServingJob(
        made, SHAPE, take=lambda _: True, random=Random(seed), at=0.0, time_slice=0.002
    )


def run(job: ServingJob, seconds: float, begin: float = 0.0, **given: float) -> list[float]:
    """Latencies, in the order in which requests finished."""
    turn = Turn()
    turn.seconds = STEP
    for name, value in given.items():
        setattr(turn, name, value)
    for i in range(round(seconds / STEP)):
        turn.at = begin + i * STEP
        job.step(turn)
    return [latency for _, latency in job.served.since(begin)]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@settings(max_examples=40)
@given(st.floats(0.5, 80), st.floats(1, 4), st.floats(0.05, 1), st.floats(0.2, 1))
def test_every_request_is_served_once_waits_or_was_turned_away(
    rate: float, stretch: float, cpu: float, clock: float
) -> None:
    job = service(rate=rate, jitter=0.0)
    others = stretch - 1
    seen = run(job, 20, stretch=stretch, others=others, cpu=cpu, clock=clock)
    finished = [at for at, _ in job.served.since(0)]
    assert finished == sorted(finished)
    began = [at - latency for at, latency in job.served.since(0)]
    assert began == sorted(began)
    assert job.served.count == len(seen)
    fastest = 0.001 / cpu + (0.012 + 0.003) * SHAPE.gpu_share(clock) * stretch
    assert min(seen, default=1e9) >= fastest - 1e-9
    assert 0 <= job.gpu_share <= 1
    assert 0 <= job.pending <= 1


def test_requests_come_at_their_rate_and_at_another_when_told() -> None:
    job = service(rate=10.0)
    assert len(run(job, 300)) == pytest.approx(3000, rel=0.06)
    job.change_rate(40.0, 300.0)
    assert len(run(job, 100, begin=300.0)) == pytest.approx(4000, rel=0.06)
    job.change_rate(0.0, 400.0)
    run(job, 1, begin=400.0)
    assert run(job, 60, begin=401.0) == []


def test_a_trace_is_followed_and_repeated() -> None:
    job = service(trace=[0.5, 0.7, 3.0], trace_seconds=10.0, jitter=0.0)
    run(job, 29)
    arrived = [round(at - latency, 6) for at, latency in job.served.since(0)]
    assert arrived == [0.5, 0.7, 3.0, 10.5, 10.7, 13.0, 20.5, 20.7, 23.0]


def test_neighbours_a_low_clock_and_too_little_cpu_each_make_it_slower() -> None:
    alone = p99(run(service(rate=20.0), 200))
    assert p99(run(service(rate=20.0), 200, stretch=2.0, others=1.0)) > 1.6 * alone
    assert p99(run(service(rate=20.0), 200, clock=0.4)) > 1.4 * alone
    assert p99(run(service(rate=20.0), 200, cpu=0.05)) > 1.5 * alone


def test_a_full_queue_turns_requests_away_and_does_not_grow() -> None:
    job = service(rate=5000.0, max_batch=1)
    run(job, 10)
    assert job.turned_away > 1000
    assert job.served.count < 1000
