"""Sensor `mps`: the MPS control daemons, whose their clients are, and what those who share one must know.

A daemon writes some lines into its log for each command and never trims it, so it is asked when
there is reason to: the processes on the cards are others than before, the agent has changed something
of it, or half a minute has passed.
"""

from collections.abc import Iterator, Mapping, Sequence

from gpuagent.model.declare import On
from gpuagent.model.inventory import Level, MpsDaemon, Tenant, on_mps, on_tenant
from gpuagent.model.state import Event, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    MPS_CLIENTS,
    MPS_FAULTED_SERVERS,
    MPS_SERVERS,
    MPS_UP,
    TENANT_MPS_CLIENTS,
)
from gpuagent.ports import Mps

FAULT = "FAULT"
"""State of a server that takes no new clients until those it has are gone."""
ASK_SECONDS = 30.0
"""A daemon is asked once in so long at least."""
_DOWN_ASKINGS = 2
"""One of our own is started by the agent itself right after it was first found down."""


class MpsWatch:
    """See the module."""

    name = "mps"
    interval = 5.0

    def __init__(self, mps: Mps) -> None:
        self._mps = mps
        self._daemons: tuple[MpsDaemon, ...] = ()
        self._asked_at = float("-inf")
        self._reason: object = None
        self._said = _Said()

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        reason = _reason(state)
        if reason != self._reason or now.mono - self._asked_at >= ASK_SECONDS:
            self._reason, self._asked_at = reason, now.mono
            self._daemons = tuple(await self._mps.daemons())
        owners = state.inventory.owners()
        events = tuple(self._said.news(self._daemons, owners, state, now.mono))
        return Sensed(
            readings=tuple(self._readings(owners, state)), mps=self._daemons, events=events
        )

    def _readings(self, owners: Mapping[int, Tenant], state: NodeState) -> Iterator[Reading]:
        at = self._asked_at
        for daemon in self._daemons:
            subject = on_mps(daemon.name)
            yield Reading(MPS_UP, subject, float(daemon.up), at)
            if not daemon.clients_known:
                continue
            yield Reading(MPS_SERVERS, subject, len(daemon.servers), at)
            yield Reading(MPS_CLIENTS, subject, len(daemon.clients), at)
            if all(s.state for s in daemon.servers):
                faulted = sum(s.state == FAULT for s in daemon.servers)
                yield Reading(MPS_FAULTED_SERVERS, subject, faulted, at)
        if not self._daemons:
            return
        clients = {c.pid for d in self._daemons for c in d.clients}
        all_known = all(d.clients_known for d in self._daemons)
        unread = _unread(self._daemons)
        for tenant in state.inventory.tenants or ():
            count = sum(owners[pid] is tenant for pid in clients if pid in owners)
            # Of a daemon that is down there are none to miss, as far as can be said.
            if all_known or (count and not unread):
                yield Reading(TENANT_MPS_CLIENTS, on_tenant(tenant.name), count, at)


def _reason(state: NodeState) -> object:
    """What is another when there is reason to ask."""
    listed = state.inventory.gpu_processes or ()
    turned = {(k.name, s.gpu): o.result for (k, s), o in state.outcomes.items() if s.on is On.MPS}
    return frozenset((p.pid, p.gpu) for p in listed), turned


