"""Who is at the other end of a connection, and what that peer may see and do.

The kernel says who connected (SO_PEERCRED, SO_PEERGROUPS: unix(7)); /proc says where that process
lives. Root inside a tenant's container is the tenant, not an administrator, and a number that a
container made up is nobody on the host. What cannot be told is never taken for an administrator.
Over TCP a token says what its bearer may (see `bearer`); both give the same kind of answer, a `Peer`.
"""

import os
import select
import socket
import struct
from collections.abc import Iterable
from typing import Protocol, overload

import msgspec

from gpuagent.model.inventory import Inventory, Tenant
from gpuagent.model.text import wire
from gpuagent.model.token import Token, tenant_of

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
"""Linux 6.5 and later (include/uapi/asm-generic/socket.h)."""
_UCRED = struct.Struct("iII")


class Credentials(msgspec.Struct, frozen=True):
    """What the kernel noted when the peer connected."""

    pid: int
    uid: int
    groups: frozenset[int] = frozenset()
    """Primary and supplementary group ids."""


class Origin(msgspec.Struct, frozen=True):
    """Where the peer's process lives."""

    started: int
    """Clock ticks since boot, which make the pid an identity."""
    cgroup: str
    """cgroup v2 path; empty where there is none."""
    contained: bool
    """Whether its pid or user namespace is another than the agent's."""


class Caller(msgspec.Struct, frozen=True):
    """A peer as it connected. `origin` is None where its process could not be looked at."""

    credentials: Credentials
    origin: Origin | None


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may now: by its role on the host, or by the scopes of its token."""

    label: str
    """Who it is, for the log and for messages."""
    admin: bool = False
    """Everything: the rights below come with it."""
    reads: bool = False
    """All that is told, of all tenants."""
    scrapes: bool = False
    """The pages for Prometheus, which name all tenants."""
    overrides: bool = False
    tenants: frozenset[str] = frozenset()
    """Names of the tenants that it may see."""
    reports: frozenset[str] = frozenset()
    """Names of the tenants that it may report for."""
    why: str = ""
    """Why it is no administrator, where that may surprise."""
    caller: Caller | None = None
    """As the kernel knows it; None where a token tells who asks."""

    @property
    def sees_all(self) -> bool:
        return self.admin or self.reads

    @property
    def may_scrape(self) -> bool:
        return self.sees_all or self.scrapes

    @property
    def may_override(self) -> bool:
        return self.admin or self.overrides

    def may_see(self, tenant: str) -> bool:
        return self.sees_all or tenant in self.tenants

    @property
    def local(self) -> bool:
        """Whether the kernel knows its process, and that is in no tenant and no container."""
        return self.caller is not None and self.caller.origin is not None and not self.why

    def may_report_for(self, tenant: str) -> bool:
        """`tenant` is a name as it stands in a path (`model.text.wire`)."""
        return self.admin or any(wire(name) == tenant for name in self.reports)


def of_token(token: Token) -> Peer:
    """What the bearer of a valid token may. Pure."""
    return Peer(
        label=f"token {token.id}",
        admin="admin" in token.scopes,
        reads="read" in token.scopes,
        scrapes="metrics" in token.scopes,
        overrides="override" in token.scopes,
        reports=frozenset(t for t in map(tenant_of, token.scopes) if t),
        why=f"its scopes are {', '.join(token.scopes)}",
    )


class Rules(msgspec.Struct, frozen=True):
    """By what the roles are told apart."""

    group: int | None = None
    """Id of the group whose members are administrators; None for root only."""
    own_cgroup: str = ""
    """The agent's own: a cgroup that holds the agent as well says nothing about a peer."""


class Socket(Protocol):
    """The part of a socket that is needed here; asyncio's transports offer the same."""

    @overload
    def getsockopt(self, level: int, name: int, /) -> int: ...
    @overload
    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def judge(caller: Caller, inventory: Inventory, rules: Rules) -> Peer:
    """What `caller` may, given who exists. Pure."""
    uid = caller.credentials.uid
    label = f"user {uid}" if uid else "root"
    origin = caller.origin
    if origin is None:
        return Peer(label=label, why="your process had ended before it could be looked at")
    tenants = inventory.tenants or ()
    home = frozenset(t.name for t in tenants if _lives_in(caller.credentials.pid, origin, t, rules))
    if home:
        why = "your process belongs to a tenant"
        return Peer(label=label, tenants=home, reports=home, why=why)
    if origin.contained:
        return Peer(label=label, why="your process runs in a container")
    if uid == 0 or (rules.group is not None and rules.group in caller.credentials.groups):
        return Peer(label=label, admin=True)
    own = frozenset(t.name for t in tenants if _runs_as(uid, t))
    return Peer(label=label, tenants=own, reports=own)


