"""What a launcher should set for the next process of a tenant: pure functions of the snapshot.

A running process keeps the environment that it was started with: all of this acts at the next start.
The variables of MPS are read by a client as it starts, and can only tighten what its server allows
(NVIDIA, Multi-Process Service, "Environment variables").
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from gpuagent.expose import picture
from gpuagent.expose.auth import Peer
from gpuagent.expose.gate import forbidden
from gpuagent.expose.problems import not_found
from gpuagent.expose.routes import Ask, For, Get, Told, current
from gpuagent.expose.views import EnvironmentView, VariableView
from gpuagent.model.inventory import Gpu, Inventory, Level, MpsDaemon, Tenant, on_tenant
from gpuagent.model.plan import Snapshot
from gpuagent.model.text import wire
from gpuagent.model.vocab import MPS_THREADS
from gpuagent.quantities import bytes_, ratio

_MIB = 1024**2
_GIB = 1024**3
_ORDINALS_MOST = 32
"""MPS takes a memory limit for the devices 0 to 31."""
_AT_START = "as the process starts"
_MPS_START = "as the process starts, if it is a client of an MPS server then; nothing else reads it"


class Promise(msgspec.Struct, frozen=True):
    """As much of a tenant as its environment depends on."""

    name: str
    level: Level
    memory_limit_bytes: int | None
    present: bool
    compute_share_ratio: float | None = None
    """As declared."""
    threads_ratio: float | None = None
    """What it is held to while it is held back; None while it is not."""
    pipe_directory: str = ""
    """Of the MPS daemon of its cards; empty where there is none, or that is not known."""


def variables(promise: Promise, cards: int | None, socket: str) -> tuple[VariableView, ...]:
    """The environment of a tenant on a host of so many cards (None where that is not known).

    An empty `socket` is one that is not known.
    """
    return tuple(_variables(promise, cards, socket))


def _variables(promise: Promise, cards: int | None, socket: str) -> Iterator[VariableView]:
    protected = promise.level is Level.L1
    yield VariableView(
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID",
        "CUDA then numbers the cards as the agent and nvidia-smi do",
        _AT_START,
    )
    yield VariableView(
        "CUDA_MPS_CLIENT_PRIORITY",
        "0" if protected else "1",
        f"the tenant is {promise.level.name}: "
        + ("its kernels go first" if protected else "kernels of an L1 client go first"),
        _MPS_START,
    )
    limit = promise.memory_limit_bytes
    if limit is not None and cards and (size := _whole(limit)):
        yield VariableView(
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            ",".join(f"{i}={size}" for i in range(min(cards, _ORDINALS_MOST))),
            f"its memory_limit is {limit} bytes on one card; MPS holds each process to it by itself",
            _MPS_START,
        )
    yield VariableView("GPUAGENT_TENANT", wire(promise.name), "the name to report under", _AT_START)
    if promise.pipe_directory:
        yield VariableView(
            "CUDA_MPS_PIPE_DIRECTORY",
            promise.pipe_directory,
            "where the MPS control daemon of its cards is reached",
            _AT_START,
        )
    yield from _threads(promise)
    if socket:
        why = "where to report latency and to read events: the agent's socket"
        yield VariableView("GPUAGENT_SOCKET", socket, why, _AT_START)


def _threads(promise: Promise) -> Iterator[VariableView]:
    """The smaller of what is declared and what it is held to, in tenths of a percent."""
    share, held = promise.compute_share_ratio, promise.threads_ratio
    least = min((r for r in (share, held) if r is not None), default=1.0)
    percent = math.floor(round(least * 1000, 6)) / 10
    if not 0 < percent < 100:
        return
    why = "it is held back" if held is not None and held == least else "its compute_share"
    yield VariableView(
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        f"{percent:g}",
        f"{why}: a ceiling on the multiprocessors it may use, not a reservation",
        _MPS_START,
    )


def drop_in(tenant: str, made: Iterable[VariableView]) -> str:
    """As a file that systemd reads beside a unit (systemd.exec(5), Environment=)."""
    values = (f"{v.name}={v.value}" for v in made)
    quoted = (v.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") for v in values)
    return "".join(
        (
            f"# What gpuagent tells of {tenant} now. Nobody renews this file: ask again after a change.\n",
            "[Service]\n",
            *(f'Environment="{v}"\n' for v in quoted),
        )
    )


def _whole(limit: int) -> str:
    """A size as MPS takes it, whole G or M, never more than the limit; empty where it is less than 1M."""
    if limit >= _GIB and limit % _GIB == 0:
        return f"{limit // _GIB}G"
    return f"{limit // _MIB}M" if limit >= _MIB else ""


# -- whose ---------------------------------------------------------------------------------------------


Settings = Callable[[], Mapping[str, object]]
"""Gives the configuration in force. It is not asked before the reader's right is known."""