class _Said:
    """What has been said, so that each thing is said once, and once more when it has been otherwise."""

    def __init__(self) -> None:
        self._down: dict[str, int] = {}
        """How often a daemon was found down in a row, by name."""
        self._faults: set[tuple[str, int]] = set()
        self._shared: set[tuple[str, int, str, str]] = set()
        self._over: set[tuple[str, str]] = set()
        self._met: dict[tuple[str, int], frozenset[int]] = {}
        """The clients that each server was last seen with."""
        self._heard: Sequence[MpsDaemon] = ()

    def news(
        self,
        daemons: Sequence[MpsDaemon],
        owners: Mapping[int, Tenant],
        state: NodeState,
        now: float,
    ) -> Iterator[Event]:
        if daemons is not self._heard:
            self._heard = daemons
            for daemon in daemons:
                yield from self._health(daemon, now)
                yield from self._fault(daemon, owners, now)
        yield from self._sharing(daemons, owners, now)
        yield from self._contexts(daemons, owners, state, now)

    def _health(self, daemon: MpsDaemon, now: float) -> Iterator[Event]:
        before = self._down.get(daemon.name, 0 if daemon.up else None)
        found = 0 if daemon.up else (before or 0) + 1
        # One that was up is missed at once; one that never was, when it is not there again.
        if before == 0 and found:
            found = _DOWN_ASKINGS
        self._down[daemon.name] = found
        if found >= _DOWN_ASKINGS > (before or 0):
            text = f"the MPS control daemon of {daemon.name} is down: {daemon.why}"
            yield Event("mps-down", now, text, on_mps(daemon.name), alert=True)
        elif before is not None and before >= _DOWN_ASKINGS and not found:
            text = f"the MPS control daemon of {daemon.name} is up"
            yield Event("mps-up", now, text, on_mps(daemon.name))

    def _fault(
        self, daemon: MpsDaemon, owners: Mapping[int, Tenant], now: float
    ) -> Iterator[Event]:
        for server in daemon.servers:
            key = (daemon.name, server.pid)
            here = frozenset(c.pid for c in daemon.clients if c.server == server.pid)
            met = self._met.get(key, frozenset()) | here
            self._met[key] = here
            if server.state != FAULT:
                self._faults.discard(key)
            elif met and key not in self._faults:
                self._faults.add(key)
                text = (
                    f"MPS server {server.pid} of {daemon.name} is in state {FAULT}: what one of its "
                    "clients did reaches all of them, and new ones are turned away until they have "
                    f"left: {_everybody(met, owners)}"
                )
                yield Event("mps-fault", now, text, on_mps(daemon.name), alert=True)
        if daemon.up and not daemon.clients_known:
            return  # a server that could not be read has not gone
        there = {(daemon.name, s.pid) for s in daemon.servers}
        gone = {k for k in self._met if k[0] == daemon.name} - there
        for key in gone:
            del self._met[key]
        self._faults -= gone

    def _sharing(
        self, daemons: Sequence[MpsDaemon], owners: Mapping[int, Tenant], now: float
    ) -> Iterator[Event]:
        # What cannot be looked at now is as it was.
        holds = {s for s in self._shared if s[0] in _unread(daemons)}
        for daemon in daemons:
            for server in daemon.servers:
                here = {
                    owners[c.pid].name: owners[c.pid]
                    for c in daemon.clients
                    if c.server == server.pid and c.pid in owners
                }
                for one in (t for t in here.values() if t.level is Level.L1):
                    others = [t for t in here.values() if t is not one]
                    pairs = {(daemon.name, server.pid, one.name, t.name) for t in others}
                    holds |= pairs
                    if pairs - self._shared:
                        listed = ", ".join(_called(t) for t in sorted(others, key=_by_name))
                        text = (
                            f"{_called(one)} shares MPS server {server.pid} of {daemon.name} with "
                            f"{listed}: a fault of any of them ends the work of all"
                        )
                        yield Event(
                            "mps-shared-with-l1", now, text, on_tenant(one.name), alert=True
                        )
        self._shared = holds

    def _contexts(
        self,
        daemons: Sequence[MpsDaemon],
        owners: Mapping[int, Tenant],
        state: NodeState,
        now: float,
    ) -> Iterator[Event]:
        """A client process has one context on a card at least: there are no fewer than are counted."""
        clients = {c.pid for d in daemons for c in d.clients}
        counts: dict[tuple[str, str], int] = {}
        for pid, gpu in {(p.pid, p.gpu) for p in state.inventory.gpu_processes or ()}:
            if pid in clients and pid in owners:
                key = (owners[pid].name, gpu)
                counts[key] = counts.get(key, 0) + 1
        over = set(self._over) if _unread(daemons) else set()
        for (name, gpu), count in sorted(counts.items()):
            tenant = state.inventory.tenant(name)
            most = None if tenant is None else tenant.limits.mps_contexts
            if most is None or count <= most:
                continue
            over.add((name, gpu))
            if (name, gpu) not in self._over:
                text = (
                    f"{name} has {count} MPS clients on {gpu}, and may have {most} contexts there"
                )
                numbers = (("contexts", float(count)), ("limit", float(most)))
                yield Event("mps-contexts-over", now, text, on_tenant(name), numbers, alert=True)
        self._over = over


def _unread(daemons: Sequence[MpsDaemon]) -> frozenset[str]:
    """Daemons that run, and have more servers or clients than are known, maybe."""
    return frozenset(d.name for d in daemons if d.up and not d.clients_known)


def _by_name(tenant: Tenant) -> str:
    return tenant.name


def _called(tenant: Tenant) -> str:
    return f"{tenant.name} ({tenant.level.name})"


def _everybody(pids: frozenset[int], owners: Mapping[int, Tenant]) -> str:
    """All of them, by tenant; those of nobody that is known by their number."""
    named: dict[str, list[int]] = {}
    for pid in sorted(pids):
        whose = _called(owners[pid]) if pid in owners else "of no known tenant"
        named.setdefault(whose, []).append(pid)
    return "; ".join(f"{who}, pid {', '.join(map(str, some))}" for who, some in named.items())
