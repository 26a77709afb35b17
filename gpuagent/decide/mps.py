"""The policy for MPS control daemons: one of our own where that is configured, and a daemon's default.

A default holds for every client of the daemon's next server, whoever that is. So it is set only where
nobody on the daemon, or on its cards, is L1.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpuagent.config import Config, MpsGroup
from gpuagent.model.declare import OWN_DAEMON_RULE
from gpuagent.model.inventory import Level, MpsDaemon, Tenant, on_mps
from gpuagent.model.plan import Blocked, Decision, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import MPS_DAEMON, MPS_DEFAULT_THREADS

DEFAULT_RULE = "mps/default"


class Memory(msgspec.Struct, frozen=True):
    """What was wished when it was last known who uses which daemon."""

    defaults: tuple[Setting, ...] = ()
    unstarted: tuple[str, ...] = ()
    """Daemons of our own of which it is said that they could not be started."""


class MpsGroups:
    """See the module."""

    name = "mps"

    def __init__(self, config: Config) -> None:
        self._groups = config.mps.groups

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        own = tuple(_own(g) for g in self._groups if g.own)
        limited = [g for g in self._groups if g.default_threads is not None]
        known = state.tenants_known and state.inventory.mps is not None
        if known:
            memory = msgspec.structs.replace(memory, defaults=tuple(_defaults(limited, state)))
        # What was wished of a group that is configured otherwise by now is wished no longer.
        wished = {(g.name, g.default_threads) for g in limited}
        kept = tuple(s for s in memory.defaults if (s.subject.gpu, s.value) in wished)
        failed = _unstarted(own, state)
        events = tuple(
            Event(
                "mps-unstarted",
                state.now.mono,
                f"the MPS control daemon of {name} could not be started: {why}",
                on_mps(name),
                alert=True,
            )
            for name, why in failed.items()
            if name not in memory.unstarted
        )
        return Memory(kept, tuple(failed)), Decision(
            settings=(*own, *kept), events=events, complete=known or not limited
        )


def _own(group: MpsGroup) -> Setting:
    return Setting(
        MPS_DAEMON,
        on_mps(group.name),
        1.0,
        why=f"the MPS group {group.name} is configured as the agent's own",
        rule=OWN_DAEMON_RULE,
    )


def _unstarted(own: Iterable[Setting], state: NodeState) -> dict[str, str]:
    """Those of our own of which the host says that they cannot be had, and why, by name."""
    found = ((s.subject.gpu, state.outcomes.get(s.key)) for s in own)
    return {n: o.why for n, o in found if o is not None and o.result in ("refused", "contested")}


def _defaults(groups: Sequence[MpsGroup], state: NodeState) -> Iterator[Setting]:
    daemons = {d.name: d for d in state.inventory.mps or ()}
    for group in groups:
        daemon = daemons.get(group.name)
        ratio = group.default_threads
        if daemon is None or ratio is None:
            continue  # the sensor has not met it yet
        against = _against(daemon, state)
        yield Setting(
            MPS_DEFAULT_THREADS,
            on_mps(group.name),
            ratio,
            why=f"{ratio:.0%} for each client of the next server of {group.name}, as configured",
            rule=DEFAULT_RULE,
            numbers=(("clients", float(len(daemon.clients))),),
            blocked=Blocked("refused", against) if against else None,
        )


def _against(daemon: MpsDaemon, state: NodeState) -> str:
    """Why no default may be set; empty where it may."""
    if daemon.up and not daemon.clients_known:
        return f"not all of its clients are known, and so not whether one is L1: {daemon.why}"
    tenants = state.inventory.tenants or ()
    owners = state.inventory.owners()
    on_it = [owners[c.pid] for c in daemon.clients if c.pid in owners]
    first = next((t.name for t in on_it if t.level is Level.L1), "")
    if first:
        return f"{first} (L1) is a client of it, and a default would hold for its next start too"
    stranger = next((c.pid for c in daemon.clients if c.pid not in owners), None)
    if stranger is not None:
        return f"it is not known whose its client {stranger} is, and so not whether that is L1"
    near = next((t.name for t in tenants if t.level is Level.L1 and _uses(t, daemon)), "")
    if near:
        return f"{near} (L1) uses a card of it, and may become its client at its next start"
    return ""


def _uses(tenant: Tenant, daemon: MpsDaemon) -> bool:
    return any(daemon.serves(uuid) for uuid in tenant.gpus)
