"""Runs that nobody made, for what is done with runs."""

import random
from collections.abc import Callable, Mapping, Sequence

from gpuagent.lab.evaluate import EDGES, POINTS, Job, Progress, Run, Tally
from gpuagent.model.inventory import Level

LEVELS = {"chat": Level.L1, "batch": Level.L2, "training": Level.L3}
REQUESTS = 10_000


def run(
    policy: str,
    seed: int = 1,
    *,
    missed: float = 0.05,
    p99: float = 1.2,
    kept: Mapping[str, float] | None = None,
    variation: str = "as modelled",
    held: tuple[str, ...] = (),
    left: tuple[str, ...] = (),
) -> Run:
    """`kept` is work, of 1000 for each tenant; `p99` a part of an objective of 100 ms."""
    work = {"chat": 1.0, "batch": 1.0, "training": 1.0, **(kept or {})}
    counts = [0] * (len(EDGES) + 1)
    counts[30], counts[45] = REQUESTS - round(missed * REQUESTS), round(missed * REQUESTS)
    return Run(
        policy=policy,
        variation=variation,
        seed=seed,
        seconds=100.0,
        joules=2e4 * work["training"],
        tenants=tuple(
            Tally(
                name=name,
                level=level,
                work=1000.0 * work[name],
                mean_share=work[name],
                requests=REQUESTS if name == "chat" else 0,
                missed=round(missed * REQUESTS) if name == "chat" else 0,
                p99_seconds=0.1 * p99 if name == "chat" else None,
                objective_seconds=0.1 if name == "chat" else None,
            )
            for name, level in LEVELS.items()
        ),
        shares={n: (None,) * 5 + (work[n],) * (POINTS - 5) for n in LEVELS},
        latencies={"chat": tuple(counts)},
        held_at_end=held,
        left=left,
    )


Law = Callable[[Job], Mapping[str, float]]
"""What a policy comes to: missed, p99 and the work of training."""


class Made:
    """Stands in for a pool: every run is as the law says, a little different with each seed."""

    def __init__(self, law: Law) -> None:
        self.jobs: list[Job] = []
        self._law = law

    def play(self, jobs: Sequence[Job], progress: Progress) -> list[Run]:
        self.jobs += jobs
        progress(len(jobs), len(jobs))
        return [self._run(job) for job in jobs]

    def _run(self, job: Job) -> Run:
        found = self._law(job)
        load = random.Random(job.seed).gauss(1.0, 0.02)
        return run(
            job.member.name,
            job.seed,
            missed=found["missed"] * load,
            p99=found["p99"] * load,
            kept={"training": found["training"]},
            variation=job.variation,
        )
