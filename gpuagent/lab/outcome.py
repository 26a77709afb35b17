"""What came of a run on a simulated host, over a window of it: latencies, work done, energy."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from gpuagent.config import Config
from gpuagent.model.inventory import Level
from gpuagent.sim.host import SimHost
from gpuagent.sim.jobs import Progress
from gpuagent.sim.scenario import Objective, Scenario

WARM_UP_SECONDS = 60.0
"""The window begins so long after the load does."""


class Did(msgspec.Struct, frozen=True):
    """One tenant in the window."""

    name: str
    level: Level | None
    """None where the agent's configuration has no rule of this name."""
    work: float
    """Iterations, requests or tokens, whichever it makes."""
    latencies: tuple[float, ...] = ()
    """Seconds, ascending, of the requests that finished in the window."""
    objective: Objective | None = None

    def quantile(self, quantile: float) -> float | None:
        """Nearest rank; None for fewer requests than tell it from the worst."""
        count = len(self.latencies)
        if count * (1.0 - quantile) < 1.0 - 1e-9:
            return None
        return self.latencies[max(math.ceil(quantile * count), 1) - 1]

    @property
    def missed_ratio(self) -> float | None:
        """Share of its requests that took longer than the objective; None without either."""
        if self.objective is None or not self.latencies:
            return None
        bound = self.objective.seconds
        return sum(1 for s in self.latencies if s > bound) / len(self.latencies)


class Outcome(msgspec.Struct, frozen=True):
    """All tenants in the window."""

    seconds: float
    joules: float
    """Of all cards together."""
    tenants: tuple[Did, ...]

    def of(self, name: str) -> Did:
        return next(t for t in self.tenants if t.name == name)

    def at(self, level: Level) -> tuple[Did, ...]:
        return tuple(t for t in self.tenants if t.level is level)


class Meter:
    """Stands at the beginning of the window; `read` at its end."""

    def __init__(self, host: SimHost, levels: Mapping[str, Level]) -> None:
        self._host = host
        self._levels = levels
        self._began = host.clock.mono
        self._joules = _joules(host)
        self._progress = {t.name: host.progress(t.name) for t in host.scenario.tenants}

    def read(self) -> Outcome:
        host = self._host
        return Outcome(
            seconds=host.clock.mono - self._began,
            joules=_joules(host) - self._joules,
            tenants=tuple(self._did(t.name, t.objective) for t in host.scenario.tenants),
        )

    def _did(self, name: str, objective: Objective | None) -> Did:
        seconds = sorted(s for _, s in self._host.latencies(name, self._began))
        return Did(
            name=name,
            level=self._levels.get(name),
            work=_work(self._host.progress(name)) - _work(self._progress[name]),
            latencies=tuple(seconds),
            objective=objective,
        )


def levels_of(config: Config) -> dict[str, Level]:
    """Service level by tenant; scenarios name their rules after their tenants."""
    return {rule.name: rule.sla for rule in config.tenants}


def load_begins(scenario: Scenario) -> float:
    """Seconds at which the last of the tenants that start by themselves does."""
    return max((t.start for t in scenario.tenants if not t.waits), default=0.0)


def kept_ratio(mine: Sequence[Did], other: Sequence[Did]) -> float | None:
    """Mean over the tenants of work done in one run by work in the other.

    None where the other did none at all.
    """
    by_name = {t.name: t.work for t in other}
    parts = [t.work / by_name[t.name] for t in mine if by_name.get(t.name)]
    return sum(parts) / len(parts) if parts else None


def _work(progress: Progress) -> float:
    return float(progress.iterations + progress.requests + progress.tokens)


def _joules(host: SimHost) -> float:
    return sum(card.joules for card in host.cards)