def _lives_in(pid: int, origin: Origin, tenant: Tenant, rules: Rules) -> bool:
    """Whether the peer is a process of the tenant, or sits in a cgroup of the tenant.

    In a user's session neither tells them apart: `sudo` stays in the session that it was called
    from, and an administrator may be a tenant as well. Containers in there are told by namespaces.
    """
    if below(origin.cgroup, "/user.slice") and not origin.contained:
        return False
    if any(p.pid == pid and p.started == origin.started for p in tenant.processes):
        return True
    # A shared cgroup tells nobody from its neighbours; a container is somebody's whatever its seat.
    homes = {seat.path for seat in tenant.seats if not seat.refusal}
    homes |= {p.home for p in tenant.places if p.container or p.pod or p.slurm_job}
    return any(below(origin.cgroup, home) for home in homes if _identifies(home, rules.own_cgroup))


def _identifies(path: str, own_cgroup: str) -> bool:
    """Whether sitting below a cgroup tells a tenant from the host: not where the agent sits too."""
    return path != "/" and not below(own_cgroup, path)


def below(path: str, ancestor: str) -> bool:
    """Whether cgroup `path` is `ancestor` or lies below it."""
    return bool(path) and (path + "/").startswith(ancestor.rstrip("/") + "/")


def _runs_as(uid: int, tenant: Tenant) -> bool:
    """Whether the tenant runs as this user of the host; numbers in containers are others' users."""
    if any(place.container or place.pod for place in tenant.places):
        return False
    return any(p.uid == uid for p in tenant.processes)


# -- what the kernel says -------------------------------------------------------------------------------


def look(sock: Socket, proc: str = "/proc") -> Caller:
    """Who has connected to `sock`. Reads the socket and /proc/PID. Raises OSError only for no socket."""
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    pidfd = _pidfd(sock)
    try:
        origin = locate(pid, proc)
        groups = _groups(sock)
        if groups is None:
            groups = _status_groups(pid, proc)
        if pidfd is not None and _ended(pidfd):
            # The number may have been given to another process before it was looked up.
            origin = None
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return Caller(Credentials(pid, uid, frozenset((gid, *groups))), origin)


def locate(pid: int, proc: str = "/proc") -> Origin | None:
    """Where a process lives; None where it has gone or cannot be read (pid 0: another namespace)."""
    try:
        stat = _text(f"{proc}/{pid}/stat")
        status = _text(f"{proc}/{pid}/status")
        users = _text(f"{proc}/{pid}/uid_map")
        return Origin(
            started=int(stat.rpartition(")")[2].split()[19]),
            cgroup=cgroup_of(pid, proc),
            # NSpid has one number for each pid namespace below the reader's (proc(5)).
            contained=len(_field(status, "NSpid")) > 1
            or users.split() != _text(f"{proc}/self/uid_map").split(),
        )
    except (OSError, IndexError, ValueError):
        return None


def cgroup_of(pid: int | str, proc: str = "/proc") -> str:
    """Path in cgroup v2 of a process; empty where it has none. Raises OSError."""
    for line in _text(f"{proc}/{pid}/cgroup").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _field(status: str, name: str) -> list[str]:
    for line in status.splitlines():
        if line.startswith(name + ":"):
            return line.partition(":")[2].split()
    return []


def _groups(sock: Socket) -> Iterable[int] | None:
    """Supplementary groups; None where the kernel does not say or there are more than fit."""
    try:
        # Python takes at most 1024 bytes, which are 256 groups; more of them is ERANGE.
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
    except OSError:
        return None
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _status_groups(pid: int, proc: str) -> Iterable[int]:
    try:
        return [int(g) for g in _field(_text(f"{proc}/{pid}/status"), "Groups")]
    except (OSError, ValueError):
        return ()


def _pidfd(sock: Socket) -> int | None:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
