"""The same load twice, side by side: on a host that the agent looks after, and on one left alone."""

from collections.abc import Mapping
from typing import Self

import msgspec

from gpuagent.lab.outcome import (
    WARM_UP_SECONDS,
    Did,
    Meter,
    Outcome,
    kept_ratio,
    levels_of,
    load_begins,
)
from gpuagent.lab.peaks import PeakMeter, Peaks
from gpuagent.lab.trial import Trial
from gpuagent.model.inventory import Level
from gpuagent.model.plan import Snapshot
from gpuagent.sim.host import SimHost
from gpuagent.sim.latency import SimLatency
from gpuagent.sim.scenario import Objective, Scenario
from gpuagent.sim.story import told

LEAST_SECONDS = 600.0
"""A show covers at least ten simulated minutes."""
_RECENT_SECONDS = 10.0
_P99 = 0.99


class TenantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant at the end."""

    name: str
    level: str
    kind: str = msgspec.field(name="class")
    """As declared; empty where it is not."""
    final_share: float | None
    """Null for one that had left."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a show came to. The window of the measures begins a minute after the load does."""

    scenario: str
    seed: int
    simulated: bool = True
    simulated_seconds: float
    measured_seconds: float
    ticks: int
    tenants: tuple[TenantSummary, ...]
    actions: Mapping[str, int]
    """By knob and what became of them, such as "cgroup_cpu_max applied"."""
    l1_tenant: str | None
    """Whose latency it is: of several the one that suffers most without the agent."""
    l1_objective_seconds: float | None
    l1_p99_seconds_without: float | None
    l1_p99_seconds_with: float | None
    l1_missed_ratio_without: float | None
    l1_missed_ratio_with: float | None
    l3_throughput_kept: float | None
    """Work of the L3 tenants by what they did without the agent."""
    peaks_without: Peaks | None
    peaks_with: Peaks | None
    """Null before the window has begun."""
    restored: bool
    """Whether everything is as it was that still exists."""
    left: tuple[str, ...]
    """What was not put back."""
    lost_cards: tuple[int, ...] = ()
    """Cards that fell off the bus: what was set on them is gone with them."""


class Beside(msgspec.Struct, frozen=True):
    """A service's latency on both hosts over the last seconds, None where it is not known."""

    objective: Objective
    with_agent: float | None
    without: float | None


