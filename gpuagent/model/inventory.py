"""Who and what exists on this host: cards, links, processes, tenants. It changes slowly."""

from collections.abc import Iterable
from enum import IntEnum, unique
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from gpuagent.model.declare import On


class Subject(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """What a reading or a setting is about. Unused parts are empty; equal parts, equal subject."""

    on: On
    gpu: str = ""
    """UUID of a card, of a MIG instance where `on` is MIG; name of an MPS daemon where it is MPS."""
    tenant: str = ""
    cgroup: str = ""
    """Path below the cgroup root, starting with a slash."""
    inode: int = 0
    """Inode of the cgroup: a path made anew is another subject."""
    pid: int = 0
    started: int = 0
    """Start time of the process in clock ticks since boot: a number given anew is another subject."""

    def __str__(self) -> str:
        what = self.gpu or self.cgroup or (str(self.pid) if self.pid else "")
        return ":".join(p for p in (self.on.value, self.tenant, what) if p)


NODE = Subject(On.NODE)


def on_gpu(uuid: str) -> Subject:
    return Subject(On.GPU, gpu=uuid)


def on_mig(uuid: str) -> Subject:
    return Subject(On.MIG, gpu=uuid)


def on_tenant(name: str) -> Subject:
    return Subject(On.TENANT, tenant=name)


def on_tenant_gpu(name: str, uuid: str) -> Subject:
    return Subject(On.TENANT_GPU, tenant=name, gpu=uuid)


def on_cgroup(tenant: str, path: str, inode: int) -> Subject:
    return Subject(On.CGROUP, tenant=tenant, cgroup=path, inode=inode)


def on_process(tenant: str, pid: int, started: int) -> Subject:
    return Subject(On.PROCESS, tenant=tenant, pid=pid, started=started)


def on_mps(daemon: str) -> Subject:
    """An MPS control daemon, by the name it has in the configuration."""
    return Subject(On.MPS, gpu=daemon)


@unique
class Level(IntEnum):
    """Service level. L1 is never held back; L3 is held back first."""

    L1 = 1
    L2 = 2
    L3 = 3


class Link(msgspec.Struct, frozen=True):
    """How a card reaches another."""

    peer: str
    """UUID of the other card."""
    kind: Literal["nvlink", "pcie"]
    lanes: int | None
    """Number of NVLinks between the two; None for PCIe."""
    distance: str
    """NVML's topology level: internal, single, multiple, hostbridge, node, system."""


class MigInstance(msgspec.Struct, frozen=True):
    """A slice of a card that MIG has partitioned."""

    uuid: str
    gpu: str
    gpu_instance: int
    compute_instance: int
    name: str
    memory_bytes: int | None


class Gpu(msgspec.Struct, frozen=True):
    """A card. Known by UUID; the index is a label for people."""

    uuid: str
    index: int
    name: str
    pci_bus_id: str = ""
    memory_bytes: int | None = None
    power_min_watts: float | None = None
    power_max_watts: float | None = None
    power_default_watts: float | None = None
    driver: str = ""
    numa_node: int | None = None
    minor: int | None = None
    """Number of its device node, /dev/nvidiaN: not its index."""
    mig_enabled: bool | None = None
    mig: tuple[MigInstance, ...] = ()
    links: tuple[Link, ...] = ()
    blind: str = ""
    """Why nothing can be read from it now ("lost", "a call hangs"); empty while it answers."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that has a context on a card, as the driver lists it."""

    pid: int
    gpu: str
    kind: Literal["compute", "graphics", "mps"]
    memory_bytes: int | None
    """None where the driver does not say (some MIG and MPS set-ups)."""
    mig: str = ""
    """UUID of the MIG instance it runs in; empty outside MIG."""
    utilization_ratio: float | None = None
    """Share of time in which its kernels ran, since the list before; None where the driver is silent."""


class Process(msgspec.Struct, frozen=True):
    """A process as /proc shows it. Its identity is (pid, started)."""

    pid: int
    started: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""
    ppid: int
    uid: int
    user: str
    name: str
    """comm: at most 15 characters, chosen by the process, not to be trusted."""
    exe: str
    """Executable; empty where it cannot be read (kernel threads)."""
    cgroup: str
    """cgroup v2 path; empty where there is none."""


class Place(msgspec.Struct, frozen=True):
    """What a cgroup path says about who runs there. Empty where it does not say."""

    unit: str = ""
    """systemd service or scope, such as `triton.service`."""
    session: bool = False
    """A login session scope."""
    container: str = ""
    """Container id, as long as the path gives it."""
    runtime: str = ""
    """docker, containerd, crio, podman, lxc."""
    pod: str = ""
    """Pod UID with dashes."""
    pod_qos: str = ""
    """guaranteed, burstable, besteffort."""
    slurm_job: str = ""
    slurm_step: str = ""
    uid: int | None = None
    """User that the path itself names (user slice, Slurm)."""
    home: str = ""
    """The cgroup that belongs to this place as a whole; where its knobs are."""


class Seat(msgspec.Struct, frozen=True):
    """A cgroup through which a tenant might be held back, and what speaks against it."""

    path: str
    inode: int
    refusal: str = ""
    """Why no knob may be turned here ("shared with sshd.service"); empty if it is the tenant's own."""
    above: tuple["Seat", ...] = ()
    """Its ancestors, nearest first, without the root, each with its own refusal."""


LEVERS: tuple[str, ...] = ("notice", "cpu_weight", "io_weight", "cpu_max", "mps")
"""Families that may be turned on a tenant unless its rule says otherwise: none can lose its work."""


class Notice(msgspec.Struct, frozen=True):
    """How a tenant is told that it is held back, beside the event."""

    signal: str = ""
    """Name of a signal for each of its processes that catches it; empty for none."""
    command: tuple[str, ...] = ()
    """Run as the tenant's user; () for none."""

    def __bool__(self) -> bool:
        return bool(self.signal or self.command)


class Limits(msgspec.Struct, frozen=True):
    """What a tenant has been promised or forbidden, as declared."""

    memory_limit_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    """Device memory on each of its cards that others must leave to it."""
    compute_share_ratio: float | None = None
    """Part of a card's multiprocessors its next MPS client may use at most."""
    mps_contexts: int | None = None
    """MPS client contexts it may have on one card."""
    power_cap_watts: float | None = None
    """Power limit of the cards it has to itself."""
    host_memory_high_bytes: int | None = None
    host_memory_max_bytes: int | None = None
    """`memory.high` and `memory.max` of its control group, where it has one and that to itself."""
    off_hours_share_ratio: float | None = None
    """The most it may have while `off_hours` is true; None for its floor."""
    min_share_ratio: float = 0.2
    """The floor under the tenant's share; it is never held back further."""
    latency_slo_seconds: float | None = None
    """Objective for its latency at `latency_quantile`; only an L1's is protected."""
    latency_quantile: float = 0.99


class Tenant(msgspec.Struct, frozen=True):
    """What an operator names, or what is found and named for him."""

    name: str
    level: Level
    rule: str = ""
    """The rule that claims it; empty for one that was found."""
    kind: str = ""
    """training, inference, interactive or idle, if declared."""
    enforce: bool = False
    """Whether it may be held back at all (a found tenant only where the operator said so)."""
    levers: tuple[str, ...] = LEVERS
    """Families of knobs that may be turned to hold it back."""
    observed: tuple[str, ...] = ()
    """Of these, those that are only observed: what would be done is said."""
    hours: tuple[str, ...] = ()
    """Local times at which it may use all it gets, as configured; () for always."""
    notice: Notice = Notice()
    limits: Limits = Limits()
    places: tuple[Place, ...] = ()
    """Those with a process on a card first, then by path."""
    seats: tuple[Seat, ...] = ()
    processes: tuple[Process, ...] = ()
    """By pid: those on a card, and of the others so many that a crowd stays bounded."""
    process_count: int = 0
    """How many there are in all."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the cards its processes have contexts on, sorted."""
    users: tuple[str, ...] = ()
    since: float = 0.0
    """Monotonic seconds at which it was first seen."""


class MpsServer(msgspec.Struct, frozen=True):
    """A server of an MPS control daemon: it works for all clients of one user."""

    pid: int
    state: str = ""
    """As the daemon tells it (INITIALIZING, ACTIVE, FAULT); empty where it knows no states."""
    threads_ratio: float | None = None
    """Ceiling on the multiprocessors of its later clients; None where it does not say."""


class MpsClient(msgspec.Struct, frozen=True):
    """A client of an MPS server, as the control daemon lists it."""

    pid: int
    server: int
    """Pid of its server."""
    threads_ratio: float | None = None
    """Ceiling that it started with: the lower of its environment's and its server's at that time."""


class MpsDaemon(msgspec.Struct, frozen=True):
    """An MPS control daemon as it is now."""

    name: str
    up: bool
    why: str = ""
    """Why it is not up, or what could not be read of it."""
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    default_threads_ratio: float | None = None
    """Ceiling for each client of the next server."""
    pipe_directory: str = ""
    """CUDA_MPS_PIPE_DIRECTORY of its clients."""
    gpus: tuple[str, ...] = ()
    """Its cards as configured: UUIDs, or patterns of UUIDs; () where nobody has said."""

    @property
    def clients_known(self) -> bool:
        """Whether these are all its servers and clients: not while anything of it could not be read."""
        return self.up and not self.why

    def serves(self, uuid: str) -> bool:
        """Whether a card is one of its own, as far as the configuration says."""
        return any(fnmatchcase(uuid, pattern) for pattern in self.gpus)


def owners_of(tenants: Iterable[Tenant]) -> dict[int, Tenant]:
    """Whose a process is, by pid."""
    return {p.pid: t for t in tenants for p in t.processes}


class Inventory(msgspec.Struct, frozen=True):
    """All there is. `None` where it could not be read, which is not the same as empty."""

    gpus: tuple[Gpu, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    tenants: tuple[Tenant, ...] | None = None
    tenants_at: float = float("-inf")
    """Monotonic seconds at which somebody last said who the tenants are."""
    mps: tuple[MpsDaemon, ...] | None = None
    """The MPS control daemons that are configured."""

    def gpu(self, uuid: str) -> Gpu | None:
        return next((g for g in self.gpus or () if g.uuid == uuid), None)

    def tenant(self, name: str) -> Tenant | None:
        return next((t for t in self.tenants or () if t.name == name), None)

    def owners(self) -> dict[int, Tenant]:
        """Whose a process is, by pid."""
        return owners_of(self.tenants or ())

    def on_card(self, uuid: str) -> tuple[Tenant, ...]:
        """Tenants with a process on this card."""
        return tuple(t for t in self.tenants or () if uuid in t.gpus)
