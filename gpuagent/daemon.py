"""Composition root: the only file that knows every class. It builds the agent, runs it, ends it.

A run begins by putting back what an earlier one left, and ends by putting back what this one did.
What happens to which knob is the table in DESIGN 2; `act.restore` applies it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import structlog

import gpuagent
from gpuagent import trail
from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger, boot_id
from gpuagent.act.restore import Occasion, Report, failed
from gpuagent.clock import SystemClock, patiently
from gpuagent.config import Api, Config
from gpuagent.configfile import Loaded, changed_needs_restart, describe, load
from gpuagent.core import Core, Kept
from gpuagent.decide.merge import Violation
from gpuagent.errors import AgentError, ConfigError
from gpuagent.expose.access import Access
from gpuagent.expose.api import Sources
from gpuagent.expose.intake import Intake
from gpuagent.expose.network import Remote
from gpuagent.expose.server import Server
from gpuagent.host.machine import Machine
from gpuagent.host.notify import STOP_MOST_SECONDS, Notify
from gpuagent.host.pages import HttpPages
from gpuagent.host.scopes import SystemdScopes
from gpuagent.keptfile import replace_file
from gpuagent.leases import Leases
from gpuagent.model.plan import Posture, Reload
from gpuagent.runbook import RunBook
from gpuagent.sense.mail import LatencyMail, marks
from gpuagent.sense.sources import LatencySources
from gpuagent.starts import CRASHES_TO_OBSERVE, PauseMark, Starts
from gpuagent.tokens import TokenBook

EX_OK = 0
EX_FAILED = 1
EX_BUG = 70
"""sysexits(3) EX_SOFTWARE: a policy has failed; the service manager starts us again."""

_FIRST_LOOK_SECONDS = 0.5
"""How long the first decision waits for the cards to be read once."""
_READY_SECONDS = 60.0
_LISTENER_SECONDS = 5.0
"""How long a reload waits to hear whether the certificate can be used."""
_STOP_SECONDS = 12.0
"""How long a stop tries to put back what cannot be at once: a driver that hangs gets a new reader.

It fits into the unit's TimeoutStopSec; for `Knob.put_back_seconds` more time is asked for."""

_log = structlog.get_logger()


class _Stop(Exception):
    """Somebody asked the daemon to end."""


