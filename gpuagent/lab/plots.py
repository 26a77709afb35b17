"""Pictures of an evaluation, where matplotlib is installed: it is an extra, and nothing needs it."""

import importlib.util
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuagent.lab import stats
from gpuagent.lab.report import head_of
from gpuagent.lab.stats import Interval
from gpuagent.lab.study import Curve, Report
from gpuagent.lab.verdict import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install matplotlib"
_INCHES = (8.0, 4.5)
_DOTS = 120
_LEAST_PART = 1e-4
"""Below one request in ten thousand a run says nothing."""


def available() -> bool:
    """Whether there is a matplotlib to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report, folder: str) -> list[str]:
    """Write all pictures as PNG into an existing folder. Returns their paths. Raises OSError."""
    shown = _shown(report)
    written = [
        _picture(os.path.join(folder, f"{name}.png"), report, shown, title, paint)
        for name, title, paint in (
            ("latency", "requests slower than this", _latency),
            ("throughput", "misses and work kept", _throughput),
            ("energy", "energy, of that without control", _energy),
        )
    ]
    for tenant in _held(report):
        path = os.path.join(folder, f"share-{tenant}.png")

        def paint(axes: Any, _report: Report, shown: Sequence[Curve], tenant: str = tenant) -> None:
            _share(axes, report, shown, tenant)

        written.append(_picture(path, report, shown, f"share of {tenant}", paint))
    return written


def _shown(report: Report) -> list[Curve]:
    """All policies, and of the static shares the best."""
    hidden = {*report.statics} - {report.best_static}
    return [c for c in report.curves if c.policy not in hidden]


def _held(report: Report) -> list[str]:
    """Tenants that any policy held back."""
    names = dict.fromkeys(name for curve in report.curves for name in curve.shares)
    return [
        name
        for name in names
        if any(
            p is not None and p < 1.0
            for c in report.curves
            for seed in c.shares.get(name, ())
            for p in seed
        )
    ]


def _picture(path: str, report: Report, shown: Sequence[Curve], title: str, paint: Any) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    paint(axes, report, shown)
    axes.set_title(f"{title}: {head_of(report)}", fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Software": None})
    return path


def _latency(axes: "Axes", report: Report, shown: Sequence[Curve]) -> None:
    """The part of the requests that took longer, on logarithmic axes: tails are what matters."""
    for curve in shown:
        for service in report.objectives:
            seeds = [_slower(counts) for counts in curve.latencies.get(service, ()) if any(counts)]
            found = [stats.mean(point) for point in zip(*seeds, strict=True)]
            known = [(edge, m) for edge, m in zip(report.edges, found, strict=False) if m]
            label = curve.policy if len(report.objectives) == 1 else f"{curve.policy}, {service}"
            _line(axes, known, label, low=_LEAST_PART)
    for seconds in report.objectives.values():
        axes.axvline(seconds, color="black", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", ylim=(_LEAST_PART, 1.1), xlabel="latency in seconds")
    longest = max(report.objectives.values())
    axes.set_xlim(longest / 20, longest * 10)
    axes.set_ylabel("part of the requests")


def _slower(counts: Sequence[int]) -> list[float]:
    """Part of the requests beyond each edge."""
    total = sum(counts)
    return [1.0 - seen / total for seen in itertools.accumulate(counts[:-1])]


def _line(axes: "Axes", known: Sequence[tuple[float, Interval]], label: str, *, low: float) -> None:
    """A mean and its interval, within `low` and 1; nothing where nothing is known."""
    if not known:
        return
    places = [at for at, _ in known]
    (line,) = axes.plot(places, [max(m.value, low) for _, m in known], label=label)
    axes.fill_between(
        places,
        [max(_or(m.low, m.value), low) for _, m in known],
        [min(max(_or(m.high, m.value), low), 1.0) for _, m in known],
        alpha=0.2,
        color=line.get_color(),
    )


def _throughput(axes: "Axes", report: Report, shown: Sequence[Curve]) -> None:
    """Every policy as a point, with its intervals: down and to the right is better."""
    named = {c.policy for c in shown}
    for row in report.rows:
        if row.missed_ratio is None or row.throughput_ratio is None:
            continue
        is_named = row.policy in named
        axes.errorbar(
            row.throughput_ratio.value,
            row.missed_ratio.value,
            xerr=_half(row.throughput_ratio),
            yerr=_half(row.missed_ratio),
            fmt="o" if is_named else ".",
            color=None if is_named else "lightgrey",
            label=row.policy if is_named else None,
            zorder=2 if is_named else 1,
        )
    axes.set(xlabel="total work, of that without control", ylabel="requests over their objective")
    axes.set_ylim(bottom=0.0)


def _energy(axes: "Axes", report: Report, shown: Sequence[Curve]) -> None:
    rows = [r for r in map(report.row, (c.policy for c in shown)) if r.joules_ratio is not None]
    places = range(len(rows))
    axes.bar(places, [_value(r) for r in rows], color="tab:blue")
    axes.errorbar(
        places,
        [_value(r) for r in rows],
        yerr=[_half(r.joules_ratio) or 0.0 for r in rows],
        fmt="none",
        color="black",
    )
    axes.set_xticks(places, [r.policy for r in rows], rotation=20, ha="right", fontsize="small")
    axes.set_ylabel("energy of all cards")


def _value(row: Row) -> float:
    return 0.0 if row.joules_ratio is None else row.joules_ratio.value


def _half(found: Interval | None) -> float | None:
    return None if found is None or found.high is None else found.high - found.value


def _share(axes: "Axes", report: Report, shown: Sequence[Curve], tenant: str) -> None:
    """Mean over the seeds, with its interval."""
    step = report.seconds / report.points
    for curve in shown:
        seeds = curve.shares.get(tenant, ())
        found = [(i, stats.mean(point)) for i, point in enumerate(zip(*seeds, strict=True))]
        known = [((i + 0.5) * step, m) for i, m in found if m is not None]
        _line(axes, known, curve.policy, low=0.0)
    axes.axvline(report.measured_from_seconds, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="seconds", ylabel="share", ylim=(0.0, 1.05))


def _or(bound: float | None, value: float) -> float:
    return value if bound is None else bound
