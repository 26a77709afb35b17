"""Through which cgroups a tenant could be held back, and what speaks against each. Pure.

A cgroup may be used only by a tenant that has it to itself (DESIGN 4): whatever else lives at or
below it would be held back as well. The folders that systemd, kubelet, Slurm and container runtimes
share out among many are never used, whoever happens to live there today (FACTS 5).
"""

import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuagent.model.inventory import Process, Seat, Tenant
from gpuagent.sense.places import contained, place_of, unescaped
from gpuagent.sense.tenancy import Claims

_NAMED_MOST = 3
_SEATS_MOST = 32
"""A tenant is held back through so many cgroups: every one costs reads and writes all the time."""

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
    homes = {home for tenant in tenants for home in _homes(tenant)[:_SEATS_MOST]}
    return frozenset(homes | {above for home in homes for above in ancestors(home)})


def seated(
    claims: Claims,
    processes: Collection[Process],
    *,
    inodes: Mapping[str, int],
    own: frozenset[int] = frozenset(),
) -> tuple[Tenant, ...]:
    """The tenants with their seats: at most 32 each, and one more that says how many are left out.

    `inodes` knows the cgroups that exist below the configured root; a seat elsewhere is refused.
    """
    residents = _who_lives_where(claims, processes, own)
    return tuple(
        msgspec.structs.replace(tenant, seats=_seats(tenant, residents, inodes))
        for tenant in claims.tenants
    )


class _Residents:
    """Who lives at or below one cgroup."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names - {""}
        # With one more than is shown, one of them may be left out.
        self._first = heapq.nsmallest(_NAMED_MOST + 1, self._names)

    def others(self, me: str) -> str:
        """All but `me`, in words: the first few by name, and how many more. Empty for nobody."""
        count = len(self._names) - (me in self._names)
        named = [who for who in self._first if who != me][:_NAMED_MOST]
        more = count - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


def _who_lives_where(
    claims: Claims, processes: Collection[Process], own: frozenset[int]
) -> dict[str, _Residents]:
    found: set[tuple[str, str]] = {
        # Nobody has a seat below a home, however deep its owner makes cgroups there.
        (place_of(process.cgroup).home or process.cgroup, _resident(process, claims, own))
        for process in processes
    }
    below: dict[str, set[str]] = {}
    for cgroup, who in found:
        below.setdefault(cgroup, set()).add(who)
        for above in ancestors(cgroup):
            below.setdefault(above, set()).add(who)
    return {cgroup: _Residents(frozenset(names)) for cgroup, names in below.items()}


def _resident(process: Process, claims: Claims, own: frozenset[int]) -> str:
    """Who a process is to those who share a cgroup with it: itself where it is the host's, else its
    tenant, else its unit or program.
    """
    if process.pid in own:
        return "gpuagent itself"
    if process.pid == 1:
        return "init"
    if process.pid in claims.mps:
        return "a CUDA MPS server"
    place = place_of(process.cgroup)
    program = process.exe.rpartition("/")[2] or process.name
    inside = contained(process.cgroup)
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


def _homes(tenant: Tenant) -> Sequence[str]:
    """Its cgroups, those with a process on a card first."""
    return tuple(dict.fromkeys(place.home for place in tenant.places if place.home))


def _seats(
    tenant: Tenant, residents: Mapping[str, _Residents], inodes: Mapping[str, int]
) -> tuple[Seat, ...]:
    homes = _homes(tenant)
    sessions = {place.home for place in tenant.places if place.session}
    seats: dict[str, Seat] = {}
    for home in sorted(homes[:_SEATS_MOST]):
        if _held_from_above(home, seats):
            continue
        why = "a login session is never held back" if home in sessions else ""
        above = tuple(_seat(path, tenant, residents, inodes) for path in ancestors(home))
        seat = _seat(home, tenant, residents, inodes, why=why)
        seats[home] = msgspec.structs.replace(seat, above=above)
    homeless = sorted({p.cgroup for p in tenant.processes if not place_of(p.cgroup).home})
    room = max(_SEATS_MOST - len(seats), 0)
    nowhere = tuple(Seat(path, 0, _why_homeless(path)) for path in homeless[:room])
    left_out = [h for h in homes[_SEATS_MOST:] if not _held_from_above(h, seats)] + homeless[room:]
    if not left_out:
        return (*seats.values(), *nowhere)
    more = "1 more cgroup" if len(left_out) == 1 else f"{len(left_out)} more cgroups"
    return (*seats.values(), *nowhere, Seat(left_out[0], 0, f"{more}: too many to hold back"))


def _held_from_above(home: str, seats: Mapping[str, Seat]) -> bool:
    """Whether it is inside another cgroup that can be held: one hold is enough."""
    return any(above in seats and not seats[above].refusal for above in ancestors(home))


def _seat(
    path: str,
    tenant: Tenant,
    residents: Mapping[str, _Residents],
    inodes: Mapping[str, int],
    *,
    why: str = "",
) -> Seat:
    inode = inodes.get(path, 0)
    why = why or next((text for form, text in _SHARED_OUT if form.fullmatch(path)), "")
    if not why and not inode:
        why = "no such cgroup below the configured cgroup_root"
    if not why and path in residents:
        others = residents[path].others(_called(tenant.name))
        why = f"also home of {others}" if others else ""
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
