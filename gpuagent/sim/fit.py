"""Fits a card's power curve, and the shapes of work on it, to the Zeus traces of one kind of card.

`python -m gpuagent.sim.fit --data DIR` prints the coefficients as the profile files have them, and
how far they are off at power limits left out of the fit. DIR holds `summary_power_v100.csv` and
`summary_power_a40.csv` (Zeus, NSDI 2023): epoch time and average power of training jobs by limit.
"""

import argparse
import csv
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gpuagent.sim.curve import Curve, Shape
from gpuagent.sim.simplex import lowest

CARDS = ("v100", "a40")
SOURCE = "fitted to Zeus (NSDI 2023), {card}, {job}"
SHIPPED: dict[str, str] = {
    "bert": "squad/bert_base_uncased/32/adamw",
    "resnet": "imagenet/resnet50/128/adadelta",
    "speech": "librispeech/deepspeech2/64/adamw",
    "shufflenet": "cifar100/shufflenetv2/512/adadelta",
    "ncf": "movielens-1m/ncf/128/adam",
}
"""Names of the shapes in the profiles, and the job each was fitted to."""

_EVERY = 5
"""The curve is fitted to every fifth job: more of them cost time and change nothing."""
_HIGHEST_RATIO = 1.4
"""Work may want so much more than the most power that was seen."""
_START = (0.3, 12.0)
_MEMORY_PRIOR = 0.002
"""Where the data do not say, work counts as bound by the clock and not by memory."""

Observed = Mapping[int, tuple[float, float]]
"""Seconds per epoch and average watts, by power limit in watts."""


class Fitted(msgspec.Struct, frozen=True):
    """A curve's coefficients."""

    idle_watts: float
    knee: float
    order: float

    @property
    def curve(self) -> Curve:
        return Curve(idle_watts=self.idle_watts, knee=self.knee, order=self.order)


class Errors(msgspec.Struct, frozen=True):
    """Relative errors at limits that were left out of the fit."""

    throughput: tuple[float, ...]
    power: tuple[float, ...]


def read(data: str, card: str) -> dict[str, Observed]:
    """Jobs by "dataset/network/batch size/optimizer". Raises OSError."""
    jobs: dict[str, dict[int, tuple[float, float]]] = {}
    with open(os.path.join(data, f"summary_power_{card}.csv"), encoding="utf-8") as file:
        for row in csv.DictReader(file):
            job = "/".join(row[key] for key in ("dataset", "network", "batch_size", "optimizer"))
            seen = (float(row["time_per_epoch"]), float(row["average_power"]))
            jobs.setdefault(job, {})[int(row["power_limit"])] = seen
    return dict(sorted(jobs.items()))


def fit_card(jobs: Mapping[str, Observed], without: Iterable[int] = ()) -> Fitted:
    """The curve that fits all jobs best, the limits `without` left out."""
    left_out = frozenset(without)
    some = [_without(o, left_out) for i, o in enumerate(jobs.values()) if i % _EVERY == 0]
    least = min(watts for o in jobs.values() for _, watts in o.values())

    def loss(x: Sequence[float]) -> float:
        idle, knee, order = x
        if not (least / 3 < idle < least and 0.0 < knee < 0.95 and 1.5 < order < 40):
            return math.inf
        curve = Fitted(idle, knee, order).curve
        return sum(_fit(curve, observed, rounds=40)[0] for observed in some)

    found = lowest(loss, (0.8 * least, *_START), (0.1 * least, 0.1, 4.0), rounds=25)
    return Fitted(*found.at)


def fit_shape(curve: Curve, observed: Observed, source: str = "") -> tuple[Shape, float]:
    """The shape of one job on a card with this curve, and its seconds per epoch at full clock."""
    _, shape, seconds = _fit(curve, observed, rounds=80)
    return msgspec.structs.replace(shape, source=source), seconds


def _without(observed: Observed, limits: frozenset[int]) -> Observed:
    return {limit: seen for limit, seen in observed.items() if limit not in limits}


def _shape(x: Sequence[float], idle: float, most: float) -> Shape:
    """The nearest shape that makes sense."""
    host = min(max(x[1], 0.0), 0.97)
    return Shape(
        busy_watts=min(max(x[0], idle + 1), _HIGHEST_RATIO * most),
        host=host,
        memory=min(max(x[2], 0.0), 0.98 - host),
        source="",
    )


