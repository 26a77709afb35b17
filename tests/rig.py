"""The agent below its daemon: loop, sensors, policies, lanes and errands, over a host of values."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from gpuagent import sense
from gpuagent.act.audit import AuditLog
from gpuagent.act.cards import ClockLimit, ComputeMode, PersistenceMode, TimeSlice
from gpuagent.act.cpu import CpuMax, CpuWeight
from gpuagent.act.ledger import Ledger
from gpuagent.act.mps import MpsDefaultThreads, MpsOwnDaemon, MpsThreads
from gpuagent.act.power import PowerLimit
from gpuagent.act.reconcile import Reconciler
from gpuagent.act.suspend import Suspend
from gpuagent.act.suspensions import Suspensions
from gpuagent.config import Config, Match, TenantRule
from gpuagent.decide import POLICIES
from gpuagent.errands import Errands
from gpuagent.host.notify import Notify
from gpuagent.leases import Leases
from gpuagent.loop import Loop
from gpuagent.model.inventory import Inventory, Level
from gpuagent.model.plan import Command, Posture, Snapshot
from gpuagent.ports import Latencies, Policy, Sensor
from gpuagent.publish import Publisher
from gpuagent.record import FlightRecorder
from gpuagent.sense.mail import LatencyMail
from gpuagent.sensing import Sensing
from gpuagent.starts import PauseMark
from tests.act.host import Disk, Inline
from tests.fakes.host import Host

RULES = (
    TenantRule("serve", Level.L1, Match(unit="serve.service")),
    TenantRule("train", Level.L3, Match(unit="train*.service")),
)
CONFIG = Config(mode="enforce", tenants=RULES)


class Rig:
    """One run, in a state directory. The test makes it tick, or calls `loop.run`."""

    def __init__(
        self,
        folder: Path,
        host: Host,
        config: Config = CONFIG,
        *,
        sensors: Sequence[Sensor] | None = None,
        policies: Sequence[Policy[Any]] | None = None,
        patience: float = 30.0,
        latencies: Latencies | None = None,
    ) -> None:
        self.host = host
        self.latencies = LatencyMail(self._wake) if latencies is None else latencies
        self.config = config
        self.snapshots: list[Snapshot] = []
        self.keep_snapshots = True
        self.disk = Disk(str(folder / "ledger.jsonl"))
        self.ledger = Ledger(str(folder), boot="b1", executor=Inline(), journal=self.disk)
        self.audit = AuditLog(str(folder))
        self.mark = PauseMark(str(folder))
        self.leases = Leases(str(folder), boot="b1", clock=host.clock)
        self.leases.begin()
        self.publisher = Publisher(Notify())
        self.recorder = FlightRecorder()
        self.sensors = sensors if sensors is not None else self._all_sensors()
        self.sensing = Sensing(self.sensors, host.clock, patience=patience)
        self.reconciler = Reconciler(
            actuators=(
                CpuWeight(host.cgroups, Inline()),
                CpuMax(host.cgroups, period_seconds=0.02, executor=Inline()),
                PowerLimit(host.gpus),
                ClockLimit(
                    host.card_settings,
                    unlocked=lambda uuid: self.config.clock_unlocked(uuid),  # noqa: PLW0108 - it changes
                    held=lambda target: self.ledger.held(target) is not None,
                ),
                ComputeMode(host.card_settings),
                PersistenceMode(host.card_settings),
                TimeSlice(host.time_slices),
                Suspend(
                    Suspensions(
                        host.checkpoint,
                        level=lambda name: self.config.level(name),  # noqa: PLW0108 - it changes
                        clock=host.clock,
                        ledger=self.ledger,
                        cgroup=host.processes.cgroup,
                    ),
                    ender=host.ender,
                    seen=self._seen,
                ),
                MpsThreads(),
                MpsDefaultThreads(host.mps),
                MpsOwnDaemon(host.mps),
            ),
            ledger=self.ledger,
            audit=self.audit,
            clock=host.clock,
            wake=self._wake,
        )
        self.errands = Errands(
            gpus=host.gpus,
            mark=self.mark,
            leases=self.leases,
            reload=self._reload,
            wake=self._wake,
            posture=lambda: self.loop.posture,
            take=self._take,
            shown=lambda: self.publisher.shown(host.clock.now().mono),
        )
        self.loop = Loop(
            clock=host.clock,
            sensing=self.sensing,
            policies=[make(config) for make in POLICIES] if policies is None else policies,
            reconciler=self.reconciler,
            posture=Posture(mode=config.mode),
            obey=self.errands.obey,
            leases=self.leases.active,
            publish=self._publish,
            recorder=self.recorder,
            tick_seconds=config.tick,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for part in (self.reconciler, self.errands):
            self._tasks.append(asyncio.create_task(part.run()))
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *args: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sensing.close()
        await self.ledger.close()
        self.audit.close()

    async def tick(self, seconds: float = 1.0) -> Snapshot:
        """Time passes, the loop makes one pass, and the lanes finish what it gave them."""
        self.host.advance(seconds)
        snapshot = await self.loop.tick()
        await self.reconciler.settled()
        return snapshot

    async def run(self, seconds: int) -> Snapshot:
        for _ in range(seconds):
            snapshot = await self.tick()
        return snapshot

    async def press(self, seconds: int, *, pid: int = 20, by: float = 2.0**29) -> Snapshot:
        """A process's memory grows, which is a cause once its card is over the mark."""
        for _ in range(seconds):
            self.host.grow(pid, by)
            snapshot = await self.tick()
        return snapshot

    async def ask(self, command: Command) -> str:
        """Hand a command in, tick until it is answered, and return that. Raises as the errand."""
        waiting = asyncio.ensure_future(self.loop.inbox.submit(command))
        await asyncio.sleep(0)
        await self.tick()
        for _ in range(20):
            if not waiting.done():
                await self.tick(0.1)
        return await asyncio.wait_for(waiting, 30)

    def _seen(self) -> Inventory:
        snapshot = self.publisher.latest()
        return Inventory() if snapshot is None else snapshot.state.inventory

    def _wake(self, why: str) -> None:
        self.loop.wake(why)

    def _take(self, posture: Posture) -> None:
        self.loop.posture = posture

    def _publish(self, snapshot: Snapshot) -> None:
        self.publisher.publish(snapshot)
        if self.keep_snapshots:
            self.snapshots.append(snapshot)

    async def _reload(self, by: str) -> str:
        """As the daemon does, with `config` for what the file would say."""
        self.loop.policies = tuple(make(self.config) for make in POLICIES)
        sense.configure(self.sensors, self.config)
        self._take(Posture(mode=self.config.mode))
        return f"in force for {by}"

    def _all_sensors(self) -> tuple[Sensor, ...]:
        return sense.sensors(
            sense.Means(
                config=self.config,
                gpus=self.host.gpus,
                cgroups=self.host.cgroups,
                units=self.host.units,
                processes=self.host.processes,
                events=self.host.events,
                node=self.host.node,
                kernel_log=self.host.kernel_log,
                mps=self.host.mps,
                freezer=self.host.freezer,
                clock=self.host.clock,
                agent_pid=4000,
                latencies=self.latencies,
            )
        )
