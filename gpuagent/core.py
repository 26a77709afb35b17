"""The agent between a host and its readers: loop, sensors, policies, lanes and errands, put together.

What it runs on is given to it, so that the daemon on a real host and a trial on a simulated one are
the same agent.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuagent import act, sense
from gpuagent.act.audit import AuditLog
from gpuagent.act.books import Books
from gpuagent.act.desk import Reach
from gpuagent.act.ledger import Ledger
from gpuagent.act.reconcile import Reconciler
from gpuagent.act.restore import Occasion, Report, failed, put_back
from gpuagent.act.suspensions import Suspensions
from gpuagent.config import Config
from gpuagent.decide import POLICIES
from gpuagent.errands import Errands
from gpuagent.host.accounts import starters
from gpuagent.host.notify import Notify
from gpuagent.leases import Leases, used_in
from gpuagent.loop import Loop
from gpuagent.model.inventory import Inventory, Level
from gpuagent.model.plan import Posture
from gpuagent.model.run import RunList
from gpuagent.model.state import Event, NodeState
from gpuagent.ports import Actuator, Host, Latencies, Policy, Scopes, Sensor
from gpuagent.publish import Publisher
from gpuagent.record import FlightRecorder
from gpuagent.runbook import RunBook
from gpuagent.runs import Registrar
from gpuagent.sense.runs import NoRuns
from gpuagent.sense.sources import LatencySources
from gpuagent.sensing import PATIENCE_SECONDS, Sensing
from gpuagent.starts import PauseMark
from gpuagent.tokens import TokenBook

_AGAIN_SECONDS = 0.5

Policies = Callable[[Config], Sequence[Policy[Any]]]
Reread = Callable[[str], Coroutine[Any, Any, str]]
"""Reads the configuration again for somebody, and says what came of it. Raises ConfigError."""


def shipped(config: Config) -> tuple[Policy[Any], ...]:
    """The agent's own policies."""
    return tuple(make(config) for make in POLICIES)