class Show:
    """`async with Show(...)`, then `tick` until `over`, then `end`."""

    def __init__(self, scenario: Scenario, *, seed: int, folder: str, seconds: float) -> None:
        """`seconds` is how long to simulate. Raises ConfigError."""
        self.scenario = scenario
        self.seed = seed
        self.seconds = seconds
        self.trial = Trial(scenario, seed=seed, folder=folder)
        self.alone = SimHost(scenario, seed)
        self.snapshot: Snapshot | None = None
        self._measures_from = load_begins(scenario) + WARM_UP_SECONDS
        self._meters: tuple[Meter, Meter] | None = None
        self._peaks = PeakMeter(self.trial.host), PeakMeter(self.alone)

    async def __aenter__(self) -> Self:
        await self.trial.__aenter__()
        return self

    async def __aexit__(self, *gone: object) -> None:
        await self.trial.__aexit__(*gone)

    @property
    def elapsed(self) -> float:
        return self.trial.host.elapsed

    @property
    def over(self) -> bool:
        return self.elapsed >= self.seconds

    async def tick(self) -> Snapshot:
        """One tick of the agent; the other host is taken along."""
        self.snapshot = await self.trial.tick()
        self.alone.advance(self.elapsed - self.alone.elapsed)
        if self._meters is None and self.elapsed >= self._measures_from:
            levels = levels_of(self.trial.config)
            self._meters = Meter(self.trial.host, levels), Meter(self.alone, levels)
        if self._meters is not None:
            for peaks in self._peaks:
                peaks.see(self.trial.config.power.budget_watts, self.trial.config.tick)
        return self.snapshot

    def happened(self) -> list[tuple[float, str]]:
        """What the scenario has brought so far, in words, by monotonic seconds of the agent's clock."""
        began = self.trial.host.clock.mono - self.elapsed
        return [
            (began + what.at, told(what))
            for what in self.scenario.happenings()
            if what.at <= self.elapsed
        ]

    def beside(self) -> dict[str, Beside]:
        """Latencies of the services that have an objective."""
        found = {}
        for tenant in self.scenario.tenants:
            if tenant.objective is not None:
                here, there = (
                    SimLatency(host).read(
                        tenant.name, tenant.objective.quantile, _RECENT_SECONDS, host.clock.mono
                    )
                    for host in (self.trial.host, self.alone)
                )
                found[tenant.name] = Beside(tenant.objective, here, there)
        return found

    async def end(self) -> Summary:
        """Stop the agent, as the daemon does, and look at what came of it."""
        outcomes = None if self._meters is None else tuple(m.read() for m in self._meters)
        final = self._final_shares()
        left = await self.trial.stop()
        return self._summary(outcomes, final, left)

    def _peaks_read(self) -> tuple[Peaks | None, Peaks | None]:
        """With the agent, and without."""
        if self._meters is None:
            return None, None
        here, there = self._peaks
        return here.read(), there.read()

    def _final_shares(self) -> dict[str, float]:
        snapshot = self.snapshot
        if snapshot is None:
            return {}
        shares = {t.name: 1.0 for t in snapshot.state.inventory.tenants or ()}
        for hold in snapshot.holds:
            name = hold.subject.tenant
            if hold.in_force and name in shares:
                shares[name] = min(shares[name], hold.share)
        return shares

    def _summary(
        self, outcomes: tuple[Outcome, ...] | None, final: dict[str, float], left: tuple[str, ...]
    ) -> Summary:
        with_agent, without = outcomes if outcomes is not None else (None, None)
        here, there = _worst(with_agent, without)
        peaks_with, peaks_without = self._peaks_read()
        snapshot = self.snapshot
        actions = {} if snapshot is None else snapshot.actions
        return Summary(
            scenario=self.scenario.name,
            seed=self.seed,
            simulated_seconds=self.elapsed,
            measured_seconds=0.0 if with_agent is None else with_agent.seconds,
            ticks=0 if snapshot is None else snapshot.stats.ticks,
            tenants=tuple(
                TenantSummary(
                    name=rule.name,
                    level=rule.sla.name,
                    kind=rule.kind,
                    final_share=final.get(rule.name),
                )
                for rule in self.trial.config.tenants
            ),
            actions={f"{knob} {result}": n for (knob, result), n in sorted(actions.items()) if n},
            l1_tenant=None if there is None else there.name,
            l1_objective_seconds=None
            if there is None or there.objective is None
            else there.objective.seconds,
            l1_p99_seconds_without=None if there is None else there.quantile(_P99),
            l1_p99_seconds_with=None if here is None else here.quantile(_P99),
            l1_missed_ratio_without=None if there is None else there.missed_ratio,
            l1_missed_ratio_with=None if here is None else here.missed_ratio,
            l3_throughput_kept=None
            if with_agent is None or without is None
            else kept_ratio(with_agent.at(Level.L3), without.at(Level.L3)),
            peaks_without=peaks_without,
            peaks_with=peaks_with,
            restored=not left,
            left=left,
            lost_cards=tuple(card.index for card in self.trial.lost()),
        )


def _worst(with_agent: Outcome | None, without: Outcome | None) -> tuple[Did | None, Did | None]:
    """The L1 tenant that suffers most without the agent, on both hosts."""
    if with_agent is None or without is None:
        return None, None
    judged = [t for t in without.at(Level.L1) if t.objective is not None and t.quantile(_P99)]
    if not judged:
        return None, None
    worst = max(judged, key=_part)
    return with_agent.of(worst.name), worst


def _part(did: Did) -> float:
    """Its p99 as a part of its objective."""
    seconds = did.quantile(_P99)
    return 0.0 if seconds is None or did.objective is None else seconds / did.objective.seconds
