"""The agent of `tests.rig` over a simulated host, for as long as a scenario wants."""

from pathlib import Path
from typing import Any, cast

import msgspec

from gpuagent.config import Config
from gpuagent.configfile import parse
from gpuagent.model.plan import Pause, Reload, Snapshot
from gpuagent.sim.host import SimHost
from gpuagent.sim.latency import SimLatency
from gpuagent.sim.scenario import Host as HostSpec
from gpuagent.sim.scenario import Scenario, TenantSpec
from tests.fakes.host import Host
from tests.rig import Rig


def configuration(scenario: Scenario, at: float = 0.0, **changes: Any) -> Config:
    """The agent's configuration at so many seconds, with other values for top-level keys."""
    text = scenario.agent_toml(at)
    config = parse(text, source=scenario.name)
    return type(config)(**{name: changes.get(name, getattr(config, name)) for name in _FIELDS})


_FIELDS = Config.__struct_fields__


class SimRig(Rig):
    """Runs a scenario: the clock, the host's events and the changes of the configuration."""

    def __init__(self, folder: Path, host: SimHost, **changes: Any) -> None:
        # The rig asks nothing of its host but the protocols and `advance`, which both have.
        super().__init__(
            folder,
            cast(Host, host),
            configuration(host.scenario, **changes),
            patience=30.0,
            latencies=SimLatency(host),
        )
        self.sim = host
        self.keep_snapshots = False
        self._changes = changes
        self._pending = [at for at in host.scenario.agent_changes() if at > 0]

    async def follow(self, seconds: float) -> Snapshot:
        """So many seconds at the pace of the configuration's tick."""
        until = self.sim.elapsed + seconds
        while self.sim.elapsed < until - 1e-6:
            if self._pending and self.sim.elapsed >= self._pending[0]:
                self.config = configuration(
                    self.sim.scenario, self._pending.pop(0), **self._changes
                )
                await self.ask(Reload("the scenario"))
            snapshot = await self.tick(self.config.tick)
            self.check(snapshot)
        return snapshot

    async def put_back(self) -> None:
        """Pause, and wait until the lanes have done it."""
        await self.ask(Pause("test"))
        for _ in range(5):
            await self.tick()

    def check(self, snapshot: Snapshot) -> None:
        """What must hold after every tick; a test's rig may add to it."""


def without(
    made: Scenario,
    tenant: str,
    *,
    cpus: int | None = None,
    instead: tuple[TenantSpec, str] | None = None,
) -> Scenario:
    """A scenario without a tenant, with so many CPUs, or with one that runs something else."""
    tenants = [t for t in made.tenants if t.name != tenant]
    if instead is not None:
        spec, run = instead
        tenants.append(msgspec.structs.replace(spec, run=run, set={}))
    return msgspec.structs.replace(made, tenants=tuple(tenants), host=HostSpec(cpus))
