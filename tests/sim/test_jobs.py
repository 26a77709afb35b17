"""How each kind of work answers its levers, its neighbours and the card's clock."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.sim import profiles
from gpuagent.sim.jobs import (
    Cycle,
    DecodeJob,
    GrowerJob,
    IdleJob,
    Job,
    NotebookJob,
    TrainingJob,
    Turn,
)
from gpuagent.sim.work import Decode, Grower, Idle, Notebook, Training

SHAPES = profiles.card("a40").shapes
STEP = 0.05


def turn(**given: float) -> Turn:
    made = Turn()
    made.seconds = STEP
    for name, value in given.items():
        setattr(made, name, value)
    return made


def work(name: str, **changes: Any) -> Any:
    return profiles.work(name, changes, where="test")


def run(job: Job, seconds: float, **given: float) -> None:
    here = turn(**given)
    for _ in range(round(seconds / STEP)):
        job.step(here)


def training(name: str = "bert-training", **changes: Any) -> TrainingJob:
    made = work(name, evaluate_every=10**9, checkpoint_every=10**9, **changes)
    assert isinstance(made, Training)
    return TrainingJob(made, SHAPES[made.shape], take=lambda _: True, random=Random("t"))


def iterations(job: TrainingJob, **given: float) -> int:
    run(job, 300, **given)
    return job.progress().iterations


def test_a_launch_bound_job_slows_in_proportion_and_one_of_graphs_hardly() -> None:
    free = iterations(training(launch=0.95))
    assert iterations(training(launch=0.95), cpu=0.5) == pytest.approx(0.5 * free, rel=0.06)
    assert iterations(training(launch=0.95), cpu=0.2) == pytest.approx(0.2 * free, rel=0.06)
    graphs: dict[str, Any] = {"launch": 0.03, "host_cpu": 0.2}
    free = iterations(training(**graphs))
    assert iterations(training(**graphs), cpu=0.5) > 0.96 * free
    assert iterations(training(**graphs), cpu=0.2) > 0.9 * free


def test_there_is_work_on_which_the_cpu_has_no_effect_at_all() -> None:
    deaf: dict[str, Any] = {"launch": 0.0, "host_cpu": 0.0}
    assert iterations(training(**deaf), cpu=0.05) == iterations(training(**deaf))


def test_a_quota_above_its_need_costs_a_job_nothing() -> None:
    assert iterations(training(launch=0.5), cpu=1.0) == iterations(training(launch=0.2), cpu=1.0)


def test_neighbours_slow_a_job_by_their_turns() -> None:
    alone = iterations(training())
    beside = iterations(training(), stretch=2.0, others=1.0)
    assert alone / beside == pytest.approx(1.0 + (1.0 - SHAPES["bert"].host), rel=0.03)


def test_a_lower_clock_slows_training_and_hardly_decoding() -> None:
    slow = iterations(training(), clock=0.6) / iterations(training())
    assert slow < 0.7
    made = work("llm-decode")
    assert isinstance(made, Decode)

    def tokens(clock: float) -> int:
        job = DecodeJob(made, SHAPES["decode"], take=lambda _: True, random=Random("d"))
        run(job, 60, clock=clock)
        return job.progress().tokens

    assert tokens(0.6) / tokens(1.0) > 0.95
    assert tokens(1.0) == pytest.approx(60 / made.step_seconds * made.sequences, rel=0.02)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.floats(1, 9),
    st.floats(0, 1),
)
def test_no_job_uses_more_of_the_card_than_its_turns(
    shape: str, clock: float, cpu: float, stretch: float, launch: float
) -> None:
    cycle = Cycle(
        SHAPES[shape],
        seconds=0.2,
        launch=launch,
        jitter=0.1,
        queued=0.1,
        host_cpu=1.0,
        random=Random("c"),
    )
    for _ in range(20):
        cycle.step(turn(clock=clock, cpu=cpu, stretch=stretch))
        assert 0 <= cycle.gpu_share <= 1
        assert 0 <= cycle.pending <= 1
        assert cycle.gpu_share * stretch <= cycle.pending + 1e-9 or cycle.pending == 1


def test_training_ramps_its_memory_evaluates_and_saves() -> None:
    asked: list[float] = []

    def take(total: float) -> bool:
        asked.append(total)
        return True

    made = work(
        "bert-training", ramp_seconds=10.0, evaluate_every=20, checkpoint_every=20, jitter=0.0
    )
    job = TrainingJob(made, SHAPES["bert"], take=take, random=Random("m"))
    seen = set()
    for _ in range(1200):
        job.step(turn())
        seen.add((round(job.gpu_share, 2), job.cores))
    assert asked == sorted(asked)
    assert asked[-1] == made.memory_bytes
    assert 0 < asked[0] < 0.1 * made.memory_bytes
    assert len(seen) == 3, "training, evaluation and checkpoint differ"
    assert (0.0, 1.0) in seen


def test_training_that_is_refused_memory_is_over() -> None:
    made = work("bert-training")
    job = TrainingJob(made, SHAPES["bert"], take=lambda total: total < 2**30, random=Random("o"))
    run(job, 60)
    assert (job.ended, job.refused > 0) == ("CUDA out of memory", True)


def test_growth_follows_the_cpu_it_is_given_and_stops_at_the_card() -> None:
    made = work("grower")
    assert isinstance(made, Grower)

    def grown(seconds: float, cpu: float, room: float = 1e12) -> float:
        held = [0.0]

        def take(total: float) -> bool:
            if total <= room:
                held.append(total)
            return total <= room

        run(GrowerJob(made, SHAPES["light"], take=take, random=Random("g")), seconds, cpu=cpu)
        return held[-1] - made.memory_bytes

    assert grown(100, 1.0) == pytest.approx(100 * made.bytes_per_second, rel=0.02)
    assert grown(100, 0.2) < 0.3 * grown(100, 1.0)
    assert grown(100, 1.0, room=3 * 2**30) <= 2**30


def test_a_holder_does_nothing_and_a_notebook_something_now_and_then() -> None:
    idle = work("holder")
    assert isinstance(idle, Idle)
    holder = IdleJob(idle, SHAPES["light"], take=lambda _: True)
    run(holder, 10)
    assert (holder.pending, holder.gpu_share) == (0, 0)
    made = work("notebook", idle_mean_seconds=20.0, burst_mean_seconds=10.0)
    assert isinstance(made, Notebook)
    job = NotebookJob(made, SHAPES["light"], take=lambda _: True, random=Random("n"))
    busy = 0
    for _ in range(24_000):
        job.step(turn())
        busy += job.gpu_share > 0
    assert 0.15 < busy / 24_000 < 0.55
