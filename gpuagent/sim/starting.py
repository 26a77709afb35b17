"""Turns a workload's numbers into a job that runs on a card."""

import math
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
from gpuagent.sim.mps import Client
from gpuagent.sim.serving import ServingJob
from gpuagent.sim.work import Decode, Grower, Idle, Inference, Notebook, Training, Work

_NOTHING = Shape(busy_watts=0.0, host=1.0, memory=0.0, source="runs no kernels")


_NO_CONTEXT = "CUDA error 808: the card has all the MPS clients it can have"


def begin(
    work: Work,
    card: Card,
    pid: int,
    *,
    random: Random,
    at: float,
    client: Client | None = None,
) -> Job:
    """A process on a card: it makes its context and begins its work.

    `client` is how MPS has let it in, where the card is used through MPS. Where the card or MPS has
    no room for it, the job has ended before it began.
    """
    most = math.inf
    if client is not None and client.memory_limit_bytes is not None:
        most = client.memory_limit_bytes - card.profile.context_bytes.value
    shared = card.side_by_side
    turned_away = shared is not None and client is None
    entered = most >= 0 and not turned_away and card.enter(pid)

    def take(total: float) -> bool:
        return entered and total <= most and card.take(pid, total)

    job = _job(work, card, take, random=random, at=at)
    if not entered:
        job.ended = "no CUDA device" if card.lost else "CUDA out of memory"
        job.ended = _NO_CONTEXT if turned_away and not card.lost else job.ended
        return job
    card.jobs[pid] = job
    if shared is not None and client is not None:
        shape = "" if isinstance(work, Idle) else work.shape
        shared.admit(pid, shape, client.percentage)
    return job


def _job(work: Work, card: Card, take: Take, *, random: Random, at: float) -> Job:
    if isinstance(work, Idle):
        return IdleJob(work, _NOTHING, take=take)
    shape = card.profile.shapes[work.shape]
    match work:
        case Training():
            return TrainingJob(work, shape, take=take, random=random)
        case Inference():
            slices = card.side_by_side is None
            time_slice = card.profile.time_slice_seconds.value if slices else 0.0
            return ServingJob(work, shape, take=take, random=random, at=at, time_slice=time_slice)
        case Decode():
            return DecodeJob(work, shape, take=take, random=random)
        case Grower():
            return GrowerJob(work, shape, take=take, random=random)
        case Notebook():
            return NotebookJob(work, shape, take=take, random=random)
