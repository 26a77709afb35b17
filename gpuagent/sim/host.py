"""The simulated host: what `host/` is for a real one, behind the same protocols.

    host = SimHost(scenario.load("config/scenarios/co-location.toml"), seed=1)
    host.advance(60.0)

Nothing moves but in `advance`, which integrates everything in steps of 50 ms. The same scenario and
seed give the same run, bit for bit, whatever the sizes of the advances: each tenant and each card has
random numbers of its own, and nothing depends on the system's clock.
"""

from collections import deque
from random import Random

import msgspec

from gpuagent.model.inventory import Process
from gpuagent.ports import Host, Wake
from gpuagent.sim import profiles
from gpuagent.sim.card import Card
from gpuagent.sim.cgroups import SimCgroups
from gpuagent.sim.clock import VirtualClock
from gpuagent.sim.cpu import Cpus, Group
from gpuagent.sim.gpus import SimGpus
from gpuagent.sim.jobs import Job, Progress
from gpuagent.sim.mps import Environment, SimMps
from gpuagent.sim.mps_control import SimMpsControl
from gpuagent.sim.rungs import SimEnder, SimFreezer
from gpuagent.sim.scenario import (
    Ambient,
    CardSpec,
    Hang,
    Happening,
    Load,
    Lose,
    Mps,
    MpsSpec,
    Patch,
    Restart,
    Scenario,
    Start,
    Stop,
    TenantSpec,
    Xid,
)
from gpuagent.sim.serving import KEPT_REQUESTS, ServingJob
from gpuagent.sim.settings import SimCheckpoint, SimSettings, SimTimeSlices
from gpuagent.sim.starting import begin
from gpuagent.sim.surroundings import SimEvents, SimKernelLog, SimNode, SimProcesses, SimUnits

STEP_SECONDS = 0.05
AGENT_PID = 900
"""The agent's own process, as the simulated /proc shows it."""
MPS_CONTROL_PID = 901
"""The first of the control daemons of MPS, as the simulated /proc shows it."""
MPS_CONTROL_CGROUP = "/system.slice/nvidia-mps.service"

_SLACK_SECONDS = 1e-6
"""Sums of advances are no more exact than that."""
_FIRST_PID = 2000
_TICKS_PER_SECOND = 100
_ENDED_KEPT = 1000
_COMM_LENGTH = 15


class _Running:
    """A tenant's process while it lives."""

    def __init__(self, spec: TenantSpec, *, pid: int, group: Group, card: Card, job: Job) -> None:
        self.spec = spec
        self.pid = pid
        self.group = group
        self.card = card
        self.job = job
        self.on_card = True
        """False once MPS has ended its work there: the process lives on and does nothing."""