def _fit(curve: Curve, observed: Observed, *, rounds: int) -> tuple[float, Shape, float]:
    """Loss, shape and seconds at full clock: least squares of log time and log power."""
    seen = sorted((limit, *values) for limit, values in observed.items())
    most = max(watts for _, watts in observed.values())

    def residuals(shape: Shape) -> tuple[list[float], float]:
        times, powers = [], 0.0
        for limit, took, drawn in seen:
            seconds, watts = curve.predict(limit, shape)
            times.append(math.log(took / seconds))
            powers += math.log(watts / drawn) ** 2
        return times, powers

    def loss(x: Sequence[float]) -> float:
        times, powers = residuals(_shape(x, curve.idle_watts, most))
        mean = sum(times) / len(times)
        outside = 10 * (min(x[1], 0.0) ** 2 + min(x[2], 0.0) ** 2 + max(x[1] + x[2] - 0.98, 0) ** 2)
        fits = sum((t - mean) ** 2 for t in times) + powers
        return fits + _MEMORY_PRIOR * x[2] ** 2 + outside

    starts = ((1.05 * most, 0.1, 0.05), (1.05 * most, 0.6, 0.1))
    best = min(
        (lowest(loss, start, (20.0, 0.2, 0.2), rounds=rounds) for start in starts),
        key=lambda found: found.value,
    )
    shape = _shape(best.at, curve.idle_watts, most)
    times, _ = residuals(shape)
    return best.value, shape, math.exp(sum(times) / len(times))


def score(jobs: Mapping[str, Observed], limits: Iterable[int] | None = None) -> Errors:
    """Leave one limit out, fit curve and shapes to the rest, and predict what was left out.

    Throughput is relative to the highest limit, which therefore stays in. `limits` are those to
    leave out in turn, all but the highest by default.
    """
    known = sorted({limit for observed in jobs.values() for limit in observed})
    throughput: list[float] = []
    power: list[float] = []
    for limit in known[:-1] if limits is None else limits:
        curve = fit_card(jobs, without=(limit,)).curve
        for observed in jobs.values():
            if limit not in observed:
                continue
            shape, full = fit_shape(curve, _without(observed, frozenset((limit,))))
            seconds, watts = curve.predict(limit, shape)
            throughput.append(abs(observed[limit][0] / (seconds * full) - 1))
            power.append(abs(watts / observed[limit][1] - 1))
    return Errors(tuple(throughput), tuple(power))


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(math.ceil(q * len(values)), 1) - 1]


def shipped(jobs: Mapping[str, Observed], card: str) -> tuple[Fitted, dict[str, Shape]]:
    """What the profile of a card holds."""
    fitted = fit_card(jobs)
    shapes = {
        name: fit_shape(fitted.curve, jobs[job], SOURCE.format(card=card.upper(), job=job))[0]
        for name, job in SHIPPED.items()
    }
    return fitted, shapes


def _print(card: str, jobs: Mapping[str, Observed], say: Callable[[str], None]) -> None:
    fitted, shapes = shipped(jobs, card)
    say(f"# {card}.toml")
    for name in ("idle_watts", "knee", "order"):
        source = SOURCE.format(card=card.upper(), job="all jobs")
        say(f'{name} = {{ value = {getattr(fitted, name):.4f}, source = "{source}" }}')
    for name, shape in shapes.items():
        say(f"[shapes.{name}]")
        for key in ("busy_watts", "host", "memory"):
            say(f"{key} = {getattr(shape, key):.4f}")
        say(f'source = "{shape.source}"')
    errors = score(jobs)
    for what, seen in (("throughput", errors.throughput), ("power", errors.power)):
        median, p90 = statistics.median(seen), quantile(seen, 0.9)
        say(f"# {what} at limits left out: median {median:.1%}, p90 {p90:.1%} off")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpuagent.sim.fit", description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the Zeus traces")
    options = parser.parse_args()
    for card in CARDS:
        _print(card, read(options.data, card), print)


if __name__ == "__main__":
    main()