class Agent:
    """One run of the daemon, in a state directory that it holds."""

    def __init__(self, loaded: Loaded) -> None:
        config = loaded.config
        self._loaded = loaded
        self._started_with = config
        self._settings = describe(config)
        """As it is told: made once, for all who ask."""
        self._clock = SystemClock()
        self._notify = Notify.from_environment(os.environ)
        state_dir = config.paths.state_dir
        self._starts = Starts(state_dir, boot_id())
        self._mark = PauseMark(state_dir)
        self._ledger = Ledger(state_dir)
        self._audit = AuditLog(state_dir)
        self._audit.recall()
        self._leases = Leases(state_dir, boot=boot_id(), clock=self._clock)
        self._tokens = TokenBook(state_dir, self._clock)
        self._runs = RunBook(state_dir, boot=boot_id(), clock=self._clock)
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._reading = asyncio.Lock()
        """One reload at a time, so that the file that was read last is the one in force."""

        self._host = Machine(config, clock=self._clock, wake=self.wake)
        self._latencies = LatencyMail(self.wake)
        self._pages = HttpPages()
        self._sources = LatencySources(
            pages=self._pages, clock=self._clock, push=self._latencies.push
        )
        self._sources.configure(config)
        self._core = self._made_core(config)
        self._latencies.watch(marks(config))
        self._server = self._made_server(config)

    def _made_core(self, config: Config) -> Core:
        return Core(
            config,
            host=self._host,
            kept=Kept(
                ledger=self._ledger,
                audit=self._audit,
                mark=self._mark,
                leases=self._leases,
                tokens=self._tokens,
                runs=self._runs,
            ),
            scopes=SystemdScopes(self._host.units.bus, clock=self._clock),
            posture=self._first_posture(),
            agent_pid=os.getpid(),
            reread=self._reload,
            notify=self._notify,
            latencies=self._latencies,
            sources=self._sources,
        )

    def _made_server(self, config: Config) -> Server:
        return Server(
            Sources(
                latest=self._core.publisher.latest,
                settings=lambda: self._settings,
                clock=self._clock,
                version=gpuagent.__version__,
                listen=self._core.publisher.listen,
                intake=Intake(self._latencies.push),
                access=self._access,
            ),
            self._core.loop.inbox,
            path=config.paths.socket,
            group=config.api.group,
            metrics_listen=config.api.metrics_listen,
            metrics_token=config.api.metrics_token,
            network=_remote(config.api),
            tokens=self._tokens,
            tell=lambda kind, text, alert: self._core.event(kind, text, alert=alert),
        )

    def wake(self, why: str) -> None:
        self._core.wake(why)

    # -- one run -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until SIGTERM or SIGINT. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        code = EX_BUG
        # Two agents with one socket: the second must end before it touches anything.
        await self._server.start()
        trail.leave(self._loaded.config.paths)
        async with asyncio.TaskGroup() as host:
            # These outlive the loop: what it has changed is put back through them.
            below = (
                self._host.gpus,
                self._host.events,
                self._host.freezer,
                self._core.reconciler,
                self._server,
            )
            tasks = [host.create_task(part.run()) for part in below]
            try:
                await self._begin()
                code = await self._control()
            finally:
                code = await self._end(code)
                self._host.units.close()
                for task in tasks:
                    task.cancel()
        return code

    async def _begin(self) -> None:
        """Put back what an earlier run left behind, before anything is decided."""
        crashes = self._starts.begin(self._clock.now().mono)
        demoted = crashes >= CRASHES_TO_OBSERVE
        if demoted:
            why = f"{crashes} crashes within ten minutes; the log says more of each"
            self._core.change(demoted=why)
            self._core.event("demoted", f"only observing, although configured to enforce: {why}")
        elif crashes:
            self._core.event("crash", "the run before this one ended without a clean stop")
        for problem in self._ledger.problems:
            self._core.event("ledger-damaged", problem)
        if self._tokens.trouble:
            self._core.event("tokens-damaged", self._tokens.trouble)
        for event in (*self._leases.begin(), *self._runs.begin()):
            self._core.publisher.note(event)
        await patiently(self._host.gpus.settled(), _FIRST_LOOK_SECONDS)
        occasion = Occasion.RESCUE if demoted else Occasion.CRASH
        report = await self._put_back(occasion)
        self._core.reconciler.adopt(report, now=self._clock.now())

    async def _control(self) -> int:
        """Run the loop until somebody stops us or something of ours fails."""
        code = EX_OK
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._core.errands, self._core.loop, self._sources):
                    group.create_task(part.run())
                group.create_task(self._announce())
                group.create_task(self._until_stopped())
                self._group = group
        except* _Stop:
            pass
        finally:
            self._group = None
            await self._pages.close()
        return code

    async def _until_stopped(self) -> None:
        await self._stopping.wait()
        self._group = None  # a hangup from here on finds nobody to hand it to
        raise _Stop

    def failed(self, failure: BaseExceptionGroup[Exception]) -> int:
        """What ended the run is said, and what led to it is kept. Returns the exit code.

        What we refuse before the agent was ready (a socket in use) is for a person to mend; anything
        else is a fault, after which starting again may help (DESIGN 9).
        """
        _, faults = failure.split(
            lambda e: isinstance(e, AgentError) and not isinstance(e, Violation)
        )
        if faults is None and self._core.publisher.latest() is None:
            for error in _leaves(failure):
                _log.error("cannot run", why=str(error))
            return EX_FAILED
        _log.error("a part of the agent has failed; everything is put back", exc_info=failure)
        self._dump()
        return EX_BUG

    async def _announce(self) -> None:
        await self._core.publisher.shown(float("-inf"), seconds=_READY_SECONDS)
        self._notify.ready(self._core.status())
        _log.info("ready", mode=self._core.loop.posture.mode, version=gpuagent.__version__)

    async def _end(self, code: int) -> int:
        """Put everything back, close the books. Returns the exit code: nothing left is 0."""
        self._notify.stopping()
        report = await self._notify.meanwhile(
            self._put_all_back(Occasion.STOP if code == EX_OK else Occasion.RESCUE),
            most_seconds=STOP_MOST_SECONDS,
        )
        if failed(report):
            _log.error("not everything is put back; try `gpuagent restore`")
            code = code or EX_FAILED
        if code != EX_BUG:
            self._starts.end()
        if not self._ledger.entries:
            trail.wipe(self._started_with.paths)
        # Revoked and dropped are to stay so: this is the last chance to have them written.
        await asyncio.gather(self._leases.close(), self._tokens.close(), self._runs.close())
        await self._ledger.close()
        await asyncio.to_thread(self._audit.close)
        _log.info("stopped", put_back=sum(i.what == "put back" for i in report), exit_code=code)
        return code

    async def _put_all_back(self, occasion: Occasion) -> Report:
        """Processes that have to be resumed are, one after the other, and waited for."""
        await self._core.reconciler.close()
        if self._core.loop.posture.released:
            # What was let go of is needed once more: limits of ours must not stay on the cards.
            await self._host.gpus.resume()
            await patiently(self._host.gpus.settled(), _FIRST_LOOK_SECONDS)
        return await self._put_back(occasion, seconds=_STOP_SECONDS)

    # -- commands ------------------------------------------------------------------------------------

    def _on_hangup(self) -> None:
        if self._group is not None:  # else the file has just been read
            self._group.create_task(self._reload_for_signal())

    async def _reload_for_signal(self) -> None:
        with contextlib.suppress(AgentError):  # logged where it was found
            await self._core.loop.inbox.submit(Reload(by="SIGHUP"))

    async def _reload(self, by: str) -> str:
        """Read the configuration file again; a broken one changes nothing. Raises ConfigError."""
        async with self._reading:
            return await self._reload_alone(by)

    async def _reload_alone(self, by: str) -> str:
        self._notify.reloading(self._clock.now().mono)
        try:
            await self._tokens.reread()
            loaded = await asyncio.to_thread(load, self._loaded.path)
            self._check_paths(loaded)
            restart = changed_needs_restart(self._started_with, loaded.config)
            self._apply(loaded)
        except ConfigError as error:
            self._core.change(config_error=str(error))
            _log.error("reload refused; the running configuration stays in force", why=str(error))
            raise
        finally:
            self._notify.ready(self._core.status())
        self._core.event(
            "reloaded", f"configuration {loaded.path} read again for {by}", alert=False
        )
        late = f"; in force after a restart: {', '.join(restart)}" if restart else ""
        return f"configuration {loaded.path} is in force{late}{await self._network_trouble()}"

    async def _network_trouble(self) -> str:
        """What the network listener says of its files, now that they have been read again."""
        network = self._server.network
        if network is None:
            return ""
        await patiently(network.tried.wait(), _LISTENER_SECONDS)
        return f"; but the network listener: {network.why}" if network.why else ""

    def _check_paths(self, loaded: Loaded) -> None:
        """Where the books are cannot change while something is held. Raises ConfigError."""
        old, new = self._started_with.paths, loaded.config.paths
        moved = [k for k in ("state_dir", "cgroup_root") if getattr(old, k) != getattr(new, k)]
        if moved and self._ledger.entries:
            raise ConfigError(
                f"{loaded.path}: paths.{key}: cannot change while settings are held: stop the "
                "agent first, then change it"
                for key in moved
            )

    def _apply(self, loaded: Loaded) -> None:
        config = loaded.config
        self._loaded, self._settings = loaded, describe(config)
        self._host.gpus.reconfigure(config.nvml)
        self._host.freezer.reconfigure(config.freeze)
        self._host.mps.reconfigure(config.mps)
        self._host.checkpoint.reconfigure(config.suspend)
        self._core.configure(config)
        self._latencies.watch(marks(config))
        self._sources.configure(config)
        self._core.change(
            mode=config.mode, config_error="", config_loaded_wall=self._clock.now().wall
        )
        self._server.renew()
        for warning in loaded.warnings:
            _log.warning("configuration", why=warning)

    # -- small things --------------------------------------------------------------------------------

    def _access(self) -> Access:
        network = self._server.network
        return Access(
            self._server.listeners(),
            self._tokens.listed(),
            self._tokens.trouble,
            None if network is None else network.certificate_ends_wall,
            "; ".join(
                t for t in (self._tokens.unsaved, self._leases.trouble, self._runs.trouble) if t
            ),
        )

    def _first_posture(self) -> Posture:
        paused = self._mark.read()
        if paused is not None:
            _log.warning("paused, as before this start", by=paused)
        return Posture(
            mode=self._loaded.config.mode,
            paused=paused is not None,
            config_path=self._loaded.path,
            config_loaded_wall=self._clock.now().wall,
        )

    async def _put_back(self, occasion: Occasion, *, seconds: float = 0.0) -> Report:
        """Put back what the occasion demands, and say so; what fails is tried again for so long."""
        report = await self._core.put_back(
            occasion,
            keep_on_stop=self._loaded.config.power.keep_on_stop,
            seconds=seconds,
        )
        tell(report)
        return report

    def _dump(self) -> None:
        """Leave what led to a failed decision, for whoever is to find the bug."""
        frames, memories = self._core.recorder.dump()
        base = os.path.join(self._loaded.config.paths.state_dir, "crash")
        with contextlib.suppress(OSError):
            replace_file(f"{base}-frames.msgpack", frames)
            replace_file(f"{base}-memories.txt", memories.encode("utf-8", "replace"))


def tell(report: Report) -> None:
    for item in report:
        say = _log.error if item.what == "failed" else _log.info
        say(item.what, knob=item.entry.knob, subject=str(item.entry.subject), why=item.why)


def _remote(api: Api) -> Remote | None:
    if not api.network_listen:
        return None
    return Remote(api.network_listen, api.tls_certificate, api.tls_key)


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