def promise(snapshot: Snapshot, settings: Settings, name: str, reader: Peer) -> Promise:
    """The tenant of this name as it stands in a path, running or only declared. Raises Trouble.

    Who may not see it does not learn whether it exists. Whose a tenant is can be told by its
    processes only: one without any is for those who see everything.
    """
    for tenant in picture.tenants(snapshot, reader):
        if wire(tenant.name) == name:
            return _present(snapshot, tenant)
    if not reader.sees_all:
        raise forbidden(reader, "see a tenant that is not yours, or that has no process now")
    declared = settings().get("tenants")
    for rule in declared if isinstance(declared, list) else ():
        if isinstance(rule, Mapping) and rule.get("name") == name:
            return _declared(rule)
    return not_found(
        f"there is no tenant {name!r} here, and no rule declares one",
        "GET /v1/tenants lists those that run; in a path, write / as %2F",
    )


def _present(snapshot: Snapshot, tenant: Tenant) -> Promise:
    daemon = daemon_of(snapshot.state.inventory, tenant)
    return Promise(
        tenant.name,
        tenant.level,
        tenant.limits.memory_limit_bytes,
        present=True,
        compute_share_ratio=tenant.limits.compute_share_ratio,
        threads_ratio=held_threads(snapshot, tenant.name),
        pipe_directory="" if daemon is None else daemon.pipe_directory,
    )


def held_threads(snapshot: Snapshot, tenant: str) -> float | None:
    """What the agent gives its next MPS client at most; None while it does not hold it."""
    outcome = snapshot.outcomes.get((MPS_THREADS, on_tenant(tenant)))
    if outcome is None or outcome.result not in ("applied", "pending"):
        return None
    return outcome.real


def daemon_of(inventory: Inventory, tenant: Tenant) -> MpsDaemon | None:
    """The MPS daemon of all cards that it uses, or to which it is connected; None where none is known.

    One that is down is none: a client that finds no daemon runs without.
    """
    mine = {p.pid for p in tenant.processes}
    up = [d for d in inventory.mps or () if d.up]
    connected = next((d for d in up if any(c.pid in mine for c in d.clients)), None)
    return connected or daemon_on(inventory, tenant.gpus)


def daemon_on(inventory: Inventory, cards: Collection[str]) -> MpsDaemon | None:
    """The MPS daemon that is up and has all of these cards, by UUID; None where none is known."""
    up = [d for d in inventory.mps or () if d.up]
    return next((d for d in up if cards and all(d.serves(uuid) for uuid in cards)), None)


def _declared(rule: Mapping[str, object]) -> Promise:
    """A rule as the configuration tells it: plain values, with units."""
    limit = bytes_(rule["memory_limit"]) if "memory_limit" in rule else None
    return Promise(
        str(rule["name"]),
        Level[str(rule["sla"])],
        limit,
        present=False,
        compute_share_ratio=ratio(rule["compute_share"]) if "compute_share" in rule else None,
    )


def _cards(cards: tuple[Gpu, ...] | None) -> int | None:
    return None if cards is None else len(cards)


def _environment(told: Told, ask: Ask) -> EnvironmentView:
    snapshot = current(told)
    found = promise(snapshot, told.settings, ask.name, ask.peer)
    # Not what the configuration says: that may be in force only after a restart.
    socket = next((one.address for one in told.access().listeners if one.name == "unix"), "")
    name, made = wire(found.name), variables(found, _cards(snapshot.state.inventory.gpus), socket)
    return EnvironmentView(
        tenant=name, present=found.present, variables=made, drop_in=drop_in(name, made)
    )


GETS: tuple[Get, ...] = (
    Get(
        path="/v1/tenants/{name}/environment",
        audience=For.TENANTS,
        about="What a launcher should set for the next process of a tenant.",
        answer=_environment,
        view=EnvironmentView,
    ),
)