class SimHost:
    """See the module. `wake` is called where a real host would wake the loop."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        clock: VirtualClock | None = None,
        *,
        wake: Wake = lambda _why: None,
    ) -> None:
        self.scenario = scenario
        self.clock = clock or VirtualClock()
        self.ended: deque[tuple[float, str, str]] = deque(maxlen=_ENDED_KEPT)
        """Lives that have ended: monotonic seconds, tenant, why."""
        self._seed = seed
        self._began = self.clock.mono
        self._elapsed = 0.0
        self._steps = 0
        self.cgroups = SimCgroups()
        self.units = SimUnits()
        self.cards = tuple(_card(spec, i, seed) for i, spec in enumerate(scenario.cards))
        self.gpus = SimGpus(self.cards, self.clock, wake)
        self.card_settings = SimSettings(self.gpus, self.clock)
        self.time_slices = SimTimeSlices(self.gpus)
        self.processes = SimProcesses()
        self.events = SimEvents(wake)
        self.kernel_log = SimKernelLog()
        host = profiles.host()
        cpus = scenario.host.cpus or int(host.cpus.value)
        self._cpus = Cpus(host, self.cgroups.root, cpus=cpus, step=STEP_SECONDS)
        self.node = SimNode(host, self._cpus, self.cgroups)
        self._works = {spec.name: scenario.work(spec) for spec in scenario.tenants}
        self._specs = {spec.name: spec for spec in scenario.tenants}
        self._lives = dict.fromkeys(self._specs, 0)
        self._past = dict.fromkeys(self._specs, Progress())
        self._past_served: dict[str, list[tuple[float, float]]] = {n: [] for n in self._specs}
        self._running: dict[str, _Running] = {}
        self.checkpoint = SimCheckpoint(self.processes, self._running)
        self._timeline = deque(scenario.happenings())
        self._last_pid = _FIRST_PID
        self._cpu: dict[int, float] = {}
        self._frozen: set[int] = set()
        self.freezer = SimFreezer(self.cgroups)
        self.ender = SimEnder(self.processes, self._kill)
        self._system(1, "systemd", "/init.scope")
        self._system(AGENT_PID, "gpuagent", "/system.slice/gpuagent.service")
        self.mps_daemons = tuple(self._daemon(spec, i) for i, spec in enumerate(scenario.mps))
        """Control daemons of MPS, one for each group of cards that is used through it."""
        self.mps = SimMpsControl(self.mps_daemons, tuple(card.uuid for card in self.cards))
        self._daemons = {card: daemon for daemon in self.mps_daemons for card in daemon.cards}
        self.gpus.sample(self._now)

    # -- time -----------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        """Monotonic seconds at the end of the last step: the clock may be a part of one further."""
        return self._began + self._steps * STEP_SECONDS

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass. What is left of a step is made up for by the next call."""
        until = self._elapsed + seconds
        while (self._steps + 1) * STEP_SECONDS <= until + _SLACK_SECONDS:
            self._step()
        self._elapsed = until
        self.clock.advance_to(self._began + until)

    def _step(self) -> None:
        began, at = self._steps * STEP_SECONDS, self._now
        while self._timeline and self._timeline[0].at <= began + _SLACK_SECONDS:
            self.happen(self._timeline.popleft())
        self.freezer.step(at)
        self._share_cpus()
        for card in self.cards:
            if not card.lost:
                card.step(at, self._cpu, self._frozen)
        self._steps += 1
        self.node.elapsed = self._steps * STEP_SECONDS
        self.clock.advance_to(self._now)
        for one in [r for r in self._running.values() if r.job.ended]:
            self._end(one, one.job.ended)
        self.gpus.sample(self._now)

    def _share_cpus(self) -> None:
        running, frozen = self._running.values(), self._frozen
        frozen.clear()
        for one in running:
            group = one.group
            if group.frozen:
                frozen.add(one.pid)
            group.demand = 0.0 if group.frozen or not one.on_card else one.job.cores
        self._cpus.share()
        for one in running:
            self._cpu[one.pid] = one.group.ratio

    # -- what happens ---------------------------------------------------------------------------------

    def happen(self, what: Happening) -> None:
        """Something of a timeline, now."""
        match what:
            case Start():
                self.start(what.tenant)
            case Stop():
                self.stop(what.tenant)
            case Restart():
                self.stop(what.tenant)
                self.start(what.tenant)
            case Mps():
                self._set_mps(what)
            case Load():
                self._load(what)
            case Hang():
                until = self._began + what.at + what.seconds
                self.gpus.hang(self.cards[what.card], until)
            case Lose():
                self._lose(self.cards[what.card])
            case Xid():
                self._xid(what)
            case Ambient():
                self.cards[what.card].ambient_celsius = what.celsius
            case Patch():
                pass  # the agent's configuration is not the host's

    def start(self, tenant: str) -> None:
        """A tenant's process begins, unless it runs already."""
        if tenant in self._running:
            return
        spec = self._specs[tenant]
        card = self.cards[spec.card]
        pid = self._next_pid()
        group = self.cgroups.make(spec.path)
        self._lives[tenant] += 1
        random = Random(f"{self._seed}/tenant/{tenant}/{self._lives[tenant]}")  # noqa: S311  (as above)
        work = self._works[tenant]
        daemon = self._daemons.get(spec.card)
        environment = Environment(spec.thread_percentage, spec.memory_limit_bytes)
        client = None if daemon is None else daemon.connect(pid, spec.card, environment)
        job = begin(work, card, pid, random=random, at=self._now, client=client)
        group.memory_bytes = work.host_memory_bytes
        group.processes = 1
        self.processes.put(self._process(pid, "python3", spec.path, spec.user))
        self._running[tenant] = _Running(spec, pid=pid, group=group, card=card, job=job)
        self._cpu[pid] = 1.0
        self.events.began(pid)

    def stop(self, tenant: str) -> None:
        """A tenant's process ends, if it runs."""
        one = self._running.get(tenant)
        if one is not None:
            self._end(one, "stopped")

    def _end(self, one: _Running, why: str) -> None:
        name = one.spec.name
        self._past[name] = msgspec.structs.replace(self.progress(name), running=False)
        if isinstance(one.job, ServingJob):
            self._past_served[name] = self.latencies(name, float("-inf"))
        del self._running[name], self._cpu[one.pid]
        one.card.leave(one.pid)
        if one.spec.card in self._daemons:
            self._daemons[one.spec.card].leave(one.pid)
        self.processes.remove(one.pid)
        self.cgroups.remove(one.group)
        self.ended.append((self._now, name, why))
        self.events.ended(one.pid)

    def _kill(self, pid: int, why: str) -> bool:
        """Whether it was a tenant's process, which has ended now."""
        found = [r for r in self._running.values() if r.pid == pid]
        for one in found:
            self._end(one, why)
        return bool(found)

    def _load(self, what: Load) -> None:
        one = self._running.get(what.tenant)
        work = self._works[what.tenant]
        self._works[what.tenant] = msgspec.structs.replace(work, rate=what.rate)
        if one is not None and isinstance(one.job, ServingJob):
            one.job.change_rate(what.rate, self._now)

    def _lose(self, card: Card) -> None:
        card.lost = True
        card.watts = 0.0
        self.gpus.lose(card)
        self.kernel_log.xid(card.pci, 79, "GPU has fallen off the bus.")
        for one in [r for r in self._running.values() if r.card is card]:
            self._end(one, "its card was lost")

    def _xid(self, what: Xid) -> None:
        card = self.cards[what.card]
        one = self._running.get(what.tenant)
        pid = one.pid if one is not None else 0
        self.kernel_log.xid(card.pci, what.xid, f"pid={pid}, name=python3")
        self.gpus.xid(card, what.xid)
        if one is None:
            return
        self._end(one, f"XID {what.xid}")
        if what.card in self._daemons:
            # A fault of one client reaches all on the same card (FACTS 3).
            for other in [r for r in self._running.values() if r.card is card]:
                self._end(other, f"XID {what.xid} of {what.tenant}, through MPS")

    # -- MPS ------------------------------------------------------------------------------------------

    def _daemon(self, spec: MpsSpec, index: int) -> SimMps:
        """A control daemon, and its cards in the state that it begins with."""
        profile = profiles.mps(spec.set)
        control = MPS_CONTROL_PID + index
        self._system(control, "nvidia-cuda-mps-control", MPS_CONTROL_CGROUP)

        def start_server() -> int:
            pid = self._next_pid()
            user = next(t.user for t in self.scenario.tenants if t.card in spec.cards)
            name = "nvidia-cuda-mps-server"
            process = self._process(pid, name, MPS_CONTROL_CGROUP, user, ppid=control)
            self.processes.put(process)
            for card in spec.cards:
                self.cards[card].serve_mps(pid, profile.server_bytes.value)
            return pid

        daemon = SimMps(profile, spec.cards, start_server=start_server, end_work=self._end_work)
        for card in spec.cards:
            self.cards[card].use_mps(profile, daemon)
        daemon.set_defaults(spec.percentage, spec.memory_limit_bytes)
        return daemon

    def _end_work(self, pid: int) -> None:
        one = next(r for r in self._running.values() if r.pid == pid)
        one.card.leave(pid)
        one.on_card = False

    def _set_mps(self, what: Mps) -> None:
        """As an operator does who wants it for the running server and for those after it."""
        daemon = self.mps_daemons[what.mps]
        percentage, limit = what.percentage, what.memory_limit_bytes
        daemon.set_defaults(percentage, limit)
        for server in daemon.get_server_list():
            if percentage is not None:
                daemon.set_active_thread_percentage(server, percentage)
            if limit is not None:
                for ordinal in range(len(daemon.cards)):
                    daemon.set_device_pinned_mem_limit(server, ordinal, limit)

    # -- processes ------------------------------------------------------------------------------------

    def _next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    def _system(self, pid: int, name: str, path: str) -> None:
        self.cgroups.make(path).processes += 1
        self.processes.put(self._process(pid, name, path, "root"))

    def _process(self, pid: int, name: str, path: str, user: str, *, ppid: int = 1) -> Process:
        return Process(
            pid=pid,
            started=round(self._now * _TICKS_PER_SECOND) + pid,
            ppid=0 if pid == 1 else ppid,
            uid=0 if user == "root" else 1000,
            user=user,
            name=name[:_COMM_LENGTH],
            exe=f"/usr/bin/{name}",
            cgroup=path,
        )

    # -- what came of it ------------------------------------------------------------------------------

    def progress(self, tenant: str) -> Progress:
        """What a tenant has done so far. Raises KeyError for one that the scenario does not have."""
        past, one = self._past[tenant], self._running.get(tenant)
        if one is None:
            return past
        return one.job.progress().after(past)

    def latencies(self, tenant: str, since: float) -> list[tuple[float, float]]:
        """Finished requests since then: (monotonic seconds, latency in seconds), oldest first.

        At most `serving.KEPT_REQUESTS` are remembered. Empty for a tenant without requests.
        """
        one = self._running.get(tenant)
        past = [r for r in self._past_served[tenant] if r[0] >= since]
        if one is None or not isinstance(one.job, ServingJob):
            return past
        return (past + one.job.served.since(since))[-KEPT_REQUESTS:]

    def cgroup(self, tenant: str) -> str:
        """Path of the tenant's control group, whether it runs or not."""
        return self._specs[tenant].path


def _card(spec: CardSpec, index: int, seed: int) -> Card:
    return Card(
        profiles.card(spec.profile, spec.set),
        index=index,
        ambient_celsius=spec.ambient_celsius,
        step=STEP_SECONDS,
        random=Random(f"{seed}/card/{index}"),  # noqa: S311  (a simulation, no secret)
    )


def _fits(host: SimHost) -> Host:
    """It is what the protocol asks for: mypy looks."""
    return host
