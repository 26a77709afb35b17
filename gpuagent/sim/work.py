"""What a workload is: the numbers of each kind, as profiles and scenarios give them."""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Jitter = Annotated[float, Meta(ge=0, le=1)]
"""Standard deviation of the logarithm of a duration."""
Bytes = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class _Common(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    memory_bytes: Bytes
    """Device memory beyond the context, in the end."""
    host_memory_bytes: Bytes
    cores: NotNegative
    """CPUs it keeps busy while at work, threads that spin while they wait for the card included."""
    source: str


class Training(_Common, frozen=True, kw_only=True, tag="training"):
    """Iterations without end, with evaluations and checkpoints in between."""

    shape: str
    iteration_seconds: Positive
    jitter: Jitter
    launch: Share
    """Time in which its kernels are submitted, of the time in which they run at full clock: near 1
    for one that launches many small kernels, near 0 for CUDA graphs."""
    host_cpu: Share
    """CPU work, of the time in which the card waits for the host; the rest is disk or network."""
    queued_seconds: NotNegative
    """Kernel time, at full clock, that it has submitted ahead at most: what still runs when its
    process is frozen, but no further than the end of the step it is in."""
    ramp_seconds: NotNegative
    """Until its memory has grown to what it is in the end."""
    evaluate_every: Count
    evaluate_seconds: NotNegative
    evaluate_share: Share
    """Time with kernels on the card in an evaluation, of that in training."""
    checkpoint_every: Count
    checkpoint_seconds: NotNegative


class Inference(_Common, frozen=True, kw_only=True, tag="inference"):
    """A server that takes what has queued up as one batch, first come, first served."""

    shape: str
    rate: NotNegative
    """Requests a second, a Poisson process."""
    trace: tuple[NotNegative, ...] = ()
    """Seconds at which requests arrive, ascending, instead of the Poisson process."""
    trace_seconds: NotNegative = 0.0
    """The trace begins again after so long; 0 for never."""
    max_batch: Count
    base_seconds: Positive
    """Time on the card of a batch, at full clock ..."""
    item_seconds: NotNegative
    """... and more for each request in it."""
    host_seconds: NotNegative
    """CPU time before, for each request."""
    jitter: Jitter
    queued_seconds: NotNegative
    idle_cores: NotNegative


class Decode(_Common, frozen=True, kw_only=True, tag="decode"):
    """Token after token of a fixed number of sequences."""

    shape: str
    step_seconds: Positive
    """Time for one token of every sequence."""
    sequences: Count
    jitter: Jitter
    launch: Share
    queued_seconds: NotNegative
    host_cpu: Share = 1.0


class Idle(_Common, frozen=True, kw_only=True, tag="idle"):
    """Keeps its memory and does nothing."""


class Grower(_Common, frozen=True, kw_only=True, tag="grower"):
    """Takes more memory with each step, until it is refused."""

    shape: str
    bytes_per_second: Positive
    step_seconds: Positive
    launch: Share
    queued_seconds: NotNegative
    host_cpu: Share = 1.0
    dies: bool
    """Whether it ends when it is refused memory; otherwise it stays as it is."""


class Notebook(_Common, frozen=True, kw_only=True, tag="notebook"):
    """Somebody who runs a cell now and then."""

    shape: str
    idle_mean_seconds: Positive
    burst_mean_seconds: Positive
    step_seconds: Positive
    launch: Share
    queued_seconds: NotNegative
    host_cpu: Share = 1.0
    idle_cores: NotNegative


Work = Training | Inference | Decode | Idle | Grower | Notebook
