"""One metric with its series, as prometheus_client takes them."""

from prometheus_client import Metric
from prometheus_client.samples import Sample

from gpuagent.expose.labels import Labels

PREFIX = "gpuagent_"


class Family:
    """One metric and its series. A series given twice keeps the later value."""

    def __init__(self, name: str, text: str, kind: str = "gauge") -> None:
        self._name = PREFIX + name
        self._text = text
        self._kind = kind
        self._series: dict[tuple[str, ...], tuple[Labels, float]] = {}

    def add(self, labels: Labels, value: float) -> None:
        self._series[tuple(labels.values())] = (labels, value)

    def count(self, labels: Labels, value: float) -> None:
        """Add to what the series has: processes of one tenant share theirs."""
        _, before = self._series.get(tuple(labels.values()), (labels, 0.0))
        self.add(labels, before + value)

    def metric(self, mark: Labels) -> Metric:
        """With the labels of `mark` on every series."""
        # prometheus_client wants a counter's name without the suffix, its samples' with it.
        name = self._name.removesuffix("_total") if self._kind == "counter" else self._name
        metric = Metric(name, self._text, self._kind)
        metric.samples = [
            Sample(self._name, {**labels, **mark}, value) for labels, value in self._series.values()
        ]
        return metric

    def __bool__(self) -> bool:
        return bool(self._series)


def alone(name: str, text: str, value: float, kind: str = "gauge") -> Family:
    """A metric of one series without labels."""
    family = Family(name, text, kind)
    family.add({}, float(value))
    return family
