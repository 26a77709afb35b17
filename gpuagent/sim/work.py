"""What a workload is: the numbers of each kind, as profiles and scenarios give them."""

from typing import Annotated

import msgspec
from msgspec import Meta

WEEK_SECONDS = 604_800.0
"""Nothing takes longer, and no simulation does."""
Duration = Annotated[float, Meta(ge=1e-6, le=WEEK_SECONDS)]
"""Seconds of one step; with shorter ones the simulated clock would not get on."""
Seconds = Annotated[float, Meta(ge=0, le=WEEK_SECONDS)]
Rate = Annotated[float, Meta(ge=0, le=10_000)]
"""Requests a second."""
Cores = Annotated[float, Meta(ge=0, le=1024)]
Share = Annotated[float, Meta(ge=0, le=1)]
Jitter = Annotated[float, Meta(ge=0, le=1)]
"""Standard deviation of the logarithm of a duration."""
Bytes = Annotated[float, Meta(ge=0, le=2**60)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class _Common(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    memory_bytes: Bytes
    """Device memory beyond the context, in the end."""
    host_memory_bytes: Bytes
    cores: Cores
    """CPUs it keeps busy while at work, threads that spin while they wait for the card included."""
    source: str


class Training(_Common, frozen=True, kw_only=True, tag="training"):
    """Iterations without end, with evaluations and checkpoints in between."""

    shape: str
    iteration_seconds: Duration
    jitter: Jitter
    launch: Share
    """Time in which its kernels are submitted, of the time in which they run at full clock: near 1
    for one that launches many small kernels, near 0 for CUDA graphs."""
    host_cpu: Share
    """CPU work, of the time in which the card waits for the host; the rest is disk or network."""
    queued_seconds: Seconds
    """Kernel time, at full clock, that it has submitted ahead at most: what still runs when its
    process is frozen, but no further than the end of the step it is in."""
    ramp_seconds: Seconds
    """Until its memory has grown to what it is in the end."""
    evaluate_every: Count
    evaluate_seconds: Seconds
    evaluate_share: Share
    """Time with kernels on the card in an evaluation, of that in training."""
    checkpoint_every: Count
    checkpoint_seconds: Seconds


class Inference(_Common, frozen=True, kw_only=True, tag="inference"):
    """A server that takes what has queued up as one batch, first come, first served."""

    shape: str
    rate: Rate
    """Requests a second, a Poisson process."""
    trace: tuple[Seconds, ...] = ()
    """Seconds at which requests arrive, ascending, instead of the Poisson process."""
    trace_seconds: Seconds = 0.0
    """The trace begins again after so long; 0 for never."""
    max_batch: Count
    base_seconds: Duration
    """Time on the card of a batch, at full clock ..."""
    item_seconds: Seconds
    """... and more for each request in it."""
    host_seconds: Seconds
    """CPU time before, for each request."""
    jitter: Jitter
    queued_seconds: Seconds
    idle_cores: Cores


class Decode(_Common, frozen=True, kw_only=True, tag="decode"):
    """Token after token of a fixed number of sequences."""

    shape: str
    step_seconds: Duration
    """Time for one token of every sequence."""
    sequences: Count
    jitter: Jitter
    launch: Share
    queued_seconds: Seconds
    host_cpu: Share = 1.0


class Idle(_Common, frozen=True, kw_only=True, tag="idle"):
    """Keeps its memory and does nothing."""


class Grower(_Common, frozen=True, kw_only=True, tag="grower"):
    """Takes more memory with each step, until it is refused."""

    shape: str
    bytes_per_second: Annotated[float, Meta(ge=1, le=2**60)]
    step_seconds: Duration
    launch: Share
    queued_seconds: Seconds
    host_cpu: Share = 1.0
    dies: bool
    """Whether it ends when it is refused memory; otherwise it stays as it is."""


class Notebook(_Common, frozen=True, kw_only=True, tag="notebook"):
    """Somebody who runs a cell now and then."""

    shape: str
    idle_mean_seconds: Duration
    burst_mean_seconds: Duration
    step_seconds: Duration
    launch: Share
    queued_seconds: Seconds
    host_cpu: Share = 1.0
    idle_cores: Cores


Work = Training | Inference | Decode | Idle | Grower | Notebook
