"""One run of the agent on a simulated host, in virtual time: the same core, sensors and ledger."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.act.restore import Occasion, failed
from gpuagent.config import Config
from gpuagent.core import Core, Kept, Policies, shipped
from gpuagent.host.notify import Notify
from gpuagent.lab.pushes import Pushes
from gpuagent.lab.scenarios import configuration
from gpuagent.leases import Leases
from gpuagent.model.plan import Posture, Snapshot
from gpuagent.ports import LatencyReport, Service
from gpuagent.sim.card import Card
from gpuagent.sim.clock import VirtualClock
from gpuagent.sim.host import AGENT_PID, SimHost
from gpuagent.sim.latency import SimLatency
from gpuagent.sim.scenario import Scenario
from gpuagent.starts import PauseMark
from gpuagent.tokens import TokenBook

_BOOT = "simulated"
_PATIENCE_SECONDS = 30.0
"""Sensors are waited for, so that what a tick sees does not depend on how fast this machine is."""
_SLACK_SECONDS = 1e-6
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
        """`folder` is the state directory. Raises ConfigError."""
        self.scenario = scenario
        self.host = SimHost(scenario, seed, VirtualClock(), wake=self._wake)
        self._folder = folder
        self._policies = policies
        self._changes = [at for at in scenario.agent_changes() if at > 0]
        self.config = self._configuration(0.0)
        self._latencies = Pushes(SimLatency(self.host), self.host.clock)
        self._latencies.configure(self.config)
        self._limits = [card.limit_watts for card in self.host.cards]
        self._before: dict[tuple[str, int], dict[str, str]] = {}
        """What the files of each cgroup said when it appeared."""
        self._look()
        self.kept, self.core = self._agent()
        self._tasks: list[asyncio.Task[None]] = []

    def _agent(self) -> tuple[Kept, Core]:
        """A run of the agent on this host, with what an earlier one has left in the folder."""
        folder, clock = self._folder, self.host.clock
        kept = Kept(
            ledger=Ledger(folder, boot=_BOOT, wall=lambda: clock.now().wall),
            audit=AuditLog(folder),
            mark=PauseMark(folder),
            leases=Leases(folder, boot=_BOOT, clock=clock),
            tokens=TokenBook(folder, clock),
        )
        posture = Posture(
            self.config.mode,
            paused=kept.mark.read() is not None,
            simulated=True,
            config_path=self.scenario.name,
        )
        core = Core(
            self.config,
            host=self.host,
            kept=kept,
            latencies=self._latencies,
            posture=posture,
            agent_pid=AGENT_PID,
            reread=self._reread,
            notify=Notify(),
            policies=self._policies,
            patience=_PATIENCE_SECONDS,
        )
        return kept, core

    def _wake(self, why: str) -> None:
        self.core.wake(why)  # which the host has before there is a core

    def _configuration(self, at: float) -> Config:
        return configuration(self.scenario.agent_table(at), source=self.scenario.name)

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._vanish()

    async def _begin(self) -> None:
        services: Sequence[Service] = (self.core.reconciler, self.core.errands)
        self._tasks = [asyncio.ensure_future(part.run()) for part in services]
        await asyncio.sleep(0)

    async def _vanish(self) -> None:
        """No more of the agent: nothing is put back, and its files are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.core.loop.close()
        await self.kept.ledger.close()
        self.kept.audit.close()

    async def crash(self) -> None:
        """The agent is killed, and begins anew on the host as it stands, as the daemon would."""
        await self._vanish()
        self.kept, self.core = self._agent()
        await self._begin()
        for event in self.kept.leases.begin():
            self.core.publisher.note(event)
        report = await self.core.put_back(Occasion.CRASH)
        self.core.reconciler.adopt(report, now=self.host.clock.now())

    # -- time ----------------------------------------------------------------------------------------

    async def tick(self) -> Snapshot:
        """Time passes until the next tick is due; the loop makes it, and its lanes finish."""
        self._reconfigure_if_due()
        self.host.advance(self.config.tick)
        self._look()
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
        self._latencies.configure(self.config)
        self.core.change(mode=self.config.mode)

    def push(self, report: LatencyReport) -> None:
        """Take a latency in, in the place of what the simulated service tells. Raises Refused."""
        self._latencies.push(report)

    async def _reread(self, by: str) -> str:
        self.reconfigure(self.host.elapsed)
        return f"the configuration of {self.scenario.name} is in force, for {by}"

    # -- the end -------------------------------------------------------------------------------------

    async def stop(self) -> tuple[str, ...]:
        """End as the daemon does. Returns what is not as it was before, nothing if all is well.

        A card that has fallen off the bus has nothing left to put back: see `lost`.
        """
        await self.core.reconciler.close()
        report = await self.core.put_back(Occasion.STOP)
        gone = {card.uuid for card in self.lost()}
        left = [
            f"{i.entry.subject}: {i.why}"
            for i in report
            if failed([i]) and i.entry.subject.gpu not in gone
        ]
        return (*left, *self.traces())

    def lost(self) -> tuple[Card, ...]:
        """The cards that have fallen off the bus."""
        return tuple(card for card in self.host.cards if card.lost)

    def traces(self) -> tuple[str, ...]:
        """Values of the host that are not what they were: only the agent can have changed them."""
        found = [t for path in self._paths() for t in self._traces_at(path)]
        for card, watts in zip(self.host.cards, self._limits, strict=True):
            if not card.lost and card.limit_watts != watts:
                found.append(f"power limit of card {card.index}: {card.limit_watts:g} W")
        return tuple(found)

    def _paths(self) -> tuple[str, ...]:
        """The cgroups of tenants that run, and all above them."""
        running = [s for s in self.scenario.tenants if self.host.progress(s.name).running]
        return tuple(dict.fromkeys(path for spec in running for path in _lineage(spec.path)))

    def _look(self) -> None:
        """Note what the files of cgroups say that are new, before the agent can have seen these."""
        known = self._before
        inode = self.host.cgroups.inode
        keys = [(path, inode(path)) for path in self._paths()]
        self._before = {key: known.get(key) or self._values(key[0]) for key in keys}

    def _values(self, path: str) -> dict[str, str]:
        return {file: self.host.cgroups.read(path, file) for file in _FILES}

    def _traces_at(self, path: str) -> list[str]:
        before = self._before.get((path, self.host.cgroups.inode(path)), {})
        return [
            f"{path}/{file}: {value}"
            for file, value in self._values(path).items()
            if value != before.get(file, value)
        ]


def _lineage(path: str) -> list[str]:
    """The cgroup and all above it, without the root."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:n]) for n in range(len(parts), 0, -1)]
