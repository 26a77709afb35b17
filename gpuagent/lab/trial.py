"""One run of the agent on a simulated host, in virtual time: the same core, sensors and ledger."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, failed
from gpuagent.config import Config
from gpuagent.configfile import parse
from gpuagent.core import Core, Kept, Policies, shipped
from gpuagent.host.notify import Notify
from gpuagent.leases import Leases
from gpuagent.model.plan import Posture, Snapshot
from gpuagent.ports import Service
from gpuagent.sim.clock import VirtualClock
from gpuagent.sim.host import AGENT_PID, SimHost
from gpuagent.sim.latency import SimLatency
from gpuagent.sim.scenario import Scenario
from gpuagent.starts import PauseMark

_BOOT = "simulated"
_PATIENCE_SECONDS = 30.0
"""Sensors are waited for, so that what a tick sees does not depend on how fast this machine is."""
_SLACK_SECONDS = 1e-6
_UNTOUCHED = "/init.scope"
"""A cgroup that no agent turns: its files say what those of every other one were."""
_FILES = ("cpu.max", "cpu.weight")


class Trial:
    """`async with Trial(...)`, then `follow`; at its end everything is put back."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        folder: str,
        policies: Policies = shipped,
    ) -> None:
        """`folder` is for ledger and audit log. Raises ConfigError."""
        self.scenario = scenario
        self.host = SimHost(scenario, seed, VirtualClock(), wake=self._wake)
        self._changes = [at for at in scenario.agent_changes() if at > 0]
        self.config = self._configuration(0.0)
        self._limits = [card.limit_watts for card in self.host.cards]
        self.kept = Kept(
            ledger=Ledger(folder, boot=_BOOT, wall=lambda: self.host.clock.now().wall),
            audit=AuditLog(folder),
            mark=PauseMark(folder),
            leases=Leases(folder, boot=_BOOT, clock=self.host.clock),
        )
        self.core = Core(
            self.config,
            host=self.host,
            kept=self.kept,
            latencies=SimLatency(self.host),
            posture=Posture(self.config.mode, simulated=True, config_path=scenario.name),
            agent_pid=AGENT_PID,
            reread=self._reread,
            notify=Notify(),
            policies=policies,
            patience=_PATIENCE_SECONDS,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _wake(self, why: str) -> None:
        self.core.wake(why)  # which the host has before there is a core

    def _configuration(self, at: float) -> Config:
        return parse(self.scenario.agent_toml(at), source=self.scenario.name)

    async def __aenter__(self) -> Self:
        services: Sequence[Service] = (self.core.reconciler, self.core.errands)
        self._tasks = [asyncio.ensure_future(part.run()) for part in services]
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.core.loop.close()
        await self.kept.ledger.close()
        self.kept.audit.close()

    # -- time ----------------------------------------------------------------------------------------

    async def tick(self) -> Snapshot:
        """Time passes until the next tick is due; the loop makes it, and its lanes finish."""
        self._reconfigure_if_due()
        self.host.advance(self.config.tick)
        snapshot = await self.core.loop.tick()
        await self.core.reconciler.settled()
        return snapshot

    async def follow(self, seconds: float) -> AsyncIterator[Snapshot]:
        """So many simulated seconds, tick by tick."""
        until = self.host.elapsed + seconds
        while self.host.elapsed < until - _SLACK_SECONDS:
            yield await self.tick()

    def _reconfigure_if_due(self) -> None:
        while self._changes and self.host.elapsed >= self._changes[0] - _SLACK_SECONDS:
            self.reconfigure(self._changes.pop(0))

    def reconfigure(self, at: float) -> None:
        """Go on under the configuration that the scenario has at so many seconds."""
        self.config = self._configuration(at)
        self.core.configure(self.config)
        self.core.change(mode=self.config.mode)

    async def _reread(self, by: str) -> str:
        self.reconfigure(self.host.elapsed)
        return f"the configuration of {self.scenario.name} is in force, for {by}"

    # -- the end -------------------------------------------------------------------------------------

    async def stop(self) -> tuple[str, ...]:
        """End as the daemon does. Returns what is not as it was before, nothing if all is well."""
        busy = await self.core.reconciler.close()
        report = await self.core.put_back(Occasion.STOP, busy=busy)
        left = [f"{i.entry.subject}: {i.why}" for i in report if failed([i])]
        return (*left, *self.traces())

    def traces(self) -> tuple[str, ...]:
        """Values of the host that are not what they were: only the agent can have changed them."""
        found = []
        for spec in self.scenario.tenants:
            if self.host.progress(spec.name).running:
                found += [t for path in _lineage(spec.path) for t in self._traces_at(path)]
        for card, watts in zip(self.host.cards, self._limits, strict=True):
            if not card.lost and card.limit_watts != watts:
                found.append(f"power limit of card {card.index}: {card.limit_watts:g} W")
        return tuple(dict.fromkeys(found))

    def _traces_at(self, path: str) -> list[str]:
        read = self.host.cgroups.read
        return [
            f"{path}/{file}: {read(path, file)}"
            for file in _FILES
            if read(path, file) != read(_UNTOUCHED, file)
        ]


def _lineage(path: str) -> list[str]:
    """The cgroup and all above it, without the root."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:n]) for n in range(len(parts), 0, -1)]
