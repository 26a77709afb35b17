"""What the agent's policies reach on the simulated host against the best static shares."""

from collections.abc import Iterator

from gpuagent.lab.evaluate import Pool
from gpuagent.lab.policies import SHIPPED, named
from gpuagent.lab.report import conclusion
from gpuagent.lab.study import Report, Study
from gpuagent.lab.verdict import Check, Judgement
from gpuagent.sim import scenario
from tests.bench.pace import Pace
from tests.bench.rows import Row, not_measured

_SCENARIO = "co-location"
_SEEDS = 5
_UNITS = {
    "misses": "misses",
    "p99": "p99",
    "total throughput": "work lost",
    "L3 keeps": "L3 work lost",
}


def measure(pace: Pace) -> Iterator[Row]:
    files = [named(name) for name in SHIPPED]
    study = Study(
        scenario.named(_SCENARIO),
        files,
        candidates=[f.name for f in files if f.control == "agent"],
        seeds=2 if pace.quick else _SEEDS,
        seconds=260.0 if pace.quick else None,
        sweep=False,
    )
    with Pool() as pool:
        report = study.run(pool)
    for judgement in report.judgements:
        yield from _rows(report, judgement)


def _rows(report: Report, judgement: Judgement) -> Iterator[Row]:
    name = judgement.candidate
    how = f"{_SCENARIO}, {len(report.seeds)} seeds, against {judgement.against or 'no control'}"
    for check in judgement.checks:
        what = f"{name}: {_UNITS.get(check.name, check.name)}"
        if check.text:
            yield Row(what, float(check.met == "no"), "failures", 0.0, note=check.text)
            continue
        if check.found is None:
            yield not_measured(what, "too few requests")
            continue
        yield Row(what, _less_is_better(check, check.found.value), "%",
                  _less_is_better(check, check.goal), note=how)  # fmt: skip
    yield Row(f"{name}: goals missed", float(sum(c.met == "no" for c in judgement.checks)), "goals",
              0.0, note=f"as modelled: {conclusion(report, name)}")  # fmt: skip


def _less_is_better(check: Check, value: float) -> float:
    """In percent: of what is to be kept, what is lost."""
    if check.name == "L3 keeps":
        return 100 * (1.0 - value)
    return 100 * (-value if check.name == "total throughput" else value)