def _reach(config: Config) -> Reach:
    families = config.enforce.families
    return Reach(
        families=None if families is None else frozenset(families),
        observed=frozenset(t.name for t in config.tenants if t.observe),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What outlives a run, in a state directory that the run holds."""

    ledger: Ledger
    audit: AuditLog
    mark: PauseMark
    leases: Leases
    tokens: TokenBook | None = None
    """None for a run that nobody is to reach by token."""
    runs: RunBook | None = None
    """None for a run that starts no tenants."""


class Core:
    """One run. Its tasks are `services` and `loop.run`; a trial calls `loop.tick` itself."""

    def __init__(
        self,
        config: Config,
        *,
        host: Host,
        kept: Kept,
        posture: Posture,
        agent_pid: int,
        reread: Reread,
        notify: Notify,
        latencies: Latencies,
        sources: LatencySources | None = None,
        policies: Policies = shipped,
        patience: float = PATIENCE_SECONDS,
        scopes: Scopes | None = None,
    ) -> None:
        """`agent_pid` is the agent's own process on that host; `patience` is for `Sensing`.

        `scopes` is None where no tenants are started.
        """
        told_runs = RunList if kept.runs is None else kept.runs.told
        self.publisher = Publisher(notify, kept.audit.latest, told_runs)
        self.recorder = FlightRecorder()
        self._host = host
        self._kept = kept
        self._notify = notify
        self._policies = policies
        self.actuators = self._actuators(config)
        self.reconciler = self._reconciler(config)
        self._config = config
        self.errands = self._errands(reread, scopes)
        self.sensors = self._sensors(config, agent_pid, latencies, sources)
        books = Books(kept.ledger, kept.audit)
        self.loop = Loop(
            clock=host.clock,
            sensing=Sensing((*self.sensors, books), host.clock, patience=patience),
            policies=policies(config),
            reconciler=self.reconciler,
            posture=posture,
            obey=self.errands.obey,
            leases=kept.leases.active,
            publish=self.publisher.publish,
            recorder=self.recorder,
            tick_seconds=config.tick,
        )
        self._watch_marks(config)
        self.publisher.listen(self._learn)

    def _actuators(self, config: Config) -> tuple[Actuator, ...]:
        return act.actuators(
            act.Means(
                cgroups=self._host.cgroups,
                units=self._host.units,
                gpus=self._host.gpus,
                cpu_period_seconds=config.backpressure.cpu_period,
                freezer=self._host.freezer,
                ender=self._host.ender,
                mps=self._host.mps,
                suspensions=Suspensions(
                    self._host.checkpoint,
                    level=self._level,
                    clock=self._host.clock,
                    ledger=self._kept.ledger,
                    cgroup=self._host.processes.cgroup,
                ),
                card_settings=self._host.card_settings,
                time_slices=self._host.time_slices,
                clock_unlocked=lambda uuid: self._config.clock_unlocked(uuid),  # noqa: PLW0108 - it changes
                held=lambda target: self._kept.ledger.held(target) is not None,
                grace_seconds=lambda: self._config.terminate.grace,
                seen=self._seen,
            )
        )

    def _seen(self) -> Inventory:
        """Who and what there was when it was last published; nothing is known before."""
        snapshot = self.publisher.latest()
        return Inventory() if snapshot is None else snapshot.state.inventory

    def _reconciler(self, config: Config) -> Reconciler:
        made = Reconciler(
            actuators=self.actuators,
            ledger=self._kept.ledger,
            audit=self._kept.audit,
            clock=self._host.clock,
            wake=self.wake,
        )
        made.reach = _reach(config)
        return made

    def _level(self, tenant: str) -> Level:
        """By its run, else by its rule, also where nobody has seen it yet."""
        book = self._kept.runs
        run = None if book is None else book.told().of_tenant(tenant)
        return self._config.level(tenant) if run is None else run.level

    def _registrar(self, book: RunBook, scopes: Scopes) -> Registrar:
        return Registrar(
            book=book,
            scopes=scopes,
            processes=self._host.processes,
            starters=starters,
            config=lambda: self._config,
            state=self._published,
            clock=self._host.clock,
            tell=self.publisher.note,
            audit=self._kept.audit.record,
        )

    def _published(self) -> tuple[NodeState, Posture] | None:
        snapshot = self.publisher.latest()
        return None if snapshot is None else (snapshot.state, self.loop.posture)

    def _errands(self, reread: Reread, scopes: Scopes | None) -> Errands:
        book = self._kept.runs
        clock = self._host.clock
        return Errands(
            gpus=self._host.gpus,
            mark=self._kept.mark,
            leases=self._kept.leases,
            tokens=self._kept.tokens,
            runs=None if book is None or scopes is None else (book, self._registrar(book, scopes)),
            reload=reread,
            wake=self.wake,
            posture=lambda: self.loop.posture,
            take=self.take,
            shown=lambda: self.publisher.shown(clock.now().mono),
            tell=lambda kind, text: self.event(kind, text, alert=False),
        )

    def _sensors(
        self,
        config: Config,
        agent_pid: int,
        latencies: Latencies,
        sources: LatencySources | None,
    ) -> tuple[Sensor, ...]:
        host = self._host
        return sense.sensors(
            sense.Means(
                config=config,
                gpus=host.gpus,
                cgroups=host.cgroups,
                units=host.units,
                processes=host.processes,
                events=host.events,
                node=host.node,
                kernel_log=host.kernel_log,
                mps=host.mps,
                freezer=host.freezer,
                clock=host.clock,
                agent_pid=agent_pid,
                latencies=latencies,
                sources=sources,
                runs=NoRuns() if self._kept.runs is None else self._kept.runs,
            )
        )

    def wake(self, why: str) -> None:
        self.loop.wake(why)

    # -- what it is to do ----------------------------------------------------------------------------

    def configure(self, config: Config) -> None:
        """Go on under another configuration; what policies remember stays."""
        self._config = config
        self.loop.policies = tuple(self._policies(config))
        self.loop.tick_seconds = config.tick
        self.reconciler.reach = _reach(config)
        sense.configure(self.sensors, config)
        self._watch_marks(config)

    def _watch_marks(self, config: Config) -> None:
        law = config.backpressure
        self._host.gpus.watch(
            {
                "gpu_memory_used_ratio": law.memory_high,
                "gpu_temperature_celsius": law.temperature_high,
            }
        )

    def _learn(self) -> None:
        """A run after this one is to know what tenants used before an override held them."""
        snapshot = self.publisher.latest()
        if snapshot is not None and snapshot.posture.acts:
            self._kept.leases.learn(used_in(snapshot.plan))

    def take(self, posture: Posture) -> None:
        """Be in this posture from the next tick on, which comes at once."""
        self.loop.posture = posture
        self._notify.status(self.status())
        self.loop.wake("the posture has changed")

    def change(self, **fields: Any) -> None:
        """Take the posture in force with other values for these fields."""
        self.take(msgspec.structs.replace(self.loop.posture, **fields))

    def status(self) -> str:
        """What it is doing, in a few words."""
        posture = self.loop.posture
        doing: str = "paused" if posture.paused else posture.mode
        if posture.demoted:
            doing = f"observe, after crashes; configured to {posture.mode}"
        return f"{doing}; configuration is broken" if posture.config_error else doing

    def event(self, kind: str, text: str, *, alert: bool = True) -> None:
        """Tell of something that no sensor and no policy has seen."""
        self.publisher.note(Event(kind, self._host.clock.now().mono, text, alert=alert))

    # -- what it has changed -------------------------------------------------------------------------

    async def put_back(
        self,
        occasion: Occasion,
        *,
        keep_on_stop: bool = False,
        seconds: float = 0.0,
    ) -> Report:
        """Put back what the occasion demands; what fails is tried again for so long."""
        clock = self._host.clock
        until = clock.now().mono + seconds
        while True:
            report = await put_back(
                ledger=self._kept.ledger,
                actuators=self.actuators,
                occasion=occasion,
                clock=clock,
                keep_on_stop=keep_on_stop,
                busy=self.reconciler.busy,
                audit=self._kept.audit,
            )
            if not failed(report) or clock.now().mono >= until:
                return report
            await clock.sleep(_AGAIN_SECONDS)
