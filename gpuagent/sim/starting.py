"""Turns a workload's numbers into a job that runs on a card."""

from random import Random

from gpuagent.sim.card import Card
from gpuagent.sim.curve import Shape
from gpuagent.sim.jobs import (
    DecodeJob,
    GrowerJob,
    IdleJob,
    Job,
    NotebookJob,
    Take,
    TrainingJob,
)
from gpuagent.sim.serving import ServingJob
from gpuagent.sim.work import Decode, Grower, Idle, Inference, Notebook, Training, Work

_NOTHING = Shape(busy_watts=0.0, host=1.0, memory=0.0, source="runs no kernels")


def begin(work: Work, card: Card, pid: int, *, random: Random, at: float) -> Job:
    """A process on a card: it makes its context and begins its work.

    Where the card has no room for it, the job has ended before it began.
    """
    entered = card.enter(pid)

    def take(total: float) -> bool:
        return entered and card.take(pid, total)

    job = _job(work, card, take, random=random, at=at)
    if entered:
        card.jobs[pid] = job
    else:
        job.ended = "no CUDA device" if card.lost else "CUDA out of memory"
    return job


def _job(work: Work, card: Card, take: Take, *, random: Random, at: float) -> Job:
    if isinstance(work, Idle):
        return IdleJob(work, _NOTHING, take=take)
    shape = card.profile.shapes[work.shape]
    match work:
        case Training():
            return TrainingJob(work, shape, take=take, random=random)
        case Inference():
            time_slice = card.profile.time_slice_seconds.value
            return ServingJob(work, shape, take=take, random=random, at=at, time_slice=time_slice)
        case Decode():
            return DecodeJob(work, shape, take=take, random=random)
        case Grower():
            return GrowerJob(work, shape, take=take, random=random)
        case Notebook():
            return NotebookJob(work, shape, take=take, random=random)
