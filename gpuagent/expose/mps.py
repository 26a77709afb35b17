"""`/v1/mps`: the MPS control daemons, and of each client what is wanted, what is next, what it runs with.

No command changes a running client: the three differ until it starts again.
"""

from gpuagent.expose import environment
from gpuagent.expose.picture import unstarted
from gpuagent.expose.routes import Ask, For, Get, Told, current
from gpuagent.expose.views import Number, View
from gpuagent.model.inventory import MpsClient, MpsDaemon, Tenant, on_mps, on_tenant
from gpuagent.model.plan import Snapshot
from gpuagent.model.text import wire
from gpuagent.model.vocab import MPS_DAEMON, MPS_THREADS


class MpsServerView(View, frozen=True):
    """A server of an MPS control daemon."""

    pid: int
    state: str
    """INITIALIZING, ACTIVE or FAULT; empty before driver 550, which tells no states."""
    threads_ratio: Number
    """Ceiling for its later clients."""


class MpsClientView(View, frozen=True):
    """A client of an MPS server, with its ceilings as parts of the multiprocessors."""

    pid: int
    server: int
    tenant: str | None
    """Null where it is not known whose it is."""
    level: str | None
    wanted_ratio: Number
    """The smaller of what is declared and what is wished of its tenant; null for neither."""
    next_ratio: Number
    """What it would get if it started again, with the environment that the agent tells."""
    running_ratio: Number
    """What it has started with, as far as that is known."""


class MpsDaemonView(View, frozen=True):
    """An MPS control daemon."""

    name: str
    up: bool
    why: str
    """Why it is not up, or what could not be read of it."""
    own: bool
    """Whether it is to be one of the agent's own."""
    own_why: str
    """Why it is not as wished, if it is to be the agent's own; empty where it is."""
    pipe_directory: str
    gpus: tuple[str, ...]
    """Its cards as configured; empty where nobody has said."""
    default_threads_ratio: Number
    """Ceiling for each client of its next server."""
    servers: tuple[MpsServerView, ...]
    clients: tuple[MpsClientView, ...]


class MpsView(View, frozen=True):
    """CUDA MPS on this host."""

    daemons: tuple[MpsDaemonView, ...] | None
    """Null before they were read once."""


def view(snapshot: Snapshot) -> MpsView:
    """What is known of all daemons."""
    known = snapshot.state.inventory
    owners = known.owners()
    if known.mps is None:
        return MpsView(daemons=None)
    return MpsView(daemons=tuple(_daemon(snapshot, d, owners) for d in known.mps))


def _daemon(snapshot: Snapshot, daemon: MpsDaemon, owners: dict[int, Tenant]) -> MpsDaemonView:
    allowed = {s.pid: s.threads_ratio for s in daemon.servers}
    return MpsDaemonView(
        name=wire(daemon.name),
        up=daemon.up,
        why=wire(daemon.why),
        own=(MPS_DAEMON, on_mps(daemon.name)) in snapshot.plan.by_key(),
        own_why=wire(unstarted(snapshot).get(daemon.name, "")),
        pipe_directory=wire(daemon.pipe_directory),
        gpus=tuple(map(wire, daemon.gpus)),
        default_threads_ratio=daemon.default_threads_ratio,
        servers=tuple(MpsServerView(s.pid, s.state, s.threads_ratio) for s in daemon.servers),
        clients=tuple(
            _client(snapshot, c, owners.get(c.pid), allowed.get(c.server)) for c in daemon.clients
        ),
    )


def _client(
    snapshot: Snapshot, client: MpsClient, tenant: Tenant | None, allowed: float | None
) -> MpsClientView:
    told = None if tenant is None else _told(snapshot, tenant)
    return MpsClientView(
        pid=client.pid,
        server=client.server,
        tenant=None if tenant is None else wire(tenant.name),
        level=None if tenant is None else tenant.level.name,
        wanted_ratio=None if tenant is None else _wanted(snapshot, tenant),
        next_ratio=None if allowed is None else min(allowed, 1.0 if told is None else told),
        running_ratio=client.threads_ratio,
    )


def _told(snapshot: Snapshot, tenant: Tenant) -> float | None:
    """What its environment would say now."""
    held = environment.held_threads(snapshot, tenant.name)
    return _least(tenant.limits.compute_share_ratio, held)


def _wanted(snapshot: Snapshot, tenant: Tenant) -> float | None:
    wish = snapshot.plan.by_key().get((MPS_THREADS, on_tenant(tenant.name)))
    return _least(tenant.limits.compute_share_ratio, None if wish is None else wish.value)


def _least(*ratios: float | None) -> float | None:
    return min((r for r in ratios if r is not None), default=None)


def _answer(told: Told, _ask: Ask) -> View:
    return view(current(told))


GETS: tuple[Get, ...] = (
    Get(
        path="/v1/mps",
        audience=For.READERS,
        about="CUDA MPS: daemons, servers, and what each client is to have and has.",
        answer=_answer,
        view=MpsView,
    ),
)
