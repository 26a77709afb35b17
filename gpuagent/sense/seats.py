"""Through which cgroups a tenant could be held back, and what speaks against each. Pure.

A cgroup may be used only by a tenant that has it to itself (DESIGN 4): whatever else lives at or
below it would be held back as well. The folders that systemd, kubelet, Slurm and container runtimes
share out among many are never used, whoever happens to live there today (FACTS 5).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from gpuagent.model.inventory import Place, Process, Seat, Tenant
from gpuagent.sense.places import place_of, unescaped
from gpuagent.sense.tenancy import Claims, serves_mps

_NAMED_MOST = 3

# Programs that keep the host alive. They count only as root's and outside containers and jobs: a
# tenant's own sshd is the tenant's affair, and no way to escape being held back.
_PROTECTED = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "a containerd shim",
    "conmon": "conmon",
    "crio": "CRI-O",
    "dockerd": "dockerd",
    "podman": "podman",
    "kubelet": "kubelet",
    "k3s": "k3s",
    "sshd": "sshd",
    "sshd-session": "sshd",
    "slurmd": "slurmd",
    "systemd-journald": "systemd-journald",
    "systemd-logind": "systemd-logind",
    "nvidia-persistenced": "nvidia-persistenced",
    "nv-fabricmanager": "the NVIDIA fabric manager",
}

_SHARED_OUT = tuple(
    (re.compile(form, re.DOTALL | re.ASCII), why)
    for form, why in (
        (r".*/(?:[^/]+-)?kubepods(?:-[^/]*)?\.slice", "managed by kubelet"),
        (
            r".*/kubepods(?:/(?:burstable|besteffort))?(?:/pod[^/]+)?",
            "managed by kubelet",
        ),
        (r"/(?:system|user|machine)\.slice", "managed by systemd, with all that is in it"),
        (
            r"/user\.slice/user-\d+\.slice(?:/user@\d+\.service(?:/.*\.slice)?)?",
            "managed by systemd for the user's whole login",
        ),
        (r".*/(?:[^/]+_)?slurmstepd\.scope(?:/(?!job_)[^/]+)?", "managed by Slurm"),
        (r"/slurm(?:_[^/]+)?(?:/uid_\d+)?", "managed by Slurm"),
        (
            r"/(?:docker|libpod_parent|lxc|lxc\.payload)",
            "shared out among containers by their runtime",
        ),
        (
            r"/system\.slice/(?:containerd|docker|crio|podman|kubelet|k3s)\.service(?:/docker)?",
            "the cgroup of a container runtime",
        ),
    )
)


def ancestors(path: str) -> Iterator[str]:
    """The folders above a cgroup, nearest first, without the root."""
    cut = path.rfind("/")
    while cut > 0:
        path = path[:cut]
        yield path
        cut = path.rfind("/")


def seat_paths(tenants: Iterable[Tenant]) -> frozenset[str]:
    """Every cgroup whose inode `seated` wants to know."""
    homes = {place.home for tenant in tenants for place in tenant.places if place.home}
    return frozenset(homes | {above for home in homes for above in ancestors(home)})


def seated(
    claims: Claims,
    processes: Collection[Process],
    *,
    inodes: Mapping[str, int],
    own: frozenset[int] = frozenset(),
) -> tuple[Tenant, ...]:
    """The tenants with their seats.

    `inodes` knows the cgroups that exist below the configured root; a seat elsewhere is refused.
    """
    below = _who_lives_where(claims, processes, own)
    return tuple(
        msgspec.structs.replace(tenant, seats=_seats(tenant, below, inodes))
        for tenant in claims.tenants
    )


def _who_lives_where(
    claims: Claims, processes: Collection[Process], own: frozenset[int]
) -> dict[str, set[str]]:
    found: set[tuple[str, str]] = {
        (process.cgroup, _resident(process, claims, own)) for process in processes
    }
    below: dict[str, set[str]] = {}
    for cgroup, who in found:
        below.setdefault(cgroup, set()).add(who)
        for above in ancestors(cgroup):
            below.setdefault(above, set()).add(who)
    return below


def _resident(process: Process, claims: Claims, own: frozenset[int]) -> str:
    """Who a process is to those who share a cgroup with it: itself where it is the host's, else its
    tenant, else its unit or program.
    """
    if process.pid in own:
        return "gpuagent itself"
    if process.pid == 1:
        return "init"
    if serves_mps(process):
        return "a CUDA MPS server"
    place = place_of(process.cgroup)
    program = process.exe.rpartition("/")[2] or process.name
    inside = place.container or place.pod or place.slurm_job
    if place.unit == "init.scope" and not inside:
        return "init" if place.uid is None else f"the systemd of user {process.user}"
    if place.session:
        return f"a login session of {process.user}"
    if process.uid == 0 and not inside and program in _PROTECTED:
        return _PROTECTED[program]
    owner = claims.owner.get(process.pid)
    if owner is not None:
        return _called(owner)
    if place.slurm_job and process.uid == 0 and program == "slurmstepd":
        return ""  # the step's own supervisor, in a cgroup below the job's: nobody else's
    return f"{program} of {unescaped(place.unit)}" if place.unit and not inside else program


def _called(tenant: str) -> str:
    return f"tenant {tenant}"


def _seats(
    tenant: Tenant, below: Mapping[str, Collection[str]], inodes: Mapping[str, int]
) -> tuple[Seat, ...]:
    homes: dict[str, Place] = {place.home: place for place in tenant.places if place.home}
    seats: dict[str, Seat] = {}
    for home in sorted(homes):
        if any(above in seats and not seats[above].refusal for above in ancestors(home)):
            continue  # one hold is enough, and this one is inside another
        why = "a login session is never held back" if homes[home].session else ""
        above = tuple(_seat(path, tenant, below, inodes) for path in ancestors(home))
        seat = _seat(home, tenant, below, inodes, why=why)
        seats[home] = msgspec.structs.replace(seat, above=above)
    homeless = {p.cgroup for p in tenant.processes if not place_of(p.cgroup).home}
    nowhere = tuple(Seat(path, 0, _why_homeless(path)) for path in sorted(homeless))
    return (*seats.values(), *nowhere)


def _seat(
    path: str,
    tenant: Tenant,
    below: Mapping[str, Collection[str]],
    inodes: Mapping[str, int],
    *,
    why: str = "",
) -> Seat:
    inode = inodes.get(path, 0)
    why = why or next((text for form, text in _SHARED_OUT if form.fullmatch(path)), "")
    if not why and not inode:
        why = "no such cgroup below the configured cgroup_root"
    if not why:
        others = sorted(who for who in below.get(path, ()) if who not in ("", _called(tenant.name)))
        more = len(others) - _NAMED_MOST
        named = ", ".join(others[:_NAMED_MOST]) + (f" and {more} more" if more > 0 else "")
        why = f"also home of {named}" if others else ""
    return Seat(path, inode, why)


def _why_homeless(path: str) -> str:
    if not path:
        return "its processes have no cgroup v2 path (this host uses cgroup v1)"
    if path == "/":
        return "its processes are in the root cgroup, which cannot be limited"
    if "\ufffd" in path:
        return "the name of its cgroup is not plain text"
    if ".." in path.split("/"):
        return "its cgroup is outside the agent's own cgroup namespace"
    return "its processes are in a cgroup that is shared out, not in one of their own"
